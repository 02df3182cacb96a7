#pragma once
// What follows the sums of linear: slices folded, then bias, activation, residual and the one rounding.
//
// Where K is summed in slices, a warp leaves its sums in the workspace, as its lanes have them, and counts
// itself at the tile's counter; the last of a tile folds all slices from left to right. Nobody waits.
#include <cuda_runtime.h>

#include "common/quantize.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/linear/layout.cuh"
#include "cuda/linear/stream.cuh"

namespace eagle::cuda {

// What the scales of quantised weights make of finished sums.
struct Scales {
  const float* row;  // [tiles, 16]; nullptr: none
  const float* x;    // [m] of int8_dynamic

  template <bool kIntegers>
  __device__ __forceinline__ float operator()(float sum, float row_scale, int token) const {
    if constexpr (kIntegers)
      return scale_int8_sum(static_cast<int32_t>(float_bits(sum)), load(x + token), row_scale);
    return row ? sum * row_scale : sum;
  }
  __device__ __forceinline__ float of_row(int tile, int i) const {
    return row ? load_read_only(row + int64_t{tile} * kTileRows + i) : 1.0f;
  }
};

struct FinishParams {
  Scales scales;
  int64_t n;
  bool paired, swiglu;
  const void* bias;
  DType x_dtype;  // of bias too
  DType out_dtype;
  const void* residual;
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
  float4* partials;    // [slices, tiles, token tiles, 32]
  uint32_t* counters;  // [tiles, token groups], zero
  bool again;          // the counters will be used by another product: zero they shall be in the end
};

__device__ __forceinline__ float load_as(DType dtype, const void* data, int64_t at) {
  if (dtype == DType::kFloat32) return load(static_cast<const float*>(data) + at);
  if (dtype == DType::kBFloat16) return to_float(load(static_cast<const bf16_t*>(data) + at));
  return to_float(load(static_cast<const half_t*>(data) + at));
}
__device__ __forceinline__ void store_as(DType dtype, void* data, int64_t at, float value) {
  if (dtype == DType::kFloat32)
    store(static_cast<float*>(data) + at, value);
  else if (dtype == DType::kBFloat16)
    store(static_cast<bf16_t*>(data) + at, from_float<bf16_t>(value));
  else
    store(static_cast<half_t*>(data) + at, from_float<half_t>(value));
}

// Which row of the output, and of the residual, a token's is.
struct InOrder {
  __device__ __forceinline__ int operator()(int token) const { return token; }
};

// Rows and tokens as the Stream's; kRows is 1 or 2.
template <class Stream, int kRows, int kTokens, class Places = InOrder>
class LinearFinish {
 public:
  using Sums = typename Stream::Sums;

  __device__ __forceinline__ LinearFinish(const FinishParams& p, const StreamPlan& plan, const Stream& stream,
                                          const Places& places = {})
      : p_(p), plan_(plan), stream_(stream), places_(places) {}

  // The loops stay loops: unrolled, the end of a pass would be longer than all of its steps. What they need
  // stands in sum[0][0], and the others move up: registers have no index.
  __device__ __forceinline__ void operator()(const Walk& walk, Sums& sum) const {
#pragma unroll 1
    for (int r = 0; r < kRows && stream_.first_row() + r < walk.tiles; ++r) {
      const int tile = walk.first_tile + stream_.first_row() + r;
      if (plan_.slices == 1 || is_last(walk.slice, tile, sum)) {
        const Columns columns = columns_of(tile);
#pragma unroll 1
        for (int n = 0; n < stream_.token_tiles(); ++n)
          write(columns, n, plan_.slices == 1 ? take(sum) : fold(tile, n));
      }
      next_row(sum);
    }
  }

 private:
  // What the lane has to write: the columns of its rows r and r + 8 (-1: padding) and their bias.
  struct Columns {
    int64_t at[2];
    float bias[2], scale[2];
  };

