// linear's kernels for AVX2 with FMA and F16C.
#include <immintrin.h>

#include "cpu/linear/multiply_impl.h"
#include "cpu/linear/topk_impl.h"

namespace eagle::cpu {
namespace {

struct Pair {
  __m256 low, high;
};

// One k of 16 outputs per step.
template <class Load>
struct Single {
  using Element = float;
  using Sum = Pair;
  using Weights = Pair;
  using Input = __m256;
  static constexpr int kStepK = 1, kPanelStepBytes = kPanelRows * Load::kBytes, kMaxRows = 2,
                       kPrefetchRows = 9;
  static Sum zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Weights load(const char* p) { return {Load::load(p), Load::load(p + 8 * Load::kBytes)}; }
  static Input broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  static void accumulate(Sum& sum, const Weights& w, Input x) {
    sum.low = _mm256_fmadd_ps(w.low, x, sum.low);
    sum.high = _mm256_fmadd_ps(w.high, x, sum.high);
  }
  static void store(const Sum& sum, float* out) {
    _mm256_storeu_ps(out, sum.low);
    _mm256_storeu_ps(out + 8, sum.high);
  }
};

struct LoadFloat32 {
  static constexpr int kBytes = 4;
  static __m256 load(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
};
struct LoadFloat16 {
  static constexpr int kBytes = 2;
  static __m256 load(const char* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

// Two k of 16 outputs: the even k is the low half of every word, the odd k the high half.
struct BFloat16Pairs {
  using Element = float;
  using Sum = Pair;
  struct Weights {
    __m256i low, high;
  };
  struct Input {
    __m256 even, odd;
  };
  static constexpr int kStepK = 2, kPanelStepBytes = 64, kMaxRows = 2, kPrefetchRows = 9;
  static Sum zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Weights load(const char* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
  }
  static Input broadcast(const float* x) { return {_mm256_broadcast_ss(x), _mm256_broadcast_ss(x + 1)}; }
  static __m256 even(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
  static __m256 odd(__m256i w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u))));
  }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    sum.low = _mm256_fmadd_ps(even(w.low), x.even, sum.low);
    sum.high = _mm256_fmadd_ps(even(w.high), x.even, sum.high);
    sum.low = _mm256_fmadd_ps(odd(w.low), x.odd, sum.low);
    sum.high = _mm256_fmadd_ps(odd(w.high), x.odd, sum.high);
  }
  static void store(const Sum& sum, float* out) { Single<LoadFloat32>::store(sum, out); }
};

struct Formats {
  using BFloat16 = BFloat16Pairs;
  using Float16 = Single<LoadFloat16>;
  using Float32 = Single<LoadFloat32>;
};

}  // namespace

const LinearKernels kLinearAvx2 = {false, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
