// out = residual + activation(norm(x) @ W^T + bias): every thread streams groups of 32 packed rows past all
// rows of x.
#include "cpu/linear/products.h"

namespace eagle {

void validate(const LinearParams& p) {
  const PackedWeight& w = p.weight;
  check(w.backend == DeviceType::kCPU, "weight: expected a weight packed for cpu, got one packed for cuda");
  check(w.data != nullptr || w.n == 0, "weight: expected packed data, got a null pointer");
  check(p.m >= 0, "x: expected a number of rows >= 0, got ", p.m);
  check(p.x_dtype == cpu::dtype_of_format(w.format), "x: expected dtype ", cpu::name(w.format),
        " (the weight's format), got ", name(p.x_dtype));
  check(p.out_dtype == DType::kFloat32 || p.out_dtype == DType::kBFloat16 || p.out_dtype == DType::kFloat16,
        "out: expected a dtype of float32, bfloat16, float16, got ", name(p.out_dtype));
  check(p.activation == Activation::kNone || w.paired,
        "activation: swiglu expects a weight packed with paired=True");
  check(p.norm_eps >= 0.0f, "eps: expected a number >= 0, got ", p.norm_eps);
}

namespace cpu {

void linear(const LinearParams& p) {
  validate(p);
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

}  // namespace cpu
}  // namespace eagle
