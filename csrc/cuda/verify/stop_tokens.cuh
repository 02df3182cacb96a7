#pragma once
// Whether a token ends a request.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace eagle::cuda {

// One request's stop tokens, for a whole warp: the first 32 lie in registers, one a lane.
struct StopTokens {
  const int32_t* tokens;
  int count, lane;
  int32_t mine;

  template <class Params>
  __device__ __forceinline__ StopTokens(const Params& p, int64_t request, int lane)
      : tokens(p.stop_tokens + request * p.num_stop_tokens),
        count(p.num_stop_tokens),
        lane(lane),
        mine(get(lane)) {}

  __device__ __forceinline__ int32_t get(int64_t i) const {
    return i < count ? load_read_only(tokens + i) : -1;
  }

  __device__ __forceinline__ bool contain(int32_t token) const {
    if (token == -1) return false;  // marks unused entries
    bool found = __any_sync(kFullMask, mine == token);
    for (int64_t i = kWarpSize; i < count && !found; i += kWarpSize)
      found = __any_sync(kFullMask, get(i + lane) == token);
    return found;
  }
};

}  // namespace eagle::cuda
