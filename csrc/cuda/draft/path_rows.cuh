#pragma once
// The rows that the head begins with: those of the accepted paths.
#include <cuda_runtime.h>

#include "cuda/draft/memory.h"
#include "cuda/draft/rows.cuh"

namespace eagle::cuda {

// Row i of a request's path: where its features stand. The thread that `tells` leaves what phases take of it
// and of its request. Params: DraftParams, or PersistentParams; `capacity`: rows of a request's pages.
template <class T, class Params>
__device__ __forceinline__ const T* place_path_row(const Params& p, const DraftMemory& m, int capacity,
                                                   int request, int i, bool tells) {
  const int64_t row = int64_t{request} * p.max_path + i;
  const int node = clamped(load_read_only(p.path + row), 0, p.max_feature_nodes - 1);
  if (tells) {
    const int accepted = clamped(load_read_only(p.num_accepted + request), -1, p.max_path - 1);
    const int start = clamped(load_read_only(p.seq_lens + request), 0, capacity);
    const int32_t token = load_read_only(p.target_tokens + int64_t{request} * p.max_feature_nodes + node);
    store(m.path_tokens + row, token);
    store(m.path_depths + row, clamped(int64_t{start} + i, 0, capacity) - start);
    if (i == max(accepted, 0)) store(m.roots + request, token);
    if (i == 0) {
      const int asked = p.node_limit ? load_read_only(p.node_limit + request) : p.max_nodes;
      const int limit = accepted < 0 ? 0 : clamped(asked, 0, p.max_nodes);
      const int committed = clamped(int64_t{start} + accepted + 1, 0, capacity);
      store(m.start + request, start);
      store(m.extended + request, accepted + 1);
      store(m.committed + request, committed);
      store(m.growing + request, limit < 2 ? 0 : p.top_k);  // 1: the root alone, no draft node is wanted
      store(m.limits + request, limit);
      store(m.positions + request, committed + 1);  // of the root's children
    }
  }
  return static_cast<const T*>(p.features) + request * p.features_strides[0] + node * p.features_strides[1];
}

}  // namespace eagle::cuda
