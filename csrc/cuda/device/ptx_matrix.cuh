#pragma once
// The matrix instructions of a warp, as ptx.cuh has the other ones: each with a name, beside its twin. All 32
// lanes take part. What is from 9.0 on traps in code for older devices, and the host must choose another way
// (has_bulk_copies() of cuda/launch.h).
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/numeric.h"
#include "cuda/device/ptx.cuh"

namespace eagle::cuda {

#if defined(__CUDACC__)

// Four 8x8 matrices of 16-bit elements. Lane 8 i + r gives the address of row r of matrix i; word i of lane 4
// r + c holds elements 2 c and 2 c + 1 of row r of matrix i.
__device__ __forceinline__ uint4 load_matrices(const void* row) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared_address(row))
               : "memory");
  return x;
}

// The same of the transposed matrices: column r instead of row r.
__device__ __forceinline__ uint4 load_matrices_transposed(const void* row) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared_address(row))
               : "memory");
  return x;
}

#if __CUDA_ARCH__ >= 900

// The other way, from 9.0 on: word i of lane 4 r + c becomes elements 2 c and 2 c + 1 of row r of matrix i.
// What two lanes name alike is then undetermined.
__device__ __forceinline__ void store_matrices(void* row, uint4 x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// The same of the transposed matrices: column r instead of row r.
__device__ __forceinline__ void store_matrices_transposed(void* row, uint4 x) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}

#else

__device__ __forceinline__ void store_matrices(void*, uint4) { __trap(); }
__device__ __forceinline__ void store_matrices_transposed(void*, uint4) { __trap(); }

#endif

// c += a b: a 16x16, b 16x8 of T, c 16x8. Lane 4 r + s: a.x, a.y: rows r and r + 8, columns 2 s and 2 s + 1;
// a.z, a.w: the columns 8 further; b0: rows 2 s and 2 s + 1 of column r; b1: 8 rows further; c: columns 2 s
// and 2 s + 1 of row r, then of row r + 8.
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<bf16_t>(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<half_t>(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// The same of signed bytes, exact: a 16x32, b 32x8, c 16x8. Lane 4 r + s: a.x, a.y: rows r and r + 8, columns
// 4 s to 4 s + 3; a.z, a.w: 16 columns further; b0: rows 4 s to 4 s + 3 of column r; b1: 16 rows further; c
// as above.
__device__ __forceinline__ void multiply_add_int8(int32_t (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Two numbers rounded to nearest even, `low` in the lower half; every NaN becomes 0x7fff.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<bf16_t>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ uint32_t pack<half_t>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

#else

__forceinline__ uint4 load_matrices(const void* row) {
  return __builtin_bit_cast(uint4, simt::load_matrices(row, false));
}
__forceinline__ uint4 load_matrices_transposed(const void* row) {
  return __builtin_bit_cast(uint4, simt::load_matrices(row, true));
}

__forceinline__ void store_matrices(void* row, uint4 x) {
  simt::need(simt::Feature::kStoreMatrices);
  simt::store_matrices(row, __builtin_bit_cast(simt::Bits, x), false);
}
__forceinline__ void store_matrices_transposed(void* row, uint4 x) {
  simt::need(simt::Feature::kStoreMatrices);
  simt::store_matrices(row, __builtin_bit_cast(simt::Bits, x), true);
}

template <class T>
__forceinline__ void multiply_add(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  const uint4 before{__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]),
                     __float_as_uint(c[3])};
  const uint4 after = __builtin_bit_cast(
      uint4, simt::multiply_add(__builtin_bit_cast(simt::Bits, a), uint64_t(b1) << 32 | b0,
                                __builtin_bit_cast(simt::Bits, before), std::is_same_v<T, bf16_t>));
  c[0] = __uint_as_float(after.x);
  c[1] = __uint_as_float(after.y);
  c[2] = __uint_as_float(after.z);
  c[3] = __uint_as_float(after.w);
}

__forceinline__ void multiply_add_int8(int32_t (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  const uint4 before{uint32_t(c[0]), uint32_t(c[1]), uint32_t(c[2]), uint32_t(c[3])};
  const uint4 after = __builtin_bit_cast(
      uint4, simt::multiply_add_int8(__builtin_bit_cast(simt::Bits, a), uint64_t(b1) << 32 | b0,
                                     __builtin_bit_cast(simt::Bits, before)));
  c[0] = int32_t(after.x);
  c[1] = int32_t(after.y);
  c[2] = int32_t(after.z);
  c[3] = int32_t(after.w);
}

template <class T>
__forceinline__ uint32_t pack(float low, float high) {
  const auto bits = [](float x) -> uint32_t { return x != x ? 0x7fffu : from_float<T>(x).bits; };
  return bits(high) << 16 | bits(low);
}

#endif

}  // namespace eagle::cuda
