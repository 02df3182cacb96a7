// pack_weight: rows of a matrix into their places of the packed layout.
//
// grid: float formats: [blocks of 256 words of the packed matrix], one thread writes 32 bits, all of one row
//       others:        [blocks of 8 packed rows], one warp finds a row's scales and writes its codes
//
// Every call writes the rows that it brings; padding rows belong to the call that brings the last row before
// them.
#include <cuda_runtime.h>

#include "common/dispatch.h"
#include "common/quantize.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"
#include "cuda/linear/layout.cuh"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 256, kRowsPerBlock = kThreads / kWarpSize;

// Whether this call writes packed row `row`, of those before `end`; rows from there on are padding.
__device__ __forceinline__ bool is_ours(const PackWeightParams& p, int64_t row, int64_t end) {
  const int64_t owner = min(row, end - 1) - p.row_begin;
  return owner >= 0 && owner < p.rows;
}

// registers: <= 40
template <class Element>
__global__ void __launch_bounds__(kThreads)
    pack_weight_kernel(const PackWeightParams p, const PackedLayout layout) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int tile_words = layout.tile_bytes / 4;
  const int64_t tile = at / (int64_t{layout.steps} * tile_words);
  if (tile >= layout.tiles) return;
  const int64_t step = at / tile_words % layout.steps;
  const PackedWord word = packed_word(sizeof(Element), static_cast<int>(at % tile_words));
  const int64_t row = layout.source_row(tile, word.row), end = layout.end_of(word.row);
  if (!is_ours(p, row, end)) return;

  const int64_t k = step * layout.step_k + word.first_k;
  const Element* const from = static_cast<const Element*>(p.weight) + (row - p.row_begin) * p.weight_stride;
  uint32_t value = 0;
  for (int i = 0; i < word.count; ++i)
    if (row < end && k + i < layout.k)
      value |= static_cast<uint32_t>(load_read_only(from + k + i))
               << 8 * static_cast<int>(sizeof(Element)) * i;
  store(static_cast<uint32_t*>(p.packed) + at, value);
}

// One source row, or zeros.
template <class T>
struct SourceRow {
  const T* from;
  int64_t k;
  bool exists;
  __device__ __forceinline__ float operator()(int64_t at) const {
    return exists && at < k ? to_float(load(from + at)) : 0.0f;
  }
};

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t largest) {
  return warp_reduce(largest, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}

__device__ __forceinline__ uint32_t nibble_of(int32_t code) {
  return static_cast<uint32_t>(code < 0 ? 8 - code : code);
}

template <class Row>
__device__ __forceinline__ void pack_int4(const PackedLayout& layout, unsigned char* packed, int64_t tile,
                                          int i, const Row& row) {
  for (int64_t step = 0; step < layout.steps; ++step) {
    const int in_step = 2 * lane_id();
    const float x[2] = {row(step * kInt4Group + in_step), row(step * kInt4Group + in_step + 1)};
    const half_t scale =
        quantize_int4_scale(largest_of_warp(max(magnitude_bits(x[0]), magnitude_bits(x[1]))));
    unsigned char* const to = packed + layout.step_at(tile, step);
    const float as_stored = to_float(scale);
    const uint32_t low = nibble_of(quantize(x[0], as_stored, kInt4Max)),
                   high = nibble_of(quantize(x[1], as_stored, kInt4Max));
    store(to + code_byte(WeightFormat::kInt4, i, in_step), static_cast<unsigned char>(high << 4 | low));
    if (lane_id() == 0) store(reinterpret_cast<half_t*>(to + kInt4ScalesAt) + i, scale);
  }
}

template <class Row>
__device__ __forceinline__ void pack_bytes(const PackedLayout& layout, unsigned char* packed, int64_t tile,
                                           int i, const Row& row) {
  uint32_t largest = 0;
  for (int64_t k = lane_id(); k < layout.k; k += kWarpSize) largest = max(largest, magnitude_bits(row(k)));
  const bool float8 = layout.format == WeightFormat::kFloat8E4M3;
  const float scale = quantize_scale(largest_of_warp(largest), float8 ? kFloat8Max : kInt8Max);
  for (int64_t k = lane_id(); k < int64_t{layout.steps} * layout.step_k; k += kWarpSize) {
    const float x = row(k);
    const int32_t code = float8 ? quantize_float8(x, scale).bits : quantize(x, scale, kInt8Max);
    store(packed + layout.step_at(tile, k / layout.step_k) +
              code_byte(layout.format, i, static_cast<int>(k % layout.step_k)),
          static_cast<unsigned char>(code + (layout.format == WeightFormat::kInt8 ? 128 : 0)));
  }
  if (lane_id() == 0) store(reinterpret_cast<float*>(packed + layout.scale_at(tile, i)), scale);
}

// registers: <= 64
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    pack_codes_kernel(const PackWeightParams p, const PackedLayout layout) {
  const int64_t packed_row = int64_t{blockIdx.x} * kRowsPerBlock + warp_id(), tile = packed_row / kTileRows;
  if (tile >= layout.tiles) return;
  const int i = static_cast<int>(packed_row % kTileRows);
  const int64_t row = layout.source_row(tile, i), end = layout.end_of(i);
  if (!is_ours(p, row, end)) return;
  const SourceRow<T> source{static_cast<const T*>(p.weight) + (row - p.row_begin) * p.weight_stride, layout.k,
                            row < end};
  unsigned char* const packed = static_cast<unsigned char*>(p.packed);
  if (layout.format == WeightFormat::kInt4)
    pack_int4(layout, packed, tile, i, source);
  else
    pack_bytes(layout, packed, tile, i, source);
}

}  // namespace

int64_t packed_weight_bytes(int64_t n, int64_t k, WeightFormat format) {
  return PackedLayout(n, k, format, false).bytes();
}

void pack_weight(const PackWeightParams& p, CUstream_st* stream) {
  validate(p);
  const PackedLayout layout(p.n, p.k, p.format, p.paired);
  if (p.rows == 0) return;
  const auto config = [&](int64_t threads) {
    return LaunchConfig{dim3(static_cast<unsigned>(ceil_div<int64_t>(threads, kThreads))), dim3(kThreads),
                        stream};
  };
  if (layout.quantized()) {
    dispatch(FloatTypes{}, p.weight_dtype, "weight", [&](auto type) {
      launch(pack_codes_kernel<typename decltype(type)::type>,
             config(int64_t{layout.tiles} * kTileRows * kWarpSize), p, layout);
    });
  } else {
    launch(p.format == WeightFormat::kFloat32 ? pack_weight_kernel<uint32_t> : pack_weight_kernel<uint16_t>,
           config(layout.bytes() / 4), p, layout);
  }
}

}  // namespace eagle::cuda
