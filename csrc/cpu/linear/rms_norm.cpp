// out = x / sqrt(mean(x^2) + eps) * weight.
#include "common/check.h"
#include "cpu/linear/kernels.h"
#include "cpu/parallel.h"

namespace eagle::cpu {

void rms_norm(const RmsNormParams& p) {
  validate(p);
  InputRows rows{};
  rows.dtype = p.dtype;
  rows.form = RowForm::kKeep;
  rows.k = rows.padded_k = p.k;
  rows.eps = p.eps;
  rows.x = p.x;
  rows.x_stride = p.x_stride;
  rows.norm_weight = p.weight;
  rows.out = p.out;
  rows.out_stride = p.out_stride * element_size(p.dtype);
  constexpr int64_t kElementsPerPiece = 32768;
  const LinearKernels& kernels = linear_kernels();
  parallel_for(p.m, std::max<int64_t>(1, kElementsPerPiece / p.k),
               [&](int64_t begin, int64_t end) { kernels.prepare(rows, begin, end); });
}

}  // namespace eagle::cpu
