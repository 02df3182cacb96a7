#pragma once
// Included by the AVX-512 files; everything is internal to them (csrc/cpu/isa.h).
#include <immintrin.h>

#include "cpu/linear/multiply_impl.h"
#include "cpu/linear/topk_impl.h"

namespace eagle::cpu {
namespace {

struct LoadFloat32 {
  static constexpr int kBytes = 4;
  static __m512 load(const char* p) { return _mm512_loadu_ps(p); }
};
struct LoadFloat16 {
  static constexpr int kBytes = 2;
  // The masked form: g++ 12 warns about the undefined register inside the plain one.
  static __m512 load(const char* p) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};

// One k of 16 outputs per step.
template <class Load>
struct Single {
  using Element = float;
  using Sum = __m512;
  using Weights = __m512;
  using Input = __m512;
  static constexpr int kStepK = 1, kPanelStepBytes = kPanelRows * Load::kBytes, kMaxRows = 8,
                       kPrefetchRows = 7;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Weights load(const char* p) { return Load::load(p); }
  static Input broadcast(const float* x) { return _mm512_set1_ps(*x); }
  static void accumulate(Sum& sum, Weights w, Input x) { sum = _mm512_fmadd_ps(w, x, sum); }
  static void store(Sum sum, float* out) { _mm512_storeu_ps(out, sum); }
};

// Two k of 16 outputs: the even k is the low half of every word, the odd k the high half.
struct BFloat16Pairs {
  using Element = float;
  using Sum = __m512;
  struct Weights {
    __m512 even, odd;
  };
  struct Input {
    __m512 even, odd;
  };
  static constexpr int kStepK = 2, kPanelStepBytes = 64, kMaxRows = 8, kPrefetchRows = 7;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Weights load(const char* p) {
    const __m512i w = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, w, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u))))};
  }
  static Input broadcast(const float* x) { return {_mm512_set1_ps(x[0]), _mm512_set1_ps(x[1])}; }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    sum = _mm512_fmadd_ps(w.even, x.even, sum);
    sum = _mm512_fmadd_ps(w.odd, x.odd, sum);
  }
  static void store(Sum sum, float* out) { _mm512_storeu_ps(out, sum); }
};

}  // namespace
}  // namespace eagle::cpu
