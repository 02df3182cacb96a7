// ldmatrix, stmatrix and mma.sync, from the tables of the PTX ISA ("Matrix Fragments for mma.m16n8k16", "...
// m16n8k32", "ldmatrix" and "stmatrix"). Written from the matrix's side (which lane and register holds
// element i, k); selftest/matrix.cu and product.cu have them from the thread's.
//
// The numbers: exact products, their sum and the accumulator added once and rounded to nearest. Hardware
// rounds otherwise; what kernels may rely on is in it: rows and columns do not know each other, and a sum
// that is zero leaves the accumulator as it is, -0 included.
#include "simt/matrix.h"

#include <cstring>

#include "simt/access.h"
#include "simt/collective_at.h"
#include "simt/scheduler.h"

namespace simt {

namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kRows = 16, kColumns = 8, kDepth = 16;

float from_bf16(uint16_t x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }

float from_half(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000u) << 16, exponent = x >> 10 & 31u, fraction = x & 1023u;
  if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000u | fraction << 13);
  if (exponent > 0) return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = float(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

float half_of(uint32_t word, int upper, bool bf16) {
  const uint16_t bits = uint16_t(word >> 16 * upper);
  return bf16 ? from_bf16(bits) : from_half(bits);
}

matrix::Operands& operands(const Warp& warp, int lane) {
  return *reinterpret_cast<matrix::Operands*>(warp.lanes[lane]->value);
}

}  // namespace

namespace matrix {

// Lane 8 i + r names row r of matrix i. Row r, elements 2 c and 2 c + 1, go to
// lane 4 r + c, register i; of the transposed, column r.
void load(Warp& warp, uint32_t lanes, bool transposed) {
  if (lanes != kAllLanes) return;
  uint16_t element[4][8][8];
  for (int i = 0; i < 4; ++i)
    for (int r = 0; r < 8; ++r) std::memcpy(element[i][r], operands(warp, 8 * i + r).row, 16);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int r = lane / 4, c = lane % 4 * 2;
      const uint16_t low = transposed ? element[i][c][r] : element[i][r][c];
      const uint16_t high = transposed ? element[i][c + 1][r] : element[i][r][c + 1];
      operands(warp, lane).c[i] = uint32_t(high) << 16 | low;
    }
}

// The way back: element (r, k) of matrix i is in lane 4 r + k / 2, register i, half k % 2; of the transposed,
// element (k, r).
void store(Warp& warp, uint32_t lanes, bool transposed) {
  if (lanes != kAllLanes) return;
  for (int i = 0; i < 4; ++i)
    for (int r = 0; r < 8; ++r) {
      uint16_t row[8];
      for (int k = 0; k < 8; ++k) {
        const int a = transposed ? k : r, b = transposed ? r : k;
        row[k] = uint16_t(operands(warp, 4 * a + b / 2).c[i] >> 16 * (b % 2));
      }
      std::memcpy(operands(warp, 8 * i + r).row, row, sizeof row);
    }
}

void multiply_add(Warp& warp, uint32_t lanes, bool bf16) {
  if (lanes != kAllLanes) return;
  using Column = double __attribute__((vector_size(kColumns * sizeof(double))));
  float a[kRows][kDepth];
  Column b[kDepth];
  for (int i = 0; i < kRows; ++i)
    for (int k = 0; k < kDepth; ++k)  // element (i, k): lane 4 (i % 8) + k % 8 /
                                      // 2, register i / 8 + 2 (k / 8)
      a[i][k] = half_of(operands(warp, 4 * (i % 8) + k % 8 / 2).a[i / 8 + k / 8 * 2], k % 2, bf16);
  for (int k = 0; k < kDepth; ++k)
    for (int j = 0; j < kColumns; ++j)  // element (k, j): lane 4 j + k % 8 / 2, register k / 8
      b[k][j] = half_of(operands(warp, 4 * j + k % 8 / 2).b[k / 8], k % 2, bf16);
  for (int i = 0; i < kRows; ++i) {
    Column sum{};
    for (int k = 0; k < kDepth; ++k) sum += double(a[i][k]) * b[k];
    for (int j = 0; j < kColumns; ++j) {  // element (i, j): lane 4 (i % 8) + j /
                                          // 2, register 2 (i / 8) + j % 2
      uint32_t& c = operands(warp, 4 * (i % 8) + j / 2).c[i / 8 * 2 + j % 2];
      if (sum[j] == 0.0) continue;
      const float total = float(double(__builtin_bit_cast(float, c)) + sum[j]);
      c = total != total ? 0x7fffffffu : __builtin_bit_cast(uint32_t, total);
    }
  }
}

