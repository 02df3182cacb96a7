// The kernel of append_kernels.h; included once by each append_rows_<instruction set>.cpp. Internal linkage
// (cpu/isa.h).
#include "common/numeric.h"
#include "common/quantize.h"
#include "cpu/attention/append_kernels.h"

namespace eagle::cpu {
namespace {

// x * weight / sqrt(mean(x^2) + eps). Dimension d is summed in lane d % 16, so the width of a vector does not
// show.
EAGLE_INLINE void norm_head(const float* weight, float eps, int head_dim, float* x) {
  constexpr int kLanes = 16;
  float lane[kLanes] = {};
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes)
    for (int i = 0; i < kLanes; ++i) lane[i] = fma(x[d + i], x[d + i], lane[i]);
  for (int i = 0; d + i < head_dim; ++i) lane[i] = fma(x[d + i], x[d + i], lane[i]);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  const float scale = rsqrt_f32(lane[0] / static_cast<float>(head_dim) + eps);
  for (int i = 0; i < head_dim; ++i) x[i] = x[i] * scale * weight[i];
}

// The pair (a, b) becomes (a cos - b sin, b cos + a sin).
EAGLE_INLINE void rotate_head(const RotateParams& p, float* x) {
  const int half = p.rotary_dim / 2;
  if (p.interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = fma(a, p.cos[i], -(b * p.sin[i]));
      x[2 * i + 1] = fma(b, p.cos[i], a * p.sin[i]);
    }
  } else {
    float rotated[kMaxAppendHeadDim];
    for (int i = 0; i < half; ++i) {
      rotated[i] = fma(x[i], p.cos[i], -(x[half + i] * p.sin[i]));
      rotated[half + i] = fma(x[half + i], p.cos[i], x[i] * p.sin[i]);
    }
    for (int i = 0; i < 2 * half; ++i) x[i] = rotated[i];
  }
}

// Calls f(head, row) with each head's elements, normed and rotated.
template <class T, class F>
EAGLE_INLINE void for_each_head(const RotateParams& p, int heads, const void* x, int64_t x_stride, F f) {
  float weight[kMaxAppendHeadDim], row[kMaxAppendHeadDim];
  if (p.norm)
    for (int d = 0; d < p.head_dim; ++d) weight[d] = to_float(static_cast<const T*>(p.norm)[d]);
  for (int head = 0; head < heads; ++head) {
    const T* from = static_cast<const T*>(x) + head * x_stride;
    for (int d = 0; d < p.head_dim; ++d) row[d] = to_float(from[d]);
    if (p.norm) norm_head(weight, p.norm_eps, p.head_dim, row);
    rotate_head(p, row);
    f(head, row);
  }
}

template <class T>
void rotate_heads(const RotateParams& p, int heads, const void* x, int64_t x_stride, void* out,
                  int64_t out_stride) {
  for_each_head<T>(p, heads, x, x_stride, [&](int head, const float* row) {
    T* to = static_cast<T*>(out) + head * out_stride;
    for (int d = 0; d < p.head_dim; ++d) to[d] = from_float<T>(row[d]);
  });
}

template <class T>
void encode_heads(const RotateParams& p, int heads, const void* x, int64_t x_stride, const CodeHeads& to) {
  for_each_head<T>(p, heads, x, x_stride, [&](int head, const float* row) {
    if (!to.given) {
      uint32_t largest = 0;
      for (int d = 0; d < p.head_dim; ++d) {
        const uint32_t magnitude = magnitude_bits(row[d]);
        largest = magnitude > largest ? magnitude : largest;
      }
      to.scales[head] = quantize_scale(largest, kFloat8Max);
    }
    const float scale = to.scales[to.given ? 0 : head];
    float8_t* codes = static_cast<float8_t*>(to.out) + head * to.out_stride;
    for (int d = 0; d < p.head_dim; ++d) codes[d] = quantize_float8(row[d], scale);
  });
}

EAGLE_INLINE AppendKernels append_kernels(DType dtype) {
  return dtype == DType::kFloat32    ? AppendKernels{&rotate_heads<float>, &encode_heads<float>}
         : dtype == DType::kBFloat16 ? AppendKernels{&rotate_heads<bf16_t>, &encode_heads<bf16_t>}
                                     : AppendKernels{&rotate_heads<half_t>, &encode_heads<half_t>};
}

}  // namespace
}  // namespace eagle::cpu
