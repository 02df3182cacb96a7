#pragma once
// Included by one file per instruction set; everything is internal to it (csrc/cpu/isa.h).
// Tiles of rows times groups of outputs, then bias, activation, residual and the one rounding.
//
// A `Format` says how one set multiplies one weight format: Sum (16 outputs, fp32 or int32), Weights (one
// panel's step), Input (one row's step on all lanes). Every output owns one lane of one Sum from the first
// step to the last (int4: of every 64 k), so its bits do not depend on the tile that it is computed in.
#include "cpu/linear/rows_impl.h"

namespace eagle::cpu {
namespace {

// What stands behind the sums of a format: nothing, the row's scale, that and the one of the row of x, or a
// scale for each 64 k.
enum class Scales { kNone, kRow, kBoth, kBlock };

template <class F>
EAGLE_INLINE void load_group(const char* weight, typename F::Weights (&w)[kGroupPanels]) {
  if constexpr (requires { F::load_group(weight, w); })
    F::load_group(weight, w);
  else
    for (int p = 0; p < kGroupPanels; ++p) w[p] = F::load(weight + p * F::kPanelStepBytes);
}

// The rows of a tile and where the stream of weights has come to.
template <class F, int kRows>
struct Place {
  const typename F::Element* row[kRows];
  const char* weight;
  const char* ahead;  // asked for into L2
};

// The hardware's prefetch follows the one stream of weights by itself and is disturbed by ours as long as
// memory is the limit (measured on Zen 4, 1 to 6 rows: 36 GB/s without, 23 to 35 with). Where products are
// the limit it falls behind: 8 rows, 25 GB/s without, 29 with.
template <class F, int kRows>
EAGLE_INLINE void run_steps(Place<F, kRows>& at, int64_t first, int64_t steps, int64_t ahead_step,
                            typename F::Sum (&sum)[kRows][kGroupPanels]) {
  int64_t s = first;
  do {
    typename F::Weights w[kGroupPanels];
    if (kRows >= F::kPrefetchRows)
      for (int p = 0; p < F::kStepBytes / 64; ++p) __builtin_prefetch(at.ahead + p * 64, 0, 2);
    load_group<F>(at.weight, w);
    for (int r = 0; r < kRows; ++r) {
      const typename F::Input x = F::broadcast(at.row[r] + s * F::kStepK);
      for (int p = 0; p < kGroupPanels; ++p) F::accumulate(sum[r][p], w[p], x);
    }
    at.weight += F::kStepBytes;
    at.ahead += ahead_step;
  } while (++s < first + steps);
}

// sums[row][32] of kRows rows and one group. `ahead` advances by `ahead_step` a step.
template <class F, int kRows>
void dot(const char* weight, const char* rows, int64_t row_stride, int64_t steps, const char* ahead,
         int64_t ahead_step, float* sums) {
  using Element = typename F::Element;
  typename F::Sum sum[kRows][kGroupPanels];
  Place<F, kRows> at{{}, weight, ahead};
  for (int r = 0; r < kRows; ++r) at.row[r] = reinterpret_cast<const Element*>(rows + r * row_stride);
  if constexpr (F::kScales != Scales::kBlock) {
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kGroupPanels; ++p)
        if constexpr (F::kScales == Scales::kBoth)
          sum[r][p] = F::start(at.row[r] + steps * F::kStepK);
        else
          sum[r][p] = F::zero();
    run_steps<F, kRows>(at, 0, steps, ahead_step, sum);
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kGroupPanels; ++p) F::store(sum[r][p], sums + (r * kGroupPanels + p) * kBlock);
  } else {
    for (int i = 0; i < kRows * kGroupRows; ++i) sums[i] = 0.0f;
    for (int64_t s = 0; s < steps; s += kInt4BlockSteps) {
      typename F::BlockScales scale[kGroupPanels];
      for (int p = 0; p < kGroupPanels; ++p) scale[p] = F::load_scales(at.weight + p * kInt4ScaleBytes / 2);
      at.weight += kInt4ScaleBytes;
      at.ahead += kInt4ScaleBytes * ahead_step / F::kStepBytes;
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kGroupPanels; ++p) sum[r][p] = F::zero();
      run_steps<F, kRows>(at, s, kInt4BlockSteps, ahead_step, sum);
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kGroupPanels; ++p)
          F::add_scaled(sum[r][p], scale[p], sums + (r * kGroupPanels + p) * kBlock);
    }
  }
}

// The scales behind a group's steps. int8_dynamic: `rows` as in dot; the order of the two products is
// scale_int8_sum's.
template <class F>
EAGLE_INLINE void scale_sums(const float* scales, const char* rows, int64_t row_stride, int64_t steps,
                             int64_t num_rows, float* sums) {
  for (int64_t r = 0; r < num_rows; ++r, sums += kGroupRows) {
    if constexpr (F::kScales == Scales::kBoth) {
      Int8RowEnd end;
      __builtin_memcpy(&end, rows + r * row_stride + steps * F::kStepK, sizeof(end));
      for (int i = 0; i < kGroupRows; ++i) sums[i] *= end.scale;
    }
    for (int i = 0; i < kGroupRows; ++i) sums[i] *= scales[i];
  }
}

