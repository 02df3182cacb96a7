#pragma once
// Arithmetic shared by every backend: the same bits from g++ at any vector width, from the emulator, from
// nvcc.
//
// Rules: contraction off, every fused multiply-add written fma(), no libm transcendental. The
// functions are branch-free so that a loop over them vectorises; always inlined, so that no copy compiled for
// a newer processor can be picked by the linker for an older one.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace eagle {

#if defined(__CUDACC__)
#define EAGLE_INLINE __host__ __device__ __forceinline__
#else
#define EAGLE_INLINE [[gnu::always_inline]] inline
#endif

template <class T>
EAGLE_INLINE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

EAGLE_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

EAGLE_INLINE uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
EAGLE_INLINE float bits_float(uint32_t x) { return __builtin_bit_cast(float, x); }

// ---- storage types ----------------------------------------------------------------------------------------

struct bf16_t {
  uint16_t bits;
};
struct half_t {
  uint16_t bits;
};

EAGLE_INLINE float to_float(float x) { return x; }
EAGLE_INLINE float to_float(bf16_t x) { return bits_float(uint32_t(x.bits) << 16); }
EAGLE_INLINE float to_float(half_t x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  // Scaling by 2^112 moves the exponent, denormals included; infinities and NaN get the full exponent back.
  const float scaled = bits_float(magnitude << 13) * bits_float(0x77800000u);
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return bits_float(sign | float_bits(scaled) | special);
}

// Round to nearest even; NaN stays NaN.
template <class T>
EAGLE_INLINE T from_float(float x);
template <>
EAGLE_INLINE float from_float<float>(float x) {
  return x;
}
template <>
EAGLE_INLINE bf16_t from_float<bf16_t>(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return {uint16_t((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) | 0x40u) : rounded)};
}
template <>
EAGLE_INLINE half_t from_float<half_t>(float x) {
  const uint32_t u = float_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  // Denormal results: adding 0.5 aligns the mantissa so that the adder rounds at 2^-24.
  const uint32_t denormal = float_bits(bits_float(a) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const uint32_t finite = a < 0x38800000u ? denormal : normal;
  const uint32_t large = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return {uint16_t(sign | (a >= 0x47800000u ? large : (finite > 0x7c00u ? 0x7c00u : finite)))};
}

// ---- transcendental functions -----------------------------------------------------------------------------

// Bounds: largest error against fp64 in ulp of the result, measured by tests/cpp/numeric_check.cpp
// on every 11th float, rounded up.

// exp(x). 1.1 ulp, denormal results included; exp(0) = 1 exactly, never above 1 for x <= 0. NaN -> NaN.
EAGLE_INLINE float exp_f32(float x) {
  float c = x < -104.0f ? -104.0f : x;
  c = c > 89.0f ? 89.0f : c;
  const float shifted =
      fma(c, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: the integer part in the low bits
  const int32_t n = int32_t(float_bits(shifted)) - 0x4b400000;
  const float nf = shifted - 12582912.0f;
  float r = fma(nf, -0.693359375f, c);  // ln 2 in two parts, the first exact in 9 bits
  r = fma(nf, 2.12194440e-4f, r);
  float p = 1.0f / 5040.0f;  // Taylor: |r| <= 0.347, the first term left out is below 6e-9
  p = fma(p, r, 1.0f / 720.0f);
  p = fma(p, r, 1.0f / 120.0f);
  p = fma(p, r, 1.0f / 24.0f);
  p = fma(p, r, 1.0f / 6.0f);
  p = fma(p, r, 0.5f);
  p = fma(p * r, r, r) + 1.0f;
  const int32_t n1 = n >> 1, n2 = n - n1;  // two factors: results from 2^-149 to overflow
  const float y = p * bits_float(uint32_t(n1 + 127) << 23) * bits_float(uint32_t(n2 + 127) << 23);
  return x != x ? x : y;
}

// log(x). 1 ulp, denormal arguments included. log(0) = -inf, x < 0 and NaN -> NaN, log(inf) = inf.
EAGLE_INLINE float log_f32(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float scaled = tiny ? x * 8388608.0f : x;
  const uint32_t u = float_bits(scaled) - 0x3f3504f3u;  // mantissa in [sqrt(1/2), sqrt(2))
  const int32_t k = (int32_t(u) >> 23) - (tiny ? 23 : 0);
  const float m = bits_float((u & 0x007fffffu) + 0x3f3504f3u);
  const float f = m - 1.0f;
  const float s = f / (2.0f + f), s2 = s * s;  // log(m) = 2 atanh(s), |s| <= 0.172
  float p = 2.0f / 11.0f;
  p = fma(p, s2, 2.0f / 9.0f);
  p = fma(p, s2, 2.0f / 7.0f);
  p = fma(p, s2, 2.0f / 5.0f);
  p = fma(p, s2, 2.0f / 3.0f);
  // 2 s = f - s f, hence log(m) = f - s (f - s2 p)
  const float log_m = f - s * (f - s2 * p);
  const float kf = float(k);
  float y = fma(kf, 0.693359375f, fma(kf, -2.12194440e-4f, log_m));
  y = x == bits_float(0x7f800000u) ? x : y;
  y = x == 0.0f ? bits_float(0xff800000u) : y;
  return x < 0.0f || x != x ? bits_float(0x7fc00000u) : y;
}

// log(1 + x). 1.5 ulp. log1p(-1) = -inf, x < -1 and NaN -> NaN.
EAGLE_INLINE float log1p_f32(float x) {
  const float u = 1.0f + x;
  const float lost = x - (u - 1.0f);
  const float correction = lost / u;  // NaN at -1 and infinity, where the logarithm alone is the answer
  const float y = log_f32(u) + (correction == correction ? correction : 0.0f);
  return u == 1.0f ? x : y;
}

// tanh(x). 1.6 ulp, denormal arguments included. Never beyond +-1, tanh(-0) = -0, NaN -> NaN.
EAGLE_INLINE float tanh_f32(float x) {
  const float a = __builtin_fabsf(x), a2 = a * a;
  float p = -6.61575468e-3f;  // Chebyshev fit of (tanh(a) / a - 1) / a2 for a <= 0.55: 6e-9 of the result
  p = fma(p, a2, 2.13127453e-2f);
  p = fma(p, a2, -5.39100654e-2f);
  p = fma(p, a2, 0.13333118f);
  p = fma(p, a2, -0.33333331f);
  const float small = fma(a * a2, p, a);
  const float large = 1.0f - 2.0f / (exp_f32(2.0f * a) + 1.0f);
  const float y = a < 0.55f ? small : large;
  return bits_float(float_bits(y) | (float_bits(x) & 0x80000000u));
}

// x kept within +-cap, smoothly; cap > 0 and finite.
EAGLE_INLINE float soft_cap(float x, float cap) { return cap * tanh_f32(x / cap); }

// 1 / sqrt(x). 1.5 ulp.
EAGLE_INLINE float rsqrt_f32(float x) { return 1.0f / __builtin_sqrtf(x); }
// 2.6 ulp for x >= -87; below it the results, all under 1e-35 in size, go to zero early. silu(-inf) is NaN.
EAGLE_INLINE float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
EAGLE_INLINE float silu_f32(float x) { return x / (1.0f + exp_f32(-x)); }

}  // namespace eagle
