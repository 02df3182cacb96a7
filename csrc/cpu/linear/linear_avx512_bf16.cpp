// linear's kernels for AVX-512 with BF16 and VNNI products: one instruction for two or four k of 16 outputs.
// The codes of a quantised format become bf16 exactly, by tables, and meet bf16 rows in BF16 products.
#include "cpu/linear/avx512_impl.h"

namespace eagle::cpu {
namespace {

struct Products : FloatSums {
  using Element = uint16_t;
  static __m512i broadcast_two(const uint16_t* x) {
    int pair;
    __builtin_memcpy(&pair, x, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static void add(__m512& sum, __m512i w, __m512i x) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
  }
};

struct BFloat16Products : Products {
  using Weights = __m512i;
  using Input = __m512i;
  static constexpr Scales kScales = Scales::kNone;
  static constexpr int kStepK = 2, kPanelStepBytes = 64, kStepBytes = 128;
  static Weights load(const char* p) { return _mm512_loadu_si512(p); }
  static Input broadcast(const uint16_t* x) { return broadcast_two(x); }
  static void accumulate(Sum& sum, Weights w, Input x) { add(sum, w, x); }
};

// The bytes of a code's magnitude as bf16.
struct ByteTable {
  alignas(64) uint8_t low[128], high[128];
};
constexpr uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value) >> 16; }
constexpr ByteTable byte_table(bool float8) {
  ByteTable table{};
  for (int code = 0; code < 128; ++code) {
    float value = float(code);
    if (float8) {
      value = float(code < 8 ? code : 8 + code % 8) / 512.0f;  // in units of the smallest, 2^-9
      for (int i = 1; i < code / 8; ++i) value *= 2.0f;
    }
    table.low[code] = uint8_t(bits_of(value));
    table.high[code] = uint8_t(bits_of(value) >> 8);
  }
  return table;
}

// Codes of a sign and seven bits.
template <bool kFloat8>
struct ByteProducts : Products {
  using Weights = __m512i;
  using Input = __m512i;
  static constexpr Scales kScales = Scales::kRow;
  static constexpr int kStepK = 2, kStepBytes = 64, kPrefetchRows = 5;
  static constexpr ByteTable kTable = byte_table(kFloat8);
  static void load_group(const char* p, Weights (&w)[kGroupPanels]) {
    const __m512i codes = _mm512_loadu_si512(p);
    const auto look_up = [&](const uint8_t* table) {  // the top bit of an index is not looked at
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    };
    const __m512i low = look_up(kTable.low);
    const __m512i high = _mm512_ternarylogic_epi32(look_up(kTable.high), codes, _mm512_set1_epi8(-128),
                                                   0xf8);  // a | (b & c): the sign
    w[0] = _mm512_unpacklo_epi8(low, high);
    w[1] = _mm512_unpackhi_epi8(low, high);
  }
  static Input broadcast(const uint16_t* x) { return broadcast_two(x); }
  static void accumulate(Sum& sum, Weights w, Input x) { add(sum, w, x); }
};

struct NibbleTable {
  alignas(64) uint16_t bits[32];
};
constexpr NibbleTable nibble_table() {
  NibbleTable table{};
  for (int i = 0; i < 32; ++i) table.bits[i] = uint16_t(bits_of(float(i % 16 < 8 ? i % 16 : i % 16 - 16)));
  return table;
}

struct NibbleProducts : Blocks {
  using Element = uint16_t;
  struct Weights {
    __m512i first, second;  // pairs of k
  };
  struct Input {
    __m512i first, second;
  };
  static constexpr NibbleTable kTable = nibble_table();
  static void load_group(const char* p, Weights (&w)[kGroupPanels]) {
    const __m512i codes = _mm512_loadu_si512(p), table = _mm512_load_si512(kTable.bits);
    // An index has five bits: one of the neighbour, which changes nothing.
    const auto look_up = [&](__m512i index) { return _mm512_permutexvar_epi16(index, table); };
    w[0] = {look_up(codes), look_up(_mm512_srli_epi16(codes, 8))};
    w[1] = {look_up(_mm512_srli_epi16(codes, 4)), look_up(_mm512_srli_epi16(codes, 12))};
  }
  static Input broadcast(const uint16_t* x) {
    return {Products::broadcast_two(x), Products::broadcast_two(x + 2)};
  }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    Products::add(sum, w.first, x.first);
    Products::add(sum, w.second, x.second);
  }
};

struct IntegerProducts : IntegerSums {
  using Weights = __m512i;
  using Input = __m512i;
  static Weights load(const char* p) { return _mm512_loadu_si512(p); }
  static Input broadcast(const int8_t* x) { return broadcast_four(x); }
  static void accumulate(Sum& sum, Weights w, Input x) { sum = _mm512_dpbusd_epi32(sum, w, x); }
};

struct Formats {
  using BFloat16 = BFloat16Products;
  using Float16 = Single<LoadFloat16>;
  using Float32 = Single<LoadFloat32>;
  using Float8 = Bytes<DecodeFloat8>;
  using Int8 = Bytes<DecodeInt8>;
  using Int4 = Nibbles;
  using Float8OfBFloat16 = ByteProducts<true>;
  using Int8OfBFloat16 = ByteProducts<false>;
  using Int4OfBFloat16 = NibbleProducts;
  using Int8Dynamic = IntegerProducts;
};

}  // namespace

const LinearKernels kLinearAvx512Bf16 = {true, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
