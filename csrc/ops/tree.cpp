#include "eagle_cuda/tree.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>

#include "common/check.h"
#include "eagle_cuda/device.h"

namespace eagle {
namespace {

// Contiguous tensors on one device.
class Tensors {
 public:
  explicit Tensors(const TensorView& device) : device_(device) {}

  template <class T>
  T* input(const char* what, const TensorView& t, DType dtype, std::initializer_list<int64_t> shape) const {
    Expect(what, t).dtype(dtype).shape(shape).contiguous().same_device(device_);
    return t.as<T>();
  }
  template <class T>
  T* output(const char* what, const TensorView& t, DType dtype, std::initializer_list<int64_t> shape) const {
    Expect(what, t).dtype(dtype).shape(shape).contiguous().writable().same_device(device_);
    return t.as<T>();
  }

 private:
  const TensorView& device_;
};

constexpr DType kInt = DType::kInt32, kFloat = DType::kFloat32;

int checked_int(const char* what, int64_t n, int64_t limit = std::numeric_limits<int>::max()) {
  check(n <= limit, what, ": expected a dimension of at most ", limit, ", got ", n);
  return static_cast<int>(n);
}

using Path = std::vector<int>;

std::string text(const Path& path) {
  std::string out = "[";
  for (size_t i = 0; i < path.size(); ++i) out += (i ? ", " : "") + std::to_string(path[i]);
  return out + "]";
}

// In flat order, each once and with its parent.
std::vector<Path> checked_paths(std::vector<Path> paths) {
  check(!paths.empty(), "paths: expected at least 1 node, got none");
  check(paths.size() <= kMaxShapeNodes, "paths: expected at most ", kMaxShapeNodes, " nodes, got ",
        paths.size());
  for (const Path& path : paths) {
    check(!path.empty(), "paths: expected at least one rank in each (the root is not listed), got []");
    for (const int rank : path)
      check(rank >= 0 && rank < kMaxTopK, "paths: expected ranks of 0 to ", kMaxTopK - 1, ", got ",
            text(path));
  }
  const auto before = [](const Path& a, const Path& b) {
    return a.size() != b.size() ? a.size() < b.size() : a < b;
  };
  std::sort(paths.begin(), paths.end(), before);
  for (size_t i = 0; i < paths.size(); ++i) {
    check(i == 0 || paths[i] != paths[i - 1], "paths: expected each once, got ", text(paths[i]), " twice");
    const Path parent(paths[i].begin(), paths[i].end() - 1);
    check(parent.empty() || std::binary_search(paths.begin(), paths.end(), parent, before),
          "paths: expected every node's parent, got ", text(paths[i]), " without ", text(parent));
  }
  return paths;
}

}  // namespace

TreeShape tree_shape(const std::vector<std::vector<int>>& given, int top_k) {
  const std::vector<Path> paths = checked_paths(given);
  TreeShape shape;
  shape.num_nodes = static_cast<int>(paths.size());
  shape.levels = static_cast<int>(paths.back().size());
  // In flat order children meet their parents in flat order too. The root, level 0, has row 0.
  int least = 1, parent = -1, row = 0, row_level = 1;
  for (int i = 0; i < shape.num_nodes; ++i) {
    const Path& path = paths[static_cast<size_t>(i)];
    const int level = static_cast<int>(path.size());
    const Path above(path.begin(), path.end() - 1);
    if (level > 1 && (parent < 0 || paths[static_cast<size_t>(parent)] != above)) {
      while (paths[static_cast<size_t>(++parent)] != above) {
      }
      row = row_level == level ? row + 1 : 0;
      row_level = level;
      check(row < kMaxTopK, "paths: expected at most ", kMaxTopK,
            " nodes with children on a level, got more on level ", level - 1);
      shape.nodes[parent].has_children = 1;
      shape.nodes[parent].beam_row = static_cast<uint16_t>(row);
    }
    shape.nodes[i].rank = static_cast<uint16_t>(path.back());
    shape.nodes[i].row = static_cast<uint16_t>(row);
    least = std::max({least, path.back() + 1, row + 1});
    if (level <= kMaxBranchingLevels) shape.level_ends[level] = static_cast<uint8_t>(i + 1);
  }
  check(top_k == 0 || (top_k >= least && top_k <= kMaxTopK), "top_k: expected ", least, " to ", kMaxTopK,
        " for these paths, got ", top_k);
  shape.top_k = top_k == 0 ? least : top_k;
  check(shape.top_k == 1 || shape.levels <= kMaxBranchingLevels, "paths: expected at most ",
        kMaxBranchingLevels, " levels where top_k > 1, got ", shape.levels);
  check(num_candidates(shape.top_k, shape.levels) <= kMaxCandidates, "paths: expected at most ",
        kMaxCandidates, " candidates (top_k + (levels - 1) top_k^2), got ",
        num_candidates(shape.top_k, shape.levels), " with top_k = ", shape.top_k);
  return shape;
}

void validate(const TreeShape& shape) {
  const int K = shape.top_k;
  bool sound = shape.num_nodes >= 1 && shape.num_nodes <= kMaxShapeNodes && K >= 1 && K <= kMaxTopK &&
               shape.levels >= 1 && (K == 1 || shape.levels <= kMaxBranchingLevels) &&
               num_candidates(K, shape.levels) <= kMaxCandidates && nodes_to(shape, 0) == 0 &&
               nodes_to(shape, shape.levels) == shape.num_nodes;
  int parents = 1;  // rows of the beam before
  for (int level = 1; sound && level <= shape.levels; ++level) {
    int rows = 0, last = -1;
    const int end = nodes_to(shape, level);
    for (int i = nodes_to(shape, level - 1); i < end && end <= shape.num_nodes; ++i) {
      const TreeShape::Node& node = shape.nodes[i];
      const int candidate = node.row * K + node.rank;
      sound &= candidate > last && node.rank < K && node.row < parents &&
               (!node.has_children || node.beam_row == rows);
      last = candidate;
      rows += node.has_children;
    }
    sound &= end > nodes_to(shape, level - 1) && rows <= K && (rows > 0) == (level < shape.levels);
    parents = rows;
  }
  check(sound, "shape: expected one made by tree_shape(), got another");
}

void check_shape(const TreeShape* shape, int top_k, int levels) {
  if (!shape) return;
  validate(*shape);
  check(top_k == shape->top_k, "top_k: expected the shape's ", shape->top_k, ", got ", top_k);
  check(levels <= shape->levels, "levels: expected at most the shape's ", shape->levels, ", got ", levels);
}

void validate(const ExpandTreeParams& p) {
  check(p.batch_size >= 0, "batch_size: expected at least 0, got ", p.batch_size);
  check(p.top_k >= 1 && p.top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", p.top_k);
  check(p.levels >= 1, "levels: expected at least 1, got ", p.levels);
  check(p.top_k == 1 || p.levels <= kMaxBranchingLevels, "levels: expected at most ", kMaxBranchingLevels,
        " where top_k > 1, got ", p.levels);
  check(num_candidates(p.top_k, p.levels) <= kMaxCandidates, "levels: expected at most ", kMaxCandidates,
        " candidates (top_k + (levels - 1) top_k^2), got ", num_candidates(p.top_k, p.levels));
  check(p.level >= 1 && p.level <= p.levels, "level: expected 1 to ", p.levels, ", got ", p.level);
  check_shape(p.shape, p.top_k, p.levels);
}

void validate(const RetrieveIndicesParams& p) {
  check(p.batch_size >= 0, "batch_size: expected at least 0, got ", p.batch_size);
  check(p.max_nodes >= 0 && p.max_nodes <= kMaxTreeNodes, "max_nodes: expected 0 to ", kMaxTreeNodes,
        ", got ", p.max_nodes);
  check(p.max_leaves >= 0, "max_leaves: expected at least 0, got ", p.max_leaves);
  check(p.max_path >= 0, "max_path: expected at least 0, got ", p.max_path);
}

void validate(const BuildTreeParams& p) {
  check(p.batch_size >= 0, "batch_size: expected at least 0, got ", p.batch_size);
  check(p.num_candidates >= 0 && p.num_candidates <= kMaxCandidates, "num_candidates: expected 0 to ",
        kMaxCandidates, ", got ", p.num_candidates);
  check(p.max_nodes >= 1 && p.max_nodes <= kMaxTreeNodes, "max_nodes: expected 1 to ", kMaxTreeNodes,
        ", got ", p.max_nodes);
}

void expand_tree(TensorView tokens, TensorView log_probs, int level, int levels, TensorView num_accepted,
                 TensorView candidate_tokens, TensorView candidate_scores, TensorView candidate_parents,
                 TensorView beam_candidates, TensorView beam_scores, TensorView beam_tokens,
                 TensorView beam_rows, TensorView beam_mask, const TreeShape* shape, CUstream_st* stream) {
  Expect("tokens", tokens).dtype(kInt).rank(3).contiguous();
  const int64_t b = tokens.shape[0], k = tokens.shape[2];
  ExpandTreeParams p{};
  p.batch_size = checked_int("tokens", b);
  p.top_k = checked_int("tokens", k, kMaxTopK);
  p.level = level;
  p.levels = levels;
  p.shape = shape;
  validate(p);
  const Tensors on{tokens};
  const int64_t rows = level == 1 ? 1 : k, c = num_candidates(k, levels);
  p.tokens = on.input<const int32_t>("tokens", tokens, kInt, {b, rows, k});
  p.log_probs = on.input<const float>("log_probs", log_probs, kFloat, {b, rows, k});
  if (num_accepted.present())
    p.num_accepted = on.input<const int32_t>("num_accepted", num_accepted, kInt, {b});
  p.candidate_tokens = on.output<int32_t>("candidate_tokens", candidate_tokens, kInt, {b, c});
  p.candidate_scores = on.output<float>("candidate_scores", candidate_scores, kFloat, {b, c});
  p.candidate_parents = on.output<int32_t>("candidate_parents", candidate_parents, kInt, {b, c});
  p.beam_candidates = on.output<int32_t>("beam_candidates", beam_candidates, kInt, {b, k});
  p.beam_scores = on.output<float>("beam_scores", beam_scores, kFloat, {b, k});
  p.beam_tokens = on.output<int32_t>("beam_tokens", beam_tokens, kInt, {b, k});
  p.beam_rows = on.output<int32_t>("beam_rows", beam_rows, kInt, {b, k});
  p.beam_mask = on.output<int32_t>("beam_mask", beam_mask, kInt, {b, k, mask_words(levels * k)});
  check_disjoint({{"candidate_tokens", candidate_tokens},
                  {"candidate_scores", candidate_scores},
                  {"candidate_parents", candidate_parents},
                  {"beam_candidates", beam_candidates},
                  {"beam_scores", beam_scores},
                  {"beam_tokens", beam_tokens},
                  {"beam_rows", beam_rows},
                  {"beam_mask", beam_mask}});
  const DeviceGuard guard(tokens);
  tokens.device == DeviceType::kCPU ? cpu::expand_tree(p) : cuda::expand_tree(p, stream);
}

void build_tree(TensorView root_tokens, TensorView candidate_tokens, TensorView candidate_scores,
                TensorView candidate_parents, TensorView node_limit, TreeOrder order,
                const DraftTreeViews& tree, TensorView selected, CUstream_st* stream) {
  Expect("root_tokens", root_tokens).dtype(kInt).rank(1).contiguous();
  Expect("candidate_tokens", candidate_tokens).rank(2);
  Expect("tree.tokens", tree.tokens).rank(2);
  const Tensors on{root_tokens};
  const int64_t b = root_tokens.shape[0], c = candidate_tokens.shape[1], n = tree.tokens.shape[1];
  BuildTreeParams p{};
  p.batch_size = checked_int("root_tokens", b);
  p.num_candidates = checked_int("candidate_tokens", c, kMaxCandidates);
  p.max_nodes = checked_int("tree.tokens", n, kMaxTreeNodes);
  p.order = order;
  p.root_tokens = root_tokens.as<const int32_t>();
  p.candidate_tokens = on.input<const int32_t>("candidate_tokens", candidate_tokens, kInt, {b, c});
  p.candidate_scores = on.input<const float>("candidate_scores", candidate_scores, kFloat, {b, c});
  p.candidate_parents = on.input<const int32_t>("candidate_parents", candidate_parents, kInt, {b, c});
  if (node_limit.present()) p.node_limit = on.input<const int32_t>("node_limit", node_limit, kInt, {b});
  p.tree.tokens = on.output<int32_t>("tree.tokens", tree.tokens, kInt, {b, n});
  p.tree.parents = on.output<int32_t>("tree.parents", tree.parents, kInt, {b, n});
  p.tree.depths = on.output<int32_t>("tree.depths", tree.depths, kInt, {b, n});
  p.tree.mask = on.output<int32_t>("tree.mask", tree.mask, kInt, {b, n, mask_words(n)});
  p.tree.scores = on.output<float>("tree.scores", tree.scores, kFloat, {b, n});
  p.tree.num_nodes = on.output<int32_t>("tree.num_nodes", tree.num_nodes, kInt, {b});
  p.tree.first_child = on.output<int32_t>("tree.first_child", tree.first_child, kInt, {b, n});
  p.tree.next_sibling = on.output<int32_t>("tree.next_sibling", tree.next_sibling, kInt, {b, n});
  if (selected.present()) p.selected = on.output<int32_t>("selected", selected, kInt, {b, n});
  check_disjoint({{"tree.tokens", tree.tokens},
                  {"tree.parents", tree.parents},
                  {"tree.depths", tree.depths},
                  {"tree.mask", tree.mask},
                  {"tree.scores", tree.scores},
                  {"tree.num_nodes", tree.num_nodes},
                  {"tree.first_child", tree.first_child},
                  {"tree.next_sibling", tree.next_sibling},
                  {"selected", selected}});
  const DeviceGuard guard(root_tokens);
  root_tokens.device == DeviceType::kCPU ? cpu::build_tree(p) : cuda::build_tree(p, stream);
}

void retrieve_indices(TensorView parents, TensorView num_nodes, TensorView retrieve_indices,
                      TensorView num_leaves, CUstream_st* stream) {
  Expect("parents", parents).dtype(kInt).rank(2).contiguous();
  const Tensors on{parents};
  const int64_t b = parents.shape[0];
  RetrieveIndicesParams p{};
  p.batch_size = checked_int("parents", b);
  p.max_nodes = checked_int("parents", parents.shape[1], kMaxTreeNodes);
  p.parents = parents.as<const int32_t>();
  p.num_nodes = on.input<const int32_t>("num_nodes", num_nodes, kInt, {b});
  p.retrieve_indices = on.output<int32_t>("retrieve_indices", retrieve_indices, kInt, {b, -1, -1});
  p.max_leaves = checked_int("retrieve_indices", retrieve_indices.shape[1]);
  p.max_path = checked_int("retrieve_indices", retrieve_indices.shape[2]);
  p.num_leaves = on.output<int32_t>("num_leaves", num_leaves, kInt, {b});
  const DeviceGuard guard(parents);
  parents.device == DeviceType::kCPU ? cpu::retrieve_indices(p) : cuda::retrieve_indices(p, stream);
}

}  // namespace eagle
