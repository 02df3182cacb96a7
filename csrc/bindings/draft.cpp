#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
#include "eagle_cuda/draft.h"

namespace eagle::bindings {
namespace py = pybind11;

void bind_draft(py::module_&) {}

}  // namespace eagle::bindings
