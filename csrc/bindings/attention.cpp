#include "eagle_cuda/attention.h"

#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"

namespace eagle::bindings {
namespace py = pybind11;
using namespace py::literals;

void bind_attention(py::module_& m) {
  m.def(
      "append_kv",
      [](const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
         const TensorView& v_cache, const TensorView& page_table, const TensorView& seq_lens,
         const TensorView& depths, const TensorView& num_nodes, const TensorView& cos, const TensorView& sin,
         bool interleaved, const TensorView& q_norm, const TensorView& k_norm, float norm_eps,
         const TensorView& q_out, const TensorView& k_scale, const TensorView& v_scale) {
        without_gil([&] {
          append_kv(q, k, v, k_cache, v_cache, page_table, seq_lens, depths, num_nodes, cos, sin, interleaved,
                    q_norm, k_norm, norm_eps, q_out, k_scale, v_scale, current_stream);
        });
      },
      "q"_a, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a, "page_table"_a, "seq_lens"_a, "depths"_a, "num_nodes"_a,
      "cos"_a, "sin"_a, "interleaved"_a, "q_norm"_a, "k_norm"_a, "norm_eps"_a, "q_out"_a,
      "k_scale"_a = py::none(), "v_scale"_a = py::none());
  m.def(
      "tree_attention",
      [](const TensorView& q, const TensorView& k_cache, const TensorView& v_cache,
         const TensorView& page_table, const TensorView& seq_lens, const TensorView& num_nodes,
         const TensorView& mask, float softmax_scale, int window, const TensorView& out,
         const TensorView& lse, float logit_softcap, const TensorView& sinks, const TensorView& k_scale,
         const TensorView& v_scale, const TensorView& workspace) {
        without_gil([&] {
          tree_attention(q, k_cache, v_cache, page_table, seq_lens, num_nodes, mask, softmax_scale, window,
                         out, lse, logit_softcap, sinks, k_scale, v_scale, workspace, current_stream);
        });
      },
      "q"_a, "k_cache"_a, "v_cache"_a, "page_table"_a, "seq_lens"_a, "num_nodes"_a, "mask"_a,
      "softmax_scale"_a, "window"_a, "out"_a, "lse"_a, "logit_softcap"_a = 0.0f, "sinks"_a = py::none(),
      "k_scale"_a = py::none(), "v_scale"_a = py::none(), "workspace"_a = py::none());
  m.def(
      "tree_attention_workspace_bytes",
      [](const TensorView& q, const TensorView& k_cache, const TensorView& v_cache,
         const TensorView& page_table) {
        return tree_attention_workspace_bytes(q, k_cache, v_cache, page_table);
      },
      "q"_a, "k_cache"_a, "v_cache"_a, "page_table"_a);
}

}  // namespace eagle::bindings
