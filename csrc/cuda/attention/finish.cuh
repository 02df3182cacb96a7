#pragma once
// The end of tree_attention: the tail of each row in order of position, folded onto what the common pass
// found.
//
// A block has a node and at most 8 query heads of a KV head at a time, a warp each. The node's ancestors are
// looked up in its mask and stand at the positions that they will have once accepted. Keys and values of at
// most 48 positions lie in shared memory; a lane scores two of the positions, then owns pairs of output
// dimensions and adds the values in order of position. float, which has no common pass, reduces its chunks
// here in the same way. Codes of float8 are read as numbers; their scales multiply the scores and the
// weights. The logit of a sink is folded on last.
#include <cuda_runtime.h>

#include <type_traits>

#include "common/float8.h"
#include "cuda/attention/partials.cuh"
#include "cuda/attention/tile.cuh"
#include "cuda/device/warp.cuh"

namespace eagle::cuda {

inline constexpr int kFinishWarps = 8;

// Queries of T, keys and values of C.
template <class T, class C, int kHeadDim>
struct FinishShared {
  static constexpr bool kCodes = std::is_same_v<C, float8_t>;
  static constexpr int kPositions = sizeof(T) == 4 ? 32 : 48;  // positions at a time
  static constexpr int kVector = 16 / static_cast<int>(sizeof(C));
  static constexpr int kPieces = kHeadDim / kVector;
  static constexpr int kPitch = kPieces | 1;  // odd: lanes that read one piece of adjacent rows meet no
                                              // bank conflict
  static constexpr int kScores = sizeof(T) == 4 ? kChunk : 64;

  uint4 keys[kPositions * kPitch], values[kPositions * kPitch];
  float query[kFinishWarps][kHeadDim];
  float score[kFinishWarps][kScores];
  CacheSlot slots[kPositions];
  int rows[kPositions];
  float k_scale[kCodes ? kPositions : 1], v_scale[kCodes ? kPositions : 1];  // 0 where there is no row
};

// What one block does at a time, kFinishWarps query heads of the KV head's group.
struct FinishTask {
  int request, node, kv_head, head_block;
};

// All but pages, a tensor's scales and sinks may have been written in the same launch.
template <class T, class C, int kHeadDim>
class Finish {
 public:
  using Shared = FinishShared<T, C, kHeadDim>;
  static constexpr bool kCodes = Shared::kCodes;
  static constexpr int kPairs = (kHeadDim + 63) / 64;  // pairs of dimensions of a lane
  static constexpr int kBatch = kPairs <= 2 ? 8 : 4;   // partials on their way at a time
  using Out = float[kPairs][2];

  __device__ __forceinline__ Finish(const AttendParams& p, const Plan& plan, Shared& shared)
      : p_(p), plan_(plan), shared_(shared) {}

  // Whole block, of at least min(group, kFinishWarps) warps: what needs no partial of the common pass.
  // `shared` is free before and behind it only with a barrier of the caller's.
  __device__ __forceinline__ void tail(const FinishTask& task) {
    request_ = task.request;
    node_ = task.node;
    kv_head_ = task.kv_head;
    head_ = task.head_block * kFinishWarps + warp_id();
    works_ = false;
    nodes_ = request_nodes(p_, request_);
    if (node_ >= nodes_) return;
    prefix_ = request_prefix(p_, request_);
    span_ = node_span(p_, request_, node_, prefix_);
    works_ = warp_id() < kFinishWarps && head_ < plan_.group;  // the others help to load
    load_query();
    total_ = no_keys();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) out_[i][0] = out_[i][1] = 0.0f;
    if constexpr (std::is_same_v<T, float>) reduce_chunks();
    reduce(max(span_.limit, span_.begin), span_.position + 1, tail_, tail_out_);
  }

