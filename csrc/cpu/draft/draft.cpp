// The whole draft phase: extend along the accepted path, `levels` levels of top-k expansion, rerank
// (eagle_cuda/draft.h).
//
// A beam row is run only while its children can still enter the tree. Scores never grow along a path and an
// equal score loses to a smaller flat index, so a row scoring no more than the node_limit-th best candidate
// so far has no child in the result. Leaving such rows out changes neither the tree nor which better rows
// make up the later beams. A static tree's beam rows without a node score -inf, and so are not run either.
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>

#include "common/check.h"
#include "cpu/draft/head.h"
#include "cpu/scratch.h"

namespace eagle::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

class DraftPhase {
 public:
  explicit DraftPhase(const DraftParams& p)
      : p_(p),
        head_(*p.head),
        B_(p.batch_size),
        K_(p.top_k),
        C_(num_candidates(p.top_k, p.levels)),
        mask_words_(mask_words(int64_t(p.levels) * p.top_k)),
        row_bytes_(head_.hidden_size * element_size(head_.dtype)),
        capacity_(cache_capacity(p.caches[0])) {
    const int64_t beam = int64_t(B_) * K_;
    first_row_ = scratch<int32_t, struct FirstRow>(B_);
    committed_ = scratch<int32_t, struct Committed>(B_);
    growing_ = scratch<int32_t, struct Growing>(B_);
    limit_ = scratch<int32_t, struct Limit>(B_);
    root_tokens_ = scratch<int32_t, struct RootTokens>(B_);
    candidate_tokens_ = scratch<int32_t, struct CandidateTokens>(B_ * C_);
    candidate_scores_ = scratch<float, struct CandidateScores>(B_ * C_);
    candidate_parents_ = scratch<int32_t, struct CandidateParents>(B_ * C_);
    sorted_ = scratch<float, struct Sorted>(C_);
    beam_candidates_ = scratch<int32_t, struct BeamCandidates>(beam);
    beam_scores_ = scratch<float, struct BeamScores>(beam);
    beam_tokens_ = scratch<int32_t, struct BeamTokens>(beam);
    beam_rows_ = scratch<int32_t, struct BeamRows>(beam);
    beam_mask_ = scratch<int32_t, struct BeamMask>(beam * mask_words_);
    child_tokens_ = scratch<int32_t, struct ChildTokens>(beam * K_);
    child_log_probs_ = scratch<float, struct ChildLogProbs>(beam * K_);
    best_tokens_ = scratch<int32_t, struct BestTokens>(beam * K_);
    best_log_probs_ = scratch<float, struct BestLogProbs>(beam * K_);
    rows_ = scratch<HeadRow, struct LevelRows>(beam);
    owner_ = scratch<int32_t, struct Owner>(beam);
    slot_ = scratch<int32_t, struct SlotOfRow>(beam);
    row_of_ = scratch<int32_t, struct RowOfSlot>(beam);
    tails_ = scratch<int32_t, struct Tails>(beam * p.levels);
    temperature_ = scratch<float, struct RowTemperature>(beam);
    seeds_ = scratch<int64_t, struct RowSeeds>(beam);
    positions_ = scratch<int32_t, struct RowPositions>(beam);
    output_ = scratch<char, struct Output>(beam * row_bytes_);
    input_ = scratch<char, struct Input>(beam * row_bytes_);
  }

