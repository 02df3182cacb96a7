#pragma once
// Bit tricks and minima of CUDA C++. No transcendental: product code takes those from common/numeric.h.
#include <cmath>
#include <type_traits>

#include "simt/qualifiers.h"

__forceinline__ float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
__forceinline__ float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
__forceinline__ unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
__forceinline__ int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
__forceinline__ double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
__forceinline__ long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }

__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
__forceinline__ int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
__forceinline__ int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__forceinline__ int __ffsll(long long x) { return __builtin_ffsll(x); }
__forceinline__ unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
// Bytes 0 to 3 are those of `low`, 4 to 7 of `high`; each of four nibbles selects one. Of a nibble's
// uppermost bit, which would repeat a sign, no kernel makes use.
__forceinline__ unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7u) & 0xffu) << 8 * i;
  return result;
}
__forceinline__ unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned((static_cast<unsigned long long>(a) * b) >> 32);
}
__forceinline__ unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// Of two arithmetic types, as CUDA's overloads; NaN loses against a number.
template <class A, class B, class T = std::common_type_t<A, B>>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
__forceinline__ T min(A a, B b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmin(T(a), T(b));
  else
    return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B, class T = std::common_type_t<A, B>>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
__forceinline__ T max(A a, B b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmax(T(a), T(b));
  else
    return T(a) > T(b) ? T(a) : T(b);
}
