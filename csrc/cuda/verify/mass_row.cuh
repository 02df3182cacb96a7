#pragma once
// Sums of masses over a row, by a block.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/fixed_mass.h"
#include "cuda/device/ptx.cuh"
#include "cuda/sampling/block_search.cuh"
#include "cuda/sampling/row.cuh"
#include "eagle_cuda/verify.h"

namespace eagle::cuda {

// The row in kSegments pieces of whole 16-byte vectors, one after the other; a warp sums a piece. Sums are of
// integers, so that where the pieces end says nothing.
template <int kThreads>
struct RowSums {
  static constexpr int kWarps = kThreads / kWarpSize, kSegments = kWarps * 8;
  using Words = uint32_t[4];

  const Row<float>& row;
  uint64_t* segments;  // shared, [kSegments]
  BlockScratch<kThreads>& scratch;

  // Elements of a piece, a multiple of 128.
  __device__ __forceinline__ uint32_t segment_size() const {
    constexpr uint32_t kStep = kSegments * kWarpSize * 4;
    return (row.size + row.skew + kStep - 1) / kStep * (kWarpSize * 4);
  }
  __device__ __forceinline__ uint32_t segment_of(uint32_t element) const {
    return (element + row.skew) / segment_size();
  }

  // Four elements from `first` on, 16 bytes where `other` is aligned there as the row is.
  __device__ __forceinline__ static void read(const Row<float>& other, uint32_t first, float (&x)[4]) {
    Words words;
    if ((first + other.skew) % 4 == 0) {
      other.read(first, words);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = first + i < other.size ? float_bits(other.at(first + i)) : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = first + i < other.size ? bits_float(words[i]) : 0.0f;
  }

  // body(x, first) for the vectors of this warp's pieces; end(segment) behind each piece.
  template <class Body, class End>
  __device__ __forceinline__ void scan(Body body, End end) const {
    const uint32_t size = segment_size();
    for (uint32_t s = warp_id(); s < kSegments; s += kWarps) {
      const uint32_t begin = s * size, until = min(begin + size, row.size + row.skew);
#pragma unroll 4
      for (uint32_t at = begin + 4 * lane_id(); at < until; at += 4 * kWarpSize) body(at - row.skew);
      end(s);
    }
  }

  // The bits of the largest probability; `flags` learns of entries that are none.
  __device__ __forceinline__ uint32_t largest(int32_t& flags) const {
    uint32_t largest = 0, bad = 0;
    scan(
        [&](uint32_t first) {
          float x[4];
          read(row, first, x);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            largest = max(largest, probability_bits(x[i]));
            bad |= !is_probability(x[i]);
          }
        },
        [](uint32_t) {});
    const uint64_t all =
        block_reduce<kThreads>(uint64_t{bad} << 32 | largest, scratch, [](uint64_t a, uint64_t b) {
          return ((a | b) & ~uint64_t{0xffffffffu}) | max(static_cast<uint32_t>(a), static_cast<uint32_t>(b));
        });
    if (all >> 32) flags |= kBadProbability;
    return static_cast<uint32_t>(all);
  }

  // The sum of weight(first, w) over the row, which gives the masses of four elements; the segments get
  // theirs.
  template <class Weight>
  __device__ __forceinline__ uint64_t sum(Weight weight) const {
    uint64_t mine = 0, all = 0;
    scan(
        [&](uint32_t first) {
          uint64_t w[4];
          weight(first, w);
          mine += (w[0] + w[1]) + (w[2] + w[3]);
        },
        [&](uint32_t s) {
          mine = warp_reduce(mine, [](uint64_t a, uint64_t b) { return a + b; });
          if (lane_id() == 0) segments[s] = mine, all += mine;
          mine = 0;
        });
    all = block_sum<kThreads>(all, scratch);
    __syncthreads();
    return all;
  }

  // The first token at which the masses up to and with it exceed `target`, which is below their sum. Masses
  // as segments[] has them, and of a token mass(token).
  template <class Mass>
  __device__ __forceinline__ uint32_t find(uint64_t target, Mass mass) const {
    const Crossing piece =
        find_crossing<kThreads>(kSegments, 0, target + 1, [&](uint32_t s) { return segments[s]; }, scratch);
    const uint32_t size = segment_size(), begin = piece.index * size;
    const uint32_t first = begin > row.skew ? begin - row.skew : 0;
    const uint32_t last = min(begin + size - row.skew, row.size);
    return first +
           find_crossing<kThreads>(
               last - first, piece.before, target + 1, [&](uint32_t i) { return mass(first + i); }, scratch)
               .index;
  }
};

}  // namespace eagle::cuda
