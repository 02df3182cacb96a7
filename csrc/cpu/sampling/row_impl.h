#pragma once
// Included once per instruction set; everything here has internal linkage. Blocks vectorise.
#include "common/exp_sum.h"
#include "common/numeric.h"
#include "common/philox.h"
#include "cpu/sampling/row_kernels.h"

namespace eagle::cpu {
namespace {

constexpr float kNegativeInfinity = -__builtin_inff();

EAGLE_INLINE float usable(float x) { return x == x ? x : kNegativeInfinity; }

// Integers compare like the floats, so that the maximum is a reduction in any order. NaN must not occur.
EAGLE_INLINE int32_t ordered(float x) {
  const int32_t bits = int32_t(float_bits(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
EAGLE_INLINE float from_ordered(int32_t key) {
  return bits_float(uint32_t(key ^ ((key >> 31) & 0x7fffffff)));
}

template <class F>
EAGLE_INLINE void by_dtype(DType dtype, const void* data, F&& f) {
  if (dtype == DType::kFloat32) return f(static_cast<const float*>(data));
  if (dtype == DType::kBFloat16) return f(static_cast<const bf16_t*>(data));
  f(static_cast<const half_t*>(data));
}

// NaN as -inf, -0 as 0.
template <class T>
EAGLE_INLINE int32_t logit_key(T logit) {
  return ordered(usable(to_float(logit)) + 0.0f);
}

ScoredToken argmax(DType dtype, const void* logits, int64_t n) {
  ScoredToken result{kNegativeInfinity, 0};
  by_dtype(dtype, logits, [&](const auto* l) {
    const int32_t lowest = ordered(kNegativeInfinity);
    int32_t best = lowest;
    int64_t best_block = 0;
    for (int64_t i = 0; i < n; i += kRowBlock) {
      int32_t block = lowest;
      if (i + kRowBlock <= n) {
        for (int64_t j = 0; j < kRowBlock; ++j) {
          const int32_t key = logit_key(l[i + j]);
          block = key > block ? key : block;
        }
      } else {
        for (int64_t j = i; j < n; ++j) {
          const int32_t key = logit_key(l[j]);
          block = key > block ? key : block;
        }
      }
      if (block > best) best = block, best_block = i;
    }
    if (best == lowest) return;
    int64_t token = best_block;
    while (logit_key(l[token]) != best) ++token;
    result = {from_ordered(best), int32_t(token)};
  });
  return result;
}

float log_sum_exp(DType dtype, const void* logits, int64_t n, float max) {
  alignas(64) float lane_max[kExpSumLanes], lane_sum[kExpSumLanes];
  const int64_t lanes = n < kExpSumLanes ? n : kExpSumLanes;
  for (int64_t j = 0; j < lanes; ++j) lane_max[j] = kLowestFloat, lane_sum[j] = 0.0f;
  by_dtype(dtype, logits, [&](const auto* l) {
    for (int64_t begin = 0; begin < n; begin += lanes) {
      const int64_t count = n - begin < lanes ? n - begin : lanes;
      for (int64_t j = 0; j < count; ++j)
        exp_sum_add(lane_max[j], lane_sum[j], usable(to_float(l[begin + j])));
    }
  });
  const float scale = exp_sum_scale(n);
  int64_t total = 0;
  for (int64_t j = 0; j < lanes; ++j) total += exp_sum_fixed(lane_max[j], lane_sum[j], max, scale);
  return log_f32(float(double(total) / double(scale)));
}

void scale(DType dtype, const void* logits, int64_t n, float temperature, float z_max, float* z, float* e) {
  by_dtype(dtype, logits, [&](const auto* l) {
    for (int64_t i = 0; i < n; ++i) {
      const float scaled = usable(usable(to_float(l[i])) / temperature) + 0.0f;
      z[i] = scaled;
      e[i] = exp_f32(scaled - z_max);
    }
  });
  for (int64_t i = n; i < padded_row(n); ++i) z[i] = kNegativeInfinity, e[i] = 0.0f;
}

void block_max(const float* z, int64_t padded, float* out) {
  for (int64_t i = 0; i < padded; i += kRowBlock) {
    int32_t best = ordered(kNegativeInfinity);
    for (int64_t j = 0; j < kRowBlock; ++j) best = ordered(z[i + j]) > best ? ordered(z[i + j]) : best;
    out[i / kRowBlock] = from_ordered(best);
  }
}

uint64_t mass(const float* e, int64_t padded) {
  int64_t total = 0;
  for (int64_t i = 0; i < padded; ++i) total += int64_t(e[i] * 4294967296.0f);
  return uint64_t(total);
}

void keep(const float* z, int64_t padded, float z_limit, int32_t token_limit, float min_p, float* e) {
  for (int32_t i = 0; i < int32_t(padded); ++i) {
    const bool stays = (z[i] > z_limit) | ((z[i] == z_limit) & (i <= token_limit));
    e[i] = stays & (e[i] >= min_p) ? e[i] : 0.0f;
  }
}

EAGLE_INLINE void random_block(uint64_t seed, int32_t position, int64_t first_token, uint32_t* r) {
  const uint32_t counter = uint32_t(first_token >> 2);
  for (uint32_t group = 0; group < kRowBlock / 4; ++group) {
    const Philox4 x = philox_4x32_10(seed, counter + group, uint32_t(position), kTargetStream, 0);
    for (uint32_t lane = 0; lane < 4; ++lane) r[4 * group + lane] = x.lane[lane];
  }
}

// A factor f such that a token with v > e f cannot reach `best`: g <= -log v, hence z + g < best. The margin
// covers the rounding of z + g, of g and of e.
EAGLE_INLINE float reach(float z_max, float best) {
  const float margin = 1e-4f + (__builtin_fabsf(best) + 46.0f) * 4.76837158e-7f;
  const float f = exp_f32(z_max - best + margin);
  return f < 3e38f ? f : 3e38f;
}

int32_t noise_argmax(const float* z, const float* e, int64_t padded, uint64_t seed, int32_t position,
                     float z_max, int32_t max_token) {
  ScoredToken best{z_max + gumbel(seed, position, max_token), max_token};
  float factor = reach(z_max, best.score);
  for (int64_t i = 0; i < padded; i += kRowBlock) {
    int32_t largest = 0;  // e is not negative: its bits compare like integers
    for (int64_t j = 0; j < kRowBlock; ++j) {
      const int32_t bits = int32_t(float_bits(e[i + j]));
      largest = bits > largest ? bits : largest;
    }
    if (bits_float(uint32_t(largest)) * factor < 1.1641532e-10f) continue;  // below 2^-33, the smallest v

    alignas(64) uint32_t r[kRowBlock];
    alignas(64) float v[kRowBlock];
    random_block(seed, position, i, r);
    int32_t hits = 0;
    for (int64_t j = 0; j < kRowBlock; ++j) {
      v[j] = uniform_from_bits(r[j]);
      hits += v[j] <= e[i + j] * factor;
    }
    if (!hits) continue;
    for (int64_t j = 0; j < kRowBlock; ++j) {
      if (!(v[j] <= e[i + j] * factor)) continue;
      const float score = z[i + j] + gumbel_from_bits(r[j]);
      const int32_t token = int32_t(i + j);
      if (score > best.score || (score == best.score && token < best.token)) {
        best = {score, token};
        factor = reach(z_max, best.score);
      }
    }
  }
  return best.token;
}

void widen(DType dtype, const void* logits, int64_t n, float* out) {
  by_dtype(dtype, logits, [&](const auto* l) {
    for (int64_t i = 0; i < n; ++i) out[i] = to_float(l[i]);
  });
}

void penalise(float* row, int64_t n, const Penalties& penalties, const int32_t* prompt_counts,
              const int32_t* output_counts) {
  const Penalties p = penalties;
  const auto apply = [&](const auto& in_prompt, const auto& in_output) {
    for (int64_t i = 0; i < n; ++i) row[i] = penalised(row[i], p, in_prompt(i), in_output(i));
  };
  const auto none = [](int64_t) { return uint32_t{0}; };
  const auto of_prompt = [&](int64_t i) { return usable_count(prompt_counts[i]); };
  const auto of_output = [&](int64_t i) { return usable_count(output_counts[i]); };
  if (prompt_counts && output_counts)
    apply(of_prompt, of_output);
  else if (output_counts)
    apply(none, of_output);
  else if (prompt_counts)
    apply(of_prompt, none);
}

void mask(float* row, int64_t n, const int32_t* words) {
  for (int64_t i = 0; i < n; i += 32) {
    const uint32_t word = uint32_t(words[i / 32]);
    if (word == 0xffffffffu) continue;
    const int64_t count = n - i < 32 ? n - i : 32;
    for (int64_t j = 0; j < count; ++j) row[i + j] = word >> j & 1 ? row[i + j] : kNegativeInfinity;
  }
}

void gumbel_row(uint64_t seed, int32_t position, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kRowBlock) {
    alignas(64) uint32_t r[kRowBlock];
    random_block(seed, position, i, r);
    if (i + kRowBlock <= n) {
      for (int64_t j = 0; j < kRowBlock; ++j) out[i + j] = gumbel_from_bits(r[j]);
    } else {
      for (int64_t j = i; j < n; ++j) out[j] = gumbel_from_bits(r[j - i]);
    }
  }
}

constexpr RowKernels kTable{argmax,       log_sum_exp, scale,    block_max, mass,      keep,
                            noise_argmax, widen,       penalise, mask,      gumbel_row};

}  // namespace
}  // namespace eagle::cpu
