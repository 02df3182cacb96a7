#pragma once
// The packed layout of a weight on CUDA: what a warp multiplies comes as it is needed, 16 bytes a lane.
//
//   [row tile of 16][step along K][bytes of the tile's step]
//
// A row tile's steps follow each other, so that a block that works on some tiles reads one stream a tile. The
// 16 rows are 16 outputs, or for paired weights 8 gate rows and the 8 up rows of the same outputs: an output
// and its gate meet in one thread. Within a step:
//
//   bf16, fp16   64 k: four 16x16 matrices, of each 16 bytes a lane as mma.m16n8k16 takes them
//   fp32         32 k: four k of a row together, then the 16 rows, then the next four k
//   fp8, int8    64 k: two pairs of 16x16 matrices, of each pair 16 bytes a lane; int8 as code + 128
//   int4         64 k: four 16x16 matrices, of all 16 bytes a lane, sign and magnitude; then a float16 scale
//                a row
//   int8_dynamic 128 k: four 16x32 matrices, of each 16 bytes a lane as mma.m16n8k32 takes them
//
// Behind the last step stand the rows' float32 scales, tile by tile (fp8, int8, int8_dynamic).
//
// Ragged N and K are padded with zeros: a product that is exactly zero leaves a sum as it is.
#include <cstdint>

#include "common/numeric.h"
#include "eagle_cuda/linear.h"

namespace eagle::cuda {

inline constexpr int kTileRows = 16;

struct PackedLayout {
  int64_t n, k;
  WeightFormat format;
  bool paired;
  int step_k;      // k of a step
  int tile_bytes;  // of one tile's step
  int tiles, steps;

  PackedLayout(int64_t n_, int64_t k_, WeightFormat format_, bool paired_)
      : n(n_),
        k(k_),
        format(format_),
        paired(paired_),
        tiles(static_cast<int>(paired_ ? ceil_div<int64_t>(n_ / 2, kTileRows / 2)
                                       : ceil_div<int64_t>(n_, kTileRows))) {
    constexpr int kStepK[] = {32, 64, 64, 64, 64, 64, 128};
    constexpr int kTileBytes[] = {2048, 2048, 2048, 1024, 1024, 512 + 32, 2048};
    step_k = kStepK[static_cast<int>(format)];
    tile_bytes = kTileBytes[static_cast<int>(format)];
    steps = static_cast<int>(ceil_div<int64_t>(k_, step_k));
  }
  explicit PackedLayout(const PackedWeight& w) : PackedLayout(w.n, w.k, w.format, w.paired) {}

  EAGLE_INLINE bool quantized() const { return format >= WeightFormat::kFloat8E4M3; }
  EAGLE_INLINE bool row_scales() const { return quantized() && format != WeightFormat::kInt4; }
  EAGLE_INLINE int64_t step_at(int64_t tile, int64_t step) const {
    return (tile * steps + step) * tile_bytes;
  }
  EAGLE_INLINE int64_t scales_at() const { return int64_t{tiles} * steps * tile_bytes; }
  EAGLE_INLINE int64_t scale_at(int64_t tile, int row) const {
    return scales_at() + (tile * kTileRows + row) * 4;
  }
  int64_t bytes() const { return scales_at() + (row_scales() ? int64_t{tiles} * kTileRows * 4 : 0); }
  // Of an element of x, at most.
  int element_bytes() const {
    return format == WeightFormat::kBFloat16 || format == WeightFormat::kFloat16 ? 2 : 4;
  }

  // Source row of row `i` of a tile; rows from `end_of` on are padding.
  EAGLE_INLINE int64_t source_row(int64_t tile, int i) const {
    return paired ? i / 8 * (n / 2) + tile * 8 + i % 8 : tile * kTileRows + i;
  }
  EAGLE_INLINE int64_t end_of(int i) const { return paired && i < 8 ? n / 2 : n; }
};

// One row's part of a tile's step that lies in one 32-bit word.
struct PackedWord {
  int row;      // of the tile
  int first_k;  // of the step
  int count;    // elements
};

EAGLE_INLINE PackedWord packed_word(int element_bytes, int word) {
  if (element_bytes == 4) return {word / 4 % kTileRows, word / 64 * 4 + word % 4, 1};
  const int matrix = word / 128, lane = word / 4 % 32, part = word % 4;
  return {lane / 4 + part % 2 * 8, matrix * 16 + part / 2 * 8 + lane % 4 * 2, 2};
}

// Where a quantised format has the code of a row and a k of the step; int4: in the upper nibble for odd k.
EAGLE_INLINE int code_byte(WeightFormat format, int row, int k) {
  if (format == WeightFormat::kInt8Dynamic) {
    const int lane = row % 8 * 4 + k % 16 / 4;
    return k / 32 * 512 + lane * 16 + (k % 32 / 16 * 2 + row / 8) * 4 + k % 4;
  }
  const int matrix = k / 16, lane = row % 8 * 4 + k % 8 / 2, upper = k % 16 / 8;
  if (format == WeightFormat::kInt4) return lane * 16 + matrix * 4 + upper * 2 + row / 8;
  return matrix / 2 * 512 + lane * 16 + (matrix % 2 * 2 + row / 8) * 4 + upper * 2 + k % 2;
}
inline constexpr int kInt4ScalesAt = 512;  // within a tile's step

}  // namespace eagle::cuda
