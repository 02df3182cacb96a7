#pragma once
// float8 e4m3 (the finite kind: no infinities, one NaN, largest value 448), as torch.float8_e4m3fn stores it.
#include "common/numeric.h"

namespace eagle {

struct float8_t {
  uint8_t bits;
};

inline constexpr float kFloat8Max = 448.0f;

// Exact; NaN stays NaN.
EAGLE_INLINE float to_float(float8_t x) {
  const uint32_t sign = uint32_t(x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  // Scaling by 2^120 moves the exponent, denormals included.
  const float scaled = bits_float(magnitude << 20) * bits_float(0x7b800000u);
  const uint32_t special = magnitude == 0x7fu ? 0x7fc00000u : 0u;
  return bits_float(sign | float_bits(scaled) | special);
}

// Round to nearest even; what lies beyond 448, infinity too, becomes 448; NaN stays NaN.
template <>
EAGLE_INLINE float8_t from_float<float8_t>(float x) {
  const uint32_t u = float_bits(x), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
  // Denormal results: adding 2^14 aligns the mantissa so that the adder rounds at 2^-9.
  const uint32_t denormal = float_bits(bits_float(a) + 16384.0f) - 0x46800000u;
  const uint32_t normal = (a - 0x3c000000u + 0x7ffffu + ((a >> 20) & 1u)) >> 20;
  const uint32_t finite = a < 0x3c800000u ? denormal : (normal > 0x7eu ? 0x7eu : normal);
  return {uint8_t(sign | (a > 0x7f800000u ? 0x7fu : finite))};
}

}  // namespace eagle
