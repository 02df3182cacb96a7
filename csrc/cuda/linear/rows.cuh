#pragma once
// Rows of activations: their norm, in the CPU's order and to its bits, and their way into shared memory.
#include <cuda_runtime.h>

#include "common/numeric.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "eagle_cuda/linear.h"

namespace eagle::cuda {

inline constexpr int kNormLanes = 16;  // element i is summed by lane i % 16

// sqrt(mean(x^2) + eps), for both halves of a warp, each with a row of its own.
template <class T>
__device__ __forceinline__ float row_root(const T* row, int64_t k, float eps) {
  constexpr int kAhead = 32;  // loads under way: the row is read once, from L2
  float squares = 0.0f;
  for (int64_t first = lane_id() % kNormLanes; first < k; first += kAhead * kNormLanes) {
    float x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = first + i * kNormLanes;
      x[i] = at < k ? to_float(load(row + at)) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) squares = fma(x[i], x[i], squares);
  }
  for (int half = kNormLanes / 2; half > 0; half /= 2) squares += __shfl_xor_sync(kFullMask, squares, half);
  return __builtin_sqrtf(squares / static_cast<float>(k) + eps);
}

template <class T>
__device__ __forceinline__ T normalised(T x, float root, T weight) {
  return from_float<T>(to_float(x) / root * to_float(weight));
}

// 16 bytes as elements.
template <class T>
struct alignas(16) Piece {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  T element[kElements];
};

template <class T>
__device__ __forceinline__ Piece<T> load_piece(const T* row, int64_t piece) {
  return __builtin_bit_cast(Piece<T>, load(reinterpret_cast<const uint4*>(row) + piece));
}

// The first `count` elements of a piece (less than 1: none), zeros behind them. Where the address is no
// multiple of 16, at once instead of in flight.
template <class T>
__device__ __forceinline__ void copy_elements(uint4* to, const T* from, int64_t count, bool aligned) {
  constexpr int kElements = Piece<T>::kElements;
  const int present = static_cast<int>(count < 0 ? 0 : count < kElements ? count : kElements);
  if (aligned) return copy_async(to, from, present * static_cast<int>(sizeof(T)));
  Piece<T> piece{};
#pragma unroll
  for (int i = 0; i < kElements; ++i)
    if (i < present) piece.element[i] = load(from + i);
  *reinterpret_cast<Piece<T>*>(to) = piece;
}

// rms_norm, or without a weight a copy; in rms_norm.cu.
void prepare_rows(const RmsNormParams& p, CUstream_st* stream);

// The same, quantised by row: int8 codes to `p.out`, the rows' scales to `scales` [m].
void prepare_codes(const RmsNormParams& p, float* scales, CUstream_st* stream);

}  // namespace eagle::cuda
