#include "eagle_cuda/tree.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"

namespace eagle::bindings {
namespace py = pybind11;
using namespace py::literals;

namespace {

TreeOrder parse_order(const std::string& order) {
  if (order == "path") return TreeOrder::kPath;
  if (order == "candidate") return TreeOrder::kCandidate;
  throw py::value_error("order: expected \"path\" or \"candidate\", got \"" + order + "\"");
}

}  // namespace

void bind_tree(py::module_& m) {
  m.attr("MAX_TREE_NODES") = kMaxTreeNodes;
  m.attr("MAX_TOP_K") = kMaxTopK;
  m.attr("MAX_CANDIDATES") = kMaxCandidates;
  m.attr("MAX_BRANCHING_LEVELS") = kMaxBranchingLevels;
  py::class_<TreeShape>(m, "TreeShape", "A static draft tree's nodes; made by eagle_cuda.TreeShape.")
      .def(py::init(&tree_shape), "paths"_a, "top_k"_a)
      .def_readonly("num_nodes", &TreeShape::num_nodes)
      .def_readonly("top_k", &TreeShape::top_k)
      .def_readonly("levels", &TreeShape::levels);
  m.def(
      "expand_tree",
      [](TensorView tokens, TensorView log_probs, int level, int levels, TensorView num_accepted,
         TensorView candidate_tokens, TensorView candidate_scores, TensorView candidate_parents,
         TensorView beam_candidates, TensorView beam_scores, TensorView beam_tokens, TensorView beam_rows,
         TensorView beam_mask, const TreeShape* shape) {
        without_gil([&] {
          expand_tree(tokens, log_probs, level, levels, num_accepted, candidate_tokens, candidate_scores,
                      candidate_parents, beam_candidates, beam_scores, beam_tokens, beam_rows, beam_mask,
                      shape, current_stream);
        });
      },
      "tokens"_a, "log_probs"_a, "level"_a, "levels"_a, "num_accepted"_a, "candidate_tokens"_a,
      "candidate_scores"_a, "candidate_parents"_a, "beam_candidates"_a, "beam_scores"_a, "beam_tokens"_a,
      "beam_rows"_a, "beam_mask"_a, "shape"_a = py::none());
  m.def(
      "build_tree",
      [](TensorView root_tokens, TensorView candidate_tokens, TensorView candidate_scores,
         TensorView candidate_parents, TensorView node_limit, const std::string& order, TensorView tokens,
         TensorView parents, TensorView depths, TensorView mask, TensorView scores, TensorView num_nodes,
         TensorView first_child, TensorView next_sibling, TensorView selected) {
        const TreeOrder tree_order = parse_order(order);
        const DraftTreeViews tree{tokens, parents,   depths,      mask,
                                  scores, num_nodes, first_child, next_sibling};
        without_gil([&] {
          build_tree(root_tokens, candidate_tokens, candidate_scores, candidate_parents, node_limit,
                     tree_order, tree, selected, current_stream);
        });
      },
      "root_tokens"_a, "candidate_tokens"_a, "candidate_scores"_a, "candidate_parents"_a, "node_limit"_a,
      "order"_a, "tokens"_a, "parents"_a, "depths"_a, "mask"_a, "scores"_a, "num_nodes"_a, "first_child"_a,
      "next_sibling"_a, "selected"_a);
  m.def(
      "retrieve_indices",
      [](TensorView parents, TensorView num_nodes, TensorView out, TensorView num_leaves) {
        without_gil([&] { retrieve_indices(parents, num_nodes, out, num_leaves, current_stream); });
      },
      "parents"_a, "num_nodes"_a, "retrieve_indices"_a, "num_leaves"_a);
}

}  // namespace eagle::bindings