template <class T, class Out>
EAGLE_INLINE void finish_block(const GroupProducts& a, const float* sums, const float* up_sums,
                               int64_t bias_at, int64_t up_bias_at, int64_t row, int64_t column, int count) {
  alignas(64) float v[kBlock], up[kBlock], other[kBlock];
  const T* bias = static_cast<const T*>(a.bias);
  load_block(sums, v);
  if (bias) {
    load_block(bias + bias_at, count, other);
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) v[i] += other[i];
  }
  if (up_sums) {
    load_block(up_sums, up);
    if (bias) {
      load_block(bias + up_bias_at, count, other);
#pragma GCC unroll 1
      for (int i = 0; i < kBlock; ++i) up[i] += other[i];
    }
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) v[i] = silu_f32(v[i]) * up[i];
  }
  if (a.residual) {
    load_block(static_cast<const Out*>(a.residual) + row * a.residual_stride + column, count, other);
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) v[i] = other[i] + v[i];
  }
  store_block(v, count, static_cast<Out*>(a.out) + row * a.out_stride + column);
}

// sums[row][32] of `rows` rows and one group.
template <class T, class Out>
void finish_group(const GroupProducts& a, const float* sums, int64_t first_row, int64_t rows, int64_t group) {
  const int64_t half = a.n / 2;
  const auto count = [](int64_t left) { return int(left < kBlock ? left : kBlock); };
  for (int64_t row = first_row; row < first_row + rows; ++row, sums += kGroupRows) {
    if (a.swiglu) {
      const int64_t column = group * kPanelRows;
      finish_block<T, Out>(a, sums, sums + kBlock, column, half + column, row, column, count(half - column));
      continue;
    }
    for (int p = 0; p < kGroupPanels; ++p) {
      const int64_t column = a.paired ? p * half + group * kPanelRows : group * kGroupRows + p * kPanelRows;
      const int64_t left = (a.paired && p == 0 ? half : a.n) - column;
      if (left > 0) finish_block<T, Out>(a, sums + p * kBlock, nullptr, column, 0, row, column, count(left));
    }
  }
}

using Finish = void (*)(const GroupProducts&, const float*, int64_t, int64_t, int64_t);

template <class T>
Finish choose_finish(DType out) {
  return out == DType::kFloat32    ? finish_group<T, float>
         : out == DType::kBFloat16 ? finish_group<T, bf16_t>
                                   : finish_group<T, half_t>;
}

Finish choose_finish(DType x, DType out) {
  return x == DType::kFloat32    ? choose_finish<float>(out)
         : x == DType::kBFloat16 ? choose_finish<bf16_t>(out)
                                 : choose_finish<half_t>(out);
}

using Dot = void (*)(const char*, const char*, int64_t, int64_t, const char*, int64_t, float*);

// A format may bring a `dot` of its own: the order of an output's products is the same, hence its bits.
template <class F, int kRows>
constexpr Dot dot_of() {
  if constexpr (kRows > F::kMaxRows)
    return nullptr;
  else if constexpr (requires { F::template dot<kRows>; })
    return F::template dot<kRows>;
  else
    return dot<F, kRows>;
}

// Rows go in tiles of equal size. A group's weights come from memory for the first tile, from the cache for
// those that follow; meanwhile each tile asks for its share of the next group.
template <class F>
void multiply_format(const GroupProducts& a, int64_t begin, int64_t end) {
  constexpr Dot kDots[] = {nullptr,        dot_of<F, 1>(), dot_of<F, 2>(), dot_of<F, 3>(), dot_of<F, 4>(),
                           dot_of<F, 5>(), dot_of<F, 6>(), dot_of<F, 7>(), dot_of<F, 8>()};
  constexpr int64_t kAheadBytes = 8192;
  alignas(64) float sums[F::kMaxRows * kGroupRows];
  const Finish finish = choose_finish(a.x_dtype, a.out_dtype);
  const int64_t tiles = ceil_div<int64_t>(a.m, F::kMaxRows);
  for (int64_t group = begin; group < end; ++group) {
    const char* weight = a.weight + group * a.group_bytes;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = a.m * tile / tiles, last = a.m * (tile + 1) / tiles;
      const int64_t ahead = tiles == 1 ? kAheadBytes : a.group_bytes + a.group_bytes * tile / tiles;
      const char* rows = a.rows + first * a.row_stride;
      kDots[last - first](weight, rows, a.row_stride, a.steps, weight + ahead, F::kStepBytes / tiles, sums);
      if constexpr (F::kScales == Scales::kRow || F::kScales == Scales::kBoth)
        scale_sums<F>(reinterpret_cast<const float*>(weight + a.steps * F::kStepBytes), rows, a.row_stride,
                      a.steps, last - first, sums);
      finish(a, sums, first, last - first, group);
    }
  }
}

// A set without bf16 products multiplies bf16 rows as it does others: widened.
template <class Formats>
void multiply(const GroupProducts& a, int64_t begin, int64_t end) {
  const bool bf16_rows = a.x_dtype == DType::kBFloat16;
  switch (a.format) {
    case WeightFormat::kBFloat16:
      return multiply_format<typename Formats::BFloat16>(a, begin, end);
    case WeightFormat::kFloat16:
      return multiply_format<typename Formats::Float16>(a, begin, end);
    case WeightFormat::kFloat32:
      return multiply_format<typename Formats::Float32>(a, begin, end);
    case WeightFormat::kFloat8E4M3:
      return bf16_rows ? multiply_format<typename Formats::Float8OfBFloat16>(a, begin, end)
                       : multiply_format<typename Formats::Float8>(a, begin, end);
    case WeightFormat::kInt8:
      return bf16_rows ? multiply_format<typename Formats::Int8OfBFloat16>(a, begin, end)
                       : multiply_format<typename Formats::Int8>(a, begin, end);
    case WeightFormat::kInt4:
      return bf16_rows ? multiply_format<typename Formats::Int4OfBFloat16>(a, begin, end)
                       : multiply_format<typename Formats::Int4>(a, begin, end);
    case WeightFormat::kInt8Dynamic:
      return multiply_format<typename Formats::Int8Dynamic>(a, begin, end);
  }
}

}  // namespace
}  // namespace eagle::cpu
