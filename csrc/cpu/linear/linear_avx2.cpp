// linear's kernels for AVX2 with FMA and F16C.
#include <immintrin.h>

#include "cpu/linear/multiply_impl.h"
#include "cpu/linear/topk_impl.h"

namespace eagle::cpu {
namespace {

struct Pair {
  __m256 low, high;
};
struct IntegerPair {
  __m256i low, high;
};

__m256i load_bytes(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

struct FloatSums {
  using Element = float;
  using Sum = Pair;
  static constexpr int kMaxRows = 2, kPrefetchRows = 9;
  static Sum zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static void add(Sum& sum, __m256 low, __m256 high, __m256 x) {
    sum.low = _mm256_fmadd_ps(low, x, sum.low);
    sum.high = _mm256_fmadd_ps(high, x, sum.high);
  }
  static void store(const Sum& sum, float* out) {
    _mm256_storeu_ps(out, sum.low);
    _mm256_storeu_ps(out + 8, sum.high);
  }
};

// One k of 16 outputs per step.
template <class Load>
struct Single : FloatSums {
  using Weights = Pair;
  using Input = __m256;
  static constexpr Scales kScales = Scales::kNone;
  static constexpr int kStepK = 1, kPanelStepBytes = kPanelRows * Load::kBytes,
                       kStepBytes = kGroupPanels * kPanelStepBytes;
  static Weights load(const char* p) { return {Load::load(p), Load::load(p + 8 * Load::kBytes)}; }
  static Input broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  static void accumulate(Sum& sum, const Weights& w, Input x) { add(sum, w.low, w.high, x); }
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

// Two k of 16 outputs, decoded where they are used: 16 registers hold no more.
template <class Decode>
struct Pairs : FloatSums {
  using Weights = IntegerPair;
  struct Input {
    __m256 even, odd;
  };
  static constexpr int kStepK = 2;
  static Input broadcast(const float* x) { return {_mm256_broadcast_ss(x), _mm256_broadcast_ss(x + 1)}; }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    add(sum, Decode::even(w.low), Decode::even(w.high), x.even);
    add(sum, Decode::odd(w.low), Decode::odd(w.high), x.odd);
  }
};

// The even k is the low half of every word, the odd k the high half.
struct DecodeBFloat16 {
  static __m256 even(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
  static __m256 odd(__m256i w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u))));
  }
};
struct BFloat16Pairs : Pairs<DecodeBFloat16> {
  static constexpr Scales kScales = Scales::kNone;
  static constexpr int kPanelStepBytes = 64, kStepBytes = 128;
  static Weights load(const char* p) { return {load_bytes(p), load_bytes(p + 32)}; }
};

// The odd k is the high byte of every word, the even k the one below. `enter` sees the codes as they lie.
struct DecodeInt8 {
  static __m256i enter(__m256i codes) {  // sign and magnitude to two's complement
    return _mm256_sign_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(0x7f)), codes);
  }
  static __m256 odd(__m256i w) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(w, 24)); }
  static __m256 even(__m256i w) { return odd(_mm256_slli_epi32(w, 8)); }
};
struct DecodeFloat8 {
  static __m256i enter(__m256i codes) { return codes; }
  static __m256 odd(__m256i w) {
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(w, 4), _mm256_set1_epi32(int(0x87f00000u)));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));  // as to_float(float8_t)
  }
  static __m256 even(__m256i w) { return odd(_mm256_slli_epi32(w, 8)); }
};
template <class Decode>
struct Bytes : Pairs<Decode> {
  using Weights = IntegerPair;
  static constexpr Scales kScales = Scales::kRow;
  static constexpr int kStepBytes = 64;
  static void load_group(const char* p, Weights (&w)[kGroupPanels]) {
    const __m256i low = Decode::enter(load_bytes(p)), high = Decode::enter(load_bytes(p + 32));
    w[0] = {_mm256_unpacklo_epi16(low, low), _mm256_unpacklo_epi16(high, high)};
    w[1] = {_mm256_unpackhi_epi16(low, low), _mm256_unpackhi_epi16(high, high)};
  }
};

