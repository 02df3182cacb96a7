#pragma once
// The common pass of tree_attention: keys that lie well before every query, on tensor cores.
//
// A block packs the queries of one KV head, row = node * group + head, 16 rows to a warp, and walks over its
// units of positions (one chunk of 256, or a group of 8 chunks), 32 positions at a time at absolute
// multiples. Tiles of 32 keys and of 32 values alternate in a ring in shared memory, which the warps share;
// while one is worked on, the next ones are on their way. A warp reduces each chunk from empty; chunks of a
// group are folded left to right into an accumulator in shared memory. A row's own limits are a mask;
// positions that no row of the block sees, or that have no page, are loaded as zeros, so that nothing in dead
// pages meets a zero weight.
#include <cuda_runtime.h>

#include "cuda/attention/common_loads.cuh"
#include "cuda/device/ptx_matrix.cuh"
#include "cuda/device/warp.cuh"

namespace eagle::cuda {

template <class T, class C, int kHeadDim>
class CommonPass : CommonLoads<T, C, kHeadDim> {
  using Loads = CommonLoads<T, C, kHeadDim>;
  using Loads::arrive, Loads::tile_of, Loads::scales;
  using Loads::kCodes, Loads::kLag, Loads::kPairs;
  using Loads::load_queries, Loads::look_up, Loads::publish, Loads::issue, Loads::convert;
  using Loads::p_, Loads::plan_, Loads::shared_, Loads::queries_, Loads::ring_, Loads::rows_,
      Loads::position_;
  using Loads::request, Loads::kv_head, Loads::first_row;
  using typename Loads::Layout;

 public:
  __device__ __forceinline__ CommonPass(const AttendParams& p, const Plan& plan, CommonShared& shared)
      : Loads(p, plan, shared) {}

  // Whole block. A request without rows there, or rows that see nothing there, cost nothing and leave
  // nothing.
  __device__ __forceinline__ void run(const CommonTask& task) {
    const int nodes = request_nodes(p_, task.request), first_row = task.row_block * plan_.rows_per_block;
    rows_ = min(nodes * plan_.group - first_row, plan_.rows_per_block);
    if (rows_ <= 0) return;
    const int prefix = request_prefix(p_, task.request);
    if (threadIdx.x == 0) shared_.task = task;
    int begin, end;
    find_limits(task, prefix, begin, end);
    const Units units = request_units(plan_, prefix, p_.first_node + nodes, p_.window);
    const Steps steps{units.size(), units.size() * (plan_.splits - 1), end};
    position_ = first_step(units, task.split, begin, end);
    if (position_ < 0) return;
    if (threadIdx.x == 0) {
      shared_.begin = begin;
      shared_.end = end;
      shared_.steps = steps;
      shared_.units = units;
    }
    if (warp_id() == 0) __syncwarp();
    load_queries();
    if (warp_id() == 0)
      for (int i = 0; i + 1 < kLookahead; ++i) publish(i, look_up(shared_.steps.after(position_, i)));
    __syncthreads();
    for (int item = 0; item + kLag < plan_.ring; ++item) issue(item, item / 2);
    if constexpr (kCodes) {
      arrive();
      convert(0);
    }

    clear();
    const bool works = warp_row() < rows_;
    for (int step = 0; position_ >= 0; ++step) {
      arrive();
      typename Loads::Place found{};
      if (warp_id() == 0) found = look_up(shared_.steps.after(position_, kLookahead - 1));
      issue(2 * step + plan_.ring - kLag, (plan_.ring - kLag) / 2);
      if (warp_id() == 0) publish((step + kLookahead - 1) % kLookahead, found);
      if constexpr (kCodes) convert(2 * step + 1);
      uint4 weights[kStep / 16];
      if (works) score(tile_of(2 * step), step % kLookahead, weights);
      arrive();
      issue(2 * step + 1 + plan_.ring - kLag, (plan_.ring + 1 - kLag) / 2);
      if constexpr (kCodes)
        if (shared_.steps.after(position_, 1) >= 0) convert(2 * step + 2);
      if (works) add_values(tile_of(2 * step + 1), weights);

      const int next = shared_.steps.after(position_, 1);
      if (works && (next < 0 || next / kChunk != position_ / kChunk)) {
        finish_chunk(next);
        clear();
      }
      position_ = next;
    }
    copy_async_wait<0>();
  }

