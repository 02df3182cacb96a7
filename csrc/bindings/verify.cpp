#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
#include "eagle_cuda/verify.h"

namespace eagle::bindings {
namespace py = pybind11;

void bind_verify(py::module_&) {}

}  // namespace eagle::bindings
