// One level of growth: scores of the new candidates, and the beam that grows the next level.
//
// grid: [batch_size]   one block grows one request; thread i has candidate i of the level (at most 32 x 32)
//
// The beam: every warp sorts the ranks of its 32 candidates, then lists are merged pairwise, the better 32 of
// two at a time, until warp 0 has the best of all. Ranks differ, so the order never depends on the shape of
// the merge. (Counting for each candidate the better ones takes a million comparisons at top_k = 32.)
#include "common/numeric.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"
#include "cuda/tree/score_key.cuh"
#include "eagle_cuda/tree.h"

namespace eagle::cuda {
namespace {

constexpr int kMaxCount = kMaxTopK * kMaxTopK;

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

struct SharedMemory {
  uint64_t sorted[kMaxCount / kWarpSize][kWarpSize];  // one warp's best, best first
  float scores[kMaxCount];
  int32_t tokens[kMaxCount];
  int32_t old_mask[max_beam_mask_words()];
  float parent_scores[kMaxTopK];
  int32_t parent_candidates[kMaxTopK];
  int32_t best_rows[kMaxTopK];
  int32_t num_accepted;
};

// A log-probability is at most 0: rounding above it would let a child outrank its parent.
__device__ float clamped(float log_prob) {
  return log_prob <= 0.0f ? log_prob : (log_prob > 0.0f ? 0.0f : kNegativeInfinity);
}
// A parent of score NaN, or a sum of infinities.
__device__ float usable(float score) { return score == score ? score : kNegativeInfinity; }

// Larger scores, then smaller indices, have larger ranks; 0 is below them all.
__device__ uint64_t rank(float score, int index) {
  return uint64_t{score_key(score)} << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}
__device__ int index_of(uint64_t rank) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank)); }

// One step of a bitonic network over the lanes; the larger of a pair goes to its lower lane if `descending`.
__device__ __forceinline__ uint64_t exchange(uint64_t value, int distance, bool descending) {
  const uint64_t other = __shfl_xor_sync(kFullMask, value, distance);
  const bool lower = (lane_id() & distance) == 0;
  return (value > other) == (lower == descending) ? value : other;
}

__device__ __forceinline__ uint64_t sort_descending(uint64_t value) {
#pragma unroll
  for (int width = 2; width <= kWarpSize; width *= 2)
#pragma unroll
    for (int distance = width / 2; distance > 0; distance /= 2)
      value = exchange(value, distance, (lane_id() & width) == 0);
  return value;
}

// Both lists descend; `reversed` is the other one, last first. Returns the better 32 of the 64.
__device__ __forceinline__ uint64_t merge_descending(uint64_t value, uint64_t reversed) {
  value = value > reversed ? value : reversed;
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value = exchange(value, distance, true);
  return value;
}

// registers: <= 40
__global__ void __launch_bounds__(kMaxCount)
    expand_tree_kernel(const ExpandTreeParams p, const LevelShape shape) {
  SharedMemory& shared = shared_memory<SharedMemory>();
  const int64_t request = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const bool from_root = p.level == 1;
  const int k = p.top_k, count = from_root ? k : k * k, words = shape.words;
  int32_t* const beam_candidates = p.beam_candidates + request * k;
  float* const beam_scores = p.beam_scores + request * k;
  int32_t* const mask = p.beam_mask + request * k * words;

  // Everything is read at once, before it is known whether the request is absent and before the beam is
  // overwritten.
  int32_t token = 0;
  float log_prob = 0.0f;
  if (thread < count) {
    token = load_read_only(p.tokens + request * count + thread);
    log_prob = load_read_only(p.log_probs + request * count + thread);
  }
  if (!from_root) {
    if (thread < k) {
      shared.parent_scores[thread] = load(beam_scores + thread);
      shared.parent_candidates[thread] = load(beam_candidates + thread);
    }
    for (int i = thread; i < k * words; i += threads) shared.old_mask[i] = load(mask + i);
  }
  if (thread == 0) shared.num_accepted = p.num_accepted ? load_read_only(p.num_accepted + request) : 0;
  __syncthreads();
  if (shared.num_accepted < 0) return;

  // The level's candidates.
  uint64_t value = 0;
  if (thread < count) {
    const int row = thread / k;
    const float score = usable((from_root ? 0.0f : shared.parent_scores[row]) + clamped(log_prob));
    const int64_t candidate = request * shape.candidates + shape.first + thread;
    store(p.candidate_tokens + candidate, token);
    store(p.candidate_scores + candidate, score);
    store(p.candidate_parents + candidate, from_root ? -1 : shared.parent_candidates[row]);
    shared.scores[thread] = score;
    shared.tokens[thread] = token;
    value = rank(score, thread);
  }

  // Their best. In every round the upper half of the remaining warps hands its lists to the lower half and is
  // done.
  value = sort_descending(value);
  const int warp = warp_id(), warps = threads / kWarpSize;
  int half = kMaxCount / kWarpSize;
  while (half >= warps) half /= 2;
  for (; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) shared.sorted[warp][lane_id()] = value;
    __syncthreads();
    if (warp < half && warp + half < warps)
      value = merge_descending(value, shared.sorted[warp + half][kWarpSize - 1 - lane_id()]);
  }
  // `scores` and `tokens` of other warps: ordered by the rounds' barriers, of the own warp by this.
  __syncwarp();
  if (warp == 0 && lane_id() < k) {
    const int r = lane_id(), best = index_of(value);
    store(beam_candidates + r, shape.first + best);
    store(beam_scores + r, shared.scores[best]);
    store(p.beam_tokens + request * k + r, shared.tokens[best]);
    store(p.beam_rows + request * k + r, best / k);
    shared.best_rows[r] = best / k;
  }
  __syncthreads();

  // A beam entry's ancestors are its parent row's and itself.
  for (int i = thread; i < k * words; i += threads) {
    const int r = i / words, word = i % words, bit = (p.level - 1) * k + r;
    uint32_t bits =
        from_root ? 0 : static_cast<uint32_t>(shared.old_mask[shared.best_rows[r] * words + word]);
    if (word == bit / 32) bits |= uint32_t{1} << (bit % 32);
    store(mask + i, static_cast<int32_t>(bits));
  }
}

}  // namespace

void expand_tree(const ExpandTreeParams& p, CUstream_st* stream) {
  validate(p);
  const int count = (p.level == 1 ? 1 : p.top_k) * p.top_k;
  const LevelShape shape{static_cast<int>(mask_words(int64_t{p.levels} * p.top_k)),
                         static_cast<int>(num_candidates(p.top_k, p.levels)),
                         p.level == 1 ? 0 : static_cast<int>(num_candidates(p.top_k, p.level - 1))};
  launch(expand_tree_kernel,
         {.grid = static_cast<unsigned>(p.batch_size),
          .block = static_cast<unsigned>(ceil_div(count, kWarpSize) * kWarpSize),
          .stream = stream,
          .shared_bytes = sizeof(SharedMemory)},
         p, shape);
}

}  // namespace eagle::cuda
