#pragma once
// tree: growing a draft tree by levels, and choosing the nodes that are worth verifying.
//
// Candidates are numbered flat, as in EAGLE-2: level 1 holds candidates 0 .. K-1, level j >= 2 the K^2
// candidates from K + (j-2) K^2 on, row by row of the beam. Equal scores: the smaller flat index wins, so a
// parent always beats its child.
#include <cstdint>
#include <vector>

#include "eagle_cuda/tensor_view.h"

namespace eagle {

inline constexpr int kMaxTreeNodes = 256;
inline constexpr int kMaxTopK = 32;
inline constexpr int kMaxCandidates = 8192;
inline constexpr int kMaxBranchingLevels = 31;  // a chain (top_k = 1) has no such limit

// order of the nodes in a DraftTree
enum class TreeOrder : uint8_t { kPath, kCandidate };

inline constexpr int64_t mask_words(int64_t nodes) { return (nodes + 31) / 32; }
inline constexpr int64_t num_candidates(int64_t top_k, int64_t levels) {
  return top_k + (levels - 1) * top_k * top_k;
}

// A draft tree whose shape is fixed (EAGLE-1): which child, by rank, of which node, whatever the scores. In
// the candidates' numbers a static tree is a dynamic one that scores -inf outside its shape, and whose beam
// on a level is the shape's nodes with children. Made by tree_shape(); plain data, which kernels take by
// value.
inline constexpr int kMaxShapeNodes = kMaxTreeNodes - 1;
struct TreeShape {
  struct Node {
    uint16_t rank : 5, row : 5;  // among its parent's children; the parent's row in its level's beam
    uint16_t has_children : 1, beam_row : 5;  // its own row in the level's beam
  };
  int num_nodes = 0;                // root excluded; 0: no shape
  int top_k = 0;                    // K: above every rank, and at least the nodes with children of any level
  int levels = 0;                   // of the deepest node; at most kMaxBranchingLevels where top_k > 1
  Node nodes[kMaxShapeNodes] = {};  // in flat order: by level, then lexicographic
  uint8_t level_ends[kMaxBranchingLevels + 1] = {};  // nodes on levels 1 .. l; where top_k = 1 they are l
};
inline int nodes_to(const TreeShape& shape, int level) {
  return shape.top_k == 1 ? level : shape.level_ends[level];
}

// A draft tree per request. Node 0 is the root; parents[i] < i. Slots at and beyond num_nodes: token 0,
// parent -2, depth 0, mask 0, score 0, links -1.
struct DraftTree {
  int32_t* tokens;        // [B, N]
  int32_t* parents;       // [B, N]  root -1
  int32_t* depths;        // [B, N]
  int32_t* mask;          // [B, N, ceil(N/32)]  ancestor-or-self bits
  float* scores;          // [B, N]  cumulative log-probability, root 0
  int32_t* num_nodes;     // [B]     root included; 0: the request is absent
  int32_t* first_child;   // [B, N]  -1 none; siblings in rank order (flat candidate order)
  int32_t* next_sibling;  // [B, N]  -1 none
};

// One level of growth. At level 1 there is one parent row, the root; later K rows, the beam.
struct ExpandTreeParams {
  int batch_size;  // B
  int top_k;       // K
  int level;       // 1-based level that the new candidates stand on
  int levels;      // levels of the whole tree: C = K + (levels - 1) K^2

  const int32_t* tokens;   // [B, R, K]  children of each parent row, best first; R = 1 at level 1, else K
  const float* log_probs;  // [B, R, K]
  const int32_t* num_accepted;  // [B] or nullptr; < 0: the request is absent, its rows are left alone

  int32_t* candidate_tokens;   // [B, C]  this level's slice is written
  float* candidate_scores;     // [B, C]  parent's score + min(log_prob, 0), fp32; NaN is stored as -inf
  int32_t* candidate_parents;  // [B, C]  flat index of the parent candidate, -1 for the root

