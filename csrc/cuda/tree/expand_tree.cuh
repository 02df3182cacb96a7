#pragma once
// One level of growth of one request by one block: the body of expand_tree, and of a level's end in a larger
// kernel.
//
// Thread t has candidates t, t + threads, ... of the level (at most 32 x 32), kItems of them.
//
// The beam: every warp sorts the ranks of 32 candidates at a time and merges its lists; then lists of warps
// are merged pairwise, the better 32 of two at a time, until warp 0 has the best of all. Ranks differ, so the
// order never depends on the shape of the merge. (Counting for each candidate the better ones takes a million
// comparisons at top_k = 32.) A static tree's beam is known: thread n puts the level's n-th node down in
// shared memory, in its candidate's place and in its beam row.
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/tree/score_key.cuh"
#include "eagle_cuda/tree.h"

namespace eagle::cuda {

inline constexpr int kMaxLevelCandidates = kMaxTopK * kMaxTopK;

// Words of a beam's mask rows, for any top_k and levels that validate() lets pass.
constexpr int max_beam_mask_words() {
  int64_t most = 0;
  for (int64_t k = 1; k <= kMaxTopK; ++k) {
    int64_t levels = 1 + (kMaxCandidates - k) / (k * k);
    if (k > 1 && levels > kMaxBranchingLevels) levels = kMaxBranchingLevels;
    if (k * mask_words(levels * k) > most) most = k * mask_words(levels * k);
  }
  return static_cast<int>(most);
}

// What follows from top_k, level and levels.
struct LevelShape {
  int words;       // of a mask row
  int candidates;  // of all levels
  int first;       // candidate of this level
};

// In int, which holds them all; callable on both sides, unlike mask_words() and num_candidates().
__host__ __device__ __forceinline__ LevelShape level_shape(int top_k, int level, int levels) {
  const auto candidates = [top_k](int levels) {
    return levels == 0 ? 0 : top_k + (levels - 1) * top_k * top_k;
  };
  return {(levels * top_k + 31) / 32, candidates(levels), candidates(level - 1)};
}

struct ExpandShared {
  uint64_t sorted[kMaxLevelCandidates / kWarpSize][kWarpSize];  // one warp's best, best first
  float scores[kMaxLevelCandidates];
  int32_t tokens[kMaxLevelCandidates];
  int32_t old_mask[max_beam_mask_words()];
  float parent_scores[kMaxTopK];
  int32_t parent_candidates[kMaxTopK];
  int32_t best_rows[kMaxTopK];
  int32_t num_accepted;
  int32_t better[kMaxLevelCandidates / kWarpSize];  // candidates that a warp counted
  // Of a static tree: the candidates that are nodes, and the candidate of each beam row, -1: none.
  bool inside[kMaxLevelCandidates];
  int32_t beam[kMaxTopK];
};

// A block of any number of whole warps, as long as kItems candidates a thread are enough for the level; all
// threads take part. `shared` is free before and behind it only with a barrier of the caller's. What it reads
// may have been written in the same launch.
// `shape` stands for p.shape, which is the host's; without nodes: a dynamic tree.
template <int kItems>
class TreeExpansion {
 public:
  __device__ __forceinline__ TreeExpansion(const ExpandTreeParams& p, const LevelShape& level,
                                           const TreeShape& shape, int request, ExpandShared& shared)
      : p_(p), level_(level), shape_(shape), shared_(shared), request_(request) {}

