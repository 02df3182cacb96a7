#pragma once
// From sizes to work: the partition of K, which bits depend on, and everything else, which they do not.
#include <algorithm>

#include "common/check.h"
#include "common/dispatch.h"
#include "cuda/launch.h"
#include "cuda/linear/codes.cuh"
#include "cuda/linear/finish.cuh"
#include "cuda/linear/layout.cuh"
#include "cuda/linear/rows.cuh"
#include "cuda/linear/stream.cuh"
#include "cuda/linear/work.cuh"

namespace eagle::cuda {

// Two shapes of warps. Up to 32 tokens a warp has one row tile and all tokens; beyond, two row tiles, so that
// activations are read half as often from shared memory, and tokens are split over warps from 128 on.
struct WarpShape {
  int warps, tiles, token_tiles;
};
inline constexpr int kSmallTokenTiles = 4, kLargeTokenTiles = 8;
inline constexpr int kSmallWarps = 16, kLargeWarps = 12;
inline constexpr WarpShape kSmallShape{kSmallWarps, 1, kSmallTokenTiles},
    kLargeShape{kLargeWarps, 2, kLargeTokenTiles};

// How many parts K is summed in. A function of the weight's shape alone, whatever the device: blocks of a GPU
// of some 132 multiprocessors should all have the same to read. In units of half a tile's step: a block's
// tiles, half a tile for the activations that come with each step, and the partial sums of every tile.
inline int slices_of(const PackedLayout& layout) {
  constexpr int64_t kNominal = 132;
  constexpr int kMostSlices = 16, kFewestSteps = 4;
  int best = 1;
  int64_t least = 0;
  for (int slices = 1; slices <= std::clamp(layout.steps / kFewestSteps, 1, kMostSlices); ++slices) {
    const int64_t tiles = ceil_div<int64_t>(int64_t{layout.tiles} * slices, kNominal);
    const int64_t cost = (2 * tiles + 1) * ceil_div(layout.steps, slices) + (slices > 1 ? 2 * tiles : 0);
    if (slices == 1 || cost * 100 < least * 97) {
      best = slices;
      least = cost;
    }
  }
  return best;
}

inline int64_t address_of(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

inline int64_t round_up(int64_t value, int64_t unit) { return ceil_div(value, unit) * unit; }

// Rows of x as the products read them.
struct Rows {
  const void* x;
  int64_t x_stride;
  int m;
  DType dtype;
  const void* norm_weight;
  float norm_eps;
};

// Of one row of x in a step.
inline int row_bytes_of(const PackedLayout& layout, DType dtype) {
  return layout.step_k *
         static_cast<int>(layout.format == WeightFormat::kInt8Dynamic ? 1 : element_size(dtype));
}

struct StreamLaunch {
  StreamPlan plan;
  bool large;  // which shape of warps
  int blocks, warps;
  size_t shared_bytes;
};

inline constexpr int64_t kRingOffset = 384;  // behind StreamShared and what else the kernel keeps there
static_assert(sizeof(StreamShared) <= kRingOffset);

// Where the ring ends, from the beginning of shared memory.
inline int64_t ring_end(const StreamPlan& plan, int tile_bytes, int row_bytes) {
  return kRingOffset +
         int64_t{plan.ring} * step_bytes(tile_bytes, row_bytes, plan.pass_tiles, plan.token_tiles());
}

// Rows of x that a launch takes: `most`, or as many as leave room for three steps of `unit` tiles in this
// device's shared memory. `behind(rows, tiles)`: bytes of it that the kernel wants behind the ring.
template <class Behind>
int64_t rows_per_launch(const PackedLayout& layout, int row_bytes, int unit, int64_t most, Behind&& behind) {
  const auto limit = static_cast<int64_t>(shared_memory_limit());
  const auto fits = [&](int64_t rows) {
    const int64_t step = step_bytes(layout.tile_bytes, row_bytes, unit, static_cast<int>(rows / 8));
    return kRingOffset + 3 * step + behind(rows, unit) <= limit;
  };
  while (most > 8 && !fits(most)) most /= 2;
  return most;
}

// Which of the kernel's products, where it has its ring, and how many blocks it has.
struct StreamRoom {
  WarpShape shape;
  int blocks;
  int64_t ring_offset;  // in shared memory
};

// What a block does at a time: as many tiles as it has in all, or as its warps can take; fewer where the ring
// would be short of steps. `behind(pass_tiles)`: bytes of shared memory that the kernel wants behind the
// ring. The ring may come out shorter than the three steps that it needs.
template <class Behind>
void plan_passes(StreamPlan& plan, int tile_bytes, int row_bytes, const StreamRoom& room, Behind&& behind) {
  const auto limit = static_cast<int64_t>(shared_memory_limit());
  plan.token_groups = ceil_div(plan.token_tiles(), room.shape.token_tiles);
  const int units = ceil_div(plan.items(), room.blocks);
  int pass_units = std::max(room.shape.warps / plan.token_groups * room.shape.tiles / plan.unit, 1);
  pass_units = ceil_div(units, ceil_div(units, pass_units));
  for (;; --pass_units) {
    plan.pass_tiles = pass_units * plan.unit;
    const int64_t step = step_bytes(tile_bytes, row_bytes, plan.pass_tiles, plan.token_tiles());
    plan.ring = static_cast<int>(
        std::min<int64_t>((limit - room.ring_offset - behind(plan.pass_tiles)) / step, kMaxRing));
    if (plan.ring >= 4 || pass_units == 1) return;
  }
}

template <class Behind>
StreamLaunch plan_stream(const PackedWeight& weight, const Rows& rows, int slices, int unit,
                         Behind&& behind) {
  const PackedLayout layout(weight);
  const int row_bytes = row_bytes_of(layout, rows.dtype);
  StreamLaunch launch{};
  StreamPlan& plan = launch.plan;
  plan.weight = static_cast<const unsigned char*>(weight.data);
  plan.tiles = layout.tiles;
  plan.steps = layout.steps;
  plan.slices = slices;
  plan.unit = unit;
  plan.bulk = has_bulk_copies();
  plan.x = rows.x;
  plan.x_stride = rows.x_stride;
  plan.m = rows.m;
  plan.k = layout.k;
  plan.norm_weight = rows.norm_weight;
  plan.norm_eps = rows.norm_eps;
  plan.x_vectors = address_of(rows.x) % 16 == 0 && rows.x_stride * element_size(rows.dtype) % 16 == 0;
  plan.norm_vectors = address_of(rows.norm_weight) % 16 == 0;

  launch.large = plan.token_tiles() > kSmallTokenTiles;
  launch.blocks = std::min(multiprocessors(), plan.items());
  const WarpShape& shape = launch.large ? kLargeShape : kSmallShape;
  plan_passes(plan, layout.tile_bytes, row_bytes, {shape, launch.blocks, kRingOffset}, behind);
  check(plan.ring >= 3, "linear: this device's ", shared_memory_limit(),
        " bytes of shared memory do not hold three steps");
  launch.warps = ceil_div(plan.pass_tiles, shape.tiles) * plan.token_groups;
  launch.shared_bytes =
      static_cast<size_t>(ring_end(plan, layout.tile_bytes, row_bytes) + behind(plan.pass_tiles));
  return launch;
}

// The workspace: counters, rows of x that were prepared apart, and what the kernel leaves for the last block.
struct Workspace {
  int64_t counters, rows, x_scales, partials, bytes;  // offsets

  // `counters` words, [m, k] elements of at most `element` bytes, `partials` bytes.
  Workspace(int64_t counter_words, int64_t m, int64_t k, int64_t element, int64_t partial_bytes) {
    counters = 0;
    rows = round_up(counter_words * 4, 128);
    x_scales = rows + round_up(m * row_stride(k, element), 128);
    partials = x_scales + round_up(m * 4, 128);
    bytes = partials + partial_bytes;
  }
  static int64_t row_stride(int64_t k, int64_t element) { return round_up(k * element, 16); }
};

inline void check_workspace(const void* workspace, int64_t bytes, int64_t needed) {
  check(bytes >= needed, "workspace: expected at least ", needed, " bytes, got ", bytes);
  check(address_of(workspace) % 16 == 0, "workspace: expected an address that is a multiple of 16");
}

// Rows of x that are made ready by a launch of their own, into the workspace: codes of int8_dynamic; what
// blocks would normalise too often; a copy where the results go into x's memory while other blocks read it.
inline Rows prepare_apart(const Rows& rows, const PackedWeight& weight, const Workspace& offsets,
                          unsigned char* workspace, bool copy, CUstream_st* stream) {
  const bool codes = weight.format == WeightFormat::kInt8Dynamic;
  if (!codes && !copy && !(rows.norm_weight && rows.m > kMaxFusedNormRows)) return rows;
  const int64_t size = codes ? 1 : element_size(rows.dtype);
  RmsNormParams p{};
  p.m = rows.m;
  p.k = weight.k;
  p.dtype = rows.dtype;
  p.eps = rows.norm_eps;
  p.x = rows.x;
  p.x_stride = rows.x_stride;
  p.weight = rows.norm_weight;
  p.out = workspace + offsets.rows;
  p.out_stride = Workspace::row_stride(weight.k, size) / size;
  if (codes)
    prepare_codes(p, reinterpret_cast<float*>(workspace + offsets.x_scales), stream);
  else
    prepare_rows(p, stream);
  return {p.out, p.out_stride, rows.m, codes ? DType::kInt8 : rows.dtype, nullptr, 0.0f};
}

inline Scales scales_of(const PackedWeight& weight, const Workspace& offsets,
                        const unsigned char* workspace) {
  const PackedLayout layout(weight);
  const unsigned char* const data = static_cast<const unsigned char*>(weight.data);
  return {layout.row_scales() ? reinterpret_cast<const float*>(data + layout.scales_at()) : nullptr,
          reinterpret_cast<const float*>(workspace + offsets.x_scales)};
}

// Calls f(Type<Products>{}) with what multiplies this format with x of this dtype.
template <class F>
void dispatch_products(WeightFormat format, DType x_dtype, F&& f) {
  const auto codes = [&]<class Codes>(Type<Codes>) {
    dispatch(FloatTypes{}, x_dtype, "x",
             [&](auto type) { f(Type<CodeProducts<Codes, typename decltype(type)::type>>{}); });
  };
  switch (format) {
    case WeightFormat::kFloat32:
      return f(Type<FloatProducts>{});
    case WeightFormat::kBFloat16:
      return f(Type<TensorProducts<bf16_t>>{});
    case WeightFormat::kFloat16:
      return f(Type<TensorProducts<half_t>>{});
    case WeightFormat::kFloat8E4M3:
      return codes(Type<ByteCodes<Float8Code>>{});
    case WeightFormat::kInt8:
      return codes(Type<ByteCodes<Int8Code>>{});
    case WeightFormat::kInt4:
      return codes(Type<Int4Codes>{});
    case WeightFormat::kInt8Dynamic:
      return f(Type<IntegerProducts>{});
  }
}

}  // namespace eagle::cuda
