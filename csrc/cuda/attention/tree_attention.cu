// tree_attention: two launches, the common pass (common_pass.cuh) and the end of every row (finish.cuh).
// Grids: x requests, y KV heads, z splits of the positions x blocks of rows; x requests x nodes, y KV heads x
// blocks of query heads.
// float goes through the second alone. Which blocks share the work is decided here from sizes that the host
// knows; no choice changes a bit of the results.
//
// A Hopper tier, should a GPU show the need. On paper 60 queries of 32/8 heads over 32k keys are 53 us of
// mma.sync on an H200 (63 % of the rate of wgmma) beside as many of exponentials, which must hide behind it
// to reach the 68 us that we aim at. wgmma m64n32k16 with queries and weights in registers, tiles by bulk
// tensor copies from a warp of their own, and two groups of four warps whose exponentials alternate would
// take the same steps of 32 positions, chunks and groups. Its sums round in their own way: it would have to
// replace mma.sync for every number of queries of a format, so that the bits stay one.
#include <algorithm>

#include "common/check.h"
#include "common/dispatch.h"
#include "cuda/attention/common_pass.cuh"
#include "cuda/attention/finish.cuh"
#include "cuda/launch.h"

namespace eagle::cuda {
namespace {

// Head sizes up to 128: all of 512 threads, hence 128 registers. One block fills a multiprocessor, by
// registers, or by shared memory: 224 KB of 256 rows at head size 128 (queries, ring, the group's sums).
// registers: <= 255
template <class T, class C, int kHeadDim>
__global__ void __launch_bounds__(kHeadDim <= 128 ? 512 : 256)
    common_pass_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
  const int z = static_cast<int>(blockIdx.z);
  const CommonTask task{static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), z / plan.row_blocks,
                        z % plan.row_blocks};
  CommonPass<T, C, kHeadDim>(p, plan, shared_memory<CommonShared>()).run(task);
}

// Two blocks of 8 warps fill a multiprocessor by registers; each has 33 KB of shared memory at head size 128.
// registers: <= 128
template <class T, class C, int kHeadDim>
__global__ void __launch_bounds__(kFinishWarps* kWarpSize, 2)
    finish_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
  const int x = static_cast<int>(blockIdx.x), y = static_cast<int>(blockIdx.y);
  const int head_blocks = (plan.group + kFinishWarps - 1) / kFinishWarps;
  Finish<T, C, kHeadDim>(p, plan, shared_memory<FinishShared<T, C, kHeadDim>>())
      .run({x / p.max_nodes, x % p.max_nodes, y / head_blocks, y % head_blocks});
}

bool multiples(int64_t of, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [of](int64_t x) { return x % of == 0; });
}

int64_t address(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

bool has_codes(const KVCacheView& cache) { return cache.dtype == DType::kFloat8E4M3; }

size_t shared_bytes(const KVCacheView& cache, int rows, int ring) {
  size_t bytes = 0;
  dispatch(HeadDims{}, cache.head_dim, "head_dim",
           [&](auto dim) { bytes = common_shared_bytes<dim()>(rows, ring, has_codes(cache)); });
  return bytes;
}

Plan own_plan(const AttendParams& p) {
  return attend_plan(p, {multiprocessors(), shared_memory_limit(), p.cache.head_dim <= 128 ? 256 : 128});
}

template <class T, class C, int kHeadDim>
void launch_common_pass(const AttendParams& p, const Plan& plan, CUstream_st* stream) {
  const LaunchConfig config{
      dim3(static_cast<unsigned>(p.batch_size), static_cast<unsigned>(p.cache.num_kv_heads),
           static_cast<unsigned>(plan.splits * plan.row_blocks)),
      dim3(static_cast<unsigned>(plan.rows_per_block / kWarpRows * kWarpSize)), stream,
      common_shared_bytes<kHeadDim>(plan.rows_per_block, plan.ring, has_codes(p.cache))};
  launch(common_pass_kernel<T, C, kHeadDim>, config, p, plan);
}

template <class T, class C, int kHeadDim>
void launch_finish(const AttendParams& p, const Plan& plan, CUstream_st* stream) {
  const int warps = std::min(plan.group, kFinishWarps);
  const LaunchConfig config{
      dim3(static_cast<unsigned>(p.batch_size * p.max_nodes),
           static_cast<unsigned>(p.cache.num_kv_heads * ceil_div(plan.group, kFinishWarps))),
      dim3(static_cast<unsigned>(warps * kWarpSize)), stream, sizeof(FinishShared<T, C, kHeadDim>)};
  launch(finish_kernel<T, C, kHeadDim>, config, p, plan);
}

template <class T, class C, int kHeadDim>
void launch_both(const AttendParams& p, const Plan& plan, CUstream_st* stream) {
  if constexpr (!std::is_same_v<T, float>) launch_common_pass<T, C, kHeadDim>(p, plan, stream);
  launch_finish<T, C, kHeadDim>(p, plan, stream);
}

}  // namespace