  __device__ __forceinline__ static float4 take(Sums& sum) {
    const float4 x{sum[0][0][0], sum[0][0][1], sum[0][0][2], sum[0][0][3]};
#pragma unroll
    for (int n = 0; n + 1 < kTokens; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[0][n][i] = sum[0][n + 1][i];
    return x;
  }
  __device__ __forceinline__ static void next_row(Sums& sum) {
    if constexpr (kRows > 1) {
#pragma unroll
      for (int n = 0; n < kTokens; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[0][n][i] = sum[1][n][i];
    }
  }

  __device__ __forceinline__ float4* partial(int slice, int tile, int n) const {
    const int64_t at =
        (int64_t{slice} * plan_.tiles + tile) * plan_.token_tiles() + stream_.first_token_tile() + n;
    return p_.partials + at * kWarpSize + lane_id();
  }

  // Leaves this slice of a tile. Whether it was the last.
  __device__ __forceinline__ bool is_last(int slice, int tile, Sums& sum) const {
#pragma unroll 1
    for (int n = 0; n < stream_.token_tiles(); ++n) store(partial(slice, tile, n), take(sum));
    __syncwarp();
    uint32_t before = 0;
    if (lane_id() == 0) {
      const int group = stream_.first_token_tile() / kTokens;
      uint32_t* const counter = p_.counters + tile * plan_.token_groups + group;
      before = atomic_add_acq_rel<Scope::kDevice>(counter, 1);
      if (p_.again && before + 1 == static_cast<uint32_t>(plan_.slices)) store(counter, 0u);
    }
    before = __shfl_sync(kFullMask, before, 0);
    __syncwarp();
    return before + 1 == static_cast<uint32_t>(plan_.slices);
  }

  __device__ __forceinline__ static float add(float a, float b) {
    return Stream::kIntegers ? bits_float(float_bits(a) + float_bits(b)) : a + b;
  }

  __device__ __forceinline__ float4 fold(int tile, int n) const {
    float4 total = load(partial(0, tile, n));
#pragma unroll 4
    for (int s = 1; s < plan_.slices; ++s) {
      const float4 more = load(partial(s, tile, n));
      total = {add(total.x, more.x), add(total.y, more.y), add(total.z, more.z), add(total.w, more.w)};
    }
    return total;
  }

  __device__ __forceinline__ Columns columns_of(int tile) const {
    Columns c{};
    const int row = lane_id() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = int64_t{tile} * (p_.paired ? 8 : 16) + row + (p_.paired ? 0 : 8 * half);
      const bool exists = at < (p_.paired ? p_.n / 2 : p_.n);
      c.scale[half] = p_.scales.of_row(tile, row + 8 * half);
      c.at[half] = exists ? at + (p_.paired ? half * (p_.n / 2) : 0) : -1;
      if (p_.bias && exists) c.bias[half] = load_as(p_.x_dtype, p_.bias, c.at[half]);
    }
    return c;
  }

  __device__ __forceinline__ void write(const Columns& columns, int n, float4 sum) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * (stream_.first_token_tile() + n) + lane_id() % 4 * 2 + i;
      if (token >= plan_.m) continue;
      float low = scaled(i == 0 ? sum.x : sum.y, columns.scale[0], token),
            high = scaled(i == 0 ? sum.z : sum.w, columns.scale[1], token);
      if (p_.bias) low += columns.bias[0], high += columns.bias[1];
      if (p_.swiglu) low = silu_f32(low) * high;
      const int row = places_(token);
      if (columns.at[0] >= 0) write_one(row, columns.at[0], low);
      if (columns.at[1] >= 0 && !p_.swiglu) write_one(row, columns.at[1], high);
    }
  }

  __device__ __forceinline__ float scaled(float sum, float row_scale, int token) const {
    return p_.scales.template operator()<Stream::kIntegers>(sum, row_scale, token);
  }

  __device__ __forceinline__ void write_one(int row, int64_t column, float value) const {
    if (p_.residual) value = load_as(p_.out_dtype, p_.residual, row * p_.residual_stride + column) + value;
    store_as(p_.out_dtype, p_.out, row * p_.out_stride + column, value);
  }

  const FinishParams& p_;
  const StreamPlan& plan_;
  const Stream& stream_;
  const Places places_;
};

}  // namespace eagle::cuda
