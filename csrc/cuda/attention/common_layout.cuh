#pragma once
// What a block of the common pass keeps in shared memory, and which positions it walks over.
#include <cstddef>
#include <cstdint>

#include "cuda/attention/partials.cuh"
#include "cuda/attention/tile.cuh"

namespace eagle::cuda {

inline constexpr int kStep = 32;  // positions of a tile: more would not fit the registers beside the output
inline constexpr int kWarpRows = 16;  // rows of a warp
inline constexpr int kMaxWarps = 16;
inline constexpr int kLookahead = 4;  // steps whose pages are known

// The steps of a block in order: every `splits`th unit, cut to [first, last).
struct Steps {
  int size;    // of a unit: a power of two
  int stride;  // from the end of a unit to the block's next one
  int last;

  // So many steps behind the one at `position`; -1: none.
  __device__ __forceinline__ int after(int position, int steps) const {
    for (int i = 0; i < steps; ++i) {
      position += kStep;
      if ((position & (size - 1)) == 0) position += stride;
    }
    return position < last ? position : -1;
  }
};

// What one block does at a time: a split of the positions for a block of rows.
struct CommonTask {
  int request, kv_head, split, row_block;
};

// At the beginning of shared memory; behind it the queries [rows_per_block], the ring of tiles [ring][kStep],
// and the accumulators of groups, float2 [warps][2][D / 8][32]. Where the cache has codes, there are two
// tiles, one of keys and one of values, and behind the accumulators the ring of codes [ring][kStep][D] and
// CodeScales.
struct CommonShared {
  // The same for all threads and seldom asked for: registers are scarce.
  CommonTask task;
  int begin, end;  // positions that some row of the block sees
  Steps steps;
  Units units;
  CacheSlot slots[kLookahead][kStep];
  uint32_t present[kLookahead];  // one bit a position
  int first[kMaxWarps], last[kMaxWarps];
  Stats group[kMaxWarps][kWarpRows];  // goes with the accumulators
  Stats total[kMaxWarps][kWarpRows];  // of the units so far, where one block has them all
};

struct CodeScales {
  float k[kLookahead][kStep], v[kLookahead][kStep];  // 0 where there is no row
};

template <int kHeadDim>
constexpr size_t common_shared_bytes(int rows, int ring, bool codes) {
  return (sizeof(CommonShared) + 127) / 128 * 128 +
         (rows + (codes ? 2 : ring) * kStep) * Tile<kHeadDim>::kPitch * size_t{16} +
         size_t(rows) * kHeadDim * sizeof(float) +
         (codes ? size_t(ring) * kStep * kHeadDim + sizeof(CodeScales) : 0);
}

}  // namespace eagle::cuda
