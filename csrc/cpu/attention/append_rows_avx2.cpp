// append_rows with AVX2, FMA and F16C.
#include "cpu/attention/append_kernel.h"

namespace eagle::cpu {

RotateHeads rotate_heads_avx2(DType dtype) { return rotate_heads(dtype); }

}  // namespace eagle::cpu
