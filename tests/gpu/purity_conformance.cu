// What bit-exactness takes from the hardware: an element of a matrix product is made of its row, its column
// and what it is added to, wherever they stand and whatever stands beside them; a conversion is made of its
// input alone. Every case compares the machine with itself, conversions also with plain C++. planted_cases()
// are the same over instructions with a fault, and each must be told.
#include <type_traits>

#include "common/float8.h"
#include "common/numeric.h"
#include "conformance.h"
#include "cuda/device/ptx_matrix.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"

namespace conformance {
namespace {

using namespace eagle;
using namespace eagle::cuda;

// ---- products: c += a b of a tile, then of the same rows and columns in other places or among strangers

constexpr int kM = 16, kN = 8, kK = 16, kTile = kM * kN, kTiles = 8;
constexpr int kStrangers = 4;  // zeros, NaN, infinities, the largest numbers
enum class Kept { kAll, kOneRow, kOneColumn };

struct TileMemory {
  uint16_t a[kM][kK], b[kK][kN];
  float c[kM][kN], product[kM][kN];
  uint32_t same[kM][kN];  // how often the element had the bits of `product`
};

// Row i stands in place i - first_row, column j in place j - first_column; what is not `only` is replaced.
struct Variation {
  int first_row, first_column;
  Kept kept;
  int only, stranger;

