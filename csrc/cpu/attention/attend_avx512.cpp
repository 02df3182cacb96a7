// attend with AVX-512 (F, BW, DQ, VL).
#include <immintrin.h>

// g++ 12 warns of the undefined register that its own intrinsics pass to an instruction that ignores it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "common/float8.h"
#include "common/numeric.h"
#include "cpu/attention/attend_kernels.h"

namespace eagle::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 16, kRows = 6;
  static constexpr bool kTransposesPairs = true;
  using Vector = __m512;
  EAGLE_INLINE static Vector zero() { return _mm512_setzero_ps(); }
  EAGLE_INLINE static Vector set(float x) { return _mm512_set1_ps(x); }
  EAGLE_INLINE static Vector load(const float* x) { return _mm512_loadu_ps(x); }
  EAGLE_INLINE static Vector load(const bf16_t* x) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  EAGLE_INLINE static Vector load(const half_t* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  // As to_float(), by way of halves: those have the codes' exponents.
  EAGLE_INLINE static Vector load(const float8_t* x) {
    const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
    const __m256i nan =
        _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
    const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)), nan);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  }
  EAGLE_INLINE static void store(float* out, Vector x) { _mm512_storeu_ps(out, x); }
  EAGLE_INLINE static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  EAGLE_INLINE static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  EAGLE_INLINE static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  EAGLE_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

  EAGLE_INLINE static void transpose(Vector* x) {
    Vector t[16];
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      x[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      x[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
      x[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      x[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {  // x[i + 4 k]: rows 4 k .. 4 k + 3 of the columns i, i + 4, i + 8, i + 12
      t[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
      x[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
      x[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
      x[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
  }

  // Neighbouring dimensions travel as one 32-bit word and are parted at the end: half the shuffles.
  EAGLE_INLINE static void transpose_pairs(const void* const* keys, int head_dim, float* out) {
    for (int d = 0; d < head_dim; d += 32) {
      const int pairs = head_dim - d < 32 ? (head_dim - d) / 2 : 16;
      const __mmask16 mask = static_cast<__mmask16>((1u << pairs) - 1);
      Vector x[16];
      for (int i = 0; i < 16; ++i)
        x[i] = _mm512_maskz_loadu_ps(mask, static_cast<const bf16_t*>(keys[i]) + d);
      transpose(x);
      for (int i = 0; i < 16; ++i)
        if (i < pairs) {
          const __m512i word = _mm512_castps_si512(x[i]);
          store(out + (d + 2 * i) * kKeyBlock, _mm512_castsi512_ps(_mm512_slli_epi32(word, 16)));
          store(
              out + (d + 2 * i + 1) * kKeyBlock,
              _mm512_castsi512_ps(_mm512_and_si512(word, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
        }
    }
  }
};

}  // namespace
}  // namespace eagle::cpu

#include "cpu/attention/attend_kernel.h"

namespace eagle::cpu {

const AttendKernels& attend_kernels_avx512(DType dtype, bool codes) {
  return codes ? kernels<float8_t>(dtype) : kernels(dtype);
}

}  // namespace eagle::cpu
