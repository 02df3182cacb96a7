#pragma once
// Which passes a row needs at temperature > 0: how top-k and top-p narrow down to one token.
//
// Reads of the row, the first pass included:
//   1  temperature alone; top-k and top-p of a row that fits in shared memory as a whole
//   2  min-p alone; the tokens that matter, or those down to top-k's last bin, fit in shared memory
//   3  top-p of a flatter row, or a large top-k: buckets, then the choice
//   4  more than kCapacity tokens share the bucket with the boundary (ties): its keys are counted before the
//      choice; or top-p of what a large top-k leaves: the mass of that is measured before the choice
//   5  both, where the bounds of that mass do not agree in which bucket top-p ends
// A row of more than kOneSplitVocab tokens may need more.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/sampling/row_passes.cuh"

namespace eagle::cuda {

template <class T, int kThreads>
struct RowSampler : RowPasses<T, kThreads> {
  using Passes = RowPasses<T, kThreads>;
  using Passes::choose;
  using Passes::choose_listed;
  using Passes::clear_list;
  using Passes::fill;
  using Passes::s;
  using Passes::shared;
  using Passes::survey;
  using Passes::survivors_mass;
  using Passes::trial;
  using Passes::winner;
  using Passes::z_max;
  using typename Passes::Memory;
  using typename Passes::Part;
  using typename Passes::Survey;

  // What `choose` is to do, and for a list what stands before it and the mass that top-p is a part of.
  struct Boundary {
    Part part;
    KeyRange range;
    uint64_t total;
  };

  // After the first pass has counted the tokens of every bin. At most two more passes (three in rare cases
  // named below) before the choice.
  __device__ __forceinline__ Boundary find_boundary() {
    Boundary found{{~0u, false, 0, 0}, {}, 0};
    Buckets<kThreads> b{shared.buckets, shared.scratch, order_key(z_max) >> kKeyBits,
                        last_bin_that_matters(z_max), 0};
    const auto tokens = [&](uint32_t i) { return uint64_t{b.table.bins[b.first_bin + i]}; };
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i <= b.last_bin - b.first_bin; i += kThreads) sum += tokens(i);
    sum = block_sum<kThreads>(sum, shared.scratch);
    if (s.top_k >= sum) s.top_k = 0;  // takes away nothing that matters
    if (s.top_k == 0 && s.top_p == 1.0f) return found;

    const bool total_of_all = s.top_p < 1.0f && (s.joint || s.top_k == 0);
    if (s.top_k > 0 &&
        !total_of_all) {  // what lies beyond the bin of the last survivor does not matter either
      const Crossing c =
          find_crossing<kThreads>(b.last_bin - b.first_bin + 1, 0, s.top_k, tokens, shared.scratch);
      sum = c.before + tokens(c.index);
      b.last_bin = b.first_bin + c.index;
    }
    const KeyRange all{b.first_bin << kKeyBits,
                       b.last_bin << kKeyBits | ((1u << kKeyBits) - 1),
                       static_cast<uint32_t>(sum),
                       0,
                       0,
                       0};
    KeyRange& range = found.range = all;
    if (!all.few()) {
      __syncthreads();
      b.share_out(all.tokens);
      find_in_buckets(b, all, total_of_all, found);
    }
    if (range.few())
      found.part = {range.first, true, range.last, 0};
    else
      found.part = find_key(range, found.total);
    return found;
  }

  // Narrows `found.range` to one that fits: few tokens, or few keys, which then are counted.
  __device__ __forceinline__ void find_in_buckets(Buckets<kThreads>& b, const KeyRange& all,
                                                  bool total_of_all, Boundary& found) {
    enum class Pass { kBuckets, kSurvivors, kBins, kKeys } pass = Pass::kBuckets;
    bool whole = true;  // the buckets are those of `all`
    KeyRange& range = found.range;
    KeyRange least{}, most{};  // buckets of top-p's end for the least and the most mass that top-k may leave
    Survey v{};
    for (;;) {
      if (pass == Pass::kBuckets) {
        fill(b, range);
        if (total_of_all && whole) found.total = b.total_mass();
        range = find_bucket(b, range, found.total);
        if (!range.fits()) {  // not in rows up to kOneSplitVocab
          b.zoom(range);
          whole = false;
          continue;
        }
        v = {};
        if (s.top_p == 1.0f || found.total > 0) {
          if (range.few()) return;
          v.second = range;
          pass = Pass::kKeys;
        } else {  // top-p of what top-k leaves
          v.first = range, v.listed = range.few(), v.counts = shared.exact.other_counts;
          if (whole) find_top_p_buckets(b, range, all, least, most);
          if (whole && least.first == most.first && !least.few() && least.fits()) v.second = least;
          pass = Pass::kSurvivors;
        }
      } else {
        survey(v);
        if (pass == Pass::kKeys) return;
        if (pass == Pass::kSurvivors) {
          found.total = survivors_mass(v.first);
          s.top_k = 0;  // top-p ends within what it leaves
          range = between(least, most, top_p_target(s.top_p, found.total));
          if (whole && range.fits()) {
            if (range.few() || range.first == v.second.first) return;
            v = {};
            v.second = range;
            pass = Pass::kKeys;
          } else {
            v = {{0, ~0u, 1, 0, 0, 0}, false, kKeyBits, b.table.bins, {}};
            pass = Pass::kBins;
          }
        } else {
          b.share_out(all.tokens);
          range = all;
          whole = true;
          pass = Pass::kBuckets;
        }
      }
    }
  }

