#pragma once
// Results over some of a row's keys, and how two of them become one.
#include <cstdint>

#include "common/numeric.h"
#include "cuda/attention/positions.cuh"

namespace eagle::cuda {

__device__ __forceinline__ float minus_infinity() { return bits_float(0xff800000u); }

// Largest score, and sum of exponentials relative to it; sum 0: no key, and nothing else is looked at.
struct Stats {
  float max, sum;
};

__device__ __forceinline__ Stats no_keys() { return {minus_infinity(), 0.0f}; }

// What the exponentials are taken relative to.
__device__ __forceinline__ float shift_of(float max) { return max == minus_infinity() ? 0.0f : max; }

// Weights of the earlier and the later partial. One without keys leaves the other's bits alone.
struct Fold {
  float earlier, later;
  bool keep, take;

  __device__ __forceinline__ float operator()(float a, float b) const {
    const float both = fma(a, earlier, b * later);
    return keep ? a : take ? b : both;
  }
};

__device__ __forceinline__ Fold fold(Stats& a, const Stats& b) {
  Fold f{1.0f, 1.0f, b.sum == 0.0f, a.sum == 0.0f};
  if (f.keep) return f;
  if (f.take) {
    a = b;
    return f;
  }
  const float max = a.max >= b.max ? a.max : b.max;
  f.earlier = a.max == max ? 1.0f : exp_f32(a.max - max);
  f.later = b.max == max ? 1.0f : exp_f32(b.max - max);
  a = {max, fma(a.sum, f.earlier, b.sum * f.later)};
  return f;
}

// Workspace: Stats [B, Hkv, slots, rows], then float [B, Hkv, slots, rows, D].
struct Partials {
  Stats* stats;
  float* out;
};

__host__ __device__ __forceinline__ int64_t num_partials(const TreeAttentionParams& p, const Plan& plan) {
  return int64_t{p.batch_size} * p.cache.num_kv_heads * plan.slots * plan.rows;
}

__host__ __device__ __forceinline__ Partials partials_at(const TreeAttentionParams& p, const Plan& plan) {
  Stats* const stats = static_cast<Stats*>(p.workspace);
  return {stats, reinterpret_cast<float*>(stats + (num_partials(p, plan) + 1) / 2 * 2)};
}

__device__ __forceinline__ int64_t partial_index(const TreeAttentionParams& p, const Plan& plan, int request,
                                                 int kv_head, int slot, int row) {
  return ((int64_t{request} * p.cache.num_kv_heads + kv_head) * plan.slots + slot) * plan.rows + row;
}

}  // namespace eagle::cuda
