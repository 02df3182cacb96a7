#pragma once
// kv_cache: after acceptance, move the accepted nodes' rows, and their scales, to the end of the prefix.
#include <cstdint>
#include <vector>

#include "eagle_cuda/attention.h"
#include "eagle_cuda/tensor_view.h"

namespace eagle {

// For i = 1 .. num_accepted: row seq_lens + path[i] -> row seq_lens + i, in every cache: K, V and whichever
// scales it has. Since path[i] >= i, ascending order is hazard-free in place; where path[i] == i nothing is
// read or written. A path entry below i or at or beyond `max_nodes` is malformed: the request's rows are left
// alone from there on. A row whose source or destination is missing is skipped. num_accepted <= 0: nothing
// moves. Elements are moved as bits: any DType of 1, 2 or 4 bytes.
//
// Rows must not share memory: where a page table names a page twice, in one request or in two, the rows of
// that page are undefined afterwards (nothing outside the caches is touched).
struct CompactKvParams {
  int batch_size;               // B
  int num_caches;               // layers
  int max_nodes;                // bound for path entries
  int max_path;                 // P
  const KVCacheView* caches;    // [num_caches]  K and V of each layer; all have the page table of the first
  const int32_t* path;          // [B, P]
  const int32_t* num_accepted;  // [B]
  const int32_t* seq_lens;      // [B]  before acceptance; below 0 counts as 0
};

void validate(const CompactKvParams& p);
namespace cpu {
void compact_kv(const CompactKvParams& p);
}
namespace cuda {
void compact_kv(const CompactKvParams& p, CUstream_st* stream);
}

// Tensor form: one K and one V tensor per layer. The lists of scales are as long, with absent entries where a
// layer has none, or empty.
void compact_kv(const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
                const std::vector<TensorView>& k_scales, const std::vector<TensorView>& v_scales,
                TensorView page_table, TensorView path, TensorView num_accepted, TensorView seq_lens,
                int max_nodes, CUstream_st* stream);

}  // namespace eagle
