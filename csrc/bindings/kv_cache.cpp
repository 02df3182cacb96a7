#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
#include "eagle_cuda/kv_cache.h"

namespace eagle::bindings {
namespace py = pybind11;

void bind_kv_cache(py::module_&) {}

}  // namespace eagle::bindings
