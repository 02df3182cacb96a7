// linear's kernels for AVX-512 without BF16 products.
#include "cpu/linear/avx512_impl.h"

namespace eagle::cpu {
namespace {

struct Formats {
  using BFloat16 = BFloat16Pairs;
  using Float16 = Single<LoadFloat16>;
  using Float32 = Single<LoadFloat32>;
};

}  // namespace

const LinearKernels kLinearAvx512 = {false, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
