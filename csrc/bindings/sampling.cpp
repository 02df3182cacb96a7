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
         TensorView tokens, TensorView log_probs, TensorView flags) {
        const TopKTopP rule = parse_rule(top_k_top_p);
        without_gil([&] {
          sample_tokens(logits, num_nodes, temperature, top_k, top_p, min_p, seeds, positions, rule, tokens,
                        log_probs, flags, current_stream);
        });
      },
      "logits"_a, "num_nodes"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seeds"_a, "positions"_a,
      "top_k_top_p"_a, "tokens"_a, "log_probs"_a, "flags"_a);
  m.def(
      "gumbel_noise",
      [](TensorView seeds, TensorView positions, TensorView out) {
        without_gil([&] { gumbel_noise(seeds, positions, out, current_stream); });
      },
      "seeds"_a, "positions"_a, "out"_a);
}

}  // namespace eagle::bindings
