#pragma once
// Which part of a product a block has, and in which order it goes through it.
//
// The partition of K is `slices`, a function of the weight's shape alone (plan.cuh): every output is summed
// from zero within a slice, slices are folded from left to right. Everything else here is free: how many
// blocks there are, which row tiles are theirs, how many they take at a time; no choice changes a bit.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/numeric.h"
#include "eagle_cuda/linear.h"

namespace eagle::cuda {

struct StreamPlan {
  // The weight.
  const unsigned char* weight;
  int tiles, steps;  // PackedLayout
  int slices;        // parts of K
  int tile_bytes;    // PackedLayout, where the kernel is not of one format
  WeightFormat format;
  int unit;  // tiles that stay in one block

  // What a block does at a time.
  int pass_tiles;    // at most so many tiles, a multiple of `unit`
  int token_groups;  // warps that share a tile, each with its tokens
  int stage_steps;   // steps that come and go together, the last of a pass maybe fewer
  int ring;          // stages of weights in shared memory: 3 at least
  int row_ring;    // stages of x there: 3 at least, and as many as of weights where these do not come in bulk
  int weights_at;  // bytes of the ring of x, behind which that of weights begins
  bool bulk;       // weights come by bulk copies

  // Activations [m, k], m at most 256.
  const void* x;
  int64_t x_stride;
  int m;
  int64_t k;
  bool x_vectors, norm_vectors;  // addresses are multiples of 16
  const void* norm_weight;       // nullptr: no norm
  float norm_eps;

  EAGLE_INLINE int token_tiles() const { return ceil_div(m, 8); }
  EAGLE_INLINE int items() const { return slices * ceil_div(tiles, unit); }
};

// A position in the block's work: pass after pass, stage after stage. A pass is some tiles of one slice.
struct Walk {
  int item, last_item;  // units left, numbered through all slices
  int slice, first_tile, tiles;
  int step, last_step;

  __device__ __forceinline__ bool more() const { return step < last_step; }
  __device__ __forceinline__ int steps(const StreamPlan& plan) const {  // of the stage
    return min(plan.stage_steps, last_step - step);
  }
  __device__ __forceinline__ bool ends_pass(const StreamPlan& plan) const {
    return step + plan.stage_steps >= last_step;
  }

  __device__ __forceinline__ static Walk begin(const StreamPlan& plan, int block, int blocks) {
    Walk w{};
    const int64_t items = plan.items();
    w.item = static_cast<int>(items * block / blocks);
    w.last_item = static_cast<int>(items * (block + 1) / blocks);
    w.next_pass(plan);
    return w;
  }

  __device__ __forceinline__ void next_pass(const StreamPlan& plan) {
    step = last_step = 0;
    if (item >= last_item) return;
    const int units = ceil_div(plan.tiles, plan.unit);
    slice = item / units;
    const int first_unit = item % units, run = min(last_item - item, units - first_unit);
    const int passes = ceil_div(run, plan.pass_tiles / plan.unit), taken = ceil_div(run, passes);
    first_tile = first_unit * plan.unit;
    tiles = min(taken * plan.unit, plan.tiles - first_tile);
    item += taken;
    step = plan.steps * slice / plan.slices;
    last_step = plan.steps * (slice + 1) / plan.slices;
  }

  __device__ __forceinline__ void advance(const StreamPlan& plan) {
    step += plan.stage_steps;
    if (step >= last_step) next_pass(plan);
  }
};

}  // namespace eagle::cuda
