#pragma once
// Words for the warps of one block.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/warp.cuh"

namespace eagle::cuda {

// Sum over this lane and the lanes below it.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T below = __shfl_up_sync(kFullMask, value, distance);
    if (lane_id() >= distance) value += below;
  }
  return value;
}

// ---- radix selection: 8 bits of a key at a time, from the top, down to the n-th largest key ---------------

inline constexpr int kRadixBits = 8, kRadixBins = 1 << kRadixBits;

// Where a histogram of T[kRadixBins] keeps the count of `digit`: find_digit reads it without bank conflicts.
__device__ __forceinline__ int radix_bin(uint32_t digit) {
  constexpr int kDigitsPerLane = kRadixBins / kWarpSize;
  return static_cast<int>(digit % kDigitsPerLane * kWarpSize + digit / kDigitsPerLane);
}

template <class T>
struct RadixDigit {
  uint32_t digit;
  T above;  // sum of the counts of all larger digits, less than what was asked for
  T count;
};

// The largest digit at which the counts, summed from the largest digit down, reach `wanted`: at least 1, at
// most the sum of all counts. Every warp finds it for itself, which costs no barrier.
template <class T>
__device__ __forceinline__ RadixDigit<T> find_digit(const T* histogram, T wanted) {
  constexpr int kDigitsPerLane = kRadixBins / kWarpSize;
  const int group = kWarpSize - 1 - lane_id();  // lane 0 has the largest digits
  T count[kDigitsPerLane], sum = 0;
#pragma unroll
  for (int i = 0; i < kDigitsPerLane; ++i) sum += count[i] = histogram[i * kWarpSize + group];
  T above = warp_inclusive_sum(sum) - sum;
  const int owner = __ffs(static_cast<int>(__ballot_sync(kFullMask, above + sum >= wanted))) - 1;

  RadixDigit<T> found{0, 0, 0};
#pragma unroll
  for (int i = kDigitsPerLane - 1; i >= 0; --i) {
    if (above < wanted) found = {static_cast<uint32_t>(group * kDigitsPerLane + i), above, count[i]};
    above += count[i];
  }
  return {__shfl_sync(kFullMask, found.digit, owner), __shfl_sync(kFullMask, found.above, owner),
          __shfl_sync(kFullMask, found.count, owner)};
}

}  // namespace eagle::cuda
