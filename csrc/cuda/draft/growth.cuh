#pragma once
// The ends of the persistent draft kernel's work: the rows that the head begins with, a level's growth, the
// finished trees.
#include <cuda_runtime.h>

#include "cuda/draft/path_rows.cuh"
#include "cuda/draft/phases.cuh"
#include "cuda/tree/build_tree.cuh"
#include "cuda/tree/expand_tree.cuh"

namespace eagle::cuda {

// The features of the accepted paths, a row's slice (fc_norm) a block, and what requests hold in the form in
// which the phases take it. Rows behind the end of a path are nobody's.
template <class T>
__device__ __forceinline__ void place_paths(const PersistentParams& p, RowShared& shared, int block,
                                            int blocks) {
  const DraftMemory& m = p.memory;
  const int slices = p.fc_norm ? p.num_aux : 1, slice_size = p.feature_size / slices;
  for (int item = block; item < p.batch_size * p.max_path * slices; item += blocks) {
    const int row = item / slices, slice = item % slices;
    if (row % p.max_path > max(load_read_only(p.num_accepted + row / p.max_path), 0)) continue;
    const int64_t first = int64_t{slice} * slice_size;
    const T* const from = place_path_row<T>(p, m, p.row_capacity, row / p.max_path, row % p.max_path,
                                            threadIdx.x == 0 && slice == 0) +
                          first;
    const T* const norm = p.fc_norm ? static_cast<const T*>(p.fc_norm) + first : nullptr;
    move_row(shared, from, static_cast<T*>(m.path_features) + int64_t{row} * p.feature_size + first,
             slice_size, norm, p.norm_eps, p.feature_vectors);
    __syncthreads();  // `shared` is used again
  }
  const int thread = block * kPersistentThreads + static_cast<int>(threadIdx.x),
            threads = blocks * kPersistentThreads;
  if (p.temperature)
    for (int row = thread; row < p.batch_size * p.top_k; row += threads) {
      store(m.temperature + row, load_read_only(p.temperature + row / p.top_k));
      store(m.seeds + row, load_read_only(p.seeds + row / p.top_k));
    }
  // Rows that do not attend are multiplied all the same.
  for (int64_t i = thread; i < m.head.attended_bytes / 16; i += threads)
    store(static_cast<uint4*>(m.head.attended) + i, uint4{});
}

// The candidates of `level` from the best tokens of the rows before it, its beam, and what the head takes of
// it. One block; all its threads.
__device__ __forceinline__ void grow_trees(const PersistentParams& p, int level, unsigned char* scratch) {
  const DraftMemory& m = p.memory;
  const ExpandTreeParams expand{.batch_size = p.batch_size,
                                .top_k = p.top_k,
                                .level = level,
                                .levels = p.levels,
                                .tokens = m.child_tokens,
                                .log_probs = m.child_log_probs,
                                .num_accepted = nullptr,  // absent requests grow too: all memory is written
                                .candidate_tokens = m.candidate_tokens,
                                .candidate_scores = m.candidate_scores,
                                .candidate_parents = m.candidate_parents,
                                .beam_candidates = m.beam_candidates,
                                .beam_scores = m.beam_scores,
                                .beam_tokens = m.beam_tokens,
                                .beam_rows = m.beam_rows,
                                .beam_mask = m.beam_mask,
                                .shape = nullptr};  // given beside it
  const LevelShape shape = level_shape(p.top_k, level, p.levels);
  constexpr int kItems = (kMaxLevelCandidates + kPersistentThreads - 1) / kPersistentThreads;
  bool over = true;
  for (int request = 0; request < p.batch_size; ++request) {
    const TreeExpansion<kItems> expansion(expand, shape, p.shape, request,
                                          *reinterpret_cast<ExpandShared*>(scratch));
    expansion.run();
    const int limit = load(m.limits + request);
    over &= limit < 2 || expansion.is_over(limit - 1);
    __syncthreads();  // the shared memory is used again
  }
  for (int row = static_cast<int>(threadIdx.x); row < p.batch_size * p.top_k; row += kPersistentThreads) {
    const int request = row / p.top_k, committed = load(m.committed + request);
    // A cache row a node, a position a level.
    if (row % p.top_k == 0) store(m.append_at + request, committed + (level - 1) * p.top_k);
    store(m.depths + row, (level - 1) * (1 - p.top_k));
    store(m.positions + row, committed + level + 1);  // of the children; the root stands at `committed`
  }
  if (threadIdx.x == 0) store(p.words.over, over ? 1 : 0);
}

// From the candidates of the first `levels` levels.
using PersistentBuild = BuildShared<kPersistentThreads * kPersistentItems>;
static_assert(kPersistentThreads * kPersistentItems >= kMaxCandidates);
__device__ __forceinline__ void build_trees(const PersistentParams& p, int levels, PersistentBuild& shared,
                                            int block, int blocks) {
  const DraftMemory& m = p.memory;
  const BuildTreeParams build{.batch_size = p.batch_size,
                              .num_candidates = level_shape(p.top_k, 1, p.levels).candidates,
                              .max_nodes = p.max_nodes,
                              .order = p.order,
                              .root_tokens = m.roots,
                              .candidate_tokens = m.candidate_tokens,
                              .candidate_scores = m.candidate_scores,
                              .candidate_parents = m.candidate_parents,
                              .node_limit = m.limits,
                              .tree = p.tree,
                              .selected = nullptr};
  const int count = level_shape(p.top_k, 1, levels).candidates;
  for (int request = block; request < p.batch_size; request += blocks) {
    build_request<kPersistentThreads, kPersistentItems>(build, request, count, shared);
    __syncthreads();  // the shared memory is used again
  }
}

}  // namespace eagle::cuda
