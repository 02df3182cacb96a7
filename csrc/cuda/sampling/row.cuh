#pragma once
// One row of logits, streamed by a block.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/numeric.h"
#include "cuda/device/ptx.cuh"

namespace eagle::cuda {

// NaN counts as -inf, -0 as 0.
__device__ __forceinline__ float usable(float x) { return (x == x ? x : bits_float(0xff800000u)) + 0.0f; }

// Two storage elements, or one of 4 bytes, in a register.
template <class T>
struct Packed;
template <>
struct Packed<float> {
  using Bits = uint32_t;
  static constexpr uint32_t kNothing = 0xff800000u;  // -inf
  static __device__ __forceinline__ float get(const uint32_t (&words)[4], int i) {
    return bits_float(words[i]);
  }
};
template <>
struct Packed<bf16_t> {
  using Bits = uint16_t;
  static constexpr uint32_t kNothing = 0xff80u;
  static __device__ __forceinline__ float get(const uint32_t (&words)[4], int i) {
    return bits_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
  }
};
template <>
struct Packed<half_t> {
  using Bits = uint16_t;
  static constexpr uint32_t kNothing = 0xfc00u;
  static __device__ __forceinline__ float get(const uint32_t (&words)[4], int i) {
    return to_float(half_t{static_cast<uint16_t>(words[i / 2] >> (i % 2 ? 16 : 0))});
  }
};

template <class T>
struct Row {
  using Bits = typename Packed<T>::Bits;
  static constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));  // logits of one 16-byte load
  static constexpr int kPerThread = 8;                                 // logits of a thread in one round
  static constexpr int kVectors = kPerThread / kPerVector;

  const T* data;
  uint32_t size;  // V
  uint32_t skew;  // logits between the 16-byte boundary at or below the row and the row

  static __device__ __forceinline__ Row of(const T* data, int64_t size) {
    return {data, static_cast<uint32_t>(size),
            static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T))};
  }

  __device__ __forceinline__ float at(uint32_t i) const {
    uint32_t words[4] = {load_read_only(reinterpret_cast<const Bits*>(data) + i), 0, 0, 0};
    return Packed<T>::get(words, 0);
  }

  // 16 bytes from logit `first` on, which may lie before the row (wrapped below 0) or reach beyond it: only
  // what is the row's own is read.
  __device__ __forceinline__ void read(uint32_t first, uint32_t (&words)[4]) const {
    const Bits* const bits = reinterpret_cast<const Bits*>(data) + static_cast<int32_t>(first);
    if (first < size && size - first >= kPerVector) {
      const uint4 v = load_read_only(reinterpret_cast<const uint4*>(bits));
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
      return;
    }
    // One by one from the last, each pushing the later ones up by its size: a loop, as it is rare.
#pragma unroll 1
    for (int i = kPerVector - 1; i >= 0; --i) {
      const uint32_t element = first + i < size ? load_read_only(bits + i) : Packed<T>::kNothing;
      constexpr int kBits = 8 * static_cast<int>(sizeof(T)) % 32;
#pragma unroll
      for (int w = 3; w > 0; --w)
        words[w] = kBits == 0 ? words[w - 1] : words[w] << kBits | words[w - 1] >> (32 - kBits) % 32;
      words[0] = kBits == 0 ? element : words[0] << kBits | element;
    }
  }
};

// Every logit of the row once, in rounds of kVectors vectors per thread, kThreads apart: body(x, first, j)
// gets vector j of its round, the values of the tokens from `first` on; tokens that do not exist have -inf.
// Every thread takes every round, so that the body may hold collectives; a round is loaded while the one
// before is worked on.
template <int kThreads, int kVectors, class T, class Body>
__device__ __forceinline__ void for_each_vector(const Row<T>& row, Body&& body) {
  constexpr uint32_t kStep = kThreads * Row<T>::kPerVector, kRound = kVectors * kStep;
  const uint32_t rounds = (row.size + row.skew + kRound - 1) / kRound;
  uint32_t next[kVectors][4] = {}, words[kVectors][4] = {};
  uint32_t first = threadIdx.x * Row<T>::kPerVector - row.skew - kRound;
  for (uint32_t round = 0;; ++round, first += kRound) {
    if (round < rounds)
#pragma unroll
      for (int j = 0; j < kVectors; ++j) row.read(first + kRound + j * kStep, next[j]);
    if (round > 0)
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float x[Row<T>::kPerVector];
#pragma unroll
        for (int i = 0; i < Row<T>::kPerVector; ++i) x[i] = usable(Packed<T>::get(words[j], i));
        body(x, first + j * kStep, j);
      }
    if (round == rounds) return;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int w = 0; w < 4; ++w) words[j][w] = next[j][w];
  }
}
template <int kThreads, class T, class Body>
__device__ __forceinline__ void for_each_vector(const Row<T>& row, Body&& body) {
  for_each_vector<kThreads, Row<T>::kVectors>(row, body);
}

}  // namespace eagle::cuda
