#pragma once
// Included by one file per instruction set; everything is internal to it (csrc/cpu/isa.h).
// What lm_head_topk does to one row's logits in one chunk of ids: noise, partial log-sum-exp, the best few.
#include "common/philox.h"
#include "cpu/linear/rows_impl.h"

namespace eagle::cpu {
namespace {

// "unroll 1" as in rows_impl.h.
EAGLE_INLINE void gumbel_block(const uint32_t (&random)[kBlock], float* out) {
#pragma GCC unroll 1
  for (int j = 0; j < kBlock; ++j) out[j] = gumbel_from_bits(random[j]);
}

void noise(const ChunkNoise& a) {
  const auto position = uint32_t(a.position);
  if (!a.draft_to_target) {
    // Four consecutive ids share a Philox block, and chunks start at multiples of four.
    for (int64_t i = 0; i < a.count; i += 4 * kBlock) {
      alignas(64) uint32_t random[4][kBlock];
      alignas(64) float values[4][kBlock], in_order[4 * kBlock];
      const auto first = uint32_t((a.first_id + i) / 4);
#pragma GCC unroll 1
      for (int b = 0; b < kBlock; ++b) {
        const Philox4 r = philox_4x32_10(a.seed, first + uint32_t(b), position, kTargetStream, 0);
        random[0][b] = r.lane[0];
        random[1][b] = r.lane[1];
        random[2][b] = r.lane[2];
        random[3][b] = r.lane[3];
      }
      for (int lane = 0; lane < 4; ++lane) gumbel_block(random[lane], values[lane]);
      for (int j = 0; j < 4 * kBlock; ++j) in_order[j] = values[j % 4][j / 4];
      const int64_t left = a.count - i < 4 * kBlock ? a.count - i : 4 * kBlock;
      __builtin_memcpy(a.out + i, in_order, sizeof(float) * size_t(left));
    }
    return;
  }
  for (int64_t i = 0; i < a.count; i += kBlock) {
    alignas(64) uint32_t token[kBlock] = {}, random[kBlock];
    const int64_t left = a.count - i < kBlock ? a.count - i : kBlock;
    __builtin_memcpy(token, a.draft_to_target + a.first_id + i, sizeof(uint32_t) * size_t(left));
#pragma GCC unroll 1
    for (int j = 0; j < kBlock; ++j) {
      const Philox4 r = philox_4x32_10(a.seed, token[j] >> 2, position, kTargetStream, 0);
      const uint32_t low = token[j] & 1 ? r.lane[1] : r.lane[0], high = token[j] & 1 ? r.lane[3] : r.lane[2];
      random[j] = token[j] & 2 ? high : low;
    }
    gumbel_block(random, a.out + i);
  }
}

// Keeps (score descending, id ascending); ids come in ascending order, so an equal score stays behind.
EAGLE_INLINE void insert(ChunkBest* best, int top_k, float score, int32_t id) {
  int at = best->count < top_k ? best->count++ : top_k - 1;
  for (; at > 0 && best->score[at - 1] < score; --at) {
    best->score[at] = best->score[at - 1];
    best->id[at] = best->id[at - 1];
  }
  best->score[at] = score;
  best->id[at] = id;
}

void best(const ChunkScores& a, ChunkBest* out) {
  constexpr float kInfinity = __builtin_inff();
  const int64_t padded = ceil_div<int64_t>(a.count, kBlock) * kBlock;
  float* const q = a.q;
  for (int64_t i = a.count; i < padded; ++i) q[i] = -kInfinity;
  if (a.coupled)
    for (int64_t i = 0; i < a.count; ++i) q[i] = fma(a.temperature, a.noise[i], q[i]);
  for (int64_t i = 0; i < padded; ++i) q[i] = q[i] == q[i] ? q[i] : -kInfinity;

  // The exponents y, and their maximum. Division by a positive tau keeps the order.
  float* const y = a.scratch;
  if (a.coupled)
    for (int64_t i = 0; i < padded; ++i) y[i] = q[i] / a.tau;
  else
    for (int64_t i = 0; i < padded; ++i) y[i] = q[i];
  float highest[kBlock];
  for (int j = 0; j < kBlock; ++j) highest[j] = -kInfinity;
  for (int64_t i = 0; i < padded; i += kBlock)
#pragma GCC unroll 1
    for (int j = 0; j < kBlock; ++j) highest[j] = y[i + j] > highest[j] ? y[i + j] : highest[j];
  float max = -kInfinity;
  for (int j = 0; j < kBlock; ++j) max = highest[j] > max ? highest[j] : max;

  float sums[kBlock] = {};
  if (max > -kInfinity && max < kInfinity)
    for (int64_t i = 0; i < padded; i += kBlock)
#pragma GCC unroll 1
      for (int j = 0; j < kBlock; ++j) sums[j] += exp_f32(y[i + j] - max);
  out->max = max;
  out->sum = sum_lanes(sums);

  out->count = 0;
  float threshold = -kInfinity;
  for (int64_t i = 0; i < padded; i += kBlock) {
    int above = 0;
#pragma GCC unroll 1
    for (int j = 0; j < kBlock; ++j) above += q[i + j] > threshold;
    if (!above) [[likely]]
      continue;
    for (int j = 0; j < kBlock; ++j)
      if (q[i + j] > threshold) {
        insert(out, a.top_k, q[i + j], int32_t(a.first_id + i + j));
        if (out->count == a.top_k) threshold = out->score[a.top_k - 1];
      }
  }
}

}  // namespace
}  // namespace eagle::cpu
