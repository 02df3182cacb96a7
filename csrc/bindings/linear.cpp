#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
#include "eagle_cuda/linear.h"

namespace eagle::bindings {
namespace py = pybind11;

void bind_linear(py::module_&) {}

}  // namespace eagle::bindings
