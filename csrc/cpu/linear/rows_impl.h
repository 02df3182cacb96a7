#pragma once
// Included by one file per instruction set; everything is internal to it (csrc/cpu/isa.h).
// Blocks of 16 elements, and the rows of x as the dot products want them.
#include <cstdint>

#include "common/quantize.h"
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

// Row `x` as it enters the products: normalised where there is a weight, rounded to T.
template <class T>
struct NormedRow {
  const T* x;
  const T* norm_weight;
  int64_t k;
  float root = 1.0f;

  EAGLE_INLINE int count(int64_t i) const { return int(k - i < kBlock ? k - i : kBlock); }

  EAGLE_INLINE NormedRow(const T* x_, const T* norm_weight_, int64_t k_, float eps)
      : x(x_), norm_weight(norm_weight_), k(k_) {
    if (!norm_weight) return;
    alignas(64) float v[kBlock], squares[kBlock] = {};
    for (int64_t i = 0; i < k; i += kBlock) {
      load_block(x + i, count(i), v);
#pragma GCC unroll 1
      for (int j = 0; j < kBlock; ++j) squares[j] = fma(v[j], v[j], squares[j]);
    }
    root = __builtin_sqrtf(sum_lanes(squares) / float(k) + eps);
  }

  // Elements i .. i + 15; zeros behind K.
  EAGLE_INLINE void load(int64_t i, float (&v)[kBlock]) const {
    load_block(x + i, count(i), v);
    if (!norm_weight) return;
    alignas(64) float w[kBlock];
    load_block(norm_weight + i, count(i), w);
#pragma GCC unroll 1
    for (int j = 0; j < kBlock; ++j) v[j] = to_float(from_float<T>(v[j] / root * w[j]));
  }
};

template <class T, class Out>
EAGLE_INLINE void prepare_row(const NormedRow<T>& row, Out* out) {
  alignas(64) float v[kBlock];
  for (int64_t i = 0; i < row.k; i += kBlock) {
    row.load(i, v);
    store_block(v, row.count(i), out + i);
  }
}

template <class T, class Out>
void prepare_rows(const InputRows& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    Out* out = reinterpret_cast<Out*>(static_cast<char*>(a.out) + row * a.out_stride);
    prepare_row(NormedRow<T>(static_cast<const T*>(a.x) + row * a.x_stride,
                             static_cast<const T*>(a.norm_weight), a.k, a.eps),
                out);
    for (int64_t i = a.k; i < a.padded_k; ++i) out[i] = Out{};
  }
}

// Codes of int8_dynamic. What lies behind K is padding up to the Int8RowEnd.
template <class T>
void quantize_rows(const InputRows& a, int64_t begin, int64_t end) {
  alignas(64) float v[kBlock];
  for (int64_t index = begin; index < end; ++index) {
    auto* out = reinterpret_cast<int8_t*>(static_cast<char*>(a.out) + index * a.out_stride);
    const NormedRow<T> row(static_cast<const T*>(a.x) + index * a.x_stride,
                           static_cast<const T*>(a.norm_weight), a.k, a.eps);
    alignas(64) uint32_t largest[kBlock] = {};
    for (int64_t i = 0; i < a.k; i += kBlock) {
      row.load(i, v);
#pragma GCC unroll 1
      for (int j = 0; j < kBlock; ++j) {
        const uint32_t magnitude = magnitude_bits(v[j]);
        largest[j] = magnitude > largest[j] ? magnitude : largest[j];
      }
    }
    uint32_t all = 0;
    for (int j = 0; j < kBlock; ++j) all = largest[j] > all ? largest[j] : all;
    const float scale = quantize_scale(all, kInt8Max);
    alignas(64) int32_t sums[kBlock] = {}, codes[kBlock];
    for (int64_t i = 0; i < a.k; i += kBlock) {
      row.load(i, v);
#pragma GCC unroll 1
      for (int j = 0; j < kBlock; ++j) codes[j] = quantize(v[j], scale, kInt8Max);
#pragma GCC unroll 1
      for (int j = 0; j < kBlock; ++j) sums[j] += codes[j];
      alignas(64) int8_t bytes[kBlock];
#pragma GCC unroll 1
      for (int j = 0; j < kBlock; ++j) bytes[j] = int8_t(codes[j]);
      const int64_t room = a.padded_k - i < kBlock ? a.padded_k - i : kBlock;
      __builtin_memcpy(out + i, bytes, size_t(room));
    }
    int32_t sum = 0;
    for (int j = 0; j < kBlock; ++j) sum += sums[j];
    const Int8RowEnd end_of_row = {scale, -128 * sum};
    __builtin_memcpy(out + a.padded_k, &end_of_row, sizeof(end_of_row));
  }
}

template <class T>
void prepare_form(const InputRows& a, int64_t begin, int64_t end) {
  switch (a.form) {
    case RowForm::kKeep:
      return prepare_rows<T, T>(a, begin, end);
    case RowForm::kWiden:
      return prepare_rows<T, float>(a, begin, end);
    case RowForm::kInt8:
      return quantize_rows<T>(a, begin, end);
  }
}

void prepare(const InputRows& a, int64_t begin, int64_t end) {
  if (a.dtype == DType::kFloat32)
    prepare_form<float>(a, begin, end);
  else if (a.dtype == DType::kBFloat16)
    prepare_form<bf16_t>(a, begin, end);
  else
    prepare_form<half_t>(a, begin, end);
}

}  // namespace
}  // namespace eagle::cpu
