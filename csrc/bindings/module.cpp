// The extension module. One file per noun registers its ops.
#include <pybind11/pybind11.h>

#include "bindings/argument_names.h"
#include "bindings/tensor_caster.h"
#include "eagle_cuda/device.h"
#include "eagle_cuda/threads.h"

namespace py = pybind11;

namespace eagle::bindings {
void bind_linear(py::module_& m);
void bind_draft(py::module_& m);
void bind_tree(py::module_& m);
void bind_attention(py::module_& m);
void bind_sampling(py::module_& m);
void bind_verify(py::module_& m);
void bind_kv_cache(py::module_& m);
}  // namespace eagle::bindings

PYBIND11_MODULE(_C, m) {
  m.doc() = "eagle_cuda native ops; use them through the functions of the package eagle_cuda";
  m.def("num_threads", &eagle::num_threads);
  m.def(
      "set_num_threads", [](int n) { eagle::bindings::without_gil([n] { eagle::set_num_threads(n); }); },
      py::arg("n"));
  m.def("build_info", [] {
    py::dict info;
    info["version"] = EAGLE_VERSION;
    info["compiler"] = EAGLE_COMPILER;
    info["cuda"] = *eagle::cuda_toolkit() != '\0';
    info["cuda_toolkit"] = eagle::cuda_toolkit();
    info["cuda_architectures"] = eagle::cuda_architectures();
    info["cpu_isa"] = eagle::cpu_isa();
    info["num_threads"] = eagle::num_threads();
    return info;
  });
  m.def("cuda_error", [] {
    std::string reason;
    eagle::bindings::without_gil([&] { reason = eagle::cuda_error(); });
    return reason;
  });
  eagle::bindings::bind_linear(m);
  eagle::bindings::bind_tree(m);
  eagle::bindings::bind_draft(m);  // its signature names a type of tree's
  eagle::bindings::bind_attention(m);
  eagle::bindings::bind_sampling(m);
  eagle::bindings::bind_verify(m);
  eagle::bindings::bind_kv_cache(m);
  eagle::bindings::name_arguments(m);
}
