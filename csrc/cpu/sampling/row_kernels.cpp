#include "cpu/sampling/row_kernels.h"

#include "cpu/isa.h"

namespace eagle::cpu {

const RowKernels& row_kernels() {
  static const RowKernels& chosen = isa() >= Isa::kAvx512 ? kRowKernelsAvx512
                                    : isa() == Isa::kAvx2 ? kRowKernelsAvx2
                                                          : kRowKernelsGeneric;
  return chosen;
}

}  // namespace eagle::cpu
