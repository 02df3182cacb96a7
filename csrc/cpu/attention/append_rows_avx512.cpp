// append_rows with AVX-512 (F, BW, DQ, VL).
#include "cpu/attention/append_kernel.h"

namespace eagle::cpu {

RotateHeads rotate_heads_avx512(DType dtype) { return rotate_heads(dtype); }

}  // namespace eagle::cpu
