// append_rows on any processor.
#include "cpu/attention/append_kernel.h"

namespace eagle::cpu {

RotateHeads rotate_heads_generic(DType dtype) { return rotate_heads(dtype); }

}  // namespace eagle::cpu
