#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
#include "eagle_cuda/tree.h"

namespace eagle::bindings {
namespace py = pybind11;

void bind_tree(py::module_&) {}

}  // namespace eagle::bindings
