#pragma once
// What append_rows.cpp needs from an instruction set; same bits on each.
#include "eagle_cuda/tensor_view.h"

namespace eagle::cpu {

struct RotateParams {
  int head_dim;  // at most kMaxAppendHeadDim
  int rotary_dim;
  bool interleaved;
  float norm_eps;
  const void* norm;  // [head_dim] or nullptr
  const float* cos;  // [rotary_dim / 2] of the row's position
  const float* sin;
};

inline constexpr int kMaxAppendHeadDim = 256;

// Where the codes of heads go, and their scales: `scales[head]`, or one for all that is given.
struct CodeHeads {
  void* out;
  int64_t out_stride;
  float* scales;
  bool given;
};

// Norm and rotation of `heads` heads from x to out, which may be x.
using RotateHeads = void (*)(const RotateParams& p, int heads, const void* x, int64_t x_stride, void* out,
                             int64_t out_stride);

// The same to float8 codes.
using EncodeHeads = void (*)(const RotateParams& p, int heads, const void* x, int64_t x_stride,
                             const CodeHeads& to);

struct AppendKernels {
  RotateHeads rotate;
  EncodeHeads encode;
};

AppendKernels append_kernels_generic(DType dtype);
AppendKernels append_kernels_avx2(DType dtype);
AppendKernels append_kernels_avx512(DType dtype);

}  // namespace eagle::cpu
