// attend with AVX2, FMA and F16C.
#include <immintrin.h>

#include "common/float8.h"
#include "common/numeric.h"
#include "cpu/attention/attend_kernels.h"

namespace eagle::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 8, kRows = 3;
  static constexpr bool kTransposesPairs = false;
  using Vector = __m256;
  EAGLE_INLINE static Vector zero() { return _mm256_setzero_ps(); }
  EAGLE_INLINE static Vector set(float x) { return _mm256_set1_ps(x); }
  EAGLE_INLINE static Vector load(const float* x) { return _mm256_loadu_ps(x); }
  EAGLE_INLINE static Vector load(const bf16_t* x) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  EAGLE_INLINE static Vector load(const half_t* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  // As to_float(), by way of halves: those have the codes' exponents.
  EAGLE_INLINE static Vector load(const float8_t* x) {
    const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
    const __m128i magnitude = _mm_and_si128(code, _mm_set1_epi16(0x7f));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(code, _mm_set1_epi16(0x80)), 8);
    const __m128i nan =
        _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
    const __m128i half = _mm_or_si128(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 7)), nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
  }
  EAGLE_INLINE static void store(float* out, Vector x) { _mm256_storeu_ps(out, x); }
  EAGLE_INLINE static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  EAGLE_INLINE static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  EAGLE_INLINE static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  EAGLE_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

  EAGLE_INLINE static void transpose(Vector* x) {
    Vector t[8];
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      x[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      x[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      x[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) x[i] = t[i];
  }
};

}  // namespace
}  // namespace eagle::cpu

#include "cpu/attention/attend_kernel.h"

namespace eagle::cpu {

const AttendKernels& attend_kernels_avx2(DType dtype, bool codes) {
  return codes ? kernels<float8_t>(dtype) : kernels(dtype);
}

}  // namespace eagle::cpu
