#pragma once
// The draft head's layers over rows with explicit cache rows: what extend_draft and draft share.
#include <cstdint>

#include "eagle_cuda/draft.h"

namespace eagle::cpu {

// One row: an embedding and a hidden state, where its key and value go, and what it sees. A query sees cache
// rows 0 .. prefix - 1 at their own positions, then the rows of `tail`, its own the last
// (cpu/attention/attend.h).
struct HeadRow {
  int32_t token;  // clamped to [0, V)
  int32_t request;
  int32_t cache_row;
  int32_t position;  // RoPE
  int32_t prefix;
  int32_t tail_length;
  const int32_t* tail;
};

// Features [m, F] to what the head takes as hidden state [m, H]: fc (EAGLE-3), or the features themselves
// (EAGLE-1).
void fuse_features(const DraftHead& head, const void* features, int64_t stride, int64_t m, void* out);

// hidden [m, H] -> out [m, H], the output g of the last layer; nullptr: only keys and values are written.
// Rows may see the keys of earlier rows of the call: every layer writes all keys of up to kTileRows rows
// first, in order.
void run_head(const DraftHead& head, const KVCacheView* caches, const HeadRow* rows, int64_t m,
              const void* hidden, void* out);

// Rows that a request's pages can hold, at most 2^30: lengths are clamped to it, so that nothing overflows.
int64_t cache_capacity(const KVCacheView& cache);

}  // namespace eagle::cpu
