#pragma once
// Gumbel-max over tokens in any order: noise is computed only for a token that can still win.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/numeric.h"
#include "common/philox.h"
#include "cuda/device/warp.cuh"

namespace eagle::cuda {

inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kMinGumbel = -2.83f;  // the smallest value gumbel() can take, rounded down

// Smaller for a larger z; its own inverse. NaN and -0 do not occur.
__device__ __forceinline__ uint32_t order_bits(uint32_t bits) {
  return bits ^ (~static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) & 0x7fffffffu);
}
__device__ __forceinline__ uint32_t order_key(float z) { return order_bits(float_bits(z)); }
__device__ __forceinline__ float from_order_key(uint32_t key) { return bits_float(order_bits(key)); }

// The smaller, the better: by score, then by the lower token.
__device__ __forceinline__ uint64_t rank(float score, uint32_t token) {
  return static_cast<uint64_t>(order_key(score)) << 32 | token;
}

// At least gumbel_from_bits of the bits whose uniform is `v`, at most 0.07 above it. g <= -log v, and the
// bits of a float are linear in the logarithm or below it; 1e-3 covers every rounding.
__device__ __forceinline__ float gumbel_bound(float v) {
  return fma(static_cast<float>(float_bits(v)), -8.2629582e-8f, 88.029692f + 1e-3f);  // ln 2 / 2^23, 127 ln 2
}

// The best token that this thread has tried. Rounding is monotone: z + bound < best, rounded, is a token that
// cannot win, whatever the size of z; hence the order of tokens, and what `limit` knows when, change nothing.
struct Trial {
  uint64_t seed;
  int32_t position;
  float threshold;  // no more than the best score of the row
  uint64_t best;    // rank()
  uint32_t* limit;  // shared: the smallest order_key of a score that any thread has seen

  // What the others know. Called by whole warps.
  __device__ __forceinline__ void listen() {
    uint32_t key = 0;
    if (lane_id() == 0) key = atomicMin(limit, 0xffffffffu);  // an atomic read
    key = __shfl_sync(kFullMask, key, 0);
    threshold = fmaxf(threshold, key >= 0xff800000u ? threshold : from_order_key(key));
  }

  __device__ __forceinline__ static uint32_t lane_of(const Philox4& x, uint32_t i) {
    const uint32_t low = i & 1 ? x.lane[1] : x.lane[0], high = i & 1 ? x.lane[3] : x.lane[2];
    return i & 2 ? high : low;
  }
  __device__ __forceinline__ Philox4 philox(uint32_t token) const {
    return philox_4x32_10(seed, token / 4, static_cast<uint32_t>(position), kTargetStream, 0);
  }

  __device__ __forceinline__ void try_token(float z, uint32_t token) {
    if (!(z + kMaxGumbel >= threshold)) return;
    const float score = z + gumbel_from_bits(lane_of(philox(token), token % 4));
    const uint64_t mine = rank(score, token);
    best = mine < best ? mine : best;
    if (score > threshold) {
      threshold = score;
      atomicMin(limit, order_key(score));
    }
  }

  // Tokens from `first` on. first % 4 is the same for all threads.
  template <int kCount>
  __device__ __forceinline__ void try_tokens(const float (&z)[kCount], uint32_t first) {
    float largest = z[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = fmaxf(largest, z[i]);
    if (!(largest + kMaxGumbel >= threshold)) return;
    uint32_t promising = 0;
    Philox4 x;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t token = first + i;
      if (i == 0 || token % 4 == 0) x = philox(token);
      const float v = uniform_from_bits(lane_of(x, token % 4));
      if (z[i] + gumbel_bound(v) >= threshold) promising |= 1u << i;
    }
    // Few get here: their bits are made again rather than kept, the logarithms stand in one place.
    for (; promising > 0; promising &= promising - 1) {
      const int at = __ffs(static_cast<int>(promising)) - 1;
      float z_at = z[0];
#pragma unroll
      for (int i = 1; i < kCount; ++i) z_at = i == at ? z[i] : z_at;
      try_token(z_at, first + at);
    }
  }
};

}  // namespace eagle::cuda
