#pragma once
// The n largest logits of a row, in one more read of it.
//
// The first pass has left the largest logit of every thread. The n-th largest of these bounds the n-th
// largest of the row from below, so that little else is listed; where a list fills up all the same, the n
// best of it stay, and a better bound with them.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/sampling/block_search.cuh"
#include "cuda/sampling/noise.cuh"
#include "cuda/sampling/row.cuh"
#include "eagle_cuda/sampling.h"

namespace eagle::cuda {

// Leaves rank() of the n best, at most one of a thread's share of the row and kMaxTop, in list[0 .. n).
// `list`: kCapacity words of shared memory; `listed`: one. `largest`: of this thread's logits.
template <int kThreads, uint32_t kCapacity, class T>
__device__ __forceinline__ void find_top(const Row<T>& row, uint32_t n, float largest, uint64_t* list,
                                         uint32_t& listed) {
  constexpr uint32_t kRoom = kThreads * Row<T>::kPerThread;  // what one round can add
  static_assert(kMaxTop <= kThreads && kThreads <= kCapacity && kRoom <= kCapacity);
  __syncthreads();
  list[threadIdx.x] = rank(largest, threadIdx.x);
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  block_sort<kThreads>(list, kThreads);
  uint64_t limit = list[n - 1] | 0xffffffffu;
  __syncthreads();
  for_each_vector<kThreads>(row, [&](const auto& x, uint32_t first, int j) {
#pragma unroll
    for (int i = 0; i < Row<T>::kPerVector; ++i) {
      const uint64_t mine = rank(x[i], first + i);
      if (mine > limit || first + i >= row.size) continue;
      const uint32_t at = atomicAdd(&listed, 1u);
      if (at < kCapacity) list[at] = mine;
    }
    if constexpr (kRoom < kCapacity) {  // else the row has one round
      if (j + 1 < Row<T>::kVectors) return;
      __syncthreads();
      const uint32_t count = listed;
      __syncthreads();
      if (count + kRoom <= kCapacity) return;
      block_sort<kThreads>(list, count);
      limit = list[n - 1];
      __syncthreads();
      if (threadIdx.x == 0) listed = n;
      __syncthreads();
    }
  });
  __syncthreads();
  block_sort<kThreads>(list, min(listed, kCapacity));
}

}  // namespace eagle::cuda
