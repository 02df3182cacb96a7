#pragma once
// The whole draft phase as launches from sizes that the host knows: extend along the accepted path, `levels`
// levels of top-k expansion, rerank. For what the persistent kernel does not take; the bits are the same.
//
// All levels run: where the persistent kernel ends early, because no candidate can enter a tree any more, the
// host does not know, and with more requests it is seldom so for all of them.
//
// Lengths, paths and absent requests are looked at on the device. The extend has max_path rows a request and
// a level top_k rows a request; rows beyond what a request has are computed from valid memory and dropped:
// they are neither appended nor attend, and no row looks at another.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/check.h"
#include "common/dispatch.h"
#include "cuda/draft/path_rows.cuh"
#include "cuda/launch.h"

namespace eagle::cuda {

// ---- kernels: they move rows, and turn what requests hold into what the ops take -------------------------

struct PathRowsParams {
  DraftParams draft;
  DraftMemory memory;
  int64_t feature_size;
  int capacity;
  bool vectors;
};

// grid: [P, B]   the features of the accepted path, and the request's lengths
// registers: <= 64
template <class T>
__global__ void __launch_bounds__(kRowThreads) path_rows_kernel(const __grid_constant__ PathRowsParams p) {
  const DraftParams& d = p.draft;
  const int i = static_cast<int>(blockIdx.x), request = static_cast<int>(blockIdx.y);
  const T* const from = place_path_row<T>(d, p.memory, p.capacity, request, i, threadIdx.x == 0);
  const int64_t row = int64_t{request} * d.max_path + i;
  move_row(shared_memory<RowShared>(), from, static_cast<T*>(p.memory.path_features) + row * p.feature_size,
           p.feature_size, static_cast<const T*>(nullptr), 0.0f, p.vectors);
}

// The hidden states that a level's rows start from.
struct ParentRowsParams {
  int request_rows, level;  // rows of a request: 1, the parents of level 1, which is `level` 0, or top_k
  int top_k, max_path;
  int64_t size;  // H
  const int32_t *committed, *num_accepted, *beam_rows;
  const float* request_temperature;  // [B] or nullptr
  const int64_t* request_seeds;
  const void* from;  // level 0: the extend's output; 1: level 0's rows; else the rows of the level above
  void* to;
  int32_t *append_at, *depths, *positions;
  float* temperature;
  int64_t* seeds;
  bool vectors;
};

// grid: [rows of a request, B]
// registers: <= 64
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    parent_rows_kernel(const __grid_constant__ ParentRowsParams p) {
  const int r = static_cast<int>(blockIdx.x), request = static_cast<int>(blockIdx.y);
  const int64_t row = int64_t{request} * p.request_rows + r;
  int64_t parent = request;
  if (p.level == 0)
    parent =
        int64_t{request} * p.max_path + clamped(load_read_only(p.num_accepted + request), 0, p.max_path - 1);
  else if (p.level > 1)
    parent = int64_t{request} * p.top_k + clamped(load_read_only(p.beam_rows + row), 0, p.top_k - 1);
  if (threadIdx.x == 0) {
    if (p.level > 0) {  // a cache row a node, a position a level
      const int committed = load_read_only(p.committed + request);
      if (r == 0) store(p.append_at + request, committed + (p.level - 1) * p.top_k);
      store(p.depths + row, (p.level - 1) * (1 - p.top_k));
      store(p.positions + row, committed + p.level + 1);  // of the children; the root stands at `committed`
    }
    if (p.request_temperature) {
      store(p.temperature + row, load_read_only(p.request_temperature + request));
      store(p.seeds + row, load_read_only(p.request_seeds + request));
    }
  }
  move_row(shared_memory<RowShared>(), static_cast<const T*>(p.from) + parent * p.size,
           static_cast<T*>(p.to) + row * p.size, p.size, static_cast<const T*>(nullptr), 0.0f, p.vectors);
}

// ---- the phase, launch by launch -------------------------------------------------------------------------

class DraftPhase {
 public:
  DraftPhase(const DraftParams& p, const DraftMemory& memory, CUstream_st* stream)
      : p_(p), head_(*p.head), m_(memory), stream_(stream), width_(element_size(head_.dtype)) {}

  // The head over the accepted path.
  void extend() {
    EAGLE_CUDA_CHECK(
        cudaMemsetAsync(m_.head.attended, 0, static_cast<size_t>(m_.head.attended_bytes), stream_));
    const int64_t F = head_.feature_size, rows = int64_t{p_.batch_size} * p_.max_path;
    PathRowsParams rows_of_path{p_, m_, F, row_capacity(p_.caches[0]), false};
    rows_of_path.vectors =
        row_vectors({p_.features, m_.path_features},
                    {F * width_, p_.features_strides[0] * width_, p_.features_strides[1] * width_});
    const LaunchConfig config{dim3(static_cast<unsigned>(p_.max_path), static_cast<unsigned>(p_.batch_size)),
                              dim3(kRowThreads), stream_, sizeof(RowShared)};
    dispatch(FloatTypes{}, head_.dtype, "features", [&](auto type) {
      launch(path_rows_kernel<typename decltype(type)::type>, config, rows_of_path);
    });
    const void* hidden = m_.path_features;
    if (head_.kind == HeadKind::kEagle3) {
      fuse_features(head_, m_.path_features, F, rows, m_.path_features, m_.path_hidden, m_.head, stream_);
      hidden = m_.path_hidden;
    }
    const RowGroup group = m_.path_group(p_);
    run_head(head_, p_.caches, {&group, 1}, rows, m_.path_tokens, hidden, head_.hidden_size, m_.path_output,
             m_.head, stream_);
    move_parents(0, m_.path_output, m_.output);
  }

