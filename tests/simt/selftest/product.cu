// Products of matrices: their numbers, and what must be told of a warp, or of a fragment, that is not as mma
// wants it. The lane maps are the thread's side of them, as in matrix.cu.
#include <type_traits>
#include <utility>

#include "common/numeric.h"
#include "cuda/device/ptx_matrix.cuh"
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

using eagle::bf16_t;
using eagle::half_t;
using eagle::cuda::multiply_add;
using eagle::cuda::multiply_add_int8;
using eagle::cuda::pack;

// ---- a product -------------------------------------------------------------------------------------------

constexpr int kM = 16, kN = 8, kK = 16;

// Thread's elements, in the words of the PTX ISA.
struct Place {
  int group = int(threadIdx.x) >> 2, in_group = int(threadIdx.x) % 4;
  int a_row(int i) const { return (i >= 0 && i < 2) || (i >= 4 && i < 6) ? group : group + 8; }
  int a_column(int i) const { return i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8; }
  int b_row(int i) const { return i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8; }
  int b_column(int) const { return group; }
  int c_row(int i) const { return i < 2 ? group : group + 8; }
  int c_column(int i) const { return in_group * 2 + (i & 1); }
};

// The same of .s8, of which four make a register; c as above.
struct BytePlace : Place {
  int a_row(int i) const { return (i >= 0 && i < 4) || (i >= 8 && i < 12) ? group : group + 8; }
  int a_column(int i) const { return i < 8 ? in_group * 4 + (i & 3) : in_group * 4 + (i & 3) + 16; }
  int b_row(int i) const { return i < 4 ? in_group * 4 + (i & 3) : in_group * 4 + (i & 3) + 16; }
};

template <class T>
constexpr bool kBytes = std::is_same_v<T, int8_t>;
template <class T>
using Element = std::conditional_t<kBytes<T>, int8_t, float>;
template <class T>
using Sum = std::conditional_t<kBytes<T>, int32_t, float>;
template <class T>
using PlaceOf = std::conditional_t<kBytes<T>, BytePlace, Place>;
template <class T>
constexpr int kDepthOf = kBytes<T> ? 32 : kK;

// Register i from element(0), element(1), ... of the thread.
template <class T, class F>
__device__ __forceinline__ uint32_t word(int i, F&& element) {
  if constexpr (kBytes<T>) {
    uint32_t x = 0;
    for (int j = 0; j < 4; ++j) x |= uint32_t(uint8_t(element(4 * i + j))) << 8 * j;
    return x;
  } else {
    return pack<T>(element(2 * i), element(2 * i + 1));
  }
}

