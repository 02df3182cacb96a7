#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
#include "eagle_cuda/attention.h"

namespace eagle::bindings {
namespace py = pybind11;

void bind_attention(py::module_&) {}

}  // namespace eagle::bindings
