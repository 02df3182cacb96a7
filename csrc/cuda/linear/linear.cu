// out = residual + activation(norm(x) @ W^T + bias): one launch for up to 256 rows, in which every byte of
// the weight is read once. Where shared memory does not hold three steps of 256 rows (99 KB a block: 8.6,
// 8.9, 12.x), a launch takes 128.
//
// grid: [blocks]     as many as multiprocessors; which row tiles and which slice of K a block has is
// work.cuh's, how it streams them stream.cuh's, what follows the sums finish.cuh's
//
// Two launches where x is prepared apart: more than 32 rows to normalise (each block would read and normalise
// all of them anew), results that go into x's memory,
// int8_dynamic.
#include <cuda_runtime.h>

#include "common/check.h"
#include "cuda/launch.h"
#include "cuda/linear/finish.cuh"
#include "cuda/linear/plan.cuh"

namespace eagle::cuda {
namespace {

// registers: <= 128
template <class Products>
__global__ void __launch_bounds__(kSmallWarps* kWarpSize, 1)
    linear_kernel(const __grid_constant__ StreamPlan plan, const __grid_constant__ FinishParams p) {
  using Small = Stream<Products, 1, kSmallTokenTiles>;
  StreamShared& shared = shared_memory<StreamShared>();
  Small stream(plan, {plan, shared.root}, shared.arrived, &shared.ahead,
               reinterpret_cast<unsigned char*>(&shared) + kRingOffset);
  const LinearFinish<Small, 1, kSmallTokenTiles> finish(p, plan, stream);
  stream.init_barriers();
  stream.run(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), finish);
}

// registers: <= 168
template <class Products>
__global__ void __launch_bounds__(kLargeWarps* kWarpSize, 1)
    linear_many_kernel(const __grid_constant__ StreamPlan plan, const __grid_constant__ FinishParams p) {
  using Large = Stream<Products, 2, kLargeTokenTiles>;
  StreamShared& shared = shared_memory<StreamShared>();
  Large stream(plan, {plan, shared.root}, shared.arrived, &shared.ahead,
               reinterpret_cast<unsigned char*>(&shared) + kRingOffset);
  const LinearFinish<Large, 2, kLargeTokenTiles> finish(p, plan, stream);
  stream.init_barriers();
  stream.run(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), finish);
}

Workspace workspace_of(const PackedWeight& weight, int64_t m) {
  const PackedLayout layout(weight);
  const int64_t rows = std::min<int64_t>(m, kMaxTokens);
  const int64_t slices = slices_of(layout), token_tiles = ceil_div<int64_t>(rows, 8);
  return {slices > 1 ? int64_t{layout.tiles} * ceil_div<int64_t>(token_tiles, kLargeTokenTiles) : 0, rows,
          layout.k, layout.element_bytes(),
          slices > 1 ? slices * layout.tiles * token_tiles * int64_t{kWarpSize} * 16 : 0};
}

struct Span {
  int64_t begin, end;
};
Span span_of(const void* data, int64_t rows, int64_t stride, int64_t columns, int64_t size) {
  const int64_t begin = address_of(data);
  return {begin, begin + ((rows - 1) * stride + columns) * size};
}

// Whether results go into the memory of x.
bool out_meets_x(const LinearParams& p) {
  const int64_t columns = p.activation == Activation::kSwiGLU ? p.weight.n / 2 : p.weight.n;
  const Span x = span_of(p.x, p.m, p.x_stride, p.weight.k, element_size(p.x_dtype));
  const Span out = span_of(p.out, p.m, p.out_stride, columns, element_size(p.out_dtype));
  return x.begin < out.end && out.begin < x.end;
}

template <class Products>
void launch_products(const StreamLaunch& l, const FinishParams& finish, CUstream_st* stream) {
  const LaunchConfig config{dim3(static_cast<unsigned>(l.blocks)),
                            dim3(static_cast<unsigned>(l.warps * kWarpSize)), stream, l.shared_bytes};
  launch(l.large ? linear_many_kernel<Products> : linear_kernel<Products>, config, l.plan, finish);
}

// At most kMaxTokens rows.
void run(const LinearParams& p, bool copy, CUstream_st* stream) {
  const Workspace offsets = workspace_of(p.weight, p.m);
  unsigned char* const workspace = static_cast<unsigned char*>(p.workspace);
  const int slices = slices_of(PackedLayout(p.weight));
  const Rows given{p.x, p.x_stride, static_cast<int>(p.m), p.x_dtype, p.norm_weight, p.norm_eps};
  const Rows rows = prepare_apart(given, p.weight, offsets, workspace, copy, stream);
  const StreamLaunch l = plan_stream(p.weight, rows, slices, 1, [](int) { return int64_t{0}; });

  FinishParams finish{};
  finish.scales = scales_of(p.weight, offsets, workspace);
  finish.x_dtype = p.x_dtype;
  finish.n = p.weight.n;
  finish.paired = p.weight.paired;
  finish.swiglu = p.activation == Activation::kSwiGLU;
  finish.bias = p.bias;
  finish.out_dtype = p.out_dtype;
  finish.residual = p.residual;
  finish.residual_stride = p.residual_stride;
  finish.out = p.out;
  finish.out_stride = p.out_stride;
  finish.partials = reinterpret_cast<float4*>(workspace + offsets.partials);
  finish.counters = reinterpret_cast<uint32_t*>(workspace + offsets.counters);
  if (slices > 1)
    EAGLE_CUDA_CHECK(cudaMemsetAsync(finish.counters, 0,
                                     static_cast<size_t>(l.plan.tiles * l.plan.token_groups) * 4, stream));
  dispatch_products(p.weight.format, p.x_dtype, [&](auto products) {
    launch_products<typename decltype(products)::type>(l, finish, stream);
  });
}

}  // namespace

int64_t linear_workspace_bytes(const PackedWeight& weight, int64_t m) {
  return workspace_of(weight, m).bytes;
}

void linear(const LinearParams& p, CUstream_st* stream) {
  validate(p);
  if (p.m == 0 || p.weight.n == 0) return;
  check_workspace(p.workspace, p.workspace_bytes, workspace_of(p.weight, p.m).bytes);
  const int64_t x_size = element_size(p.x_dtype), out_size = element_size(p.out_dtype);
  // Rows in tiles may overwrite x where each result stands on its own row; otherwise a tile would read what
  // an earlier one has written.
  const PackedLayout layout(p.weight);
  const int64_t rows = rows_per_launch(layout, row_bytes_of(layout, p.x_dtype), 1, kMaxTokens,
                                       [](int64_t, int) { return int64_t{0}; });
  const bool meets = out_meets_x(p);
  check(!meets || p.m <= rows || (p.out == p.x && p.out_stride * out_size == p.x_stride * x_size),
        "out: expected x itself or memory of its own for more than ", rows, " rows");
  for (int64_t row = 0; row < p.m; row += rows) {
    LinearParams part = p;
    part.m = std::min(p.m - row, rows);
    part.x = static_cast<const char*>(p.x) + row * p.x_stride * x_size;
    part.out = static_cast<char*>(p.out) + row * p.out_stride * out_size;
    if (p.residual) part.residual = static_cast<const char*>(p.residual) + row * p.residual_stride * out_size;
    run(part, meets, stream);
  }
}

}  // namespace eagle::cuda
