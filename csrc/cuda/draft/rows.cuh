#pragma once
// Phases that move rows of activations, a block a row: as they are, or behind a norm (to rms_norm's bits).
#include <cstdint>
#include <initializer_list>

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/linear/rows.cuh"

namespace eagle::cuda {

inline constexpr int kRowThreads = 128;

struct RowShared {
  float root;
};

__device__ __forceinline__ int clamped(int64_t value, int low, int high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

// `vectors`: all three begin at multiples of 16 bytes, and so does what follows them. weight = nullptr: a
// copy. Whole block; `shared` is used once a launch.
template <class T>
__device__ __forceinline__ void move_row(RowShared& shared, const T* from, T* to, int64_t size,
                                         const T* weight, float eps, bool vectors) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  float root = 1.0f;
  if (weight) {
    if (warp_id() == 0) {
      const float found = row_root(from, size, eps);
      if (lane_id() == 0) shared.root = found;
    }
    __syncthreads();
    root = shared.root;
  }
  if (vectors) {
    for (int64_t i = thread; i < size / Piece<T>::kElements; i += threads) {
      Piece<T> piece = load_piece(from, i);
      if (weight) {
        const Piece<T> w = load_piece(weight, i);
#pragma unroll
        for (int j = 0; j < Piece<T>::kElements; ++j)
          piece.element[j] = normalised(piece.element[j], root, w.element[j]);
      }
      store(reinterpret_cast<uint4*>(to) + i, __builtin_bit_cast(uint4, piece));
    }
  } else {
    for (int64_t i = thread; i < size; i += threads)
      store(to + i, weight ? normalised(load(from + i), root, load(weight + i)) : load(from + i));
  }
}

// Whether rows of `sizes` bytes at `addresses` let move_row take 16 bytes at a time.
inline bool row_vectors(std::initializer_list<const void*> addresses, std::initializer_list<int64_t> sizes) {
  bool whole = true;
  for (const void* address : addresses) whole &= reinterpret_cast<uintptr_t>(address) % 16 == 0;
  for (int64_t bytes : sizes) whole &= bytes % 16 == 0;
  return whole;
}

}  // namespace eagle::cuda
