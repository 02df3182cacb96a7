#pragma once
// Products of quantised weights: codes become bf16 or fp16 in registers, on the way into the tensor cores, or
// fp32 for fp32 activations. Every code is exact in each of them; scales meet sums.
#include <cuda_runtime.h>

#include "cuda/device/ptx_matrix.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/linear/products.cuh"
#include "eagle_cuda/linear.h"

namespace eagle::cuda {

// ---- codes to numbers ----------------------------------------------------------------------------------
// `matrix` gives a lane its part of a 16x16 matrix as mma takes it, from the 16 bytes that hold its codes of
// several, read at once; `value` gives one code of a word, numbered in the order of k as `k_of` tells.

// Bytes, four of a row in a word: k 2 s, 2 s + 1, 2 s + 8, 2 s + 9.
template <class Code>
struct ByteCodes {
  static constexpr int kTileBytes = 1024;  // of 64 k
  static constexpr bool kGroupScales = false;

  template <class T>
  static __device__ __forceinline__ uint4 matrix(const uint4& codes, int i) {
    const uint32_t low = i == 0 ? codes.x : codes.z, high = i == 0 ? codes.y : codes.w;
    return {pack<T>(Code::value(low, 0), Code::value(low, 1)),
            pack<T>(Code::value(high, 0), Code::value(high, 1)),
            pack<T>(Code::value(low, 2), Code::value(low, 3)),
            pack<T>(Code::value(high, 2), Code::value(high, 3))};
  }
  // Of lane 4 r + s: code 2 i + j of its row `half` in a matrix has k 2 s + 8 i + j.
  static __device__ __forceinline__ float value(const uint4* tile, int matrix, int lane, int half, int code) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(tile + matrix / 2 * kWarpSize + lane);
    return Code::value(words[matrix % 2 * 2 + half], code);
  }
};

struct Int8Code {
  static __device__ __forceinline__ float value(uint32_t word, int i) {  // bytes are code + 128
    return bits_float(__byte_perm(word, 0x4b000000u, 0x7540u + static_cast<uint32_t>(i))) - 8388736.0f;
  }
};
struct Float8Code {
  static __device__ __forceinline__ float value(uint32_t word, int i) {  // no code is NaN
    const uint32_t bits = word << (24 - 8 * i);
    return bits_float((bits & 0x80000000u) | (bits & 0x7f000000u) >> 4) * bits_float(0x7b800000u);
  }
};

// Nibbles, sign and magnitude, eight of two rows in a word; 16 float16 scales behind the tile's codes.
struct Int4Codes {
  static constexpr int kTileBytes = 512 + 32;
  static constexpr bool kGroupScales = true;

  template <class T>
  static __device__ __forceinline__ uint4 matrix(const uint4& codes, int i) {
    // Bytes of the numbers 0 .. 7.
    constexpr bool kBf16 = std::is_same_v<T, bf16_t>;
    constexpr uint32_t kHigh[2] = {kBf16 ? 0x40403f00u : 0x42403c00u, kBf16 ? 0x40404040u : 0x47464544u};
    constexpr uint32_t kLow[2] = {kBf16 ? 0x40008000u : 0u, kBf16 ? 0xe0c0a080u : 0u};
    const uint32_t word = i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w;
    uint32_t x[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t selector = (word >> 16 * half) & 0x7777u;
      const uint32_t high = __byte_perm(kHigh[0], kHigh[1], selector);
      const uint32_t low = kBf16 ? __byte_perm(kLow[0], kLow[1], selector) : 0u;
      x[2 * half] = __byte_perm(low, high, 0x5140u) | sign(word, 4 * half);
      x[2 * half + 1] = __byte_perm(low, high, 0x7362u) | sign(word, 4 * half + 2);
    }
    return {x[0], x[1], x[2], x[3]};
  }
  static __device__ __forceinline__ float value(const uint4* tile, int matrix, int lane, int half, int code) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(tile + lane)[matrix];
    const uint32_t nibble = word >> (16 * (code / 2) + 8 * half + 4 * (code % 2));
    const float magnitude = static_cast<float>(nibble & 7u);
    return nibble & 8u ? -magnitude : magnitude;
  }
  static __device__ __forceinline__ float scale(const uint4* tile, int row) {
    return to_float(reinterpret_cast<const half_t*>(tile + kWarpSize)[row]);
  }

 private:
  // The signs of nibbles i and i + 1 as those of a pair of numbers.
  static __device__ __forceinline__ uint32_t sign(uint32_t word, int i) {
    return (word << (28 - 4 * i) & 0x80000000u) >> 16 | (word << (24 - 4 * i) & 0x80000000u);
  }
};

// ---- products ------------------------------------------------------------------------------------------

template <class Codes, class T>
struct CodeProducts {
  using Element = T;
  static constexpr int kStepK = 64, kTileBytes = Codes::kTileBytes;
  static constexpr int kPieces = kStepK * static_cast<int>(sizeof(T)) / 16;
  static constexpr bool kIntegers = false;

  template <int kRows, int kTokens>
  static __device__ __forceinline__ void multiply(float (&sum)[kRows][kTokens][4],
                                                  const uint4* const (&weight)[kRows], const uint4* x,
                                                  int token_tiles) {
    if constexpr (Codes::kGroupScales)
      multiply_group(sum, weight, x, token_tiles);
    else
      add_products(sum, weight, x, token_tiles);
  }

