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

// A step of a format is kStepK k of 16 outputs, which `decode<k>` takes one by one out of a panel's
// `Weights`.
//
// 16 registers hold the sums of two rows and both panels, or of six rows and one panel, beside a decoded k
// and an input. So more than two rows meet one panel after the other, and each decoded k serves all of them.
// The hardware's prefetch does not follow half of a stream: the first pass asks for what both will need (Zen
// 3, six rows of bf16: 5 GB/s without, 13 with; 16 at one row).
template <class Format>
struct Floats : Format {
  using Element = float;
  using Sum = Pair;
  using Weights = typename Format::Weights;
  static constexpr int kMaxRows = Format::kMaxRows, kAheadBytes = 1024;

  static void add(Sum& sum, const Pair& w, __m256 x) {
    sum.low = _mm256_fmadd_ps(w.low, x, sum.low);
    sum.high = _mm256_fmadd_ps(w.high, x, sum.high);
  }

  // sums[row][32] of kRows rows and one group.
  template <int kRows>
  static void dot(const char* weight, const char* rows, int64_t row_stride, int64_t steps, const char*,
                  int64_t, float* sums) {
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = reinterpret_cast<const float*>(rows + r * row_stride);
    if constexpr (kRows <= 2) {
      dot_panels<kRows, 0, kGroupPanels>(weight, row, steps, sums);
    } else {
      dot_panels<kRows, 0, 1>(weight, row, steps, sums);
      dot_panels<kRows, 1, 2>(weight, row, steps, sums);
    }
  }

 private:
  // Panels [kFirst, kEnd).
  template <int kRows, int kFirst, int kEnd>
  static void dot_panels(const char* weight, const float* const (&row)[kRows], int64_t steps, float* sums) {
    Sum sum[kRows][kEnd - kFirst];
    if constexpr (Format::kScales == Scales::kBlock) {
      for (int r = 0; r < kRows; ++r)
        for (int i = kFirst * kBlock; i < kEnd * kBlock; ++i) sums[r * kGroupRows + i] = 0.0f;
      for (int64_t s = 0; s < steps; s += kInt4BlockSteps) {
        run<kRows, kFirst, kEnd>(weight + kInt4ScaleBytes, row, s, kInt4BlockSteps, sum);
        for (int p = kFirst; p < kEnd; ++p) {
          const Pair scale = Format::load_scales(weight + p * kInt4ScaleBytes / 2);
          for (int r = 0; r < kRows; ++r) {
            float* const total = sums + (r * kGroupPanels + p) * kBlock;
            const Sum& block = sum[r][p - kFirst];
            _mm256_storeu_ps(total, _mm256_fmadd_ps(block.low, scale.low, _mm256_loadu_ps(total)));
            _mm256_storeu_ps(total + 8, _mm256_fmadd_ps(block.high, scale.high, _mm256_loadu_ps(total + 8)));
          }
        }
        weight += kInt4BlockBytes;
      }
    } else {
      run<kRows, kFirst, kEnd>(weight, row, 0, steps, sum);
      for (int r = 0; r < kRows; ++r)
        for (int p = kFirst; p < kEnd; ++p) {
          float* const out = sums + (r * kGroupPanels + p) * kBlock;
          _mm256_storeu_ps(out, sum[r][p - kFirst].low);
          _mm256_storeu_ps(out + 8, sum[r][p - kFirst].high);
        }
    }
  }

  // The sums of steps [first, first + steps), whose weights begin at `weight`.
  template <int kRows, int kFirst, int kEnd>
  EAGLE_INLINE static void run(const char* weight, const float* const (&row)[kRows], int64_t first,
                               int64_t steps, Sum (&sum)[kRows][kEnd - kFirst]) {
    for (int r = 0; r < kRows; ++r)
      for (int p = kFirst; p < kEnd; ++p) sum[r][p - kFirst] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t s = first;
    do {
      if constexpr (kRows > 2 && kFirst == 0)
        for (int line = 0; line < Format::kStepBytes / 64; ++line)
          __builtin_prefetch(weight + kAheadBytes + line * 64, 0, 3);
      Weights w[kEnd - kFirst];
      w[0] = Format::template load<kFirst>(weight);
      if constexpr (kEnd - kFirst == 2) w[1] = Format::template load<kFirst + 1>(weight);
      const int64_t at = s * Format::kStepK;
      add_k<0>(w, row, at, sum);
      if constexpr (Format::kStepK > 1) add_k<1>(w, row, at, sum);
      if constexpr (Format::kStepK > 2) {
        add_k<2>(w, row, at, sum);
        add_k<3>(w, row, at, sum);
      }
      weight += Format::kStepBytes;
    } while (++s < first + steps);
  }

  template <int k, int kRows, int kPanels>
  EAGLE_INLINE static void add_k(const Weights (&w)[kPanels], const float* const (&row)[kRows], int64_t at,
                                 Sum (&sum)[kRows][kPanels]) {
    Pair decoded[kPanels];
    for (int p = 0; p < kPanels; ++p) decoded[p] = Format::template decode<k>(w[p]);
    for (int r = 0; r < kRows; ++r) {
      const __m256 x = _mm256_broadcast_ss(row[r] + at + k);
      for (int p = 0; p < kPanels; ++p) add(sum[r][p], decoded[p], x);
    }
  }
};

