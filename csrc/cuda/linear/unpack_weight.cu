// unpack_weight: the rows of a packed matrix in source order.
//
// grid: float formats: [blocks of 256 words of the packed matrix], one thread reads 32 bits, all of one row
//       others:        [blocks of 256 elements], one thread writes one: code * scale, one rounding
#include <cuda_runtime.h>

#include "common/float8.h"
#include "cuda/device/ptx.cuh"
#include "cuda/launch.h"
#include "cuda/linear/layout.cuh"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 256;

// registers: <= 40
template <class Element>
__global__ void __launch_bounds__(kThreads)
    unpack_weight_kernel(const UnpackWeightParams p, const PackedLayout layout) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int tile_words = layout.tile_bytes / 4;
  const int64_t tile = at / (int64_t{layout.steps} * tile_words);
  if (tile >= layout.tiles) return;
  const int64_t step = at / tile_words % layout.steps;
  const PackedWord word = packed_word(sizeof(Element), static_cast<int>(at % tile_words));
  const int64_t row = layout.source_row(tile, word.row), k = step * layout.step_k + word.first_k;
  if (row >= layout.end_of(word.row)) return;
  const uint32_t value = load_read_only(static_cast<const uint32_t*>(p.weight.data) + at);
  Element* const to = static_cast<Element*>(p.out) + row * layout.k + k;
  for (int i = 0; i < word.count; ++i)
    if (k + i < layout.k)
      store(to + i, static_cast<Element>(value >> 8 * static_cast<int>(sizeof(Element)) * i));
}

// registers: <= 40
__global__ void __launch_bounds__(kThreads)
    unpack_codes_kernel(const UnpackWeightParams p, const PackedLayout layout) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t packed_row = at / layout.k, k = at % layout.k, tile = packed_row / kTileRows;
  if (tile >= layout.tiles) return;
  const int i = static_cast<int>(packed_row % kTileRows), in_step = static_cast<int>(k % layout.step_k);
  const int64_t row = layout.source_row(tile, i);
  if (row >= layout.end_of(i)) return;
  const unsigned char* const packed = static_cast<const unsigned char*>(p.weight.data);
  const unsigned char* const step = packed + layout.step_at(tile, k / layout.step_k);
  const uint32_t byte = load_read_only(step + code_byte(layout.format, i, in_step));
  float code = 0.0f, scale = 0.0f;
  if (layout.format == WeightFormat::kInt4) {
    const uint32_t nibble = byte >> in_step % 2 * 4;
    code = static_cast<float>(nibble & 7u);
    code = nibble & 8u ? -code : code;
    scale = to_float(load(reinterpret_cast<const half_t*>(step + kInt4ScalesAt) + i));
  } else {
    if (layout.format == WeightFormat::kFloat8E4M3)
      code = to_float(float8_t{static_cast<uint8_t>(byte)});
    else if (layout.format == WeightFormat::kInt8)
      code = static_cast<float>(static_cast<int>(byte) - 128);
    else
      code = static_cast<float>(static_cast<int8_t>(byte));
    scale = load_read_only(reinterpret_cast<const float*>(packed + layout.scale_at(tile, i)));
  }
  store(static_cast<float*>(p.out) + row * layout.k + k, code * scale);
}

}  // namespace

void unpack_weight(const UnpackWeightParams& p, CUstream_st* stream) {
  validate(p);
  const PackedLayout layout(p.weight);
  const auto config = [&](int64_t threads) {
    return LaunchConfig{dim3(static_cast<unsigned>(ceil_div<int64_t>(threads, kThreads))), dim3(kThreads),
                        stream};
  };
  if (layout.quantized())
    launch(unpack_codes_kernel, config(int64_t{layout.tiles} * kTileRows * layout.k), p, layout);
  else
    launch(p.weight.format == WeightFormat::kFloat32 ? unpack_weight_kernel<uint32_t>
                                                     : unpack_weight_kernel<uint16_t>,
           config(layout.bytes() / 4), p, layout);
}

}  // namespace eagle::cuda
