#include "simt/forward/head_regions.h"

namespace eagle::cpu {

void extend_draft(const ExtendDraftParams& given) {
  ExtendDraftParams p = given;
  validate(p);  // sizes below 0 would make nonsense of the regions
  simulated::Workspace workspace(p.workspace, p.workspace_bytes, cuda::extend_draft_workspace_bytes(p));
  p.workspace = workspace.data();
  p.workspace_bytes = workspace.bytes();
  std::vector<simt::Region> regions = simulated::head_regions(*p.head);
  regions.push_back(simt::in("tokens", p.tokens, p.num_rows));
  regions.push_back(simt::in("seq_lens", p.seq_lens, p.batch_size));
  regions.push_back(simt::bytes("hidden", p.hidden,
                                p.num_rows * p.head->hidden_size * element_size(p.head->dtype),
                                simt::Access::kOut));
  regions.push_back(workspace.region());
  simulated::Spans features;
  simulated::add_rows(features, "features", p.features, simt::Access::kIn, p.num_rows, p.features_stride,
                      p.head->feature_size, p.head->dtype);
  features.append_to(regions);
  simulated::add_caches(regions, *p.head, p.caches, p.batch_size);
  simt::Memory memory("extend_draft", regions);
  cuda::extend_draft(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
