#pragma once
// Included by one file per instruction set; everything is internal to it (csrc/cpu/isa.h).
// Blocks of 16 elements, and the rows of x as the dot products want them.
#include <cstdint>

#include "common/numeric.h"
#include "cpu/linear/kernels.h"

namespace eagle::cpu {
namespace {

constexpr int kBlock = kPanelRows;

// "unroll 1": g++ would unroll the short loop first and then not vectorise it.
template <class T>
EAGLE_INLINE void load_block(const T* in, float (&out)[kBlock]) {
#pragma GCC unroll 1
  for (int i = 0; i < kBlock; ++i) out[i] = to_float(in[i]);
}
template <class T>
EAGLE_INLINE void store_block(const float (&in)[kBlock], T* out) {
#pragma GCC unroll 1
  for (int i = 0; i < kBlock; ++i) out[i] = from_float<T>(in[i]);
}

// The first `count` elements; zeros behind them. Nothing behind them is touched.
template <class T>
EAGLE_INLINE void load_block(const T* in, int count, float (&out)[kBlock]) {
  if (count == kBlock) return load_block(in, out);
  T part[kBlock] = {};
  __builtin_memcpy(part, in, sizeof(T) * count);
  load_block(part, out);
}
template <class T>
EAGLE_INLINE void store_block(const float (&in)[kBlock], int count, T* out) {
  if (count == kBlock) return store_block(in, out);
  T part[kBlock];
  store_block(in, part);
  __builtin_memcpy(out, part, sizeof(T) * count);
}

// Lanes summed as a tree: an order that does not depend on the vector width.
EAGLE_INLINE float sum_lanes(float (&v)[kBlock]) {
  for (int width = kBlock / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
}

template <class T, class Out>
EAGLE_INLINE void prepare_row(const T* x, const T* norm_weight, int64_t k, float eps, Out* out) {
  alignas(64) float v[kBlock], w[kBlock];
  const auto count = [k](int64_t i) { return int(k - i < kBlock ? k - i : kBlock); };
  float root = 1.0f;
  if (norm_weight) {
    alignas(64) float squares[kBlock] = {};
    for (int64_t i = 0; i < k; i += kBlock) {
      load_block(x + i, count(i), v);
#pragma GCC unroll 1
      for (int j = 0; j < kBlock; ++j) squares[j] = fma(v[j], v[j], squares[j]);
    }
    root = __builtin_sqrtf(sum_lanes(squares) / float(k) + eps);
  }
  for (int64_t i = 0; i < k; i += kBlock) {
    load_block(x + i, count(i), v);
    if (norm_weight) {
      load_block(norm_weight + i, count(i), w);
#pragma GCC unroll 1
      for (int j = 0; j < kBlock; ++j) v[j] = to_float(from_float<T>(v[j] / root * w[j]));
    }
    store_block(v, count(i), out + i);
  }
}

template <class T, class Out>
void prepare_rows(const InputRows& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    Out* out = reinterpret_cast<Out*>(static_cast<char*>(a.out) + row * a.out_stride);
    prepare_row(static_cast<const T*>(a.x) + row * a.x_stride, static_cast<const T*>(a.norm_weight), a.k,
                a.eps, out);
    for (int64_t i = a.k; i < a.padded_k; ++i) out[i] = Out{};
  }
}

void prepare(const InputRows& a, int64_t begin, int64_t end) {
  if (a.dtype == DType::kFloat32)
    prepare_rows<float, float>(a, begin, end);
  else if (a.dtype == DType::kBFloat16)
    a.widen ? prepare_rows<bf16_t, float>(a, begin, end) : prepare_rows<bf16_t, bf16_t>(a, begin, end);
  else
    a.widen ? prepare_rows<half_t, float>(a, begin, end) : prepare_rows<half_t, half_t>(a, begin, end);
}

}  // namespace
}  // namespace eagle::cpu
