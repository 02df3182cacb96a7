#pragma once
// What one step multiplies, by format: some row tiles of the weight with tiles of 8 tokens.
//
// Lane 4 r + s has rows r and r + 8 of a row tile and tokens 2 s and 2 s + 1 of a token tile, four sums, in
// the order of mma's accumulator; each sum takes its products in ascending k.
#include <cuda_runtime.h>

#include "cuda/device/ptx_matrix.cuh"
#include "cuda/device/warp.cuh"

namespace eagle::cuda {

// Where 16 bytes of a token's part of a step lie in shared memory: eight tokens at one piece lie in eight
// different groups of four banks.
template <int kPieces>
__device__ __forceinline__ int piece_at(int token, int piece) {
  return token * kPieces + (piece ^ (token & 7));
}

// bf16 and fp16: tensor cores.
template <class T>
struct TensorProducts {
  using Element = T;  // of the activations
  static constexpr int kStepK = 64, kTileBytes = 2048;
  static constexpr int kPieces = kStepK * static_cast<int>(sizeof(T)) / 16;
  static constexpr bool kIntegers = false;  // sums are int32, in the floats' places

  // `weight` are the tile's bytes of this step, for each of the kRows tiles; `x` the tokens' from the warp's
  // first one on.
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
          multiply_add<T>(sum[r][n], a[r][0], b.x, b.y);
          multiply_add<T>(sum[r][n], a[r][1], b.z, b.w);
        }
      }
    }
  }
};

// fp32: plain fused multiply-adds.
struct FloatProducts {
  using Element = float;
  static constexpr int kStepK = 32, kTileBytes = 2048;
  static constexpr int kPieces = kStepK * 4 / 16;
  static constexpr bool kIntegers = false;

  template <int kRows, int kTokens>
  static __device__ __forceinline__ void multiply(float (&sum)[kRows][kTokens][4],
                                                  const uint4* const (&weight)[kRows], const uint4* x,
                                                  int token_tiles) {
    const int row = lane_id() / 4, token = lane_id() % 4 * 2;
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      float4 a[kRows][2];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          a[r][j] = reinterpret_cast<const float4*>(weight[r])[piece * 16 + row + 8 * j];
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        if (n >= token_tiles) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 b = reinterpret_cast<const float4*>(x)[piece_at<kPieces>(8 * n + token + i, piece)];
#pragma unroll
          for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& c = sum[r][n][2 * j + i];
              c = fma(a[r][j].x, b.x, c);
              c = fma(a[r][j].y, b.y, c);
              c = fma(a[r][j].z, b.z, c);
              c = fma(a[r][j].w, b.w, c);
            }
        }
      }
    }
  }
};

}  // namespace eagle::cuda