  int32_t* beam_candidates;  // [B, K]  in: the rows' flat indices (level > 1); out: the K best of this level
  float* beam_scores;        // [B, K]  in and out
  int32_t* beam_tokens;      // [B, K]  out
  int32_t* beam_rows;        // [B, K]  out: parent row of each new beam entry (0 at level 1)
  int32_t* beam_mask;  // [B, K, ceil(levels K/32)]  in and out: ancestor-or-self bits over the beam rows of
                       //   all levels, row r of level j being bit (j-1) K + r

  // A static tree, of this top_k and at least `levels` levels; on the host, also for CUDA. Rows of its beam
  // that no node has: candidate -1, token 0, row 0, score -inf, no bit but their own. nullptr: dynamic.
  const TreeShape* shape = nullptr;
};

// The num_nodes - 1 best candidates and the root, as a DraftTree. A candidate counts (and is stored) with the
// smallest score on its way from the root, so that a chosen child's parent is always chosen; what hangs below
// a dropped candidate is dropped.
struct BuildTreeParams {
  int batch_size;      // B
  int num_candidates;  // C, at most kMaxCandidates
  int max_nodes;       // N, width of the arrays, at most kMaxTreeNodes
  TreeOrder order;

  const int32_t* root_tokens;        // [B]
  const int32_t* candidate_tokens;   // [B, C]
  const float* candidate_scores;     // [B, C]  NaN counts as -inf; -inf is never chosen
  const int32_t* candidate_parents;  // [B, C]  -1: the root; outside [-1, own index): dropped
  const int32_t* node_limit;  // [B] nodes wanted, root included, clamped to [0, N]; nullptr: N; 0: absent

  DraftTree tree;     // out
  int32_t* selected;  // [B, N]  flat candidate of each node, -1 for the root and unused slots; may be nullptr
};

// EAGLE's retrieve_indices: one row per leaf in ascending node order, root to leaf, padded -1.
struct RetrieveIndicesParams {
  int batch_size, max_nodes, max_leaves, max_path;
  const int32_t* parents;     // [B, N]
  const int32_t* num_nodes;   // [B]
  int32_t* retrieve_indices;  // [B, max_leaves, max_path]
  int32_t* num_leaves;        // [B]
};

// From the nodes' paths in any order, each the ranks (from 0) of the children from the root on. top_k = 0:
// the smallest possible. Throws unless every node's parent is there and kMaxCandidates candidates are enough.
TreeShape tree_shape(const std::vector<std::vector<int>>& paths, int top_k = 0);

void validate(const TreeShape& shape);
void check_shape(const TreeShape* shape, int top_k, int levels);  // of a call; nullptr is none
void validate(const ExpandTreeParams& p);
void validate(const BuildTreeParams& p);
void validate(const RetrieveIndicesParams& p);

namespace cpu {
void expand_tree(const ExpandTreeParams& p);
void build_tree(const BuildTreeParams& p);
void retrieve_indices(const RetrieveIndicesParams& p);
}  // namespace cpu

namespace cuda {
void expand_tree(const ExpandTreeParams& p, CUstream_st* stream);
void build_tree(const BuildTreeParams& p, CUstream_st* stream);
void retrieve_indices(const RetrieveIndicesParams& p, CUstream_st* stream);
}  // namespace cuda

// Tensor forms.
struct DraftTreeViews {
  TensorView tokens, parents, depths, mask, scores, num_nodes, first_child, next_sibling;
};
void expand_tree(TensorView tokens, TensorView log_probs, int level, int levels, TensorView num_accepted,
                 TensorView candidate_tokens, TensorView candidate_scores, TensorView candidate_parents,
                 TensorView beam_candidates, TensorView beam_scores, TensorView beam_tokens,
                 TensorView beam_rows, TensorView beam_mask, const TreeShape* shape, CUstream_st* stream);
void build_tree(TensorView root_tokens, TensorView candidate_tokens, TensorView candidate_scores,
                TensorView candidate_parents, TensorView node_limit, TreeOrder order,
                const DraftTreeViews& tree, TensorView selected, CUstream_st* stream);
void retrieve_indices(TensorView parents, TensorView num_nodes, TensorView retrieve_indices,
                      TensorView num_leaves, CUstream_st* stream);

}  // namespace eagle