struct Nibbles : FloatSums {
  using Weights = IntegerPair;  // the panel's nibbles at the top of their bytes
  using BlockScales = Pair;
  struct Input {
    __m256 x[4];
  };
  static constexpr Scales kScales = Scales::kBlock;
  static constexpr int kStepK = 4, kStepBytes = 64;
  static void load_group(const char* p, Weights (&w)[kGroupPanels]) {
    w[1] = {load_bytes(p), load_bytes(p + 32)};
    w[0] = {_mm256_slli_epi32(w[1].low, 4), _mm256_slli_epi32(w[1].high, 4)};
  }
  static Input broadcast(const float* x) {
    return {{_mm256_broadcast_ss(x), _mm256_broadcast_ss(x + 1), _mm256_broadcast_ss(x + 2),
             _mm256_broadcast_ss(x + 3)}};
  }
  template <int kShift>
  static __m256 decode(__m256i w) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, kShift), 28));
  }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    add(sum, decode<24>(w.low), decode<24>(w.high), x.x[0]);
    add(sum, decode<8>(w.low), decode<8>(w.high), x.x[1]);
    add(sum, decode<16>(w.low), decode<16>(w.high), x.x[2]);
    add(sum, decode<0>(w.low), decode<0>(w.high), x.x[3]);
  }
  static BlockScales load_scales(const char* p) { return {LoadFloat16::load(p), LoadFloat16::load(p + 16)}; }
  static void add_scaled(const Sum& sum, const BlockScales& scale, float* total) {
    _mm256_storeu_ps(total, _mm256_fmadd_ps(sum.low, scale.low, _mm256_loadu_ps(total)));
    _mm256_storeu_ps(total + 8, _mm256_fmadd_ps(sum.high, scale.high, _mm256_loadu_ps(total + 8)));
  }
};

// Codes as 16-bit integers, since products of bytes would saturate: the even and the odd k of every word.
struct Integers {
  using Element = int8_t;
  using Sum = IntegerPair;
  using Weights = IntegerPair;
  struct Input {
    __m256i even, odd;
  };
  static constexpr Scales kScales = Scales::kBoth;
  static constexpr int kStepK = 4, kPanelStepBytes = 64, kStepBytes = 128, kMaxRows = 2, kPrefetchRows = 9;
  static Sum start(const int8_t* row_end) {
    Int8RowEnd end;
    __builtin_memcpy(&end, row_end, sizeof(end));
    return {_mm256_set1_epi32(end.start), _mm256_set1_epi32(end.start)};
  }
  static Weights load(const char* p) { return {load_bytes(p), load_bytes(p + 32)}; }
  static Input broadcast(const int8_t* x) {
    int four;
    __builtin_memcpy(&four, x, sizeof(four));
    const __m256i all = _mm256_set1_epi32(four);
    return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
  }
  static __m256i add(__m256i sum, __m256i w, const Input& x) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)), x.even);
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), x.odd);
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
  }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    sum.low = add(sum.low, w.low, x);
    sum.high = add(sum.high, w.high, x);
  }
  static void store(const Sum& sum, float* out) {
    _mm256_storeu_ps(out, _mm256_cvtepi32_ps(sum.low));
    _mm256_storeu_ps(out + 8, _mm256_cvtepi32_ps(sum.high));
  }
};

struct Formats {
  using BFloat16 = BFloat16Pairs;
  using Float16 = Single<LoadFloat16>;
  using Float32 = Single<LoadFloat32>;
  using Float8 = Bytes<DecodeFloat8>;
  using Int8 = Bytes<DecodeInt8>;
  using Int4 = Nibbles;
  using Float8OfBFloat16 = Float8;
  using Int8OfBFloat16 = Int8;
  using Int4OfBFloat16 = Int4;
  using Int8Dynamic = Integers;
};

}  // namespace

const LinearKernels kLinearAvx2 = {false, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
