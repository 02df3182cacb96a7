#include "cpu/linear/kernels.h"

#include "cpu/isa.h"

namespace eagle::cpu {

const LinearKernels& linear_kernels() {
  static const LinearKernels& chosen = [&]() -> const LinearKernels& {
    switch (isa()) {
      case Isa::kAvx512Bf16:
        return kLinearAvx512Bf16;
      case Isa::kAvx512:
        return kLinearAvx512;
      case Isa::kAvx2:
        return kLinearAvx2;
      default:
        return kLinearGeneric;
    }
  }();
  return chosen;
}

}  // namespace eagle::cpu
