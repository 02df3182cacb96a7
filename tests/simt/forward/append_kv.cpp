#include "eagle_cuda/attention.h"
#include "simt/forward/cache_regions.h"

namespace eagle::cpu {

void append_kv(const AppendKvParams& p) {
  validate(p);  // sizes below 0 would make nonsense of the regions
  const int64_t b = p.batch_size, n = p.max_nodes, dim = p.cache.head_dim, size = element_size(p.dtype);
  const int64_t table = int64_t{p.max_positions} * (p.rotary_dim / 2);
  std::vector<simt::Region> regions = {
      simt::bytes("q_norm", p.q_norm, dim * size, simt::Access::kIn),
      simt::bytes("k_norm", p.k_norm, dim * size, simt::Access::kIn),
      simt::in("cos", p.cos, table),
      simt::in("sin", p.sin, table),
      simt::in("seq_lens", p.seq_lens, b),
      simt::in("depths", p.depths, b * n),
      simt::in("num_nodes", p.num_nodes, b),
  };
  simulated::add_page_table(regions, p.cache, b);
  simulated::Spans spans;
  const int64_t heads[3] = {b, n, p.num_heads}, kv_heads[3] = {b, n, p.cache.num_kv_heads};
  spans.add("q", p.q, simt::Access::kIn, heads, p.q_strides, dim, size);
  spans.add("k", p.k, simt::Access::kIn, kv_heads, p.k_strides, dim, size);
  spans.add("v", p.v, simt::Access::kIn, kv_heads, p.v_strides, dim, size);
  spans.add("q_out", p.q_out, simt::Access::kInOut, heads, p.q_out_strides, dim, size);
  spans.add_cache(p.cache, simt::Access::kInOut);
  spans.append_to(regions);
  simt::Memory memory("append_kv", regions);
  cuda::append_kv(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
