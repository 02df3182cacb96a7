// append_rows with AVX-512 (F, BW, DQ, VL).
#include "cpu/attention/append_kernel.h"

namespace eagle::cpu {

AppendKernels append_kernels_avx512(DType dtype) { return append_kernels(dtype); }

}  // namespace eagle::cpu