  __device__ bool keeps(int row, int column) const {
    return kept == Kept::kAll || (kept == Kept::kOneRow ? row : column) == only;
  }
};

template <class T>
__device__ uint16_t stranger_bits(int kind) {
  constexpr uint16_t kInfinity = std::is_same_v<T, bf16_t> ? 0x7f80 : 0x7c00;
  return kind == 0 ? 0 : kind == 1 ? 0x7fff : kind == 2 ? kInfinity : 0x8000 | (kInfinity - 1);
}

// Numbers whose sums are rounded: of a few binades, and in every other tile of many.
template <class T>
__device__ float random_number(uint32_t word, int tile) {
  const int spread = tile % 2 ? 12 : 3;
  const float size = bits_float((127u - spread + word / 4096u % (2u * spread)) << 23);
  return (static_cast<float>(word % 4096u) - 2047.5f) * (1.0f / 1024.0f) * size;
}

template <class Instruction>
__device__ void multiply(const TileMemory& tile, const Variation& v, float (&c)[4]) {
  using T = typename Instruction::Type;
  const int row = lane_id() / 4, column = lane_id() % 4 * 2;
  const auto at_row = [&](int i) { return (i + v.first_row) % kM; };
  const auto at_column = [&](int j) { return (j + v.first_column) % kN; };
  const uint16_t stranger = stranger_bits<T>(v.stranger);
  const auto a = [&](int i, int k) -> uint32_t {
    const bool there = v.kept != Kept::kOneRow || v.only == at_row(i);
    const auto pair = [&](int depth) -> uint32_t { return there ? tile.a[at_row(i)][depth] : stranger; };
    return pair(k + 1) << 16 | pair(k);
  };
  const auto b = [&](int k, int j) -> uint32_t {
    const bool there = v.kept != Kept::kOneColumn || v.only == at_column(j);
    const auto pair = [&](int depth) -> uint32_t { return there ? tile.b[depth][at_column(j)] : stranger; };
    return pair(k + 1) << 16 | pair(k);
  };
  for (int e = 0; e < 4; ++e) {
    const int i = at_row(row + e / 2 * 8), j = at_column(column + e % 2);
    c[e] = v.keeps(i, j) ? tile.c[i][j] : to_float(T{stranger});
  }
  const uint4 left{a(row, column), a(row + 8, column), a(row, column + 8), a(row + 8, column + 8)};
  Instruction::run(c, left, b(column, row), b(column + 8, row));
}

template <class Instruction>
__device__ void compare(TileMemory& tile, const Variation& v) {
  float c[4];
  multiply<Instruction>(tile, v, c);
  for (int e = 0; e < 4; ++e) {
    const int i = (lane_id() / 4 + e / 2 * 8 + v.first_row) % kM;
    const int j = (lane_id() % 4 * 2 + e % 2 + v.first_column) % kN;
    if (v.keeps(i, j)) tile.same[i][j] += float_bits(c[e]) == float_bits(tile.product[i][j]);
  }
  __syncwarp();
}

template <class Instruction, Kept kKept>
__global__ void __launch_bounds__(32) product_kernel(const uint32_t* in, uint32_t* out) {
  using T = typename Instruction::Type;
  auto& tile = shared_memory<TileMemory>();
  const int number = static_cast<int>(blockIdx.x);
  const auto random = [&](int i) {
    return random_number<T>(load(in + (number * 3 * kM * kK + i) % kWords), number);
  };
  for (int i = lane_id(); i < kM * kK; i += kWarpSize) tile.a[i / kK][i % kK] = from_float<T>(random(i)).bits;
  for (int i = lane_id(); i < kTile; i += kWarpSize) {
    tile.b[i / kN][i % kN] = from_float<T>(random(kM * kK + i)).bits;
    tile.c[i / kN][i % kN] = random(kM * kK + kTile + i);
    tile.same[i / kN][i % kN] = 0;
  }
  __syncwarp();
  float c[4];
  multiply<Instruction>(tile, {0, 0, Kept::kAll, 0, 0}, c);
  for (int e = 0; e < 4; ++e) tile.product[lane_id() / 4 + e / 2 * 8][lane_id() % 4 * 2 + e % 2] = c[e];
  __syncwarp();

  if constexpr (kKept == Kept::kAll) {
    for (int place = 0; place < kTile; ++place)
      compare<Instruction>(tile, {place / kN, place % kN, kKept, 0, 0});
  } else {
    constexpr int kCount = kKept == Kept::kOneRow ? kM : kN;
    for (int i = 0; i < kCount * kCount * kStrangers; ++i) {
      const int place = i / kCount % kCount;
      const bool rows = kKept == Kept::kOneRow;
      compare<Instruction>(tile,
                           {rows ? place : 0, rows ? 0 : place, kKept, i % kCount, i / kCount / kCount});
    }
  }
  for (int i = lane_id(); i < kTile; i += kWarpSize)
    store(out + number * kTile + i, tile.same[i / kN][i % kN]);
}

template <class Instruction, Kept kKept>
void products(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(product_kernel<Instruction, kKept>,
         {.grid = kTiles, .block = 32, .stream = stream, .shared_bytes = sizeof(TileMemory)}, in, out);
}
template <Kept kKept>
void always_the_same(const uint32_t*, uint32_t* out) {
  const int variations = kKept == Kept::kAll      ? kTile
                         : kKept == Kept::kOneRow ? kM * kStrangers
                                                  : kN * kStrangers;
  for (int i = 0; i < kTiles * kTile; ++i) out[i] = static_cast<uint32_t>(variations);
}

template <class T>
struct Multiply {
  using Type = T;
  static __device__ void run(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
    multiply_add<T>(c, a, b0, b1);
  }
};

// ---- conversions: every pattern of 16 bits, each by several lanes and beside other words

constexpr int kEach = 16;  // patterns of a word of the output

template <class F>
__global__ void __launch_bounds__(128) conversion_kernel(const uint32_t* in, uint32_t* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  uint32_t first = 0;
  bool same = true;
  for (int distance = 0; distance < kWarpSize; distance = distance ? 2 * distance : 1) {
    uint32_t hash = 0;
    for (int k = 0; k < kEach; ++k) {
      const int pattern = (i ^ distance) * kEach + k;
      const uint32_t beside = load(in + (i * kEach + k + distance) % kWords);
      hash = (hash ^ F::convert(static_cast<uint32_t>(pattern), beside)) * 0x01000193u;
    }
    hash = __shfl_xor_sync(kFullMask, hash, distance);
    if (distance == 0) first = hash;
    same = same && hash == first;
  }
  store(out + i, same ? first : ~first);
}
template <class F>
void conversions(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(conversion_kernel<F>, {.grid = kWords / 128, .block = 128, .stream = stream}, in, out);
}
template <class F>
void converted(const uint32_t*, uint32_t* out) {
  for (uint32_t i = 0; i < kWords; ++i) {
    uint32_t hash = 0;
    for (uint32_t k = 0; k < kEach; ++k) hash = (hash ^ F::expected(i * kEach + k)) * 0x01000193u;
    out[i] = hash;
  }
}
static_assert(kWords * kEach == 1 << 16);

// The float whose upper half is the pattern: many in the middle between two numbers of 16 bits.
EAGLE_INLINE float wide(uint32_t pattern) {
  const uint32_t kind = pattern % 5, random = pattern * 40503u % 0x10000u;
  const uint32_t lower = kind == 0 ? 0x8000u : kind == 1 ? 0x1000u : kind == 2 ? 0x3000u : random;
  return bits_float(pattern << 16 | lower);
}

template <class T>
struct ToFloat {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t) { return expected(pattern); }
  EAGLE_INLINE static uint32_t expected(uint32_t pattern) {
    return float_bits(to_float(T{static_cast<uint16_t>(pattern)}));
  }
};
template <class T>
struct FromFloat {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t) { return expected(pattern); }
  EAGLE_INLINE static uint32_t expected(uint32_t pattern) { return from_float<T>(wide(pattern)).bits; }
};
template <class T>
struct Pack {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t beside) {
    const float x = wide(pattern), other = bits_float(beside);
    return pack<T>(x, other) << 16 | pack<T>(other, x) >> 16;
  }
  static uint32_t expected(uint32_t pattern) {
    const float x = wide(pattern);
    return (x != x ? 0x7fffu : from_float<T>(x).bits) * 0x10001u;
  }
};
// Both bytes of the pattern.
struct Float8ToFloat {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t) { return expected(pattern); }
  EAGLE_INLINE static uint32_t expected(uint32_t pattern) {
    const auto bits = [](uint32_t code) {
      return float_bits(to_float(float8_t{static_cast<uint8_t>(code)}));
    };
    return bits(pattern) * 31 ^ bits(pattern >> 8);
  }
};
// Numbers of every binade, below, at and above the middle between two codes.
struct FloatToFloat8 {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t) { return expected(pattern); }
  EAGLE_INLINE static uint32_t expected(uint32_t pattern) {
    const uint32_t upper = pattern << 16, middle = upper & ~0xfffffu;
    const auto code = [](uint32_t bits) -> uint32_t { return from_float<float8_t>(bits_float(bits)).bits; };
    return code(upper) | code(middle | 0x80000u) << 8 | code(middle | 0x7ffffu) << 16 |
           code(middle | 0x80001u) << 24;
  }
};
struct OfIntegers {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t) { return expected(pattern); }
  EAGLE_INLINE static uint32_t expected(uint32_t pattern) {
    const uint32_t x = float_bits(wide(pattern));
    return float_bits(static_cast<float>(x)) * 31 ^ float_bits(static_cast<float>(static_cast<int32_t>(x)));
  }
};