  // The head over the accepted path; the last row of every request stands in `output_`, ready for level 1.
  void extend() {
    int64_t total = 0;
    for (int b = 0; b < B_; ++b) {
      limit_[b] = std::clamp(p_.node_limit ? p_.node_limit[b] : p_.max_nodes, 0, p_.max_nodes);
      const int accepted = std::min(p_.num_accepted[b], p_.max_path - 1);
      growing_[b] = accepted;  // < 0: absent
      if (accepted < 0) limit_[b] = 0;
      first_row_[b] = static_cast<int32_t>(total);
      total += std::max(accepted + 1, 0);
    }
    const int64_t feature_bytes = head_.feature_size * element_size(head_.dtype);
    HeadRow* rows = scratch<HeadRow, struct PathRows>(total);
    char* features = scratch<char, struct PathFeatures>(total * feature_bytes);
    char* hidden = scratch<char, struct PathHidden>(total * row_bytes_);
    char* output = scratch<char, struct PathOutput>(total * row_bytes_);
    for (int b = 0; b < B_; ++b) {
      root_tokens_[b] = 0;
      const int64_t start = std::clamp<int64_t>(p_.seq_lens[b], 0, capacity_);
      for (int i = 0; i <= growing_[b]; ++i) {
        const int64_t node = std::clamp(p_.path[int64_t(b) * p_.max_path + i], 0, p_.max_feature_nodes - 1);
        const int32_t at = static_cast<int32_t>(std::min(start + i, capacity_));
        const int32_t token = p_.target_tokens[int64_t(b) * p_.max_feature_nodes + node];
        rows[first_row_[b] + i] = {.token = token,
                                   .request = b,
                                   .cache_row = at,
                                   .position = at,
                                   .prefix = at + 1,
                                   .tail_length = 0,
                                   .tail = nullptr};
        root_tokens_[b] = token;
        const int64_t source =
            (b * p_.features_strides[0] + node * p_.features_strides[1]) * element_size(head_.dtype);
        std::memcpy(features + (first_row_[b] + i) * feature_bytes,
                    static_cast<const char*>(p_.features) + source, feature_bytes);
      }
      committed_[b] = static_cast<int32_t>(std::min(start + growing_[b] + 1, capacity_));
    }
    if (total > 0) {
      fuse_features(head_, features, head_.feature_size, total, hidden);
      run_head(head_, p_.caches, rows, total, hidden, output);
    }
    num_rows_ = 0;
    for (int b = 0; b < B_; ++b) {
      if (growing_[b] < 0) continue;
      std::memcpy(output_ + num_rows_ * row_bytes_, output + (first_row_[b] + growing_[b]) * row_bytes_,
                  row_bytes_);
      if (limit_[b] < 2) {  // the cache is extended, but no draft node is wanted
        growing_[b] = -1;
        continue;
      }
      owner_[num_rows_] = slot_[num_rows_] = b;
      row_of_[b] = static_cast<int32_t>(num_rows_++);
    }
    std::fill_n(candidate_tokens_, B_ * C_, 0);
    std::fill_n(candidate_scores_, B_ * C_, kNegativeInfinity);
    std::fill_n(candidate_parents_, B_ * C_, -1);
  }

  // Candidates of `level` from the rows in `output_`. False when no request grows any more.
  bool expand(int level) {
    if (num_rows_ == 0) return false;
    best_children(level);
    const int parents = level == 1 ? 1 : K_;
    std::fill_n(child_tokens_, int64_t(B_) * parents * K_, 0);
    std::fill_n(child_log_probs_, int64_t(B_) * parents * K_, kNegativeInfinity);
    for (int64_t i = 0; i < num_rows_; ++i) {
      std::copy_n(best_tokens_ + i * K_, K_, child_tokens_ + int64_t(slot_[i]) * K_);
      std::copy_n(best_log_probs_ + i * K_, K_, child_log_probs_ + int64_t(slot_[i]) * K_);
    }
    expand_tree({.batch_size = B_,
                 .top_k = K_,
                 .level = level,
                 .levels = p_.levels,
                 .tokens = child_tokens_,
                 .log_probs = child_log_probs_,
                 .num_accepted = growing_,
                 .candidate_tokens = candidate_tokens_,
                 .candidate_scores = candidate_scores_,
                 .candidate_parents = candidate_parents_,
                 .beam_candidates = beam_candidates_,
                 .beam_scores = beam_scores_,
                 .beam_tokens = beam_tokens_,
                 .beam_rows = beam_rows_,
                 .beam_mask = beam_mask_,
                 .shape = p_.shape});
    return true;
  }

  // Runs the head over the beam of `level`, as far as its children can matter.
  void run_beam(int level) {
    int64_t rows = 0;
    for (int b = 0; b < B_; ++b) {
      if (growing_[b] < 0) continue;
      const float threshold = least_useful(b, level);
      const int64_t before = rows;
      for (int r = 0; r < K_; ++r) {
        const int64_t beam = int64_t(b) * K_ + r;
        if (!(beam_scores_[beam] > threshold)) continue;
        const int64_t parent = level == 1 ? int64_t(b) : int64_t(b) * K_ + beam_rows_[beam];
        std::memcpy(input_ + rows * row_bytes_, output_ + row_of_[parent] * row_bytes_, row_bytes_);
        rows_[rows] = beam_row(b, r, level, tails_ + rows * p_.levels);
        owner_[rows] = b;
        slot_[rows++] = static_cast<int32_t>(beam);
      }
      if (rows == before) growing_[b] = -1;
    }
    if (rows > 0) {
      if (head_.feedback_post_norm)
        rms_norm({.m = rows,
                  .k = head_.hidden_size,
                  .dtype = head_.dtype,
                  .eps = head_.norm_eps,
                  .x = input_,
                  .x_stride = head_.hidden_size,
                  .weight = head_.norm,
                  .out = input_,
                  .out_stride = head_.hidden_size});
      run_head(head_, p_.caches, rows_, rows, input_, output_);
    }
    for (int64_t i = 0; i < rows; ++i) row_of_[slot_[i]] = static_cast<int32_t>(i);
    num_rows_ = rows;
  }