// fp32 has nothing to decode for several rows at once: two at a time are the faster (16 rows: 1.3 times).
template <class Load>
struct Single {
  using Weights = Pair;
  static constexpr int kMaxRows = Load::kMaxRows;
  static constexpr Scales kScales = Scales::kNone;
  static constexpr int kStepK = 1, kStepBytes = kGroupRows * Load::kBytes;
  template <int kPanel>
  static Weights load(const char* p) {
    p += kPanel * kPanelRows * Load::kBytes;
    return {Load::load(p), Load::load(p + 8 * Load::kBytes)};
  }
  template <int k>
  static Pair decode(const Weights& w) {
    return w;
  }
};

struct LoadFloat32 {
  static constexpr int kBytes = 4, kMaxRows = 2;
  static __m256 load(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
};
struct LoadFloat16 {
  static constexpr int kBytes = 2, kMaxRows = 6;
  static __m256 load(const char* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

// The even k is the low half of every word, the odd k the high half.
struct BFloat16Pairs {
  using Weights = IntegerPair;
  static constexpr Scales kScales = Scales::kNone;
  static constexpr int kStepK = 2, kStepBytes = 128, kMaxRows = 6;
  template <int kPanel>
  static Weights load(const char* p) {
    return {load_bytes(p + kPanel * 64), load_bytes(p + kPanel * 64 + 32)};
  }
  template <int k>
  static Pair decode(const Weights& w) {
    return {decode<k>(w.low), decode<k>(w.high)};
  }

 private:
  template <int k>
  static __m256 decode(__m256i w) {
    return _mm256_castsi256_ps(k ? _mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u)))
                                 : _mm256_slli_epi32(w, 16));
  }
};

// The odd k is the high byte of every word, the even k the one below. `enter` sees the codes as they lie.
struct DecodeInt8 {
  static __m256i enter(__m256i codes) {  // sign and magnitude to two's complement
    return _mm256_sign_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(0x7f)), codes);
  }
  static __m256 odd(__m256i w) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(w, 24)); }
};
struct DecodeFloat8 {
  static __m256i enter(__m256i codes) { return codes; }
  static __m256 odd(__m256i w) {
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(w, 4), _mm256_set1_epi32(int(0x87f00000u)));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));  // as to_float(float8_t)
  }
};
template <class Decode>
struct Bytes {
  using Weights = IntegerPair;
  static constexpr Scales kScales = Scales::kRow;
  static constexpr int kStepK = 2, kStepBytes = 64, kMaxRows = 6;
  template <int kPanel>
  static Weights load(const char* p) {
    const __m256i low = Decode::enter(load_bytes(p)), high = Decode::enter(load_bytes(p + 32));
    if constexpr (kPanel == 0) return {_mm256_unpacklo_epi16(low, low), _mm256_unpacklo_epi16(high, high)};
    return {_mm256_unpackhi_epi16(low, low), _mm256_unpackhi_epi16(high, high)};
  }
  template <int k>
  static Pair decode(const Weights& w) {
    if constexpr (k == 1) return {Decode::odd(w.low), Decode::odd(w.high)};
    return {Decode::odd(_mm256_slli_epi32(w.low, 8)), Decode::odd(_mm256_slli_epi32(w.high, 8))};
  }
};

struct Nibbles {
  using Weights = IntegerPair;  // the panel's nibbles at the top of their bytes
  static constexpr Scales kScales = Scales::kBlock;
  static constexpr int kStepK = 4, kStepBytes = 64, kMaxRows = 6;
  template <int kPanel>
  static Weights load(const char* p) {
    const Weights w = {load_bytes(p), load_bytes(p + 32)};
    if constexpr (kPanel == 1) return w;
    return {_mm256_slli_epi32(w.low, 4), _mm256_slli_epi32(w.high, 4)};
  }
  template <int k>
  static Pair decode(const Weights& w) {
    return {decode<k>(w.low), decode<k>(w.high)};
  }
  static Pair load_scales(const char* p) { return {LoadFloat16::load(p), LoadFloat16::load(p + 16)}; }

 private:
  template <int k>
  static __m256 decode(__m256i w) {
    constexpr int kShift[] = {24, 8, 16, 0};
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, kShift[k]), 28));
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
  using BFloat16 = Floats<BFloat16Pairs>;
  using Float16 = Floats<Single<LoadFloat16>>;
  using Float32 = Floats<Single<LoadFloat32>>;
  using Float8 = Floats<Bytes<DecodeFloat8>>;
  using Int8 = Floats<Bytes<DecodeInt8>>;
  using Int4 = Floats<Nibbles>;
  using Float8OfBFloat16 = Float8;
  using Int8OfBFloat16 = Int8;
  using Int4OfBFloat16 = Int4;
  using Int8Dynamic = Integers;
};

}  // namespace

const LinearKernels kLinearAvx2 = {false, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
