// out = x / sqrt(mean(x^2) + eps) * weight.
//
// grid: [M]     a block has a row: one warp sums its squares, then all write
//
// Here too: the rows of int8_dynamic, normalised and quantised.
#include <cuda_runtime.h>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/quantize.h"
#include "cuda/launch.h"
#include "cuda/linear/rows.cuh"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 256;

struct SharedMemory {
  float root;
  uint32_t largest[kThreads / kWarpSize];
};

// The row's root, for every thread of the block.
template <class T>
__device__ __forceinline__ float find_root(const RmsNormParams& p, const T* x, SharedMemory& shared) {
  if (!p.weight) return 1.0f;
  if (warp_id() == 0) {
    const float root = row_root(x, p.k, p.eps);
    if (lane_id() == 0) shared.root = root;
  }
  __syncthreads();
  return shared.root;
}

// registers: <= 64
template <class T>
__global__ void __launch_bounds__(kThreads, 4) rms_norm_kernel(const RmsNormParams p, bool vectors) {
  SharedMemory& shared = shared_memory<SharedMemory>();
  const T* const x = static_cast<const T*>(p.x) + int64_t{blockIdx.x} * p.x_stride;
  const T* const weight = static_cast<const T*>(p.weight);
  T* const out = static_cast<T*>(p.out) + int64_t{blockIdx.x} * p.out_stride;
  const float root = find_root(p, x, shared);
  if (vectors) {
    for (int64_t i = threadIdx.x; i < p.k / Piece<T>::kElements; i += kThreads) {
      Piece<T> piece = load_piece(x, i);
      if (weight) {
        const Piece<T> w = load_piece(weight, i);
#pragma unroll
        for (int j = 0; j < Piece<T>::kElements; ++j)
          piece.element[j] = normalised(piece.element[j], root, w.element[j]);
      }
      store(reinterpret_cast<uint4*>(out) + i, __builtin_bit_cast(uint4, piece));
    }
  } else {
    for (int64_t i = threadIdx.x; i < p.k; i += kThreads)
      store(out + i, weight ? normalised(load(x + i), root, load(weight + i)) : load(x + i));
  }
}

// registers: <= 64
template <class T>
__global__ void __launch_bounds__(kThreads, 4) quantize_rows_kernel(const RmsNormParams p, float* scales) {
  SharedMemory& shared = shared_memory<SharedMemory>();
  const T* const x = static_cast<const T*>(p.x) + int64_t{blockIdx.x} * p.x_stride;
  const T* const weight = static_cast<const T*>(p.weight);
  int8_t* const out = static_cast<int8_t*>(p.out) + int64_t{blockIdx.x} * p.out_stride;
  const float root = find_root(p, x, shared);
  const auto value = [&](int64_t i) {
    return to_float(weight ? normalised(load(x + i), root, load(weight + i)) : load(x + i));
  };
  uint32_t largest = 0;
  for (int64_t i = threadIdx.x; i < p.k; i += kThreads) largest = max(largest, magnitude_bits(value(i)));
  largest = warp_reduce(largest, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
  if (lane_id() == 0) shared.largest[warp_id()] = largest;
  __syncthreads();
  for (int w = 0; w < kThreads / kWarpSize; ++w) largest = max(largest, shared.largest[w]);
  const float scale = quantize_scale(largest, kInt8Max);
  for (int64_t i = threadIdx.x; i < p.k; i += kThreads)
    store(out + i, static_cast<int8_t>(quantize(value(i), scale, kInt8Max)));
  if (threadIdx.x == 0) store(scales + blockIdx.x, scale);
}

bool vectors(const RmsNormParams& p) {
  const int64_t size = element_size(p.dtype);
  const auto whole = [](int64_t bytes) { return bytes % 16 == 0; };
  const auto address = [](const void* data) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
  };
  return whole(p.k * size) && whole(p.x_stride * size) && whole(p.out_stride * size) && whole(address(p.x)) &&
         whole(address(p.out)) && whole(address(p.weight));
}

}  // namespace

void prepare_rows(const RmsNormParams& p, CUstream_st* stream) {
  const LaunchConfig config{dim3(static_cast<unsigned>(p.m)), dim3(kThreads), stream, sizeof(SharedMemory)};
  dispatch(FloatTypes{}, p.dtype, "x",
           [&](auto type) { launch(rms_norm_kernel<typename decltype(type)::type>, config, p, vectors(p)); });
}

void prepare_codes(const RmsNormParams& p, float* scales, CUstream_st* stream) {
  const LaunchConfig config{dim3(static_cast<unsigned>(p.m)), dim3(kThreads), stream, sizeof(SharedMemory)};
  dispatch(FloatTypes{}, p.dtype, "x", [&](auto type) {
    launch(quantize_rows_kernel<typename decltype(type)::type>, config, p, scales);
  });
}

void rms_norm(const RmsNormParams& p, CUstream_st* stream) {
  validate(p);
  prepare_rows(p, stream);
}

}  // namespace eagle::cuda
