#pragma once
// The passes over one row of logits at temperature > 0.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/exp_sum.h"
#include "cuda/sampling/block_search.cuh"
#include "cuda/sampling/noise.cuh"
#include "cuda/sampling/row.cuh"
#include "cuda/sampling/settings.cuh"
#include "cuda/sampling/state.cuh"
#include "cuda/sampling/support.cuh"

namespace eagle::cuda {

// kThreads = 32 is for rows of at most one round, which need no buckets. kExtended: with what a state asks
// for.
template <int kThreads, bool kExtended>
struct SamplingMemory {
  static constexpr bool kWithBuckets = kThreads > kWarpSize;
  static constexpr uint32_t kCapacity = kWithBuckets ? cuda::kCapacity : kThreads * 8;

  struct Nothing {};
  union {
    std::conditional_t<kWithBuckets, BucketTable, Nothing> buckets;
    uint64_t list[kCapacity];                          // order_key << 32 | token
    uint32_t counts[kWithBuckets ? 3 : 1][kCapacity];  // of one key each, by range
    uint32_t keys[kCapacity];                          // in place of the first range's counts
  };
  __device__ __forceinline__ uint32_t* bins() {
    if constexpr (kWithBuckets) return buckets.bins;
    return nullptr;
  }

  Settings settings;
  std::conditional_t<kExtended, RowState<kThreads>, Nothing> state;
  BlockScratch<kThreads> scratch;
  KeyRange ends[2];  // where top-p may end: whose keys are counted, if countable
  uint32_t listed;
  uint32_t limit;                          // Trial
  uint32_t ties[2][kThreads / kWarpSize];  // of a vector, by warp; two turns
};

template <class T, int kThreads, bool kExtended>
struct RowPasses {
  using Memory = SamplingMemory<kThreads, kExtended>;
  static constexpr uint32_t kCapacity = Memory::kCapacity;

  const Row<T>& row;
  Settings s;
  Memory& shared;
  float z_max;

  // -0 as 0; of a -inf it stays one.
  __device__ __forceinline__ float scaled(float logit) const { return logit / s.temperature + 0.0f; }

  // for_each_vector with the state applied.
  template <class Body>
  __device__ __forceinline__ void for_each_logit(Body&& body) const {
    for_each_vector<kThreads>(row, [&](const auto& untouched, uint32_t first, int j) {
      if constexpr (kExtended) {
        float x[Row<T>::kPerVector];
#pragma unroll
        for (int i = 0; i < Row<T>::kPerVector; ++i) x[i] = untouched[i];
        shared.state.apply(x, first);
        body(x, first, j);
      } else {
        body(untouched, first, j);
      }
    });
  }

  // ---- the choice --------------------------------------------------------------------------------------

  // Which tokens take part, by their key: those below `below`; of those from `below` to `listed_last`, listed
  // for later if `gather`; of those at `below`, the first `ties` in token order.
  struct Part {
    uint32_t below;
    bool gather;
    uint32_t listed_last;
    uint32_t ties;
  };

  // Before the row is read: all threads have left what shared memory held.
  __device__ __forceinline__ void clear_list() const {
    __syncthreads();
    if (threadIdx.x == 0) shared.listed = 0, shared.limit = ~0u;
    __syncthreads();
  }
  // Before a choice: one token with z_max takes part, whatever its noise.
  __device__ __forceinline__ Trial trial() const {
    return {s.seed, s.position, fmaxf(z_max + kMinGumbel, kLowestFloat), ~uint64_t{0}, &shared.limit};
  }

  __device__ __forceinline__ void list(uint32_t key, uint32_t token) const {
    const uint32_t at = atomicAdd(&shared.listed, 1u);
    if (at < kCapacity) shared.list[at] = static_cast<uint64_t>(key) << 32 | token;
  }

  __device__ __forceinline__ void list_key(uint32_t key) const {
    const uint32_t at = atomicAdd(&shared.listed, 1u);
    if (at < kCapacity) shared.keys[at] = key;
  }

