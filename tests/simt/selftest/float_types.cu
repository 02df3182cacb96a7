// CUDA's own fp16, bf16 and fp8 headers under the host compiler, against common/numeric.h and the formats'
// definitions.
#include "simt/selftest/kernel.h"

#if __has_include(<cuda_fp16.h>) && __has_include(<cuda_bf16.h>) && __has_include(<cuda_fp8.h>)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cmath>

#include "common/numeric.h"

namespace simt::selftest {
namespace {

constexpr int kCodes = 1 << 16;
constexpr int kThreads = 256;

// ---- 16 bits: every code to float, and floats around every code back -----------------------------------

__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T narrow(float x) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, __half>)
    return __float2half(x);
  else
    return __float2bfloat16(x);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const uint16_t* codes, float* wide, const float* floats, uint16_t* narrowed) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  store(wide + i, widen(__builtin_bit_cast(T, load(codes + i))));
  store(narrowed + i, __builtin_bit_cast(uint16_t, narrow<T>(load(floats + i))));
}

bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (a != a && b != b);
}

template <class T, class Ours>
bool sixteen_bits() {
  Buffer<uint16_t> codes(kCodes), narrowed(kCodes, 0);
  Buffer<float> wide(kCodes), floats(kCodes);
  for (int i = 0; i < kCodes; ++i) {
    codes[i] = uint16_t(i);
    // The float beside a code: exact, or just below, at or just above the middle to the next one.
    const uint32_t bits = std::bit_cast<uint32_t>(eagle::to_float(Ours{uint16_t(i)}));
    constexpr uint32_t kHalfStep = std::is_same_v<T, __half> ? 0x1000u : 0x8000u;
    floats[i] = std::bit_cast<float>(bits + (i % 4 ? kHalfStep + uint32_t(i % 4 - 2) : 0));
  }
  emulate({codes.in("codes"), wide.out("wide"), floats.in("floats"), narrowed.out("narrowed")}, [&] {
    launch(convert_kernel<T>, {.grid = kCodes / kThreads, .block = kThreads}, codes.data(), wide.data(),
           floats.data(), narrowed.data());
  });
  for (int i = 0; i < kCodes; ++i)
    if (!same(wide[i], eagle::to_float(Ours{uint16_t(i)})) ||
        !same(eagle::to_float(Ours{narrowed[i]}), eagle::to_float(eagle::from_float<Ours>(floats[i]))))
      return false;
  return true;
}

// Pairs in one register, as vector code uses them.
__global__ void __launch_bounds__(32) pairs_kernel(const float2* x, float2* y) {
  const int t = threadIdx.x;
  const float2 v = load(x + t);
  const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x, v.y);
  const float2 doubled = __bfloat1622float2(__hadd2(pair, pair));
  store(y + t, make_float2(doubled.x, doubled.y));
}

bool pairs() {
  Buffer<float2> x(32), y(32);
  for (int i = 0; i < 32; ++i) x[i] = {float(i), -0.5f * float(i)};
  emulate({x.in("x"), y.out("y")},
          [&] { launch(pairs_kernel, {.grid = 1, .block = 32}, x.data(), y.data()); });
  for (int i = 0; i < 32; ++i)
    if (y[i].x != 2.0f * float(i) || y[i].y != -float(i)) return false;
  return true;
}

// ---- 8 bits --------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kThreads)
    convert8_kernel(const uint8_t* codes, float* wide, uint8_t* back) {
  const int t = threadIdx.x;
  const float value = float(__builtin_bit_cast(T, load(codes + t)));
  store(wide + t, value);
  store(back + t, __builtin_bit_cast(uint8_t, T(value)));
}

float decode8(int code, int mantissa_bits, int bias, bool has_infinity) {
  const int exponent = code >> mantissa_bits & ((1 << (7 - mantissa_bits)) - 1);
  const int mantissa = code & ((1 << mantissa_bits) - 1), full = (1 << (7 - mantissa_bits)) - 1;
  const float sign = code & 0x80 ? -1.0f : 1.0f;
  if (has_infinity && exponent == full) return mantissa ? NAN : sign * INFINITY;
  if (!has_infinity && (code & 0x7f) == 0x7f) return NAN;
  const float magnitude =
      exponent ? std::ldexp(float((1 << mantissa_bits) + mantissa), exponent - bias - mantissa_bits)
               : std::ldexp(float(mantissa), 1 - bias - mantissa_bits);
  return sign * magnitude;
}

template <class T, int kMantissaBits, int kBias, bool kHasInfinity>
bool eight_bits() {
  Buffer<uint8_t> codes(kThreads), back(kThreads, 0);
  Buffer<float> wide(kThreads);
  for (int i = 0; i < kThreads; ++i) codes[i] = uint8_t(i);
  emulate({codes.in("codes"), wide.out("wide"), back.out("back")}, [&] {
    launch(convert8_kernel<T>, {.grid = 1, .block = kThreads}, codes.data(), wide.data(), back.data());
  });
  for (int i = 0; i < kThreads; ++i) {
    const float expected = decode8(i, kMantissaBits, kBias, kHasInfinity);
    if (!same(wide[i], expected)) return false;
    // Infinity saturates to the largest number on the way back.
    if (std::isfinite(expected) && back[i] != i) return false;
  }
  return true;
}

}  // namespace

std::vector<Case> float_type_cases() {
  return {
      {"float_types/half", "", sixteen_bits<__half, eagle::half_t>},
      {"float_types/bfloat16", "", sixteen_bits<__nv_bfloat16, eagle::bf16_t>},
      {"float_types/bfloat16_pairs", "", pairs},
      {"float_types/fp8_e4m3", "", eight_bits<__nv_fp8_e4m3, 3, 7, false>},
      {"float_types/fp8_e5m2", "", eight_bits<__nv_fp8_e5m2, 2, 15, true>},
  };
}

}  // namespace simt::selftest

#else

namespace simt::selftest {

std::vector<Case> float_type_cases() {
  constexpr const char* kWhy =
      "the CUDA toolkit's cuda_fp16.h, cuda_bf16.h and cuda_fp8.h were not found at build time";
  std::vector<Case> cases;
  for (const char* name : {"float_types/half", "float_types/bfloat16", "float_types/bfloat16_pairs",
                           "float_types/fp8_e4m3", "float_types/fp8_e5m2"})
    cases.push_back({name, "", nullptr, Builds::kBoth, kWhy});
  return cases;
}

}  // namespace simt::selftest

#endif