// Elements of 8 bits: four to a register where there were two.
void multiply_add_int8(Warp& warp, uint32_t lanes) {
  if (lanes != kAllLanes) return;
  constexpr int kBytesDeep = 32;
  const auto byte_of = [](uint32_t word, int i) { return int8_t(uint8_t(word >> 8 * i)); };
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kColumns; ++j) {
      uint32_t& c = operands(warp, 4 * (i % 8) + j / 2).c[i / 8 * 2 + j % 2];
      int32_t sum = 0;  // at most 2^19
      for (int k = 0; k < kBytesDeep; ++k) {
        const int group = k % 16 / 4,
                  half = k / 16;  // (i, k): lane 4 (i % 8) + k % 16 / 4, register i / 8 + 2 (k / 16)
        sum += byte_of(operands(warp, 4 * (i % 8) + group).a[i / 8 + 2 * half], k % 4) *
               byte_of(operands(warp, 4 * j + group).b[half], k % 4);
      }
      c += uint32_t(sum);
    }
}

}  // namespace matrix

// ---- called by device code -------------------------------------------------------------------------------

Bits load_matrices(const void* row, bool transposed) {
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  const Touch touch{reinterpret_cast<uint64_t>(row), 16, false, false, pc};
  require_aligned(me, touch);
  touch_shared(me, touch);
  log_access(me, {touch.address, pc, 16, false, true});
  matrix::Operands operands{const_cast<void*>(row), {}, {}, {}};
  collective_at(transposed ? Collective::kLoadTransposed : Collective::kLoadMatrices, kAllLanes,
                reinterpret_cast<uint64_t>(&operands), 0, 32, pc);
  Bits result;
  std::memcpy(&result, operands.c, sizeof result);
  return result;
}

// Counted and checked as a write of whoever names the row.
void store_matrices(void* row, Bits x, bool transposed) {
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  const Touch touch{reinterpret_cast<uint64_t>(row), 16, true, false, pc};
  require_aligned(me, touch);
  touch_shared(me, touch);
  log_access(me, {touch.address, pc, 16, true, true});
  matrix::Operands operands{row, {}, {}, {}};
  std::memcpy(operands.c, &x, sizeof x);
  collective_at(transposed ? Collective::kStoreTransposed : Collective::kStoreMatrices, kAllLanes,
                reinterpret_cast<uint64_t>(&operands), 0, 32, pc);
}

namespace {

Bits multiply_at(Collective op, Bits a, uint64_t b, Bits c, const void* pc) {
  matrix::Operands operands;
  std::memcpy(operands.a, &a, sizeof a);
  std::memcpy(operands.b, &b, sizeof b);
  std::memcpy(operands.c, &c, sizeof c);
  collective_at(op, kAllLanes, reinterpret_cast<uint64_t>(&operands), 0, 32, pc);
  std::memcpy(&c, operands.c, sizeof c);
  return c;
}

}  // namespace

Bits multiply_add(Bits a, uint64_t b, Bits c, bool bf16) {
  return multiply_at(bf16 ? Collective::kMultiplyBf16 : Collective::kMultiplyHalf, a, b, c,
                     __builtin_return_address(0));
}

Bits multiply_add_int8(Bits a, uint64_t b, Bits c) {
  return multiply_at(Collective::kMultiplyInt8, a, b, c, __builtin_return_address(0));
}

}  // namespace simt