  // min-p, after a cheap test that spares most tokens the exponential. e has 24 bits: 1e-3 is far beyond its
  // rounding.
  __device__ __forceinline__ bool likely_enough(float z, float floor) const {
    const float d = z - z_max;
    return d >= floor && exp_f32(d) >= s.min_p;
  }
  __device__ __forceinline__ float min_p_floor() const { return log_f32(s.min_p) - 1e-3f; }

  __device__ __forceinline__ void choose(const Part& part, Trial& trial) const {
    const float floor = s.min_p > 0.0f ? min_p_floor() : 0.0f;
    uint32_t ties_before = 0, turn = 0;
    for_each_logit([&](const auto& x, uint32_t first, int j) {
      constexpr int kCount = Row<T>::kPerVector;
      float z[kCount];
      uint32_t tied = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        z[i] = scaled(x[i]);
        const uint32_t key = order_key(z[i]);
        if (part.gather && key >= part.below && key <= part.listed_last) list(key, first + i);
        if (key == part.below && part.ties > 0) tied |= 1u << i;
        if (key >= part.below || (s.min_p > 0.0f && !likely_enough(z[i], floor))) z[i] = -kInfinity;
      }
      if (part.ties > 0 && ties_before < part.ties) {  // the same in every thread
        uint32_t before = rank_ties(__popc(tied), turn, ties_before);
        const float z_tied = from_order_key(part.below);
        const bool likely = s.min_p == 0.0f || likely_enough(z_tied, floor);
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          if (tied >> i & 1) {
            if (before < part.ties && likely) z[i] = z_tied;
            ++before;
          }
      }
      if (j == 0) trial.listen();
      trial.try_tokens(z, first);
    });
  }

  // Of `mine` ties in this thread's vector: how many stand before them in the row. Adds the block's to `all`.
  __device__ __forceinline__ uint32_t rank_ties(uint32_t mine, uint32_t& turn, uint32_t& all) const {
    const uint32_t inclusive = warp_inclusive_sum(mine);
    uint32_t* const ties = shared.ties[turn++ % 2];  // the other turn's words may still be read
    if (lane_id() == kWarpSize - 1) ties[warp_id()] = inclusive;
    __syncthreads();
    uint32_t before = all + inclusive - mine;
    for (int w = 0; w < kThreads / kWarpSize; ++w) {
      const uint32_t n = ties[w];
      if (w < warp_id()) before += n;
      all += n;
    }
    return before;
  }

  __device__ __forceinline__ uint32_t winner(const Trial& trial) const {
    return static_cast<uint32_t>(block_min<kThreads>(trial.best, shared.scratch));
  }

  // ---- the boundary among listed tokens ----------------------------------------------------------------

