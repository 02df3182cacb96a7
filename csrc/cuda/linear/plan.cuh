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

// Where the rings end, from the beginning of shared memory.
inline int64_t ring_end(const StreamPlan& plan, int tile_bytes) {
  return kRingOffset + ring_bytes(plan, tile_bytes);
}

// Rows of x that a launch takes: `most`, or as many as leave room for three steps of `unit` tiles in this
// device's shared memory. `behind(rows, tiles)`: bytes of it that the kernel wants behind the ring.
template <class Behind>
int64_t rows_per_launch(const PackedLayout& layout, int row_bytes, int unit, int64_t most, Behind&& behind) {
  const auto limit = static_cast<int64_t>(shared_memory_limit());
  const auto fits = [&](int64_t rows) {
    const int64_t step =
        int64_t{unit} * layout.tile_bytes + row_step_bytes(row_bytes, static_cast<int>(rows / 8));
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

// Bytes that a multiprocessor should have on their way, so that all of them keep the memory busy over its
// latency: of weights, and of what stands beside them until their x is there.
inline constexpr int64_t kAheadBytes = 100 * 1024, kRowsAhead = 32 * 1024;

// How weights and x share what there is of shared memory.
struct Rings {
  int stage_steps, ring, row_ring;
  int64_t ahead;  // bytes of weights that are on their way
};

// Of `room` bytes, of which a step takes `weights` and `rows`: the longest stages, and with them as many of
// x, with which `enough` bytes of weights are on their way; else what has most of them there. `ring` is 0
// where three stages of both do not fit.
inline Rings plan_rings(int64_t room, int64_t weights, int64_t rows, int tile_bytes, int64_t enough,
                        bool bulk) {
  Rings best{1, 0, 0, -1};
  for (int steps = kStageBytes / tile_bytes; steps > 0; --steps) {
    const int64_t of_weights = steps * weights, of_rows = steps * rows;
    const int64_t wanted = std::clamp<int64_t>(2 + ceil_div(kRowsAhead, of_weights), 4, kMaxRowRing);
    for (int64_t row_ring = wanted; row_ring >= 3; --row_ring) {
      int64_t ring = std::min<int64_t>((room - row_ring * of_rows) / of_weights, kMaxRing);
      if (!bulk) ring = std::min<int64_t>(room / (of_weights + of_rows), kMaxRowRing);
      const int64_t spare = (room - ring * of_weights) / of_rows;  // places of x that there are
      const Rings made{steps, static_cast<int>(ring),
                       static_cast<int>(bulk ? std::min<int64_t>({spare, ring, kMaxRowRing}) : ring),
                       (ring - 1) * of_weights};
      if (std::min(made.ring, made.row_ring) < 3) continue;
      if (made.ahead >= enough) return made;
      if (made.ahead > best.ahead) best = made;
    }
  }
  return best;
}

// What a block does at a time: as many tiles as it has in all, or as its warps can take; fewer only where
// more bytes are on their way then. `behind(pass_tiles)`: bytes of shared memory that the kernel wants behind
// the rings. These may come out empty.
template <class Behind>
void plan_passes(StreamPlan& plan, int tile_bytes, int row_bytes, const StreamRoom& room, Behind&& behind) {
  const auto limit = static_cast<int64_t>(shared_memory_limit());
  plan.token_groups = ceil_div(plan.token_tiles(), room.shape.token_tiles);
  const int units = ceil_div(plan.items(), room.blocks);
  const int64_t own = int64_t{units} * plan.unit * tile_bytes * (plan.steps / plan.slices);
  const int64_t enough = std::min({kAheadBytes, limit * 9 / 20, own});
  const int64_t rows = row_step_bytes(row_bytes, plan.token_tiles());
  int64_t ahead = -2;
  int pass_units = std::max(room.shape.warps / plan.token_groups * room.shape.tiles / plan.unit, 1) + 1;
  do {
    pass_units = ceil_div(units, ceil_div(units, pass_units - 1));
    const int tiles = pass_units * plan.unit;
    const Rings made = plan_rings(limit - room.ring_offset - behind(tiles), int64_t{tiles} * tile_bytes, rows,
                                  tile_bytes, enough, plan.bulk);
    if (made.ahead <= ahead) continue;
    ahead = made.ahead;
    plan.pass_tiles = tiles;
    plan.stage_steps = made.stage_steps;
    plan.ring = made.ring;
    plan.row_ring = made.row_ring;
  } while (ahead < enough && pass_units > 1);
  plan.weights_at = row_ring_bytes(plan, row_bytes, plan.token_tiles());
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
  launch.shared_bytes = static_cast<size_t>(ring_end(plan, layout.tile_bytes) + behind(plan.pass_tiles));
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
