#include "eagle_cuda/sampling.h"

#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"

namespace eagle::bindings {
namespace py = pybind11;
using namespace py::literals;

namespace {

TopKTopP parse_rule(const std::string& rule) {
  if (rule == "sequential") return TopKTopP::kSequential;
  if (rule == "joint") return TopKTopP::kJoint;
  throw py::value_error("top_k_top_p: expected \"sequential\" or \"joint\", got \"" + rule + "\"");
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def(
      "sample_tokens",
      [](TensorView logits, TensorView num_nodes, TensorView temperature, TensorView top_k, TensorView top_p,
         TensorView min_p, TensorView seeds, TensorView positions, const std::string& top_k_top_p,
         TensorView tree_tokens, TensorView tree_parents, TensorView prompt_counts, TensorView output_counts,
         TensorView repetition_penalty, TensorView presence_penalty, TensorView frequency_penalty,
         TensorView bias_tokens, TensorView bias_values, TensorView min_new_tokens, TensorView prompt_lens,
         TensorView stop_tokens, TensorView token_mask, TensorView tokens, TensorView log_probs,
         TensorView flags, TensorView top_tokens, TensorView top_log_probs) {
        const TopKTopP rule = parse_rule(top_k_top_p);
        const SamplingStateViews state{prompt_counts,     output_counts, repetition_penalty, presence_penalty,
                                       frequency_penalty, bias_tokens,   bias_values,        min_new_tokens,
                                       prompt_lens,       stop_tokens,   token_mask};
        without_gil([&] {
          sample_tokens(logits, num_nodes, temperature, top_k, top_p, min_p, seeds, positions, rule,
                        tree_tokens, tree_parents, state, tokens, log_probs, flags, top_tokens, top_log_probs,
                        current_stream);
        });
      },
      "logits"_a, "num_nodes"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seeds"_a, "positions"_a,
      "top_k_top_p"_a, "tree.tokens"_a, "tree.parents"_a, "state.prompt_counts"_a, "state.output_counts"_a,
      "state.repetition_penalty"_a, "state.presence_penalty"_a, "state.frequency_penalty"_a,
      "state.bias_tokens"_a, "state.bias_values"_a, "state.min_new_tokens"_a, "state.prompt_lens"_a,
      "state.stop_tokens"_a, "state.token_mask"_a, "tokens"_a, "log_probs"_a, "flags"_a, "top_tokens"_a,
      "top_log_probs"_a);
  m.def(
      "gumbel_noise",
      [](TensorView seeds, TensorView positions, TensorView out) {
        without_gil([&] { gumbel_noise(seeds, positions, out, current_stream); });
      },
      "seeds"_a, "positions"_a, "out"_a);
}

}  // namespace eagle::bindings
