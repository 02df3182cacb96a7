#pragma once
// A block's sums, crossings and order. kThreads: the block's size, 32 times a power of two.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/block.cuh"
#include "cuda/device/warp.cuh"

namespace eagle::cuda {

// Words through which the threads of a block exchange what follows.
template <int kThreads>
struct BlockScratch {
  uint64_t partial[kThreads / kWarpSize];
  uint64_t before;
  uint32_t index;
};

// `op`, commutative and associative, over all threads, for every thread.
template <int kThreads, class Op>
__device__ __forceinline__ uint64_t block_reduce(uint64_t value, BlockScratch<kThreads>& s, Op op) {
  constexpr int kWarps = kThreads / kWarpSize;
  value = warp_reduce(value, op);
  if constexpr (kWarps > 1) {
    __syncthreads();  // the words may still be read from the last time
    if (lane_id() == 0) s.partial[warp_id()] = value;
    __syncthreads();
    value = s.partial[lane_id() % kWarps];
    for (int distance = kWarps / 2; distance > 0; distance /= 2)
      value = op(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

template <int kThreads>
__device__ __forceinline__ uint64_t block_sum(uint64_t value, BlockScratch<kThreads>& s) {
  return block_reduce<kThreads>(value, s, [](uint64_t a, uint64_t b) { return a + b; });
}
template <int kThreads>
__device__ __forceinline__ uint64_t block_min(uint64_t value, BlockScratch<kThreads>& s) {
  return block_reduce<kThreads>(value, s, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
}

// Sum over the threads below this one.
template <int kThreads>
__device__ __forceinline__ uint64_t block_sum_below(uint64_t value, BlockScratch<kThreads>& s) {
  constexpr int kWarps = kThreads / kWarpSize;
  const uint64_t inclusive = warp_inclusive_sum(value);
  if constexpr (kWarps == 1) return inclusive - value;
  __syncthreads();
  if (lane_id() == kWarpSize - 1) s.partial[warp_id()] = inclusive;
  __syncthreads();
  const uint64_t warps = warp_inclusive_sum(s.partial[lane_id() % kWarps]);
  const uint64_t below = __shfl_sync(kFullMask, warps, warp_id() > 0 ? warp_id() - 1 : 0);
  return (warp_id() > 0 ? below : 0) + inclusive - value;
}

struct Crossing {
  uint32_t index;
  uint64_t before;  // `before` of the call and all weights below `index`
};

// The first of n > 0 items at which `before` and the weights up to and with it reach `target`: the last item
// where they never do.
template <int kThreads, class Weight>
__device__ __forceinline__ Crossing find_crossing(uint32_t n, uint64_t before, uint64_t target, Weight weight,
                                                  BlockScratch<kThreads>& s) {
  const uint32_t share = (n + kThreads - 1) / kThreads;
  const uint32_t begin = min(n, threadIdx.x * share), end = min(n, begin + share);
  uint64_t sum = 0;
  for (uint32_t i = begin; i < end; ++i) sum += weight(i);
  uint64_t sum_before = before + block_sum_below<kThreads>(sum, s);
  const bool reached = sum_before + sum >= target;
  // One thread's items hold the crossing. Without one, it is the last thread that has items.
  if (begin < end && (sum_before < target || begin == 0) && (reached || end == n)) {
    uint32_t i = begin;
    for (; i + 1 < end; ++i) {
      const uint64_t w = weight(i);
      if (sum_before + w >= target) break;
      sum_before += w;
    }
    s.index = i;
    s.before = sum_before;
  }
  __syncthreads();
  const Crossing found{s.index, s.before};
  __syncthreads();
  return found;
}

// Ascending. A bitonic network whose first step of every size is mirrored, so that all comparisons point one
// way and what lies beyond n need not exist.
template <int kThreads, class Word>
__device__ __forceinline__ void block_sort(Word* list, uint32_t n) {
  for (uint32_t size = 2; size / 2 < n; size *= 2)
    for (uint32_t distance = size / 2; distance > 0; distance /= 2) {
      const bool mirrored = distance == size / 2;
      for (uint32_t i = threadIdx.x; 2 * i < n + distance; i += kThreads) {
        const uint32_t offset = i % distance, low = (i - offset) * 2 + offset;
        const uint32_t high = mirrored ? (i - offset) * 2 + size - 1 - offset : low + distance;
        if (high >= n) continue;
        const Word a = list[low], b = list[high];
        if (a > b) list[low] = b, list[high] = a;
      }
      __syncthreads();
    }
}

}  // namespace eagle::cuda