template <class T>
__device__ __forceinline__ void multiply(Sum<T> (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  if constexpr (kBytes<T>)
    multiply_add_int8(c, a, b0, b1);
  else
    multiply_add<T>(c, a, b0, b1);
}

enum class Mistake {
  kNone,
  kHalfAWarp,           // the others have left
  kTwoPlaces,           // one lane at an instruction of its own
  kTwoTypes,            // and of another type
  kOtherLane,           // lane 6 brings lane 5's part of b
  kExchangedRegisters,  // of a: rows 8 further for columns further
  kOtherRows            // of c: rows 0 to 7 for 8 to 15
};

template <class T>
__global__ void __launch_bounds__(32)
    product_kernel(const Element<T>* a, const Element<T>* b, Sum<T>* c, Mistake mistake) {
  constexpr int kDepth = kDepthOf<T>;
  using Other = std::conditional_t<std::is_same_v<T, bf16_t>, half_t, bf16_t>;
  const int t = threadIdx.x;
  const PlaceOf<T> at;
  PlaceOf<T> b_at;
  if (mistake == Mistake::kOtherLane && t == 6) b_at.in_group = 1;
  uint32_t x[4], y[2];
  for (int i = 0; i < 4; ++i)
    x[i] = word<T>(i, [&](int e) { return load(a + at.a_row(e) * kDepth + at.a_column(e)); });
  for (int i = 0; i < 2; ++i)
    y[i] = word<T>(i, [&](int e) { return load(b + b_at.b_row(e) * kN + b_at.b_column(e)); });
  if (mistake == Mistake::kExchangedRegisters) std::swap(x[1], x[2]);
  Sum<T> z[4];
  for (int i = 0; i < 4; ++i) z[i] = load(c + at.c_row(i) * kN + at.c_column(i));
  if (mistake == Mistake::kHalfAWarp && t >= 16) return;
  if (mistake == Mistake::kTwoPlaces && t == 5) {
    multiply<T>(z, {x[3], x[2], x[1], x[0]}, y[1], y[0]);  // <- reported: product
    z[0] += z[1];
  } else if (mistake == Mistake::kTwoTypes && t == 5) {
    float other[4] = {};
    multiply<Other>(other, {x[0], x[1], x[2], x[3]}, y[0], y[1]);  // <- reported: product
    z[0] += Sum<T>(other[0]);
  } else {
    multiply<T>(z, {x[0], x[1], x[2], x[3]}, y[0], y[1]);  // <- reported: product
  }
  const int further = mistake == Mistake::kOtherRows ? 8 : 0;
  for (int i = 0; i < 4; ++i) store(c + (at.c_row(i) + further) % kM * kN + at.c_column(i), z[i]);
}

struct Product {
  Buffer<float> a{kM * kK}, b{kK * kN}, c{kM * kN};

  // Small integers: every sum is exact.
  Product() {
    for (int i = 0; i < kM * kK; ++i) a[i] = float(i * 7 % 31 - 15);
    for (int i = 0; i < kK * kN; ++i) b[i] = float(i * 5 % 23 - 11);
    for (int i = 0; i < kM * kN; ++i) c[i] = float(i * 3 % 17 - 8) * 0.5f;
  }
  template <class T>
  void run(Mistake mistake = Mistake::kNone) {
    emulate({a.in("a"), b.in("b"), c.inout("c")}, [&] {
      launch(product_kernel<T>, {.grid = 1, .block = 32}, a.data(), b.data(), c.data(), mistake);
    });
  }
};

template <class T>
bool product() {
  Product p;
  Buffer<float> want(kM * kN);
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j) {
      want[i * kN + j] = p.c[i * kN + j];
      for (int k = 0; k < kK; ++k) want[i * kN + j] += p.a[i * kK + k] * p.b[k * kN + j];
    }
  p.run<T>();
  for (int i = 0; i < kM * kN; ++i)
    if (p.c[i] != want[i]) return false;
  return true;
}

// NaN in one row and one column stays there.
template <class T>
bool apart() {
  Product clean, p;
  clean.run<T>();
  p.a[3 * kK + 9] = p.b[12 * kN + 5] = __builtin_nanf("");
  p.run<T>();
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j) {
      const float x = p.c[i * kN + j];
      if (i == 3 || j == 5 ? x == x : x != clean.c[i * kN + j]) return false;
    }
  return true;
}

// Products that are zero leave every accumulator as it is, bit for bit.
template <class T>
bool nothing_added() {
  Product p;
  for (int i = 0; i < kM * kK; ++i) p.a[i] = i % 3 ? 0.0f : -0.0f;
  const float odd[] = {0.0f, -0.0f, 1e-45f, -1e-45f, 3e38f, -1.0f / 3.0f, __builtin_inff()};
  for (int i = 0; i < kM * kN; ++i) p.c[i] = odd[i % 7];
  p.run<T>();
  for (int i = 0; i < kM * kN; ++i)
    if (eagle::float_bits(p.c[i]) != eagle::float_bits(odd[i % 7])) return false;
  return true;
}

// ---- signed bytes ----------------------------------------------------------------------------------------

constexpr int kBytesDeep = kDepthOf<int8_t>;

struct ByteProduct {
  Buffer<int8_t> a{kM * kBytesDeep}, b{kBytesDeep * kN};
  Buffer<int32_t> c{kM * kN};

  // With the largest factors and with accumulators that wrap around.
  ByteProduct() {
    for (int i = 0; i < kM * kBytesDeep; ++i) a[i] = int8_t(i < 64 ? -128 : i * 37 % 256 - 128);
    for (int i = 0; i < kBytesDeep * kN; ++i) b[i] = int8_t(i % 8 == 0 ? -128 : i * 91 % 256 - 128);
    for (int i = 0; i < kM; ++i)
      for (int j = 0; j < kN; ++j) c[i * kN + j] = i == 15 ? 0x7fffffff - j : i * 1000 - j;
  }
  template <class T>
  void run(Mistake mistake = Mistake::kNone) {
    emulate({a.in("a"), b.in("b"), c.inout("c")}, [&] {
      launch(product_kernel<int8_t>, {.grid = 1, .block = 32}, a.data(), b.data(), c.data(), mistake);
    });
  }
};

