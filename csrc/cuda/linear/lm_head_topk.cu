// The k best tokens of every row of norm(x) @ W^T, their log-probabilities and the log-sum-exp: one launch
// for each 64 rows, in which every byte of the weight is read once and no logit reaches memory. One before
// them prepares x where linear.cu's would.
//
// grid: [blocks]     as many as multiprocessors; each has its own chunks of ids, over all of K
//
// A block streams its row tiles (stream.cuh), puts the logits of a pass into shared memory and scans them
// (topk.cuh); the last block to arrive folds what all have left, a warp a row.
#include <cuda_runtime.h>

#include "common/check.h"
#include "cuda/launch.h"
#include "cuda/linear/plan.cuh"
#include "cuda/linear/topk.cuh"

namespace eagle::cuda {
namespace {

struct SharedMemory {
  StreamShared stream;
  bool last;
};
static_assert(sizeof(SharedMemory) <= kRingOffset);

template <class Products, int kRows, int kTokens>
__device__ __forceinline__ void run_block(const StreamPlan& plan, const TopkParams& p, int64_t topk_offset) {
  using ThisStream = Stream<Products, kRows, kTokens>;
  SharedMemory& shared = shared_memory<SharedMemory>();
  unsigned char* const begin = reinterpret_cast<unsigned char*>(&shared);
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const Topk topk(p, plan, begin + topk_offset);
  topk.clear();
  ThisStream stream(plan, {plan, shared.stream.root}, shared.stream.arrived, &shared.stream.ahead,
                    begin + kRingOffset);
  stream.init_barriers();
  stream.run(block, blocks, TopkFinish<ThisStream, kRows, kTokens>{topk, p.scales, plan, stream});
  topk.leave(block, blocks);

  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t before = atomic_add_acq_rel<Scope::kDevice>(p.counter, 1);
    shared.last = before + 1 == gridDim.x;
  }
  __syncthreads();
  if (shared.last) topk.fold(blocks);
}

// registers: <= 128
template <class Products>
__global__ void __launch_bounds__(kSmallWarps* kWarpSize, 1)
    lm_head_topk_kernel(const __grid_constant__ StreamPlan plan, const __grid_constant__ TopkParams p,
                        int64_t topk_offset) {
  run_block<Products, 1, kSmallTokenTiles>(plan, p, topk_offset);
}

// registers: <= 168
template <class Products>
__global__ void __launch_bounds__(kLargeWarps* kWarpSize, 1)
    lm_head_topk_many_kernel(const __grid_constant__ StreamPlan plan, const __grid_constant__ TopkParams p,
                             int64_t topk_offset) {
  run_block<Products, 2, kLargeTokenTiles>(plan, p, topk_offset);
}

int most_blocks(const PackedLayout& layout) {
  return std::min(multiprocessors(), ceil_div(layout.tiles, chunk_tiles(layout)));
}

struct TopkWorkspace : Workspace {
  int64_t lists, sums;
  TopkWorkspace(const PackedLayout& layout, int64_t m, int top_k, int64_t sum_bytes)
      : Workspace(1, std::min<int64_t>(m, kTopkTokens), layout.k, layout.element_bytes(),
                  std::min<int64_t>(m, kTopkTokens) * most_blocks(layout) * top_k * 8 + sum_bytes) {
    lists = partials;
    sums = partials + std::min<int64_t>(m, kTopkTokens) * most_blocks(layout) * top_k * 8;
  }
};

TopkWorkspace workspace_of(const PackedWeight& weight, int64_t m, int top_k) {
  const PackedLayout layout(weight);
  const int64_t chunks = ceil_div(layout.tiles, chunk_tiles(layout));
  return {layout, m, top_k, std::min<int64_t>(m, kTopkTokens) * chunks * int64_t{sizeof(float2)}};
}

template <class Products>
void launch_products(const StreamLaunch& l, const TopkParams& p, int64_t topk_offset, CUstream_st* stream) {
  const LaunchConfig config{dim3(static_cast<unsigned>(l.blocks)),
                            dim3(static_cast<unsigned>(l.warps * kWarpSize)), stream, l.shared_bytes};
  launch(l.large ? lm_head_topk_many_kernel<Products> : lm_head_topk_kernel<Products>, config, l.plan, p,
         topk_offset);
}

// At most kTopkTokens rows.
void run(const LmHeadTopkParams& p, CUstream_st* stream) {
  const PackedLayout layout(p.weight);
  const TopkWorkspace offsets = workspace_of(p.weight, p.m, p.top_k);
  unsigned char* const workspace = static_cast<unsigned char*>(p.workspace);
  const Rows given{p.x, p.x_stride, static_cast<int>(p.m), p.x_dtype, p.norm_weight, p.norm_eps};
  const Rows rows = prepare_apart(given, p.weight, offsets, workspace, false, stream);
  const StreamLaunch l =
      plan_stream(p.weight, rows, 1, chunk_tiles(layout), [&](int tiles) { return topk_bytes(p.m, tiles); });

  TopkParams topk{};
  topk.scales = scales_of(p.weight, offsets, workspace);
  topk.n = static_cast<int>(p.weight.n);
  topk.top_k = p.top_k;
  topk.chunks = ceil_div(layout.tiles, chunk_tiles(layout));
  topk.draft_to_target = p.draft_to_target;
  topk.temperature = p.temperature;
  topk.seeds = p.seeds;
  topk.positions = p.positions;
  topk.tau = p.tau;
  topk.tokens = p.tokens;
  topk.log_probs = p.log_probs;
  topk.lse = p.lse;
  topk.lists = reinterpret_cast<uint64_t*>(workspace + offsets.lists);
  topk.sums = reinterpret_cast<float2*>(workspace + offsets.sums);
  topk.counter = reinterpret_cast<uint32_t*>(workspace + offsets.counters);
  EAGLE_CUDA_CHECK(cudaMemsetAsync(topk.counter, 0, sizeof(uint32_t), stream));
  const int64_t offset = ring_end(l.plan, layout.tile_bytes);
  dispatch_products(p.weight.format, p.x_dtype, [&](auto products) {
    launch_products<typename decltype(products)::type>(l, topk, offset, stream);
  });
}

}  // namespace

int64_t lm_head_topk_workspace_bytes(const PackedWeight& weight, int64_t m, int top_k) {
  return workspace_of(weight, m, top_k).bytes;
}

void lm_head_topk(const LmHeadTopkParams& p, CUstream_st* stream) {
  validate(p);
  if (p.m == 0) return;
  check_workspace(p.workspace, p.workspace_bytes, workspace_of(p.weight, p.m, p.top_k).bytes);
  const PackedLayout layout(p.weight);
  const int64_t rows =
      rows_per_launch(layout, row_bytes_of(layout, p.x_dtype), chunk_tiles(layout), kTopkTokens, topk_bytes);
  for (int64_t row = 0; row < p.m; row += rows) {
    LmHeadTopkParams part = p;
    part.m = std::min(p.m - row, rows);
    part.x = static_cast<const char*>(p.x) + row * p.x_stride * element_size(p.x_dtype);
    if (p.temperature) {
      part.temperature += row;
      part.seeds += row;
      part.positions += row;
    }
    part.tokens += row * p.top_k;
    part.log_probs += row * p.top_k;
    if (p.lse) part.lse += row;
    run(part, stream);
  }
}

}  // namespace eagle::cuda
