#include "eagle_cuda/verify.h"

#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"

namespace eagle::bindings {
namespace py = pybind11;
using namespace py::literals;

namespace {

RejectionScheme parse_scheme(const std::string& scheme) {
  if (scheme == "point_mass") return RejectionScheme::kPointMass;
  if (scheme == "coin_walk") return RejectionScheme::kCoinWalk;
  if (scheme == "sampled_tree") return RejectionScheme::kSampledTree;
  if (scheme == "chain") return RejectionScheme::kChain;
  throw py::value_error(
      "scheme: expected \"point_mass\", \"coin_walk\", \"sampled_tree\" or \"chain\", got \"" + scheme +
      "\"");
}

}  // namespace

void bind_verify(py::module_& m) {
  m.def(
      "verify",
      [](TensorView tokens, TensorView first_child, TensorView next_sibling, TensorView num_nodes,
         TensorView target_tokens, TensorView seq_lens, TensorView stop_tokens, TensorView budget,
         TensorView path, TensorView num_accepted, TensorView next_tokens, TensorView finished,
         TensorView new_seq_lens) {
        without_gil([&] {
          verify(tokens, first_child, next_sibling, num_nodes, target_tokens, seq_lens, stop_tokens, budget,
                 path, num_accepted, next_tokens, finished, new_seq_lens, current_stream);
        });
      },
      "tokens"_a, "first_child"_a, "next_sibling"_a, "num_nodes"_a, "target_tokens"_a, "seq_lens"_a,
      "stop_tokens"_a, "budget"_a, "path"_a, "num_accepted"_a, "next_tokens"_a, "finished"_a,
      "new_seq_lens"_a);
  m.def(
      "verify_rejection",
      [](TensorView tokens, TensorView first_child, TensorView next_sibling, TensorView num_nodes,
         TensorView target_probs, TensorView draft_probs, const std::string& scheme, double threshold_single,
         double threshold_acc, TensorView coins, TensorView final_coins, TensorView seeds,
         TensorView seq_lens, TensorView stop_tokens, TensorView budget, TensorView path,
         TensorView num_accepted, TensorView next_tokens, TensorView finished, TensorView new_seq_lens,
         TensorView emitted, TensorView flags) {
        const RejectionScheme rule = parse_scheme(scheme);
        without_gil([&] {
          verify_rejection(tokens, first_child, next_sibling, num_nodes, target_probs, draft_probs, rule,
                           threshold_single, threshold_acc, coins, final_coins, seeds, seq_lens, stop_tokens,
                           budget, path, num_accepted, next_tokens, finished, new_seq_lens, emitted, flags,
                           current_stream);
        });
      },
      "tokens"_a, "first_child"_a, "next_sibling"_a, "num_nodes"_a, "target_probs"_a, "draft_probs"_a,
      "scheme"_a, "threshold_single"_a, "threshold_acc"_a, "coins"_a, "final_coins"_a, "seeds"_a,
      "seq_lens"_a, "stop_tokens"_a, "budget"_a, "path"_a, "num_accepted"_a, "next_tokens"_a, "finished"_a,
      "new_seq_lens"_a, "emitted"_a, "flags"_a);
}

}  // namespace eagle::bindings
