// Parents -> EAGLE's retrieve_indices.
#include <algorithm>

#include "eagle_cuda/tree.h"

namespace eagle {

void cpu::retrieve_indices(const RetrieveIndicesParams& p) {
  validate(p);
  for (int64_t request = 0; request < p.batch_size; ++request) {
    const int32_t* const parents = p.parents + request * p.max_nodes;
    int32_t* const out = p.retrieve_indices + request * p.max_leaves * p.max_path;
    std::fill(out, out + int64_t{p.max_leaves} * p.max_path, -1);
    const int nodes = std::clamp(p.num_nodes[request], 0, p.max_nodes);

    // A node counts if its parents lead to the root; parents stand before their children.
    int depth[kMaxTreeNodes];
    bool has_child[kMaxTreeNodes] = {};
    for (int i = 0; i < nodes; ++i) {
      const int parent = parents[i];
      depth[i] = i == 0 ? 0 : parent >= 0 && parent < i && depth[parent] >= 0 ? depth[parent] + 1 : -1;
      if (i > 0 && depth[i] >= 0) has_child[parent] = true;
    }
    int leaves = 0;
    for (int i = 0; i < nodes && leaves < p.max_leaves; ++i) {
      if (depth[i] < 0 || has_child[i]) continue;
      int32_t* const path = out + int64_t{leaves++} * p.max_path;
      for (int node = i; node >= 0; node = node == 0 ? -1 : parents[node])
        if (depth[node] < p.max_path) path[depth[node]] = node;
    }
    p.num_leaves[request] = leaves;
  }
}

}  // namespace eagle