bool byte_product() {
  ByteProduct p;
  std::vector<int32_t> want(kM * kN);
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j) {
      uint32_t sum = uint32_t(p.c[i * kN + j]);
      for (int k = 0; k < kBytesDeep; ++k) sum += uint32_t(p.a[i * kBytesDeep + k] * p.b[k * kN + j]);
      want[i * kN + j] = int32_t(sum);
    }
  p.run<int8_t>();
  for (int i = 0; i < kM * kN; ++i)
    if (p.c[i] != want[i]) return false;
  return true;
}

// ---- and what goes wrong with it -------------------------------------------------------------------------

// No rule of the warp is broken by a wrong fragment: the numbers tell it, where they must and nowhere else.
template <class T, Mistake kMistake>
bool mistaken() {
  std::conditional_t<kBytes<T>, ByteProduct, Product> right, p;
  p.template run<T>(kMistake);  // gives up where a rule is broken
  right.template run<T>();
  int wrong = 0;
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j) {
      const int row = kMistake == Mistake::kOtherRows ? (i + 8) % kM : i;
      const bool same = p.c[i * kN + j] == right.c[row * kN + j];
      if (kMistake == Mistake::kOtherRows || (kMistake == Mistake::kOtherLane && j != 1)) {
        if (!same) return false;
      } else {
        wrong += !same;
      }
    }
  if (kMistake == Mistake::kOtherRows)
    for (int i = 0; i < kM * kN; ++i) wrong += p.c[i] != right.c[i];
  return wrong >= (kMistake == Mistake::kOtherLane ? kM : kM * kN) / 2;
}

}  // namespace

std::vector<Case> product_cases() {
  return {
      {"product/bf16", "", product<bf16_t>},
      {"product/half", "", product<half_t>},
      {"product/bf16_rows_and_columns_apart", "", apart<bf16_t>},
      {"product/half_rows_and_columns_apart", "", apart<half_t>},
      {"product/bf16_nothing_added", "", nothing_added<bf16_t>},
      {"product/half_nothing_added", "", nothing_added<half_t>},
      {"product/bytes", "", byte_product},
      {"product/bf16_half_a_warp", "collective names exited lanes", mistaken<bf16_t, Mistake::kHalfAWarp>},
      {"product/bf16_two_places", "divergent collective", mistaken<bf16_t, Mistake::kTwoPlaces>},
      {"product/bf16_two_types", "divergent collective", mistaken<bf16_t, Mistake::kTwoTypes>},
      {"product/bf16_other_lane", "", mistaken<bf16_t, Mistake::kOtherLane>},
      {"product/bf16_exchanged_registers", "", mistaken<bf16_t, Mistake::kExchangedRegisters>},
      {"product/bf16_other_rows", "", mistaken<bf16_t, Mistake::kOtherRows>},
      {"product/half_half_a_warp", "collective names exited lanes", mistaken<half_t, Mistake::kHalfAWarp>},
      {"product/half_two_places", "divergent collective", mistaken<half_t, Mistake::kTwoPlaces>},
      {"product/half_two_types", "divergent collective", mistaken<half_t, Mistake::kTwoTypes>},
      {"product/half_other_lane", "", mistaken<half_t, Mistake::kOtherLane>},
      {"product/half_exchanged_registers", "", mistaken<half_t, Mistake::kExchangedRegisters>},
      {"product/half_other_rows", "", mistaken<half_t, Mistake::kOtherRows>},
      {"product/bytes_half_a_warp", "collective names exited lanes", mistaken<int8_t, Mistake::kHalfAWarp>},
      {"product/bytes_two_places", "divergent collective", mistaken<int8_t, Mistake::kTwoPlaces>},
      {"product/bytes_two_types", "divergent collective", mistaken<int8_t, Mistake::kTwoTypes>},
      {"product/bytes_other_lane", "", mistaken<int8_t, Mistake::kOtherLane>},
      {"product/bytes_exchanged_registers", "", mistaken<int8_t, Mistake::kExchangedRegisters>},
      {"product/bytes_other_rows", "", mistaken<int8_t, Mistake::kOtherRows>},
  };
}

}  // namespace simt::selftest