  __device__ __forceinline__ void run() const {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const bool from_root = p_.level == 1, is_static = shape_.num_nodes > 0;
    const int k = p_.top_k, count = from_root ? k : k * k, words = level_.words;
    int32_t* const beam_candidates = p_.beam_candidates + request_ * k;
    float* const beam_scores = p_.beam_scores + request_ * k;
    int32_t* const mask = p_.beam_mask + request_ * k * words;

    // Everything is read at once, before it is known whether the request is absent and before the beam is
    // overwritten.
    int32_t token[kItems];
    float log_prob[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int i = thread + j * threads;
      token[j] = i < count ? load(p_.tokens + request_ * count + i) : 0;
      log_prob[j] = i < count ? load(p_.log_probs + request_ * count + i) : 0.0f;
    }
    if (!from_root) {
      for (int r = thread; r < k; r += threads) {
        shared_.parent_scores[r] = load(beam_scores + r);
        shared_.parent_candidates[r] = load(beam_candidates + r);
      }
      for (int i = thread; i < k * words; i += threads) shared_.old_mask[i] = load(mask + i);
    }
    if (thread == 0) shared_.num_accepted = p_.num_accepted ? load(p_.num_accepted + request_) : 0;
    if (is_static) clear_nodes(count);
    __syncthreads();
    if (shared_.num_accepted < 0) return;
    if (is_static) find_nodes();

    // The level's candidates.
    uint64_t best_ranks = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int i = thread + j * threads;
      uint64_t value = 0;
      if (i < count) {
        const int row = i / k;
        float score = usable((from_root ? 0.0f : shared_.parent_scores[row]) + clamped(log_prob[j]));
        if (is_static && !shared_.inside[i]) score = kNegativeInfinity;
        const int64_t candidate = request_ * level_.candidates + level_.first + i;
        store(p_.candidate_tokens + candidate, token[j]);
        store(p_.candidate_scores + candidate, score);
        store(p_.candidate_parents + candidate, from_root ? -1 : shared_.parent_candidates[row]);
        shared_.scores[i] = score;
        shared_.tokens[i] = token[j];
        value = rank(score, i);
      }
      if (is_static) continue;
      value = sort_descending(value);
      best_ranks =
          j == 0 ? value
                 : merge_descending(best_ranks, __shfl_sync(kFullMask, value, kWarpSize - 1 - lane_id()));
    }
    if (is_static)
      __syncthreads();
    else
      best_ranks = best_of_block(best_ranks, (min(count, threads) + kWarpSize - 1) / kWarpSize);
    if (warp_id() == 0 && lane_id() < k) {
      const int r = lane_id(), best = is_static ? shared_.beam[r] : index_of(best_ranks);
      const bool used = best >= 0;
      store(beam_candidates + r, used ? level_.first + best : -1);
      store(beam_scores + r, used ? shared_.scores[best] : kNegativeInfinity);
      store(p_.beam_tokens + request_ * k + r, used ? shared_.tokens[best] : 0);
      store(p_.beam_rows + request_ * k + r, used ? best / k : 0);
      shared_.best_rows[r] = used ? best / k : -1;
    }
    __syncthreads();

    // A beam entry's ancestors are its parent row's and itself.
    for (int i = thread; i < k * words; i += threads) {
      const int r = i / words, word = i % words, bit = (p_.level - 1) * k + r;
      const int row = shared_.best_rows[r];
      uint32_t bits = from_root || row < 0 ? 0 : static_cast<uint32_t>(shared_.old_mask[row * words + word]);
      if (word == bit / 32) bits |= uint32_t{1} << (bit % 32);
      store(mask + i, static_cast<int32_t>(bits));
    }
  }

