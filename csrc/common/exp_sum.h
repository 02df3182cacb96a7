#pragma once
// The sum of exp(x - max) over a row in one pass, the maximum being known only at its end: the same bits from
// every backend, whatever its vectors, threads or alignment.
//
// Element i belongs to lane i % 4096. A lane takes its elements in ascending order and keeps the largest so
// far and the sum relative to it, in fp32. At the end each lane's sum is brought to the row's maximum and
// added as a fixed-point integer, so that the order of the lanes does not matter.
#include <cstdint>

#include "common/numeric.h"

namespace eagle {

inline constexpr int kExpSumLanes = 4096;
inline constexpr float kLowestFloat = -3.40282347e+38f;  // where a lane's maximum starts; its sum starts at 0

// One exponential: either the element or the sum so far is scaled. x = -inf changes nothing; NaN must not
// occur.
EAGLE_INLINE void exp_sum_add(float& max, float& sum, float x) {
  const float difference = x - max;
  const bool larger = difference > 0.0f;
  const float e = exp_f32(-__builtin_fabsf(difference));
  sum = fma(e, larger ? sum : 1.0f, larger ? 1.0f : sum);
  max = larger ? x : max;
}

// Fixed-point steps per unit for a row of n elements, whose sum is at most n: below 2^62 in all.
EAGLE_INLINE float exp_sum_scale(int64_t n) {
  int bits = 0;
  while (n >> bits) ++bits;
  return bits_float(uint32_t(127 + 62 - bits) << 23);
}

EAGLE_INLINE int64_t exp_sum_fixed(float lane_max, float lane_sum, float row_max, float scale) {
  return int64_t(lane_sum * exp_f32(lane_max - row_max) * scale);
}

}  // namespace eagle
