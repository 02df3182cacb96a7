// out = residual + activation(norm(x) @ W^T + bias): every thread streams groups of 32 packed rows past all
// rows of x.
#include "cpu/linear/products.h"

namespace eagle::cpu {

void linear(const LinearParams& p) {
  validate(p);
  expect_packed_here(p.weight);
  if (p.m == 0 || p.weight.n == 0) return;
  const LinearKernels& kernels = linear_kernels();
  GroupProducts products{};
  products.x_dtype = p.x_dtype;
  products.out_dtype = p.out_dtype;
  products.swiglu = p.activation == Activation::kSwiGLU;
  products.m = p.m;
  products.bias = p.bias;
  products.residual = p.residual;
  products.residual_stride = p.residual_stride;
  products.out = p.out;
  products.out_stride = p.out_stride;
  for_products(kernels, p.weight, p.x, p.x_stride, p.norm_weight, p.norm_eps, products, 1,
               stream_grain(PanelLayout(p.weight)), kernels.multiply);
}

}  // namespace eagle::cpu