  // Then, once the common pass of the request and KV head is over; no barrier.
  __device__ __forceinline__ void fold_and_write() {
    if (!works_) return;
    if constexpr (!std::is_same_v<T, float>) fold_partials();
    fold_into(total_, out_, tail_, tail_out_);
    if (p_.sinks) fold_into(total_, out_, {load_read_only(p_.sinks + query_head()), 1.0f}, Out{});
    if (!std::is_same_v<T, float> && !trunk_is_chain()) spoil();
    write();
  }

  __device__ __forceinline__ void run(const FinishTask& task) {
    tail(task);
    fold_and_write();
  }

 private:
  __device__ __forceinline__ int query_head() const { return kv_head_ * plan_.group + head_; }
  static __device__ __forceinline__ int dimension(int pair) { return 2 * lane_id() + 64 * pair; }

  __device__ __forceinline__ void fold_into(Stats& a, Out& x, const Stats& b, const Out& y) const {
    const Fold f = fold(a, b);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) x[i][j] = f(x[i][j], y[i][j]);
  }

  // The common pass takes ancestors for granted at the slots of their depths. A tree that branches more than
  // 31 levels above a node breaks that; its rows become NaN rather than wrong.
  __device__ __forceinline__ bool trunk_is_chain() const {
    const int depth = span_.limit - prefix_;
    int missing = 0;
    for (int word = 0; 32 * word < depth; ++word) {
      const uint32_t wanted = depth - 32 * word >= 32 ? ~0u : (1u << (depth - 32 * word)) - 1;
      missing += __popc(wanted & ~mask_word(p_, request_, node_, word));
    }
    return missing == 0 || span_.begin >= span_.limit;
  }
  __device__ __forceinline__ void spoil() {
    total_ = {bits_float(0x7fc00000u), 1.0f};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) out_[i][0] = out_[i][1] = bits_float(0x7fc00000u);
  }

  // ---- what the common pass left -------------------------------------------------------------------------

  __device__ __forceinline__ void read_partial(int slot, Stats& stats, Out& out) const {
    const Partials partials = partials_at(p_, plan_);
    const int64_t index = partial_index(p_, plan_, request_, kv_head_, slot, node_ * plan_.group + head_);
    stats = load(partials.stats + index);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int d = dimension(i);
      const float2 x = d < kHeadDim
                           ? load(reinterpret_cast<const float2*>(partials.out + index * kHeadDim + d))
                           : float2{};
      out[i][0] = x.x, out[i][1] = x.y;
    }
  }

  __device__ __forceinline__ void fold_partials() {
    if (span_.begin >= span_.limit) return;
    const Units units = request_units(plan_, prefix_, p_.first_node + nodes_, p_.window);
    if (plan_.splits == 1) return read_partial(0, total_, out_);
    const int first = units.at(span_.begin), last = units.at(span_.limit - 1);
    Stats group = no_keys();
    Out group_out{};
    for (int base = first; base <= last; base += kBatch) {
      Stats stats[kBatch];
      Out x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        stats[i] = no_keys();
        if (base + i <= last) read_partial(base + i - units.first, stats[i], x[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = base + i;
        fold_into(group, group_out, stats[i], x[i]);
        const bool chunks = units.log2_size == kLog2Chunk;
        if (chunks && unit % kGroupChunks != kGroupChunks - 1 && unit < last) continue;
        fold_into(total_, out_, group, group_out);
        group = no_keys();
      }
    }
  }

  __device__ __forceinline__ void reduce_chunks() {
    Stats group = no_keys();
    Out group_out{};
    for (int chunk = span_.begin / kChunk; chunk * kChunk < span_.limit; ++chunk) {
      Stats stats;
      Out x;
      reduce(max(chunk * kChunk, span_.begin), min((chunk + 1) * kChunk, span_.limit), stats, x);
      fold_into(group, group_out, stats, x);
      if (chunk % kGroupChunks != kGroupChunks - 1 && (chunk + 1) * kChunk < span_.limit) continue;
      fold_into(total_, out_, group, group_out);
      group = no_keys();
    }
  }

  // ---- keys in order of position -------------------------------------------------------------------------

  __device__ __forceinline__ void load_query() {
    if (!works_) return;
    const T* const q = static_cast<const T*>(p_.q) + request_ * p_.q_strides[0] + node_ * p_.q_strides[1] +
                       query_head() * p_.q_strides[2];
    for (int d = lane_id(); d < kHeadDim; d += kWarpSize) shared_.query[warp_id()][d] = to_float(load(q + d));
  }

  // The cache slots of the positions from `first` on, for the whole block.
  __device__ __forceinline__ void find_slots(int first, int count) {
    if (warp_id() == 0) {
      for (int j = lane_id(); j < count; j += kWarpSize) shared_.rows[j] = first + j;
      __syncwarp();
      int position = prefix_;  // of the word's lowest ancestor
      for (int word = 0; word <= (p_.first_node + node_) / 32; ++word) {
        const uint32_t bits = mask_word(p_, request_, node_, word);
        const int mine = position + __popc(bits & ((1u << lane_id()) - 1)) - first;
        if ((bits >> lane_id() & 1) && mine >= 0 && mine < count)
          shared_.rows[mine] = prefix_ + 32 * word + lane_id();
        position += __popc(bits);
      }
      __syncwarp();
      for (int j = lane_id(); j < count; j += kWarpSize) {
        const CacheSlot slot = cache_slot(p_.cache, request_, shared_.rows[j]);
        shared_.slots[j] = slot;
        if constexpr (kCodes) {
          const bool present = slot.page >= 0;
          shared_.k_scale[j] = present ? load(k_scale_at(p_.cache, slot, kv_head_)) : 0.0f;
          shared_.v_scale[j] = present ? load(v_scale_at(p_.cache, slot, kv_head_)) : 0.0f;
        }
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_tile(uint4* tile, bool values, int count) const {
    const C* const base = static_cast<const C*>(values ? p_.cache.v : p_.cache.k);
    for (int i = static_cast<int>(threadIdx.x); i < count * Shared::kPieces;
         i += static_cast<int>(blockDim.x)) {
      const int row = i / Shared::kPieces, piece = i % Shared::kPieces;
      const CacheSlot slot = shared_.slots[row];
      const bool present = slot.page >= 0;
      const int64_t offset = !present ? 0
                             : values ? v_offset(p_.cache, slot, kv_head_)
                                      : k_offset(p_.cache, slot, kv_head_);
      copy_piece(tile + row * Shared::kPitch + piece, base + offset + piece * Shared::kVector * int{present},
                 present, plan_.vectors);
    }
    copy_async_commit();
  }

  // Dimension d is summed in sum[d % 8], or of four; these pairwise.
  __device__ __forceinline__ float dot(const uint4* key, const float* query) const {
    constexpr int kVector = Shared::kVector, kSums = kVector < 8 ? kVector : 8;
    float sum[kSums] = {};
#pragma unroll(kCodes ? 1 : 2)
    for (int piece = 0; piece < Shared::kPieces; ++piece) {
      C x[kVector];
      const uint4 raw = key[piece];
      unpack(raw, x);
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        sum[i % kSums] = fma(query[piece * kVector + i], to_float(x[i]), sum[i % kSums]);
    }
#pragma unroll
    for (int half = kSums / 2; half > 0; half /= 2)
#pragma unroll
      for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
    return sum[0];
  }
  static __device__ __forceinline__ void unpack(const uint4& raw, float (&x)[4]) {
    x[0] = bits_float(raw.x), x[1] = bits_float(raw.y), x[2] = bits_float(raw.z), x[3] = bits_float(raw.w);
  }
  template <class Half>
  static __device__ __forceinline__ void unpack(const uint4& raw, Half (&x)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i].bits = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
  }
  static __device__ __forceinline__ void unpack(const uint4& raw, float8_t (&x)[16]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i].bits = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
  }

  // Everything about the positions [begin, end), at most kScores, from empty.
  __device__ __forceinline__ void reduce(int begin, int end, Stats& stats, Out& out) {
    constexpr int kPositions = Shared::kPositions;
    const int count = end - begin, lane = lane_id();
    const bool together = count <= kPositions;
    float* const score = shared_.score[warp_id() % kFinishWarps];  // of who has none, unused
    float highest = minus_infinity();
    for (int first = 0; first < count; first += kPositions) {
      const int positions = min(kPositions, count - first);
      find_slots(begin + first, positions);
      load_tile(shared_.keys, false, positions);
      if (together) {
        load_tile(shared_.values, true, positions);
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      __syncthreads();
      for (int j = lane; works_ && j < positions; j += kWarpSize) {
        const bool present = shared_.slots[j].page >= 0;
        float s = dot(shared_.keys + j * Shared::kPitch, shared_.query[warp_id()]) * p_.softmax_scale;
        if constexpr (kCodes) s *= shared_.k_scale[j];
        if (p_.logit_softcap > 0.0f) s = soft_cap(s, p_.logit_softcap);
        score[first + j] = present ? s : minus_infinity();
        highest = max(highest, score[first + j]);
      }
      if (!together) __syncthreads();
    }
    highest = warp_reduce(highest, [](float a, float b) { return max(a, b); });
    const float shift = shift_of(highest);
    for (int j = lane; works_ && j < count; j += kWarpSize) score[j] = exp_f32(score[j] - shift);
    __syncwarp();

    stats = {highest, 0.0f};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) out[i][0] = out[i][1] = 0.0f;
    for (int first = 0; first < count; first += kPositions) {
      const int positions = min(kPositions, count - first);
      if (!together) {
        find_slots(begin + first, positions);
        load_tile(shared_.values, true, positions);
      }
      copy_async_wait<0>();
      __syncthreads();
      for (int j = 0; works_ && j < positions; ++j) {
        float weight = score[first + j];
        stats.sum += weight;
        if constexpr (kCodes) weight *= shared_.v_scale[j];
        const C* const value = reinterpret_cast<const C*>(shared_.values + j * Shared::kPitch);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int d = dimension(i);
          if (d >= kHeadDim) continue;
          const Pair<C> x = *reinterpret_cast<const Pair<C>*>(value + d);
          out[i][0] = fma(weight, to_float(x.low), out[i][0]);
          out[i][1] = fma(weight, to_float(x.high), out[i][1]);
        }
      }
      if (!together) __syncthreads();
    }
    __syncthreads();
  }

  template <class E>
  struct alignas(2 * sizeof(E)) Pair {
    E low, high;
  };

  // ---- results -------------------------------------------------------------------------------------------

  __device__ __forceinline__ void write() const {
    const int head = query_head();
    const float divisor = total_.sum == 0.0f ? 1.0f : total_.sum;
    T* const to = static_cast<T*>(p_.out) + request_ * p_.out_strides[0] + node_ * p_.out_strides[1] +
                  head * p_.out_strides[2];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int d = dimension(i);
      if (d >= kHeadDim) continue;
      const bool none = total_.sum == 0.0f;
      const Pair<T> x{from_float<T>(none ? 0.0f : out_[i][0] / divisor),
                      from_float<T>(none ? 0.0f : out_[i][1] / divisor)};
      if (plan_.pairs) {
        store(reinterpret_cast<Pair<T>*>(to + d), x);
      } else {
        store(to + d, x.low);
        store(to + d + 1, x.high);
      }
    }
    if (p_.lse && lane_id() == 0)
      store(p_.lse + (int64_t{request_} * p_.max_nodes + node_) * p_.num_heads + head,
            total_.sum == 0.0f ? minus_infinity() : total_.max + log_f32(total_.sum));
  }

  const AttendParams& p_;
  const Plan& plan_;
  Shared& shared_;
  int request_, nodes_, node_, kv_head_, head_, prefix_;
  bool works_;  // the warp has a head, and the node exists
  Span span_;
  Stats total_, tail_;
  Out out_, tail_out_;
};

}  // namespace eagle::cuda