Plan attend_plan(const AttendParams& p, const AttendRoom& room) {
  Plan plan{};
  const KVCacheView& c = p.cache;
  const int64_t size = element_size(p.dtype), cache_size = element_size(c.dtype);
  plan.group = p.num_heads / c.num_kv_heads;
  plan.rows = p.max_nodes * plan.group;
  plan.vectors = multiples(16, {address(p.q), address(c.k), address(c.v)}) &&
                 multiples(16 / size, {p.q_strides[0], p.q_strides[1], p.q_strides[2]}) &&
                 multiples(16 / cache_size, {c.k_page_stride, c.k_row_stride, c.k_head_stride,
                                             c.v_page_stride, c.v_row_stride, c.v_head_stride});
  plan.pairs = address(p.out) % (2 * size) == 0 &&
               multiples(2, {p.out_strides[0], p.out_strides[1], p.out_strides[2]});
  if (p.dtype == DType::kFloat32) return plan;

  const int multiprocessors = room.multiprocessors;
  const int64_t positions = std::min(cache_capacity(c), int64_t{kMaxPrefix}) + p.all_nodes;
  const int64_t chunks = ceil_div<int64_t>(positions, kChunk),
                groups = ceil_div<int64_t>(chunks, kGroupChunks) + 1;
  const auto set_rows = [&](int blocks) {
    plan.row_blocks = blocks;
    plan.rows_per_block = ceil_div(ceil_div(plan.rows, blocks), kWarpRows) * kWarpRows;
  };
  const auto blocks = [&] { return int64_t{p.batch_size} * c.num_kv_heads * plan.row_blocks; };
  set_rows(ceil_div(plan.rows, room.rows));
  while (shared_bytes(c, plan.rows_per_block, 2) > room.shared_bytes) set_rows(plan.row_blocks + 1);
  // Fewer rows to a block, which reads keys once more, only where multiprocessors would idle.
  while (blocks() * chunks < multiprocessors && plan.rows_per_block > 4 * kWarpRows)
    set_rows(plan.row_blocks + 1);
  plan.ring = 4;
  while (plan.ring > 2 && shared_bytes(c, plan.rows_per_block, plan.ring) > room.shared_bytes) --plan.ring;
  plan.splits =
      static_cast<int>(std::clamp<int64_t>(ceil_div<int64_t>(2 * multiprocessors, blocks()), 1, chunks));
  // Groups leave fewer partials to fold: where they occupy most of the multiprocessors, they will do.
  plan.group_splits = static_cast<int>(std::max<int64_t>(multiprocessors * 3 / 4 / blocks(), 1));
  plan.slots = plan.splits == 1
                   ? 1
                   : static_cast<int>(
                         std::max(groups, std::min(chunks + 1, int64_t{kGroupChunks} * plan.group_splits)));
  return plan;
}

int64_t partials_bytes(const AttendParams& p, const Plan& plan) {
  const int64_t partials = num_partials(p, plan);
  return (partials + 1) / 2 * 2 * int64_t{sizeof(Stats)} +
         partials * p.cache.head_dim * int64_t{sizeof(float)};
}

int64_t attend_workspace_bytes(const AttendParams& p) {
  if (p.dtype == DType::kFloat32 || p.batch_size == 0 || p.max_nodes == 0) return 0;
  return partials_bytes(p, own_plan(p));
}

void attend(const AttendParams& p, CUstream_st* stream) {
  if (p.batch_size == 0 || p.max_nodes == 0) return;
  const int64_t needed = attend_workspace_bytes(p);
  check(p.workspace_bytes >= needed, "workspace: expected at least ", needed, " bytes, got ",
        p.workspace_bytes);
  check(address(p.workspace) % 16 == 0, "workspace: expected an address that is a multiple of 16");
  const Plan plan = own_plan(p);
  dispatch(HeadDims{}, p.cache.head_dim, "head_dim", [&](auto dim) {
    dispatch(FloatTypes{}, p.dtype, "q", [&](auto type) {
      using T = typename decltype(type)::type;
      has_codes(p.cache) ? launch_both<T, float8_t, dim()>(p, plan, stream)
                         : launch_both<T, T, dim()>(p, plan, stream);
    });
  });
}

int64_t tree_attention_workspace_bytes(const TreeAttentionParams& p) {
  validate(p);
  return attend_workspace_bytes({p, 0, p.max_nodes});
}

void tree_attention(const TreeAttentionParams& p, CUstream_st* stream) {
  validate(p);
  attend({p, 0, p.max_nodes}, stream);
}

}  // namespace eagle::cuda
