#pragma once
// quantize(): the scale of a row or group and the code of an element, for weights and for the activations of
// int8_dynamic, on every backend.
//
//   scale = max |x| / limit          limit = 448 (fp8), 127 (int8), 7 (int4: then rounded to fp16)
//   code  = x / scale, rounded to nearest even, within [-limit, limit]
//   value = code * scale
//
// Divisions are IEEE. A row of zeros, or one so small that its scale rounds to zero, has scale 0 and codes 0.
// A row that holds NaN or infinity has scale NaN and codes 0: whatever is computed from it is NaN.
#include "common/float8.h"

namespace eagle {

inline constexpr int kInt4Group = 64;  // columns that share a scale
inline constexpr float kInt8Max = 127.0f, kInt4Max = 7.0f;
// The longest row whose products with another of int8 codes are sure to add up in 32 bits.
inline constexpr int64_t kMaxInt8Columns = 131072;

// |x| as an integer: its maximum over a row is the same in any order, and NaN and infinity exceed all others.
EAGLE_INLINE uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

// `largest` is the maximum of magnitude_bits() over the row.
EAGLE_INLINE float quantize_scale(uint32_t largest, float limit) {
  return largest < 0x7f800000u ? bits_float(largest) / limit : bits_float(0x7fc00000u);
}

// Of a group of int4 codes. Never infinite: groups beyond 7 * 65504 saturate.
EAGLE_INLINE half_t quantize_int4_scale(uint32_t largest) {
  const half_t scale = from_float<half_t>(quantize_scale(largest, kInt4Max));
  return scale.bits == 0x7c00u ? half_t{0x7bffu} : scale;
}

// An int8 or int4 code; `scale` as stored.
EAGLE_INLINE int32_t quantize(float x, float scale, float limit) {
  float q = x / scale;
  q = q > limit ? limit : q;
  q = q < -limit ? -limit : q;
  // 1.5 * 2^23: the adder rounds to an integer, which then stands in the low bits.
  const int32_t code = int32_t(float_bits(q + 12582912.0f) - 0x4b400000u);
  return scale > 0.0f ? code : 0;
}

EAGLE_INLINE float8_t quantize_float8(float x, float scale) {
  return from_float<float8_t>(scale > 0.0f ? x / scale : 0.0f);
}

// What int8_dynamic makes of an exact sum of products of codes.
EAGLE_INLINE float scale_int8_sum(int32_t sum, float x_scale, float weight_scale) {
  return float(sum) * x_scale * weight_scale;
}

}  // namespace eagle
