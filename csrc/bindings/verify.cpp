#include "eagle_cuda/verify.h"

#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"

namespace eagle::bindings {
namespace py = pybind11;
using namespace py::literals;

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
}

}  // namespace eagle::bindings
