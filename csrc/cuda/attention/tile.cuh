#pragma once
// Rows of 16-bit elements in shared memory, as ldmatrix reads them: eight rows at one piece of 16 bytes lie
// in eight different groups of four banks.
#include "cuda/device/ptx.cuh"

namespace eagle::cuda {

template <int kHeadDim>
struct Tile {
  static constexpr int kPieces = kHeadDim / 8;
  static constexpr bool kSwizzled = kPieces % 8 == 0;  // else padded to an odd number of pieces
  static constexpr int kPitch = kSwizzled ? kPieces : kPieces | 1;

  static __device__ __forceinline__ int at(int row, int piece) {
    return row * kPitch + (kSwizzled ? piece ^ (row & 7) : piece);
  }

  // at(row + 16 n, piece + odd) for an even constant piece and at(row, odd) = start: few different registers
  // for a loop.
  static __device__ __forceinline__ int from(int start, int n, int piece) {
    return (kSwizzled ? (start ^ (piece & 7)) + (piece & ~7) : start + piece) + 16 * n * kPitch;
  }
};

// 16 bytes to shared memory, or zeros. Where addresses are no multiples of 16, at once instead of in flight.
template <class T>
__device__ __forceinline__ void copy_piece(uint4* to, const T* from, bool present, bool aligned) {
  if (aligned) return copy_async(to, from, present ? 16 : 0);
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < kElements; ++i) reinterpret_cast<T*>(to)[i] = present ? load(from + i) : T{};
}

}  // namespace eagle::cuda