  // Behind run(), for a request that is not absent: whether no candidate of a later level can enter a tree of
  // `wanted` candidates. So it is where as many of those so far are at least as good as the beam's best, from
  // which all later ones descend: children never exceed their parents, and of equals the earlier ones win.
  // The same answer in every thread.
  __device__ __forceinline__ bool is_over(int wanted) const {
    const int threads = static_cast<int>(blockDim.x), k = p_.top_k;
    const int count = level_.first + (p_.level == 1 ? k : k * k);
    const int row = min(lane_id(), k - 1);  // a static tree's beam is not sorted
    const float best = warp_reduce(load(p_.beam_scores + request_ * k + row),
                                   [](float a, float b) { return a > b ? a : b; });
    int better = 0;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += threads)
      better += load(p_.candidate_scores + request_ * level_.candidates + i) >= best;
    better = __reduce_add_sync(kFullMask, better);
    if (lane_id() == 0) shared_.better[warp_id()] = better;
    __syncthreads();
    better = 0;
    for (int warp = 0; warp < threads / kWarpSize; ++warp) better += shared_.better[warp];
    return better >= wanted || best == kNegativeInfinity;
  }

 private:
  // The nodes of a static tree, in two steps with a barrier between them; behind the second one they are
  // there for all threads.
  __device__ __forceinline__ void clear_nodes(int count) const {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int i = thread; i < count; i += threads) shared_.inside[i] = false;
    for (int r = thread; r < p_.top_k; r += threads) shared_.beam[r] = -1;
  }
  __device__ __forceinline__ void find_nodes() const {
    const int threads = static_cast<int>(blockDim.x), end = nodes_to(p_.level);
    for (int i = nodes_to(p_.level - 1) + static_cast<int>(threadIdx.x); i < end; i += threads) {
      const TreeShape::Node node = shape_.nodes[i];
      const int candidate = node.row * p_.top_k + node.rank;
      shared_.inside[candidate] = true;
      if (node.has_children) shared_.beam[node.beam_row] = candidate;
    }
    __syncthreads();
  }
  // As eagle::nodes_to, which is the host's.
  __device__ __forceinline__ int nodes_to(int level) const {
    return p_.top_k == 1 ? level : shape_.level_ends[level];
  }

  // A log-probability is at most 0: rounding above it would let a child outrank its parent.
  static __device__ __forceinline__ float clamped(float log_prob) {
    return log_prob <= 0.0f ? log_prob : (log_prob > 0.0f ? 0.0f : kNegativeInfinity);
  }
  // A parent of score NaN, or a sum of infinities.
  static __device__ __forceinline__ float usable(float score) {
    return score == score ? score : kNegativeInfinity;
  }

  // Larger scores, then smaller indices, have larger ranks; 0 is below them all.
  static __device__ __forceinline__ uint64_t rank(float score, int index) {
    return uint64_t{score_key(score)} << 32 | (0xffffffffu - static_cast<uint32_t>(index));
  }
  static __device__ __forceinline__ int index_of(uint64_t rank) {
    return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank));
  }

  // One step of a bitonic network over the lanes; the larger of a pair goes to its lower lane if
  // `descending`.
  static __device__ __forceinline__ uint64_t exchange(uint64_t value, int distance, bool descending) {
    const uint64_t other = __shfl_xor_sync(kFullMask, value, distance);
    const bool lower = (lane_id() & distance) == 0;
    return (value > other) == (lower == descending) ? value : other;
  }
  static __device__ __forceinline__ uint64_t sort_descending(uint64_t value) {
#pragma unroll
    for (int width = 2; width <= kWarpSize; width *= 2)
#pragma unroll
      for (int distance = width / 2; distance > 0; distance /= 2)
        value = exchange(value, distance, (lane_id() & width) == 0);
    return value;
  }
  // Both lists descend; `reversed` is the other one, last first. Returns the better 32 of the 64.
  static __device__ __forceinline__ uint64_t merge_descending(uint64_t value, uint64_t reversed) {
    value = value > reversed ? value : reversed;
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value = exchange(value, distance, true);
    return value;
  }

  // In warp 0: the best of the lists of the first `warps` warps; orders what they wrote to shared memory
  // before. In every round the upper half of the remaining warps hands its lists to the lower half and is
  // done.
  __device__ __forceinline__ uint64_t best_of_block(uint64_t value, int warps) const {
    const int warp = warp_id();
    int half = kMaxLevelCandidates / kWarpSize;
    while (half >= warps) half /= 2;
    for (; half > 0; half /= 2) {
      if (warp >= half && warp < min(2 * half, warps)) shared_.sorted[warp][lane_id()] = value;
      __syncthreads();
      if (warp < half && warp + half < warps)
        value = merge_descending(value, shared_.sorted[warp + half][kWarpSize - 1 - lane_id()]);
    }
    __syncwarp();  // of other warps ordered by the rounds' barriers, of the own one by this
    return value;
  }

  const ExpandTreeParams& p_;
  const LevelShape& level_;
  const TreeShape& shape_;
  ExpandShared& shared_;
  const int64_t request_;
};

}  // namespace eagle::cuda