  void rerank() const {
    build_tree({.batch_size = B_,
                .num_candidates = static_cast<int>(C_),
                .max_nodes = p_.max_nodes,
                .order = p_.order,
                .root_tokens = root_tokens_,
                .candidate_tokens = candidate_tokens_,
                .candidate_scores = candidate_scores_,
                .candidate_parents = candidate_parents_,
                .node_limit = limit_,
                .tree = p_.tree,
                .selected = nullptr});
  }

 private:
  // The top_k children of every row in `output_`.
  void best_children(int level) {
    const bool coupled = p_.temperature != nullptr;
    for (int64_t i = 0; i < num_rows_ && coupled; ++i) {
      temperature_[i] = p_.temperature[owner_[i]];
      seeds_[i] = p_.seeds[owner_[i]];
      positions_[i] = committed_[owner_[i]] + level;  // the root stands at `committed`
    }
    lm_head_topk({.m = num_rows_,
                  .weight = head_.lm_head,
                  .top_k = K_,
                  .x_dtype = head_.dtype,
                  .norm_eps = head_.norm_eps,
                  .tau = p_.tau,
                  .x = output_,
                  .x_stride = head_.hidden_size,
                  .norm_weight = head_.norm,
                  .draft_to_target = head_.draft_to_target,
                  .temperature = coupled ? temperature_ : nullptr,
                  .seeds = coupled ? seeds_ : nullptr,
                  .positions = coupled ? positions_ : nullptr,
                  .tokens = best_tokens_,
                  .log_probs = best_log_probs_,
                  .lse = nullptr});
  }

  // The score that a candidate must exceed to have children in the tree.
  float least_useful(int b, int level) const {
    const int64_t so_far = num_candidates(K_, level), wanted = limit_[b] - 1;
    if (so_far < wanted) return kNegativeInfinity;
    std::copy_n(candidate_scores_ + b * C_, so_far, sorted_);
    std::nth_element(sorted_, sorted_ + wanted - 1, sorted_ + so_far, std::greater<>());
    return sorted_[wanted - 1];
  }

  // Row r of the beam of `level` (1-based): behind the committed rows, seeing those and its own ancestors.
  HeadRow beam_row(int b, int r, int level, int32_t* tail) const {
    const int64_t beam = int64_t(b) * K_ + r;
    const int32_t* mask = beam_mask_ + beam * mask_words_;
    int32_t length = 0;
    for (int64_t word = 0; word < mask_words_; ++word)
      for (uint32_t bits = static_cast<uint32_t>(mask[word]); bits; bits &= bits - 1)
        tail[length++] = committed_[b] + static_cast<int32_t>(32 * word) + std::countr_zero(bits);
    return {.token = beam_tokens_[beam],
            .request = b,
            .cache_row = committed_[b] + (level - 1) * K_ + r,
            .position = committed_[b] + level - 1,
            .prefix = committed_[b],
            .tail_length = length,
            .tail = tail};
  }

  const DraftParams& p_;
  const DraftHead& head_;
  const int B_, K_;
  const int64_t C_, mask_words_, row_bytes_, capacity_;
  int64_t num_rows_ = 0;  // rows in output_: the parents of the next level

  // Per request.
  int32_t *first_row_, *committed_, *limit_, *root_tokens_;
  int32_t* growing_;  // < 0: absent or finished
  // Per request and candidate; as expand_tree and build_tree take them.
  int32_t *candidate_tokens_, *candidate_parents_, *beam_candidates_, *beam_tokens_, *beam_rows_, *beam_mask_;
  float *candidate_scores_, *beam_scores_, *sorted_;
  int32_t* child_tokens_;  // [B, R, K], -inf where a parent row was not run
  float* child_log_probs_;
  // Per row of output_.
  char *output_, *input_;
  int32_t* owner_;   // request
  int32_t* slot_;    // parent row of expand_tree: b at level 1, then b K + r
  int32_t* row_of_;  // [B K] the inverse of slot_
  HeadRow* rows_;
  int32_t *tails_, *best_tokens_, *positions_;
  float *best_log_probs_, *temperature_;
  int64_t* seeds_;
};

}  // namespace

void draft(const DraftParams& p) {
  validate(p);
  if (p.batch_size == 0) return;
  DraftPhase phase(p);
  phase.extend();
  for (int level = 1; phase.expand(level) && level < p.levels; ++level) phase.run_beam(level);
  phase.rerank();
}

}  // namespace eagle::cpu
