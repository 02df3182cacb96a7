#pragma once
// kv_cache: after acceptance, move the accepted nodes' rows to the end of the prefix.
#include <cstdint>
#include <vector>

#include "eagle_cuda/attention.h"
#include "eagle_cuda/tensor_view.h"

namespace eagle {

// For i = 1 .. num_accepted: row seq_lens + path[i] -> row seq_lens + i, in every cache. Since path[i] >= i,
// ascending order is hazard-free in place; nothing moves where path[i] == i. A path entry below i or at or
// beyond `max_nodes` is malformed: the request's rows are left alone from there on. num_accepted <= 0:
// nothing moves.
struct CompactKvParams {
  int batch_size;               // B
  int num_caches;               // layers
  int max_nodes;                // bound for path entries
  int max_path;                 // P
  const KVCacheView* caches;    // [num_caches]  K and V of each layer; all share the page table of the first
  const int32_t* path;          // [B, P]
  const int32_t* num_accepted;  // [B]
  const int32_t* seq_lens;      // [B]  before acceptance
};

void validate(const CompactKvParams& p);
namespace cpu {
void compact_kv(const CompactKvParams& p);
}
namespace cuda {
void compact_kv(const CompactKvParams& p, CUstream_st* stream);
}

// Tensor form: one K and one V tensor per layer.
void compact_kv(const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
                TensorView page_table, TensorView path, TensorView num_accepted, TensorView seq_lens,
                int max_nodes, CUstream_st* stream);

}  // namespace eagle
