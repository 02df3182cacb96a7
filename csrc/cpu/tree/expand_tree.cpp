// One level of growth: scores of the new candidates, and the beam that grows the next level (EAGLE-2's
// expansion phase), or that a static tree (EAGLE-1) has.
#include <algorithm>
#include <limits>

#include "cpu/parallel.h"
#include "eagle_cuda/tree.h"

namespace eagle::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr int kMaxBeamMaskWords = 1024;  // top_k mask_words(levels top_k) for every accepted top_k and levels

// A log-probability is at most 0: rounding above it would let a child outrank its parent.
float clamped(float log_prob) {
  return log_prob <= 0.0f ? log_prob : (log_prob > 0.0f ? 0.0f : kNegativeInfinity);
}
// A parent of score NaN, or a sum of infinities.
float usable(float score) { return score == score ? score : kNegativeInfinity; }

// Of the candidates of `level` those that are nodes of the tree, and the candidate of each beam row, -1:
// none.
void find_nodes(const TreeShape& shape, int level, bool* inside, int* beam) {
  std::fill_n(inside, kMaxTopK * kMaxTopK, false);
  std::fill_n(beam, kMaxTopK, -1);
  for (int i = nodes_to(shape, level - 1); i < nodes_to(shape, level); ++i) {
    const TreeShape::Node& node = shape.nodes[i];
    const int candidate = node.row * shape.top_k + node.rank;
    inside[candidate] = true;
    if (node.has_children) beam[node.beam_row] = candidate;
  }
}

void expand_request(const ExpandTreeParams& p, int64_t request) {
  const int k = p.top_k, rows = p.level == 1 ? 1 : k, count = rows * k;
  const int64_t total = num_candidates(k, p.levels);
  const int64_t first = p.level == 1 ? 0 : num_candidates(k, p.level - 1);
  const int32_t* const tokens = p.tokens + request * count;
  const float* const log_probs = p.log_probs + request * count;
  int32_t* const candidate_tokens = p.candidate_tokens + request * total + first;
  float* const candidate_scores = p.candidate_scores + request * total + first;
  int32_t* const candidate_parents = p.candidate_parents + request * total + first;
  int32_t* const beam_candidates = p.beam_candidates + request * k;
  float* const beam_scores = p.beam_scores + request * k;

  // The candidates of the next beam. A static tree's stand already in their rows, and `inside` tells its
  // nodes. Else the best of this level, kept sorted: score descending, then index ascending (a later equal
  // one does not pass).
  int best[kMaxTopK];
  int kept = 0;
  bool inside[kMaxTopK * kMaxTopK];
  if (p.shape) find_nodes(*p.shape, p.level, inside, best);
  for (int row = 0; row < rows; ++row) {
    const float parent_score = p.level == 1 ? 0.0f : beam_scores[row];
    const int32_t parent = p.level == 1 ? -1 : beam_candidates[row];
    for (int i = row * k; i < (row + 1) * k; ++i) {
      const float score =
          p.shape && !inside[i] ? kNegativeInfinity : usable(parent_score + clamped(log_probs[i]));
      candidate_tokens[i] = tokens[i];
      candidate_scores[i] = score;
      candidate_parents[i] = parent;
      if (p.shape || (kept == k && !(score > candidate_scores[best[k - 1]]))) continue;
      int place = kept < k ? kept++ : k - 1;
      for (; place > 0 && score > candidate_scores[best[place - 1]]; --place) best[place] = best[place - 1];
      best[place] = i;
    }
  }

  const int words = static_cast<int>(mask_words(int64_t{p.levels} * k));
  int32_t* const mask = p.beam_mask + request * k * words;
  int32_t old_mask[kMaxBeamMaskWords];
  if (p.level > 1) std::copy(mask, mask + k * words, old_mask);
  for (int r = 0; r < k; ++r) {
    const bool used = best[r] >= 0;
    const int parent_row = used ? best[r] / k : 0, bit = (p.level - 1) * k + r;
    p.beam_tokens[request * k + r] = used ? tokens[best[r]] : 0;
    p.beam_rows[request * k + r] = parent_row;
    beam_candidates[r] = used ? static_cast<int32_t>(first) + best[r] : -1;
    beam_scores[r] = used ? candidate_scores[best[r]] : kNegativeInfinity;
    int32_t* const own = mask + r * words;
    if (p.level > 1 && used)
      std::copy(old_mask + parent_row * words, old_mask + (parent_row + 1) * words, own);
    else
      std::fill(own, own + words, 0);
    own[bit / 32] |= static_cast<int32_t>(uint32_t{1} << (bit % 32));
  }
}

}  // namespace

void expand_tree(const ExpandTreeParams& p) {
  validate(p);
  parallel_for(p.batch_size, 16, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request)
      if (!p.num_accepted || p.num_accepted[request] >= 0) expand_request(p, request);
  });
}

}  // namespace eagle::cpu