  // Candidates of `level` from the rows in `output`, and its beam.
  void expand(int level) {
    const int64_t rows = int64_t{p_.batch_size} * (level == 1 ? 1 : p_.top_k);
    const bool coupled = p_.temperature != nullptr;
    LmHeadTopkParams best{};
    best.m = rows;
    best.weight = head_.lm_head;
    best.top_k = p_.top_k;
    best.x_dtype = head_.dtype;
    best.norm_eps = head_.norm_eps;
    best.tau = p_.tau;
    best.x = m_.output;
    best.x_stride = head_.hidden_size;
    best.norm_weight = head_.norm;
    best.draft_to_target = head_.draft_to_target;
    best.temperature = coupled ? m_.temperature : nullptr;
    best.seeds = coupled ? m_.seeds : nullptr;
    best.positions = coupled ? m_.positions : nullptr;
    best.tokens = m_.child_tokens;
    best.log_probs = m_.child_log_probs;
    best.workspace = m_.head.scratch;
    best.workspace_bytes = m_.head.scratch_bytes;
    lm_head_topk(best, stream_);
    expand_tree({.batch_size = p_.batch_size,
                 .top_k = p_.top_k,
                 .level = level,
                 .levels = p_.levels,
                 .tokens = m_.child_tokens,
                 .log_probs = m_.child_log_probs,
                 .num_accepted = nullptr,  // absent requests grow too, so that all memory is written
                 .candidate_tokens = m_.candidate_tokens,
                 .candidate_scores = m_.candidate_scores,
                 .candidate_parents = m_.candidate_parents,
                 .beam_candidates = m_.beam_candidates,
                 .beam_scores = m_.beam_scores,
                 .beam_tokens = m_.beam_tokens,
                 .beam_rows = m_.beam_rows,
                 .beam_mask = m_.beam_mask,
                 .shape = p_.shape},
                stream_);
  }

  // The head over the beam of `level`.
  void run_beam(int level) {
    const int64_t rows = int64_t{p_.batch_size} * p_.top_k, H = head_.hidden_size;
    move_parents(level, m_.output, m_.input);
    if (head_.feedback_post_norm)
      rms_norm({.m = rows,
                .k = H,
                .dtype = head_.dtype,
                .eps = head_.norm_eps,
                .x = m_.input,
                .x_stride = H,
                .weight = head_.norm,
                .out = m_.input,
                .out_stride = H},
               stream_);
    const RowGroup group = m_.level_group(p_, level);
    run_head(head_, p_.caches, {&group, 1}, rows, m_.beam_tokens, m_.input, H, m_.output, m_.head, stream_);
  }

  void rerank() const {
    build_tree({.batch_size = p_.batch_size,
                .num_candidates = static_cast<int>(num_candidates(p_.top_k, p_.levels)),
                .max_nodes = p_.max_nodes,
                .order = p_.order,
                .root_tokens = m_.roots,
                .candidate_tokens = m_.candidate_tokens,
                .candidate_scores = m_.candidate_scores,
                .candidate_parents = m_.candidate_parents,
                .node_limit = m_.limits,
                .tree = p_.tree,
                .selected = nullptr},
               stream_);
  }

 private:
  void move_parents(int level, const void* from, void* to) const {
    const int rows = level == 0 ? 1 : p_.top_k;
    const int64_t H = head_.hidden_size;
    const ParentRowsParams params{rows,
                                  level,
                                  p_.top_k,
                                  p_.max_path,
                                  H,
                                  m_.committed,
                                  p_.num_accepted,
                                  m_.beam_rows,
                                  p_.temperature,
                                  p_.seeds,
                                  from,
                                  to,
                                  m_.append_at,
                                  m_.depths,
                                  m_.positions,
                                  m_.temperature,
                                  m_.seeds,
                                  row_vectors({from, to}, {H * width_})};
    const LaunchConfig config{dim3(static_cast<unsigned>(rows), static_cast<unsigned>(p_.batch_size)),
                              dim3(kRowThreads), stream_, sizeof(RowShared)};
    dispatch(FloatTypes{}, head_.dtype, "hidden",
             [&](auto type) { launch(parent_rows_kernel<typename decltype(type)::type>, config, params); });
  }

  const DraftParams& p_;
  const DraftHead& head_;
  const DraftMemory& m_;
  CUstream_st* const stream_;
  const int64_t width_;
};

// What the largest of the launches wants beside the head's products.
inline int64_t launches_scratch_bytes(const DraftParams& p) {
  Arena none(nullptr);
  const DraftMemory shapes(p, 0, none);
  return std::max(
      {attention_bytes(*p.head, p.caches, shapes.path_group(p)),
       attention_bytes(*p.head, p.caches, shapes.level_group(p, 1)),
       cuda::lm_head_topk_workspace_bytes(p.head->lm_head, int64_t{p.batch_size} * p.top_k, p.top_k)});
}

inline void draft_by_launches(const DraftParams& p, const DraftMemory& memory, CUstream_st* stream) {
  DraftPhase phase(p, memory, stream);
  phase.extend();
  for (int level = 1; level <= p.levels; ++level) {
    phase.expand(level);
    if (level < p.levels) phase.run_beam(level);
  }
  phase.rerank();
}

}  // namespace eagle::cuda