// ---- faults

// The rows of the lower half are added in another order.
struct DependsOnThePlace : Multiply<bf16_t> {
  static __device__ void run(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
    const float lower[2] = {c[2], c[3]};
    c[2] = c[3] = 0.0f;
    Multiply::run(c, a, b0, b1);
    c[2] += lower[0], c[3] += lower[1];
  }
};
// 0 times an element of the next row, or column.
template <bool kColumn>
struct LooksBeside : Multiply<half_t> {
  static __device__ void run(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
    Multiply::run(c, a, b0, b1);
    const uint32_t next = __shfl_xor_sync(kFullMask, kColumn ? b0 : a.x, 4);
    for (float& x : c) x += 0.0f * to_float(half_t{static_cast<uint16_t>(next)});
  }
};
struct DependsOnTheLane : ToFloat<half_t> {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t) {
    const bool subnormal = pattern % 0x400 != 0 && pattern % 0x8000 < 0x400;
    return subnormal && lane_id() % 2 ? pattern / 0x8000 << 31 : expected(pattern);
  }
};
struct FlushesInOddLanes : Float8ToFloat {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t) {
    return lane_id() % 2 && pattern < 8 ? 0u : expected(pattern);
  }
};
struct DependsOnTheOther : Pack<bf16_t> {
  static __device__ uint32_t convert(uint32_t pattern, uint32_t beside) {
    return Pack::convert(pattern, beside) + (beside % 1000 == 7);
  }
};

}  // namespace

std::vector<Case> purity_cases() {
  return {
      {"any place bf16", products<Multiply<bf16_t>, Kept::kAll>, always_the_same<Kept::kAll>},
      {"any place fp16", products<Multiply<half_t>, Kept::kAll>, always_the_same<Kept::kAll>},
      {"a row alone bf16", products<Multiply<bf16_t>, Kept::kOneRow>, always_the_same<Kept::kOneRow>},
      {"a row alone fp16", products<Multiply<half_t>, Kept::kOneRow>, always_the_same<Kept::kOneRow>},
      {"a column alone bf16", products<Multiply<bf16_t>, Kept::kOneColumn>,
       always_the_same<Kept::kOneColumn>},
      {"a column alone fp16", products<Multiply<half_t>, Kept::kOneColumn>,
       always_the_same<Kept::kOneColumn>},
      {"every bf16 as fp32", conversions<ToFloat<bf16_t>>, converted<ToFloat<bf16_t>>},
      {"every fp16 as fp32", conversions<ToFloat<half_t>>, converted<ToFloat<half_t>>},
      {"fp32 as bf16", conversions<FromFloat<bf16_t>>, converted<FromFloat<bf16_t>>},
      {"fp32 as fp16", conversions<FromFloat<half_t>>, converted<FromFloat<half_t>>},
      {"every fp8 as fp32", conversions<Float8ToFloat>, converted<Float8ToFloat>},
      {"fp32 as fp8", conversions<FloatToFloat8>, converted<FloatToFloat8>},
      {"pack beside anything bf16", conversions<Pack<bf16_t>>, converted<Pack<bf16_t>>},
      {"pack beside anything fp16", conversions<Pack<half_t>>, converted<Pack<half_t>>},
      {"integers as fp32", conversions<OfIntegers>, converted<OfIntegers>},
  };
}

std::vector<Case> planted_cases() {
  using Column = LooksBeside<true>;
  using Row = LooksBeside<false>;
  return {
      {"planted: place", products<DependsOnThePlace, Kept::kAll>, always_the_same<Kept::kAll>},
      {"planted: row", products<Row, Kept::kOneRow>, always_the_same<Kept::kOneRow>},
      {"planted: column", products<Column, Kept::kOneColumn>, always_the_same<Kept::kOneColumn>},
      {"planted: lane", conversions<DependsOnTheLane>, converted<DependsOnTheLane>},
      {"planted: lane fp8", conversions<FlushesInOddLanes>, converted<FlushesInOddLanes>},
      {"planted: other half", conversions<DependsOnTheOther>, converted<DependsOnTheOther>},
  };
}

}  // namespace conformance
