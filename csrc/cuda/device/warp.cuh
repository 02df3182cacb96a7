#pragma once
// Words for the lanes of one warp.
#include <cuda_runtime.h>

#include <cstdint>

namespace eagle::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kFullMask = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % kWarpSize); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / kWarpSize); }

// `op` over the 32 lanes, in a fixed order of pairs, for every lane. `op` must be commutative.
template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value = op(value, __shfl_xor_sync(kFullMask, value, distance));
  return value;
}

}  // namespace eagle::cuda