  // Tries those of the list that are within top-k and top-p. `range`: what stands before the list. `total`:
  // the mass that top-p is a part of; 0 for that of the list, within top-k unless joint.
  __device__ __forceinline__ void choose_listed(const KeyRange& range, uint64_t total, Trial& trial) const {
    __syncthreads();
    const uint32_t n = min(shared.listed, kCapacity);
    const uint64_t* const list = shared.list;
    block_sort<kThreads>(shared.list, n);
    const auto mass = [&](uint32_t i) { return key_mass(static_cast<uint32_t>(list[i] >> 32), z_max); };

    uint32_t kept = n;
    if (s.top_k > 0) {
      const uint64_t left = s.top_k > range.tokens_before ? s.top_k - range.tokens_before : 0;
      kept = static_cast<uint32_t>(min(uint64_t{n}, left));
    }
    if (s.top_p < 1.0f && kept > 0) {
      const uint32_t among = s.joint ? n : kept;
      if (total == 0) {
        for (uint32_t i = threadIdx.x; i < among; i += kThreads) total += mass(i);
        total = block_sum<kThreads>(total, shared.scratch);
      }
      const Crossing c = find_crossing<kThreads>(among, range.mass_before, top_p_target(s.top_p, total), mass,
                                                 shared.scratch);
      kept = min(kept, c.index + 1);
    }
    const float floor = s.min_p > 0.0f ? min_p_floor() : 0.0f;
    trial.listen();
    for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
      const float z = from_order_key(static_cast<uint32_t>(list[i] >> 32));
      if (s.min_p > 0.0f && !likely_enough(z, floor)) continue;
      trial.try_token(z, static_cast<uint32_t>(list[i]));
    }
  }

  // ---- passes that count -------------------------------------------------------------------------------

  // Tokens and mass of the buckets, over the keys of `range`.
  __device__ __forceinline__ void fill(Buckets<kThreads>& b, const KeyRange& range) const {
    BucketCounter counter{b.table, 0, 0, 0};
    for_each_logit([&](const auto& x, uint32_t, int) {
#pragma unroll
      for (int i = 0; i < Row<T>::kPerVector; ++i) {
        const float z = scaled(x[i]);
        const uint32_t key = order_key(z);
        if (range.contains(key)) counter.add(b.bucket_of(key), fixed_mass(exp_f32(z - z_max)));
      }
    });
    counter.flush();
    __syncthreads();
  }

  // A pass over the tokens of three ranges, any of which may have none. Of `range` the keys are listed, or
  // its tokens are counted by key >> bits; those of `ends` are counted by key.
  struct Survey {
    KeyRange range;
    bool listed;
    int bits;
    uint32_t* counts;
  };

  // For the next survey; all threads have left what stood here.
  __device__ __forceinline__ void set_ends(const KeyRange& first, const KeyRange& second) const {
    __syncthreads();
    if (threadIdx.x == 0) shared.ends[0] = first, shared.ends[1] = second;
  }

  __device__ __forceinline__ void survey(const Survey& v) const {
    clear_list();
    const KeyRange a = shared.ends[0], b = shared.ends[1];
    const bool with_a = a.countable(), with_b = b.countable();
    if (v.range.tokens > 0 && !v.listed) clear_counts(v.counts, (v.range.last - v.range.first) >> v.bits);
    if (with_a) clear_counts(shared.counts[1], a.last - a.first);
    if (with_b) clear_counts(shared.counts[2], b.last - b.first);
    __syncthreads();
    BinCounter counter{v.counts, 0, 0}, counter_a{shared.counts[1], 0, 0}, counter_b{shared.counts[2], 0, 0};
    for_each_logit([&](const auto& x, uint32_t, int) {
#pragma unroll
      for (int i = 0; i < Row<T>::kPerVector; ++i) {
        const uint32_t key = order_key(scaled(x[i]));
        if (v.range.tokens > 0 && v.range.contains(key)) {
          if (v.listed)
            list_key(key);
          else
            counter.add((key - v.range.first) >> v.bits);
        }
        if (with_a && a.contains(key)) counter_a.add(key - a.first);
        if (with_b && b.contains(key)) counter_b.add(key - b.first);
      }
    });
    counter.flush();
    counter_a.flush();
    counter_b.flush();
    __syncthreads();
  }
  __device__ __forceinline__ void clear_counts(uint32_t* counts, uint32_t last) const {
    for (uint32_t i = threadIdx.x; i <= last; i += kThreads) counts[i] = 0;
  }

  // The mass of the first top_k tokens, the last of them in `range`, which has been surveyed.
  __device__ __forceinline__ uint64_t survivors_mass(const KeyRange& range) const {
    const uint32_t* const counts = shared.counts[0];
    const uint64_t left = s.top_k - range.tokens_before;
    uint64_t sum = 0;
    if (range.few()) {
      const uint32_t n = min(shared.listed, kCapacity);
      block_sort<kThreads>(shared.keys, n);
      for (uint32_t i = threadIdx.x; i < min(uint64_t{n}, left); i += kThreads)
        sum += key_mass(shared.keys[i], z_max);
    } else {
      const Crossing c = find_crossing<kThreads>(
          range.keys(), 0, left, [&](uint32_t i) { return uint64_t{counts[i]}; }, shared.scratch);
      for (uint32_t i = threadIdx.x; i <= c.index; i += kThreads)
        sum += (i < c.index ? counts[i] : left - c.before) * key_mass(range.first + i, z_max);
    }
    return range.mass_before + block_sum<kThreads>(sum, shared.scratch);
  }
};

}  // namespace eagle::cuda
