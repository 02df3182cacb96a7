// linear's kernels for any x86-64 processor: plain loops, the same sums in the same order as AVX2 and
// AVX-512.
#include "cpu/linear/multiply_impl.h"
#include "cpu/linear/topk_impl.h"

namespace eagle::cpu {
namespace {

struct Lanes {
  float v[kBlock];
};

struct FloatSums {
  using Element = float;
  using Sum = Lanes;
  using Input = const float*;
  static constexpr int kMaxRows = 4, kPrefetchRows = 9;
  static Sum zero() { return {}; }
  static Input broadcast(const float* x) { return x; }
  static void store(const Sum& sum, float* out) {
    for (int i = 0; i < kBlock; ++i) out[i] = sum.v[i];
  }
};

template <class T, int kStepK_>
struct Scalar : FloatSums {
  using Weights = const T*;
  static constexpr Scales kScales = Scales::kNone;
  static constexpr int kStepK = kStepK_, kPanelStepBytes = kPanelRows * kStepK * int(sizeof(T)),
                       kStepBytes = kGroupPanels * kPanelStepBytes;
  static Weights load(const char* p) { return reinterpret_cast<const T*>(p); }
  static void accumulate(Sum& sum, Weights w, Input x) {
    for (int k = 0; k < kStepK; ++k)
      for (int i = 0; i < kBlock; ++i) sum.v[i] = fma(to_float(w[i * kStepK + k]), x[k], sum.v[i]);
  }
};

struct Float8Code {
  static float value(uint8_t code) { return to_float(float8_t{code}); }
};
struct Int8Code {
  static float value(uint8_t code) {
    return bits_float(float_bits(float(code & 0x7f)) | uint32_t(code & 0x80) << 24);
  }
};

template <class Code>
struct Bytes : FloatSums {
  using Weights = const uint8_t*;
  static constexpr Scales kScales = Scales::kRow;
  static constexpr int kStepK = 2, kStepBytes = 64;
  static void load_group(const char* p, Weights (&w)[kGroupPanels]) {
    for (int panel = 0; panel < kGroupPanels; ++panel)
      w[panel] = reinterpret_cast<const uint8_t*>(p) + 8 * panel;
  }
  static void accumulate(Sum& sum, Weights w, Input x) {
    for (int k = 0; k < kStepK; ++k)
      for (int i = 0; i < kBlock; ++i)
        sum.v[i] = fma(Code::value(w[i / 4 * 16 + i % 4 * 2 + k]), x[k], sum.v[i]);
  }
};

struct Nibbles : FloatSums {
  struct Weights {
    const uint8_t* bytes;
    int shift;  // that brings the panel's nibble to the top
  };
  using BlockScales = const half_t*;
  static constexpr Scales kScales = Scales::kBlock;
  static constexpr int kStepK = 4, kStepBytes = 64;
  static void load_group(const char* p, Weights (&w)[kGroupPanels]) {
    for (int panel = 0; panel < kGroupPanels; ++panel)
      w[panel] = {reinterpret_cast<const uint8_t*>(p), 4 - 4 * panel};
  }
  static void accumulate(Sum& sum, Weights w, Input x) {
    for (int k = 0; k < kStepK; ++k)
      for (int i = 0; i < kBlock; ++i) {
        const int code = int8_t(w.bytes[i * 4 + k % 2 * 2 + k / 2] << w.shift) >> 4;
        sum.v[i] = fma(float(code), x[k], sum.v[i]);
      }
  }
  static BlockScales load_scales(const char* p) { return reinterpret_cast<const half_t*>(p); }
  static void add_scaled(const Sum& sum, BlockScales scale, float* total) {
    for (int i = 0; i < kBlock; ++i) total[i] = fma(sum.v[i], to_float(scale[i]), total[i]);
  }
};

struct IntegerLanes {
  uint32_t v[kBlock];  // sums may leave 32 bits on the way; what comes out does not
};

struct Integers {
  using Element = int8_t;
  using Sum = IntegerLanes;
  using Weights = const uint8_t*;
  using Input = const int8_t*;
  static constexpr Scales kScales = Scales::kBoth;
  static constexpr int kStepK = 4, kPanelStepBytes = 64, kStepBytes = 128, kMaxRows = 4, kPrefetchRows = 9;
  static Sum start(const int8_t* row_end) {
    Int8RowEnd end;
    __builtin_memcpy(&end, row_end, sizeof(end));
    Sum sum;
    for (int i = 0; i < kBlock; ++i) sum.v[i] = uint32_t(end.start);
    return sum;
  }
  static Weights load(const char* p) { return reinterpret_cast<const uint8_t*>(p); }
  static Input broadcast(const int8_t* x) { return x; }
  static void accumulate(Sum& sum, Weights w, Input x) {
    for (int i = 0; i < kBlock; ++i)
      for (int k = 0; k < kStepK; ++k) sum.v[i] += uint32_t(int32_t(w[i * kStepK + k]) * x[k]);
  }
  static void store(const Sum& sum, float* out) {
    for (int i = 0; i < kBlock; ++i) out[i] = float(int32_t(sum.v[i]));
  }
};

struct Formats {
  using BFloat16 = Scalar<bf16_t, 2>;
  using Float16 = Scalar<half_t, 1>;
  using Float32 = Scalar<float, 1>;
  using Float8 = Bytes<Float8Code>;
  using Int8 = Bytes<Int8Code>;
  using Int4 = Nibbles;
  using Float8OfBFloat16 = Float8;
  using Int8OfBFloat16 = Int8;
  using Int4OfBFloat16 = Int4;
  using Int8Dynamic = Integers;
};

}  // namespace

const LinearKernels kLinearGeneric = {false, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
