#pragma once
// What the draft phase keeps in its workspace, as launches and in one kernel alike, and the ways through it.
#include <algorithm>

#include "common/check.h"
#include "cuda/draft/head.h"

namespace eagle::cuda {

// What phases leave for each other, in the workspace.
struct DraftMemory {
  // Of requests.
  int32_t *start, *extended;     // where the extend rows stand, and how many there are
  int32_t *committed, *growing;  // rows behind the extend; rows of a level: top_k, or 0
  int32_t *roots, *limits;
  int32_t* append_at;
  // Of extend rows [B, P].
  int32_t *path_tokens, *path_depths;
  void *path_features, *path_hidden, *path_output;
  // Of beam rows [B, K].
  int32_t *depths, *positions;
  float* temperature;
  int64_t* seeds;
  int32_t *beam_candidates, *beam_tokens, *beam_rows, *beam_mask;
  float* beam_scores;
  void *input, *output;  // hidden states that a level starts from, and what it gives
  // Of candidates.
  int32_t *child_tokens, *candidate_tokens, *candidate_parents;  // [B, K, K], [B, C]
  float *child_log_probs, *candidate_scores;
  HeadMemory head;

  DraftMemory() = default;
  DraftMemory(const DraftParams& p, int64_t scratch, Arena& arena)
      : start(arena.take<int32_t>(p.batch_size)),
        extended(arena.take<int32_t>(p.batch_size)),
        committed(arena.take<int32_t>(p.batch_size)),
        growing(arena.take<int32_t>(p.batch_size)),
        roots(arena.take<int32_t>(p.batch_size)),
        limits(arena.take<int32_t>(p.batch_size)),
        append_at(arena.take<int32_t>(p.batch_size)),
        head(*p.head, int64_t{p.batch_size} * std::max(p.max_path, p.top_k), scratch, arena) {
    const int64_t B = p.batch_size, K = p.top_k, C = num_candidates(K, p.levels), path = B * p.max_path;
    const int64_t width = element_size(p.head->dtype), row = p.head->hidden_size * width;
    path_tokens = arena.take<int32_t>(path);
    path_depths = arena.take<int32_t>(path);
    path_features = arena.take<char>(path * p.head->feature_size * width);
    path_hidden = arena.take<char>(p.head->kind == HeadKind::kEagle3 ? path * row : 0);
    path_output = arena.take<char>(path * row);
    depths = arena.take<int32_t>(B * K);
    positions = arena.take<int32_t>(B * K);
    temperature = arena.take<float>(B * K);
    seeds = arena.take<int64_t>(B * K);
    beam_candidates = arena.take<int32_t>(B * K);
    beam_tokens = arena.take<int32_t>(B * K);
    beam_rows = arena.take<int32_t>(B * K);
    beam_mask = arena.take<int32_t>(B * K * mask_words(int64_t{p.levels} * K));
    beam_scores = arena.take<float>(B * K);
    input = arena.take<char>(B * K * row);
    output = arena.take<char>(B * K * row);
    child_tokens = arena.take<int32_t>(B * K * K);
    child_log_probs = arena.take<float>(B * K * K);
    candidate_tokens = arena.take<int32_t>(B * C);
    candidate_parents = arena.take<int32_t>(B * C);
    candidate_scores = arena.take<float>(B * C);
  }

  // The extend rows as a chain, and the beam of a level.
  RowGroup path_group(const DraftParams& p) const {
    return {.batch = p.batch_size,
            .nodes = p.max_path,
            .all_nodes = p.max_path,
            .lengths = start,
            .append_at = start,
            .depths = path_depths,
            .counts = extended};
  }
  RowGroup level_group(const DraftParams& p, int level) const {
    return {.batch = p.batch_size,
            .nodes = p.top_k,
            .first_node = (level - 1) * p.top_k,
            .all_nodes = p.levels * p.top_k,
            .mask = beam_mask,
            .lengths = committed,
            .append_at = append_at,
            .depths = depths,
            .counts = growing};
  }
};

}  // namespace eagle::cuda
