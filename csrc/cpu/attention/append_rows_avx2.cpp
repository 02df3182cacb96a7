// append_rows with AVX2, FMA and F16C.
#include "cpu/attention/append_kernel.h"

namespace eagle::cpu {

AppendKernels append_kernels_avx2(DType dtype) { return append_kernels(dtype); }

}  // namespace eagle::cpu