 private:
  // All of a step.
  template <int kRows, int kTokens>
  static __device__ __forceinline__ void add_products(float (&sum)[kRows][kTokens][4],
                                                      const uint4* const (&weight)[kRows], const uint4* x,
                                                      int token_tiles) {
    const int lane = lane_id();
    if constexpr (std::is_same_v<T, float>) {
      const int row = lane / 4, token = lane % 4 * 2;
#pragma unroll 1
      for (int matrix = 0; matrix < 4; ++matrix)
#pragma unroll 1
        for (int part = 0; part < 4; ++part) {
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            float a[kRows][2][2];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
              for (int i = 0; i < 4; ++i)
                a[r][i / 2][i % 2] = Codes::value(weight[r], matrix, row * 4 + part, i / 2, 2 * pair + i % 2);
            const int k = 16 * matrix + 8 * pair + 2 * part;
#pragma unroll
            for (int n = 0; n < kTokens; ++n) {
              if (n >= token_tiles) break;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const uint4* const piece = x + piece_at<kPieces>(8 * n + token + i, k / 4);
                const float2 b = reinterpret_cast<const float2*>(piece)[k / 2 % 2];
#pragma unroll
                for (int r = 0; r < kRows; ++r)
#pragma unroll
                  for (int half = 0; half < 2; ++half) {
                    float& c = sum[r][n][2 * half + i];
                    c = fma(a[r][half][0], b.x, c);
                    c = fma(a[r][half][1], b.y, c);
                  }
              }
            }
          }
        }
    } else {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint4 a[kRows][2];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const uint4 codes = weight[r][pair * kWarpSize + lane];
#pragma unroll
          for (int j = 0; j < 2; ++j) a[r][j] = Codes::template matrix<T>(codes, j);
        }
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          if (n >= token_tiles) break;
          const uint4 b = load_matrices(x + piece_at<kPieces>(8 * n + lane % 8, 4 * pair + lane / 8));
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            multiply_add<T>(sum[r][n], a[r][0], b.x, b.y);
            multiply_add<T>(sum[r][n], a[r][1], b.z, b.w);
          }
        }
      }
    }
  }

  // A step is a group: its sum from zero, then times its scale onto the others.
  template <int kRows, int kTokens>
  static __device__ __forceinline__ void multiply_group(float (&sum)[kRows][kTokens][4],
                                                        const uint4* const (&weight)[kRows], const uint4* x,
                                                        int token_tiles) {
    float scale[kRows][2];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) scale[r][half] = Codes::scale(weight[r], lane_id() / 4 + 8 * half);
    uint4 a[kRows][4];
    if constexpr (!std::is_same_v<T, float>) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint4 codes = weight[r][lane_id()];
#pragma unroll
        for (int j = 0; j < 4; ++j) a[r][j] = Codes::template matrix<T>(codes, j);
      }
    }
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      if (n >= token_tiles) break;
      float group[kRows][1][4] = {};
      const uint4* const tokens = x + 8 * n * kPieces;
      if constexpr (std::is_same_v<T, float>) {
        add_products(group, weight, tokens, 1);
      } else {
        const int lane = lane_id();
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint4 b = load_matrices(tokens + piece_at<kPieces>(lane % 8, 4 * pair + lane / 8));
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            multiply_add<T>(group[r][0], a[r][2 * pair], b.x, b.y);
            multiply_add<T>(group[r][0], a[r][2 * pair + 1], b.z, b.w);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][n][i] = fma(group[r][0][i], scale[r][i / 2], sum[r][n][i]);
    }
  }
};

// Any format whose activations are of T, 16 bits, as it is told: one loop for all of them.
template <class T>
struct AnyProducts {
  using Element = T;
  static constexpr int kStepK = 64, kTileBytes = 0;
  static constexpr int kPieces = kStepK * static_cast<int>(sizeof(T)) / 16;
  static constexpr bool kIntegers = false;

  template <int kRows, int kTokens>
  static __device__ __forceinline__ void multiply(WeightFormat format, float (&sum)[kRows][kTokens][4],
                                                  const uint4* const (&weight)[kRows], const uint4* x,
                                                  int token_tiles) {
    switch (format) {
      case WeightFormat::kFloat8E4M3:
        return CodeProducts<ByteCodes<Float8Code>, T>::multiply(sum, weight, x, token_tiles);
      case WeightFormat::kInt8:
        return CodeProducts<ByteCodes<Int8Code>, T>::multiply(sum, weight, x, token_tiles);
      case WeightFormat::kInt4:
        return CodeProducts<Int4Codes, T>::multiply(sum, weight, x, token_tiles);
      default:
        return TensorProducts<T>::multiply(sum, weight, x, token_tiles);
    }
  }
};

// int8_dynamic: codes on both sides, exact sums in 32 bits that stand in the floats' places.
struct IntegerProducts {
  using Element = int8_t;
  static constexpr int kStepK = 128, kTileBytes = 2048;
  static constexpr int kPieces = kStepK / 16;
  static constexpr bool kIntegers = true;

  template <int kRows, int kTokens>
  static __device__ __forceinline__ void multiply(float (&sum)[kRows][kTokens][4],
                                                  const uint4* const (&weight)[kRows], const uint4* x,
                                                  int token_tiles) {
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 a[kRows][2];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int j = 0; j < 2; ++j) a[r][j] = weight[r][(2 * half + j) * kWarpSize + lane];
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        if (n >= token_tiles) break;
        const uint4 b = load_matrices(x + piece_at<kPieces>(8 * n + lane % 8, 4 * half + lane / 8));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          int32_t c[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) c[i] = static_cast<int32_t>(float_bits(sum[r][n][i]));
          multiply_add_int8(c, a[r][0], b.x, b.y);
          multiply_add_int8(c, a[r][1], b.z, b.w);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[r][n][i] = bits_float(static_cast<uint32_t>(c[i]));
        }
      }
    }
  }
};

}  // namespace eagle::cuda
