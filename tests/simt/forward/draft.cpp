#include "simt/forward/head_regions.h"

namespace eagle::cpu {

void draft(const DraftParams& given) {
  DraftParams p = given;
  validate(p);  // sizes below 0 would make nonsense of the regions
  simulated::Workspace workspace(p.workspace, p.workspace_bytes, cuda::draft_workspace_bytes(p));
  p.workspace = workspace.data();
  p.workspace_bytes = workspace.bytes();
  const int64_t B = p.batch_size, nodes = B * p.max_nodes;
  std::vector<simt::Region> regions = simulated::head_regions(*p.head);
  for (const simt::Region& region :
       {simt::in("target_tokens", p.target_tokens, B * p.max_feature_nodes),
        simt::in("path", p.path, B * p.max_path), simt::in("num_accepted", p.num_accepted, B),
        simt::in("seq_lens", p.seq_lens, B), simt::in("node_limit", p.node_limit, B),
        simt::in("temperature", p.temperature, B), simt::in("seeds", p.temperature ? p.seeds : nullptr, B),
        simt::out("tree.tokens", p.tree.tokens, nodes), simt::out("tree.parents", p.tree.parents, nodes),
        simt::out("tree.depths", p.tree.depths, nodes),
        simt::out("tree.mask", p.tree.mask, nodes * mask_words(p.max_nodes)),
        simt::out("tree.scores", p.tree.scores, nodes), simt::out("tree.num_nodes", p.tree.num_nodes, B),
        simt::out("tree.first_child", p.tree.first_child, nodes),
        simt::out("tree.next_sibling", p.tree.next_sibling, nodes), workspace.region()})
    regions.push_back(region);
  simulated::Spans features;
  features.add("features", p.features, simt::Access::kIn, {B, p.max_feature_nodes, 1},
               {p.features_strides[0], p.features_strides[1], 0}, p.head->feature_size,
               element_size(p.head->dtype));
  features.append_to(regions);
  simulated::add_caches(regions, *p.head, p.caches, B);
  simt::Memory memory("draft", regions);
  cuda::draft(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
