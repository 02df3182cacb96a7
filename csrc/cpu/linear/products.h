#pragma once
// The part that linear and lm_head_topk share: rows prepared, groups handed to threads.
#include "common/check.h"
#include "cpu/linear/kernels.h"
#include "cpu/linear/panels.h"
#include "cpu/linear/streams.h"
#include "cpu/scratch.h"

namespace eagle::cpu {

// Whether the memory of the results and that of x have bytes between their first and last in common.
inline bool out_meets_x(const GroupProducts& products, const InputRows& x) {
  if (!products.out || products.m == 0) return false;
  const auto span = [&](int64_t stride, int64_t columns, DType dtype) {
    return ((products.m - 1) * stride + columns) * element_size(dtype);
  };
  const int64_t columns = products.swiglu ? products.n / 2 : products.n;
  const auto out = reinterpret_cast<uintptr_t>(products.out), in = reinterpret_cast<uintptr_t>(x.x);
  return in < out + static_cast<uintptr_t>(span(products.out_stride, columns, products.out_dtype)) &&
         out < in + static_cast<uintptr_t>(span(x.x_stride, x.k, x.dtype));
}

// Prepares x and calls multiply(products, begin, end) for pieces that cover [0, units), where a unit is
// `unit_groups` groups. `products` carries what follows the sums; its weight and rows are filled in here.
template <class F>
void for_products(const LinearKernels& kernels, const PackedWeight& weight, const void* x, int64_t x_stride,
                  const void* norm_weight, float norm_eps, GroupProducts products, int64_t unit_groups,
                  int64_t grain, F&& multiply) {
  struct SharedRows;
  struct OwnRows;
  const PanelLayout layout(weight);
  InputRows input{};
  input.dtype = products.x_dtype;
  const bool keep = kernels.bf16_products && products.x_dtype == DType::kBFloat16;
  input.form = weight.format == WeightFormat::kInt8Dynamic ? RowForm::kInt8
               : keep                                      ? RowForm::kKeep
                                                           : RowForm::kWiden;
  input.k = layout.k;
  input.padded_k = layout.padded_k();
  input.eps = norm_eps;
  input.x = x;
  input.x_stride = x_stride;
  input.norm_weight = norm_weight;
  const int64_t bytes = input.form == RowForm::kInt8    ? input.padded_k + int64_t(sizeof(Int8RowEnd))
                        : input.form == RowForm::kWiden ? input.padded_k * 4
                                                        : input.padded_k * 2;
  // An odd number of cache lines: rows a multiple of 4 KiB apart would fight for the same cache sets.
  input.out_stride = (ceil_div<int64_t>(bytes, 64) | 1) * 64;
  const int64_t row_bytes = products.m * input.out_stride;

  products.format = weight.format;
  products.paired = weight.paired;
  products.n = layout.n;
  products.steps = layout.steps;
  products.group_bytes = layout.group_bytes();
  products.weight = static_cast<const char*>(weight.data);
  products.row_stride = input.out_stride;

  // Few rows: every thread prepares its own copy, which costs less than waiting for one thread's. Not where
  // the results go into x's memory: a thread that is late would prepare what another one has written.
  const bool own_rows = products.m * layout.k <= 32768 && !out_meets_x(products, input);
  if (!own_rows) {
    input.out = scratch_bytes<SharedRows>(row_bytes);
    parallel_for(products.m, 4, [&](int64_t begin, int64_t end) { kernels.prepare(input, begin, end); });
    products.rows = static_cast<const char*>(input.out);
  }
  const bool serial = products.m * layout.bytes() < 65536;
  Streams(ceil_div(layout.groups, unit_groups), grain, serial ? 1 : num_threads()).run([&](auto&& take) {
    GroupProducts mine = products;
    if (own_rows) {
      InputRows my_input = input;
      my_input.out = scratch_bytes<OwnRows>(row_bytes);
      kernels.prepare(my_input, 0, products.m);
      mine.rows = static_cast<const char*>(my_input.out);
    }
    take([&](int64_t begin, int64_t end) { multiply(mine, begin, end); });
  });
}

// Groups per piece: pieces of at least 32 KiB, small enough to even out.
inline int64_t stream_grain(const PanelLayout& layout) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(layout.group_bytes(), 1));
}

}  // namespace eagle::cpu
