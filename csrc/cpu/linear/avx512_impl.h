#pragma once
// Included by the AVX-512 files; everything is internal to them (csrc/cpu/isa.h).
#include <immintrin.h>

#include "cpu/linear/multiply_impl.h"
#include "cpu/linear/topk_impl.h"

namespace eagle::cpu {
namespace {

// g++ 12 warns about the undefined register inside the plain forms of shifts and conversions: the masked ones
// with a full mask are the same instructions.
constexpr __mmask16 kAll = 0xffff;
__m512i shift_left(__m512i v, int bits) { return _mm512_maskz_slli_epi32(kAll, v, unsigned(bits)); }
__m512i shift_right(__m512i v, int bits) { return _mm512_maskz_srli_epi32(kAll, v, unsigned(bits)); }
__m512i shift_right_signed(__m512i v, int bits) { return _mm512_maskz_srai_epi32(kAll, v, unsigned(bits)); }
__m512 to_floats(__m512i v) { return _mm512_maskz_cvtepi32_ps(kAll, v); }

struct LoadFloat32 {
  static constexpr int kBytes = 4;
  static __m512 load(const char* p) { return _mm512_loadu_ps(p); }
};
struct LoadFloat16 {
  static constexpr int kBytes = 2;
  static __m512 load(const char* p) {
    return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};

struct FloatSums {
  using Element = float;
  using Sum = __m512;
  static constexpr int kMaxRows = 8, kPrefetchRows = 7;
  static Sum zero() { return _mm512_setzero_ps(); }
  static void store(Sum sum, float* out) { _mm512_storeu_ps(out, sum); }
};

// One k of 16 outputs per step.
template <class Load>
struct Single : FloatSums {
  using Weights = __m512;
  using Input = __m512;
  static constexpr Scales kScales = Scales::kNone;
  static constexpr int kStepK = 1, kPanelStepBytes = kPanelRows * Load::kBytes,
                       kStepBytes = kGroupPanels * kPanelStepBytes;
  static Weights load(const char* p) { return Load::load(p); }
  static Input broadcast(const float* x) { return _mm512_set1_ps(*x); }
  static void accumulate(Sum& sum, Weights w, Input x) { sum = _mm512_fmadd_ps(w, x, sum); }
};

// Two k of 16 outputs.
struct Pairs : FloatSums {
  struct Weights {
    __m512 even, odd;
  };
  struct Input {
    __m512 even, odd;
  };
  static constexpr int kStepK = 2;
  static Input broadcast(const float* x) { return {_mm512_set1_ps(x[0]), _mm512_set1_ps(x[1])}; }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    sum = _mm512_fmadd_ps(w.even, x.even, sum);
    sum = _mm512_fmadd_ps(w.odd, x.odd, sum);
  }
};

// The even k is the low half of every word, the odd k the high half.
struct BFloat16Pairs : Pairs {
  static constexpr Scales kScales = Scales::kNone;
  static constexpr int kPanelStepBytes = 64, kStepBytes = 128;
  static Weights load(const char* p) {
    const __m512i w = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(shift_left(w, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u))))};
  }
};

// The odd k is the high byte of every word, the even k the one below. `enter` sees the codes as they lie.
struct DecodeInt8 {
  static __m512i enter(__m512i codes) {  // sign and magnitude to two's complement
    const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi8(0x7f));
    return _mm512_mask_sub_epi8(magnitude, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), magnitude);
  }
  static __m512 odd(__m512i w) { return to_floats(shift_right_signed(w, 24)); }
};
struct DecodeFloat8 {
  static __m512i enter(__m512i codes) { return codes; }
  static __m512 odd(__m512i w) {
    const __m512i bits = _mm512_and_si512(shift_right_signed(w, 4), _mm512_set1_epi32(int(0x87f00000u)));
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));  // as to_float(float8_t)
  }
};
template <class Decode>
struct Bytes : Pairs {
  static constexpr Scales kScales = Scales::kRow;
  static constexpr int kStepBytes = 64;
  static void load_group(const char* p, Weights (&w)[kGroupPanels]) {
    const __m512i codes = Decode::enter(_mm512_loadu_si512(p));
    const __m512i first = _mm512_unpacklo_epi16(codes, codes), second = _mm512_unpackhi_epi16(codes, codes);
    w[0] = {Decode::odd(shift_left(first, 8)), Decode::odd(first)};
    w[1] = {Decode::odd(shift_left(second, 8)), Decode::odd(second)};
  }
};

// What the sums of 64 k do in int4, with products of either kind.
struct Blocks : FloatSums {
  using BlockScales = __m512;
  static constexpr Scales kScales = Scales::kBlock;
  static constexpr int kStepK = 4, kStepBytes = 64;
  static BlockScales load_scales(const char* p) { return LoadFloat16::load(p); }
  static void add_scaled(Sum sum, BlockScales scale, float* total) {
    _mm512_storeu_ps(total, _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(total)));
  }
};

// Four k of 16 outputs; a word's nibbles are looked up as floats.
struct Nibbles : Blocks {
  struct Weights {
    __m512 w[4];
  };
  struct Input {
    __m512 x[4];
  };
  static void load_group(const char* p, Weights (&w)[kGroupPanels]) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const __m512i codes = _mm512_loadu_si512(p);
    const auto decode = [&](int shift) {
      return _mm512_maskz_permutexvar_ps(kAll, shift_right(codes, shift), values);
    };
    for (int panel = 0; panel < kGroupPanels; ++panel)
      w[panel] = {{decode(4 * panel), decode(16 + 4 * panel), decode(8 + 4 * panel), decode(24 + 4 * panel)}};
  }
  static Input broadcast(const float* x) {
    return {{_mm512_set1_ps(x[0]), _mm512_set1_ps(x[1]), _mm512_set1_ps(x[2]), _mm512_set1_ps(x[3])}};
  }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    for (int k = 0; k < kStepK; ++k) sum = _mm512_fmadd_ps(w.w[k], x.x[k], sum);
  }
};

struct IntegerSums {
  using Element = int8_t;
  using Sum = __m512i;
  static constexpr Scales kScales = Scales::kBoth;
  static constexpr int kStepK = 4, kPanelStepBytes = 64, kStepBytes = 128, kMaxRows = 8, kPrefetchRows = 7;
  static Sum start(const int8_t* row_end) {
    Int8RowEnd end;
    __builtin_memcpy(&end, row_end, sizeof(end));
    return _mm512_set1_epi32(end.start);
  }
  static __m512i broadcast_four(const int8_t* x) {
    int four;
    __builtin_memcpy(&four, x, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  static void store(Sum sum, float* out) { _mm512_storeu_ps(out, to_floats(sum)); }
};

}  // namespace
}  // namespace eagle::cpu
