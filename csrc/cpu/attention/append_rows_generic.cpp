// append_rows on any processor.
#include "cpu/attention/append_kernel.h"

namespace eagle::cpu {

AppendKernels append_kernels_generic(DType dtype) { return append_kernels(dtype); }

}  // namespace eagle::cpu
