#include "eagle_cuda/kv_cache.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"

namespace eagle::bindings {
namespace py = pybind11;
using namespace py::literals;

void bind_kv_cache(py::module_& m) {
  m.def(
      "compact_kv",
      [](const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
         const std::vector<TensorView>& k_scales, const std::vector<TensorView>& v_scales,
         const TensorView& page_table, const TensorView& path, const TensorView& num_accepted,
         const TensorView& seq_lens, int max_nodes) {
        without_gil([&] {
          compact_kv(k_caches, v_caches, k_scales, v_scales, page_table, path, num_accepted, seq_lens,
                     max_nodes, current_stream);
        });
      },
      "k_caches"_a, "v_caches"_a, "k_scales"_a, "v_scales"_a, "page_table"_a, "path"_a, "num_accepted"_a,
      "seq_lens"_a, "max_nodes"_a);
}

}  // namespace eagle::bindings
