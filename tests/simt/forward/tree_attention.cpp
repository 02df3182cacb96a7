#include <vector>

#include "eagle_cuda/attention.h"
#include "simt/forward/cache_regions.h"
#include "simt/forward/workspace.h"

namespace eagle::cpu {

void tree_attention(const TreeAttentionParams& given) {
  TreeAttentionParams p = given;
  validate(p);  // sizes below 0 would make nonsense of the regions
  const int64_t b = p.batch_size, n = p.max_nodes, dim = p.cache.head_dim, size = element_size(p.dtype);
  simulated::Workspace workspace(p.workspace, p.workspace_bytes, cuda::tree_attention_workspace_bytes(p));
  p.workspace = workspace.data();
  p.workspace_bytes = workspace.bytes();
  std::vector<simt::Region> regions = {
      simt::in("seq_lens", p.seq_lens, b),          simt::in("num_nodes", p.num_nodes, b),
      simt::in("sinks", p.sinks, p.num_heads),      simt::in("mask", p.mask, b * n * ((n + 31) / 32)),
      simt::out("lse", p.lse, b * n * p.num_heads), workspace.region(),
  };
  simulated::add_page_table(regions, p.cache, b);
  simulated::Spans spans;
  const int64_t heads[3] = {b, n, p.num_heads};
  spans.add("q", p.q, simt::Access::kIn, heads, p.q_strides, dim, size);
  spans.add("out", p.out, simt::Access::kInOut, heads, p.out_strides, dim, size);
  spans.add_cache(p.cache, simt::Access::kIn);
  spans.append_to(regions);
  simt::Memory memory("tree_attention", regions);
  cuda::tree_attention(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
