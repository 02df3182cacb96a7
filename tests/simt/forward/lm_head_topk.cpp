#include "simt/forward/matrix_regions.h"

namespace eagle::cpu {

void lm_head_topk(const LmHeadTopkParams& given) {
  LmHeadTopkParams p = given;
  validate(p);  // sizes below 0 would make nonsense of the regions
  const PackedWeight& w = p.weight;
  simulated::Workspace workspace(p.workspace, p.workspace_bytes,
                                 cuda::lm_head_topk_workspace_bytes(w, p.m, p.top_k));
  p.workspace = workspace.data();
  p.workspace_bytes = workspace.bytes();
  std::vector<simt::Region> regions = {
      simulated::packed_region(w),
      simt::bytes("norm_weight", p.norm_weight, w.k * element_size(p.x_dtype), simt::Access::kIn),
      simt::in("draft_to_target", p.draft_to_target, w.n),
      simt::in("temperature", p.temperature, p.m),
      simt::in("seeds", p.temperature ? p.seeds : nullptr, p.m),
      simt::in("positions", p.temperature ? p.positions : nullptr, p.m),
      simt::out("tokens", p.tokens, p.m * p.top_k),
      simt::out("log_probs", p.log_probs, p.m * p.top_k),
      simt::out("lse", p.lse, p.m),
      workspace.region(),
  };
  simulated::Spans spans;
  simulated::add_rows(spans, "x", p.x, simt::Access::kIn, p.m, p.x_stride, w.k, p.x_dtype);
  spans.append_to(regions);
  simt::Memory memory("lm_head_topk", regions);
  cuda::lm_head_topk(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
