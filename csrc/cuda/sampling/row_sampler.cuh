#pragma once
// Which passes a row needs at temperature > 0: how top-k and top-p narrow down to one token.
//
// Reads of the row, the first pass included:
//   1  temperature alone; top-k and top-p of a row that fits in shared memory as a whole
//   2  min-p alone; the tokens that matter, or those down to top-k's last bin, fit in shared memory
//   3  top-p of a flatter row, or a large top-k: buckets, then the choice
//   4  more than kCapacity tokens share the bucket with the boundary (ties): its keys are counted before the
//      choice; or top-p of what a large top-k leaves: the mass of that is measured before the choice, and in
//      the same pass the keys of the buckets are counted in which top-p may end
// A row of more than kOneSplitVocab tokens may need more.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/sampling/row_passes.cuh"

namespace eagle::cuda {

template <class T, int kThreads, bool kExtended>
struct RowSampler : RowPasses<T, kThreads, kExtended> {
  using Passes = RowPasses<T, kThreads, kExtended>;
  using Passes::choose;
  using Passes::choose_listed;
  using Passes::clear_list;
  using Passes::fill;
  using Passes::s;
  using Passes::set_ends;
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
    const uint32_t* counts;  // of the keys of `range`, if not few
  };

  // After the first pass has counted the tokens of every bin. At most two more passes before the choice.
  __device__ __forceinline__ Boundary find_boundary() {
    Boundary found{{~0u, false, 0, 0}, {}, 0, nullptr};
    Buckets<kThreads> b{shared.buckets, shared.scratch, order_key(z_max), last_key_that_matters(z_max), 0};
    const auto tokens = [&](uint32_t i) { return uint64_t{b.table.bins[b.first_bin() + i]}; };
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i <= b.last_bin() - b.first_bin(); i += kThreads) sum += tokens(i);
    sum = block_sum<kThreads>(sum, shared.scratch);
    if (s.top_k >= sum) s.top_k = 0;  // takes away nothing that matters
    if (s.top_k == 0 && s.top_p == 1.0f) return found;

    const bool total_of_all = s.top_p < 1.0f && (s.joint || s.top_k == 0);
    if (s.top_k > 0 &&
        !total_of_all) {  // what lies beyond the bin of the last survivor does not matter either
      const Crossing c =
          find_crossing<kThreads>(b.last_bin() - b.first_bin() + 1, 0, s.top_k, tokens, shared.scratch);
      sum = c.before + tokens(c.index);
      b.last_key = min(b.last_key, (b.first_bin() + c.index) << kKeyBits | ((1u << kKeyBits) - 1));
    }
    const KeyRange all{b.first_key, b.last_key, static_cast<uint32_t>(sum), 0, 0, 0};
    KeyRange& range = found.range = all;
    if (!all.few()) {
      __syncthreads();
      b.share_out(all.tokens);
      find_in_buckets(b, all, total_of_all, found);
    }
    if (range.few())
      found.part = {range.first, true, range.last, 0};
    else
      found.part = find_key(range, found.total, found.counts);
    return found;
  }

  // Narrows `found.range` to one that fits: few tokens, or few keys, which then are counted.
  __device__ __forceinline__ void find_in_buckets(Buckets<kThreads>& b, const KeyRange& all,
                                                  bool total_of_all, Boundary& found) {
    enum class Pass { kBuckets, kSurvivors, kBins, kKeys } pass = Pass::kBuckets;
    bool whole = true;  // the buckets are those of `all`
    KeyRange& range = found.range;
    Survey v{};
    for (;;) {
      if (pass == Pass::kBuckets) {
        fill(b, range);
        if (total_of_all && whole) found.total = b.total_mass();
        if (whole) s.top_k = min(s.top_k, b.total_tokens());  // the last bin may hold more than matters
        range = find_bucket(b, range, found.total);
        if (!range.fits()) {  // not in rows up to kOneSplitVocab
          b.zoom(range);
          whole = false;
          continue;
        }
        v = {};
        found.counts = shared.counts[1];
        if (s.top_p == 1.0f || found.total > 0) {
          if (range.few()) return;
          set_ends(range, {});
          pass = Pass::kKeys;
        } else {  // top-p of what top-k leaves
          v.range = range, v.listed = range.few(), v.counts = shared.counts[0];
          if (whole)
            find_ends(b, range, all);
          else
            set_ends({}, {});
          pass = Pass::kSurvivors;
        }
      } else {
        survey(v);
        if (pass == Pass::kKeys) return;
        if (pass == Pass::kSurvivors) {
          found.total = survivors_mass(v.range);
          s.top_k = 0;  // top-p ends within what it leaves
          range = between(shared.ends[0], shared.ends[1], top_p_target(s.top_p, found.total));
          if (whole && range.fits()) {
            if (range.first == shared.ends[1].first) found.counts = shared.counts[2];
            if (range.few() || range.first == shared.ends[0].first || range.first == shared.ends[1].first)
              return;
            v = {};
            set_ends(range, {});
            pass = Pass::kKeys;
          } else {
            v = {{0, ~0u, 1, 0, 0, 0}, false, kKeyBits, b.table.bins};
            set_ends({}, {});
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

  // Where top-p may end within what top-k leaves. The mass of that is known but for the first n tokens of
  // `last`, each of a mass from a down to b, as masses fall with the keys. The mass of `last` bounds theirs,
  // too; it settles it where a - b <= 1.
  //
  // Between the buckets of both bounds lie at most n (a - b) / a <= n tokens, as each has at least a. Even of
  // many n that is few: the bin of `last` has N >= n of the row's V tokens and at most 26 in z that matter,
  // so that `last` is at most 2 * 26 / (N kSplit / V - 3) wide; (a - b) / a is no more, or, as masses are
  // rounded down, no more than twice that.
  static_assert(4 * 27 * kOneSplitVocab / kSplit <= kCapacity);
  __device__ __forceinline__ void find_ends(const Buckets<kThreads>& b, const KeyRange& last,
                                            const KeyRange& all) const {
    const uint64_t left = s.top_k - last.tokens_before, each = key_mass(last.last, z_max);
    const uint64_t spread = key_mass(last.first, z_max) - each, excess = last.mass - last.tokens * each;
    KeyRange least{}, most{};
#pragma unroll 1
    for (int end = 0; end < 2; ++end) {
      const uint64_t more = end || spread <= 1 ? min(left * spread, excess) : 0;
      most = b.find_mass(top_p_target(s.top_p, last.mass_before + left * each + more), all);
      if (!end) least = most;
    }
    set_ends(least, least.first == most.first ? KeyRange{} : most);
  }

  // The bucket of the two, or of the only one, in which the mass reaches `target`, or what lies between them.
  __device__ __forceinline__ KeyRange between(const KeyRange& a, const KeyRange& b, uint64_t target) const {
    if (target <= a.mass_before + a.mass || b.tokens == 0) return a;
    if (target > b.mass_before) return b;
    const uint64_t before = a.tokens_before + a.tokens;
    return {a.last + 1, b.first - 1, static_cast<uint32_t>(b.tokens_before - before),
            0,          before,      a.mass_before + a.mass};
  }

  // The key at the boundary, and how many of its tokens are inside, in `range`, whose keys have been counted.
  __device__ __forceinline__ Part find_key(const KeyRange& range, uint64_t total,
                                           const uint32_t* counts) const {
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
    Boundary found{{~0u, false, 0, 0}, {0, ~0u, 0, 0, 0, 0}, 0, nullptr};
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