 private:
  // ---- what the rows see ---------------------------------------------------------------------------------

  // The warp's first row.
  static __device__ __forceinline__ int warp_row() { return kWarpRows * warp_id(); }
  static __device__ __forceinline__ int row_of(int half) { return warp_row() + lane_id() / 4 + 8 * half; }

  __device__ __forceinline__ void find_limits(const CommonTask& task, int prefix, int& begin, int& end) {
    const int first_row = task.row_block * plan_.rows_per_block;
    int first = 0x7fffffff, last = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      stands_[half] = 0;
      if (row >= rows_) continue;
      const Span span = node_span(p_, task.request, (first_row + row) / plan_.group, prefix);
      stands_[half] = span.position;
      if (span.begin >= span.limit) continue;
      first = min(first, span.begin);
      last = max(last, span.limit);
    }
    first = __reduce_min_sync(kFullMask, first);
    last = __reduce_max_sync(kFullMask, last);
    if (lane_id() == 0) {
      shared_.first[warp_id()] = first;
      shared_.last[warp_id()] = last;
    }
    __syncthreads();
    begin = 0x7fffffff;
    end = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) {
      begin = min(begin, shared_.first[w]);
      end = max(end, shared_.last[w]);
    }
  }

  // Of the block's first unit at or behind the first position; -1: none.
  __device__ __forceinline__ int first_step(const Units& units, int split, int begin, int end) const {
    if (begin >= end) return -1;
    int unit = units.at(begin);
    unit += (split + plan_.splits - (unit - units.first) % plan_.splits) % plan_.splits;
    const int position = max(unit * units.size(), begin / kStep * kStep);
    return position < end ? position : -1;
  }

  // ---- one step ------------------------------------------------------------------------------------------

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) max_[half] = minus_infinity(), sum_[half] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) out_[i][j] = 0.0f;
  }

  // Scores of the warp's rows, and from them weights relative to the running maximum, as the matrix a of
  // their product with the values; what was summed before is scaled to it. A factor of 1, from then on the
  // rule, changes nothing.
  __device__ __forceinline__ void score(int slot, int index, uint4 (&weights)[kStep / 16]) {
    float s[kStep / 8][4];
    const uint4* const keys = ring_ + slot * kStep * Layout::kPitch;
    const int lane = lane_id();
    const int a_start = Layout::at(warp_row() + lane % 16, lane / 16);
    const int b_start = Layout::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[n][j] = 0.0f;
#pragma unroll(kCodes ? 2 : 4)  // where four would not fit the registers
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const uint4 a = load_matrices(queries_ + Layout::from(a_start, 0, 2 * k));
#pragma unroll
      for (int n = 0; n < kStep / 16; ++n) {
        const uint4 b = load_matrices(keys + Layout::from(b_start, n, 2 * k));
        multiply_add<T>(s[2 * n], a, b.x, b.y);
        multiply_add<T>(s[2 * n + 1], a, b.z, b.w);
      }
    }
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[n][j] *= p_.softmax_scale;
        if constexpr (kCodes) s[n][j] *= scales().k[index][8 * n + lane % 4 * 2 + j % 2];
      }
    if (p_.logit_softcap > 0.0f) {
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[n][j] = soft_cap(s[n][j], p_.logit_softcap);
    }
    const uint32_t present = shared_.present[index];
    const Span seen[2] = {span_at(stands_[0], p_.window), span_at(stands_[1], p_.window)};
    float highest[2] = {max_[0], max_[1]}, scale[2];
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = 8 * n + lane % 4 * 2 + j % 2, position = position_ + column;
        const bool sees =
            position >= seen[j / 2].begin && position < seen[j / 2].limit && (present >> column & 1);
        s[n][j] = sees ? s[n][j] : minus_infinity();
        highest[j / 2] = max(highest[j / 2], s[n][j]);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = max(highest[half], __shfl_xor_sync(kFullMask, highest[half], 1));
      highest[half] = max(highest[half], __shfl_xor_sync(kFullMask, highest[half], 2));
      const float shift = shift_of(highest[half]);
      scale[half] = exp_f32(max_[half] - shift);
      max_[half] = highest[half];
      sum_[half] *= scale[half];
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          s[n][j] = exp_f32(s[n][j] - shift);
          sum_[half] += s[n][j];
        }
    }
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      const float (&low)[4] = s[2 * k];
      const float (&high)[4] = s[2 * k + 1];
      weights[k] = {pack<T>(low[0], low[1]), pack<T>(low[2], low[3]), pack<T>(high[0], high[1]),
                    pack<T>(high[2], high[3])};
    }
    if (__any_sync(kFullMask, scale[0] != 1.0f || scale[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) out_[i][j] *= scale[j / 2];
    }
  }

  __device__ __forceinline__ void add_values(int slot, const uint4 (&weights)[kStep / 16]) {
    const uint4* const values = ring_ + slot * kStep * Layout::kPitch;
    const int b_start = Layout::at(lane_id() % 16, lane_id() / 16);
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const uint4 b = load_matrices_transposed(values + Layout::from(b_start, k, 2 * i));
        multiply_add<T>(out_[2 * i], weights[k], b.x, b.y);
        multiply_add<T>(out_[2 * i + 1], weights[k], b.z, b.w);
      }
    }
  }

  // ---- the end of a chunk, a group -----------------------------------------------------------------------

  // `next` is the step behind this one, or -1.
  __device__ __forceinline__ void finish_chunk(int next) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(kFullMask, sum, 1);
      sum += __shfl_xor_sync(kFullMask, sum, 2);
      fold_into_group(half, {max_[half], sum});
    }
    group_begun_ = true;
    __syncwarp();
    const Units units = shared_.units;
    const int unit = units.at(position_);
    if (next < 0 || units.at(next) != unit) write(unit - units.first);
  }

  __device__ __forceinline__ float2& group_out(int half, int i) const {
    return Loads::group_out()[(half * 2 * kPairs + i) * kWarpSize];
  }

  __device__ __forceinline__ Stats& group_stats(int half) const {
    return shared_.group[warp_id()][lane_id() / 4 + 8 * half];
  }

  __device__ __forceinline__ Stats& running(int half) const {
    return shared_.total[warp_id()][lane_id() / 4 + 8 * half];
  }

  __device__ __forceinline__ void fold_into_group(int half, const Stats& chunk) {
    Stats group = group_begun_ ? group_stats(half) : no_keys();
    const Fold f = fold(group, chunk);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const float2 y = {out_[i][2 * half], out_[i][2 * half + 1]};
      float2 both = y;
      if (group_begun_) {
        const float2 x = group_out(half, i);
        both = {f(x.x, y.x), f(x.y, y.y)};
      }
      group_out(half, i) = both;
      keep_order();
    }
    __syncwarp();  // four lanes have read what one of them writes
    if (lane_id() % 4 == 0) group_stats(half) = group;
  }

  // Writes the group as the unit's partial. The only block of a row folds its units as they come, into one.
  __device__ __forceinline__ void write(int slot) {
    const Partials partials = partials_at(p_, plan_);
    const bool folds = plan_.splits == 1 && written_;
    if (plan_.splits == 1) slot = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      const bool exists = row < rows_;
      const int64_t index =
          partial_index(p_, plan_, request(), kv_head(), slot, first_row() + (exists ? row : 0));
      float* const out = partials.out + index * kHeadDim + lane_id() % 4 * 2;
      Stats total = folds ? running(half) : no_keys();
      const Fold f = fold(total, group_stats(half));
#pragma unroll 2
      for (int i = 0; i < 2 * kPairs; ++i) {
        float2 x = group_out(half, i);
        float2* const to = reinterpret_cast<float2*>(out + 8 * i);
        if (folds && exists) {
          const float2 earlier = load(to);
          x = {f(earlier.x, x.x), f(earlier.y, x.y)};
        }
        if (exists) store(to, x);
      }
      __syncwarp();  // four lanes have read what one of them writes
      if (lane_id() % 4 != 0) continue;
      if (plan_.splits == 1) running(half) = total;
      if (exists) store(partials.stats + index, total);
    }
    written_ = true;
    group_begun_ = false;
  }

  int stands_[2];  // positions of this thread's rows; 0 where there is none
  float max_[2], sum_[2], out_[2 * kPairs][4];
  bool written_ = false, group_begun_ = false;
};

}  // namespace eagle::cuda