  // The bucket within `range` in which the order of tokens reaches top-k or, once its target is known, top-p:
  // the earlier of the two.
  __device__ __forceinline__ KeyRange find_bucket(const Buckets<kThreads>& b, const KeyRange& range,
                                                  uint64_t total) const {
    KeyRange found = range;
    if (s.top_k > 0) found = b.find_token(s.top_k, range);
    if (s.top_p == 1.0f || total == 0) return found;
    const KeyRange other = b.find_mass(top_p_target(s.top_p, total), range);
    return s.top_k == 0 || other.first < found.first ? other : found;
  }

  // The mass that top-k leaves is known but for that of its last tokens, in `last`; the bounds of that mostly
  // agree in which bucket top-p ends. exp_f32 need not be monotone, hence 2^-20.
  __device__ __forceinline__ void find_top_p_buckets(const Buckets<kThreads>& b, const KeyRange& last,
                                                     const KeyRange& all, KeyRange& least,
                                                     KeyRange& most) const {
    const uint64_t left = s.top_k - last.tokens_before;
#pragma unroll 1
    for (int end = 0; end < 2; ++end) {
      const uint64_t mass = left * key_mass(end ? last.first : last.last, z_max);
      const uint64_t bound = last.mass_before + (end ? mass + (mass >> 20) + left : mass - (mass >> 20));
      most = b.find_mass(top_p_target(s.top_p, bound), all);
      if (!end) least = most;
    }
  }

  // The bucket of the two in which the mass reaches `target`, or what lies between them.
  __device__ __forceinline__ KeyRange between(const KeyRange& a, const KeyRange& b, uint64_t target) const {
    if (target <= a.mass_before + a.mass || a.first == b.first) return a;
    if (target > b.mass_before) return b;
    const uint64_t before = a.tokens_before + a.tokens;
    return {a.last + 1, b.first - 1, static_cast<uint32_t>(b.tokens_before - before),
            0,          before,      a.mass_before + a.mass};
  }

  // The key at the boundary, and how many of its tokens are inside, in `range`, whose keys have been counted.
  __device__ __forceinline__ Part find_key(const KeyRange& range, uint64_t total) const {
    const uint32_t* const counts = shared.exact.counts;
    uint32_t index = ~0u, ties = 0;
    if (s.top_k > 0) {
      const Crossing c = find_crossing<kThreads>(
          range.keys(), range.tokens_before, s.top_k, [&](uint32_t i) { return uint64_t{counts[i]}; },
          shared.scratch);
      index = c.index;
      ties = static_cast<uint32_t>(min(uint64_t{counts[index]}, s.top_k - c.before));
    }
    if (s.top_p < 1.0f) {
      const auto mass = [&](uint32_t i) { return counts[i] * key_mass(range.first + i, z_max); };
      const uint64_t target = top_p_target(s.top_p, total);
      const Crossing c =
          find_crossing<kThreads>(range.keys(), range.mass_before, target, mass, shared.scratch);
      const uint64_t each = max(uint64_t{1}, key_mass(range.first + c.index, z_max));
      const uint64_t wanted = target > c.before ? (target - c.before + each - 1) / each : 1;
      const uint32_t needed = static_cast<uint32_t>(min(uint64_t{counts[c.index]}, wanted));
      if (c.index < index)
        index = c.index, ties = needed;
      else if (c.index == index)
        ties = min(ties, needed);
    }
    const bool whole = ties == counts[index];
    return {range.first + index + (whole ? 1 : 0), false, 0, whole ? 0 : ties};
  }

  // The token of a row whose largest z is finite or +inf. `listed`, `counted`: what the first pass has done.
  __device__ __forceinline__ uint32_t sample(bool listed, bool counted) {
    Boundary found{{~0u, false, 0, 0}, {0, ~0u, 0, 0, 0, 0}, 0};
    if (z_max == kInfinity)  // beats every noise: the lowest token that has it
      s.min_p = 0.0f, listed = false;
    else if constexpr (Memory::kWithBuckets)
      if (counted) found = find_boundary();
    Trial t = trial();
    if (!listed) {
      clear_list();
      choose(found.part, t);
    }
    if (listed || found.part.gather) choose_listed(found.range, found.total, t);
    return winner(t);
  }
};

}  // namespace eagle::cuda
