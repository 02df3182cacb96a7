#pragma once
// Where the rows of x stand that a product streams past its weights, and by what they are normalised.
//
// The stream asks a source for 16 bytes at a time: row `token` from column `k` on.
#include <cuda_runtime.h>

#include "cuda/device/warp.cuh"
#include "cuda/linear/rows.cuh"
#include "cuda/linear/work.cuh"

namespace eagle::cuda {

inline constexpr int kMaxFusedNormRows =
    32;  // of a launch of its own; beyond, blocks that normalise for themselves do too much twice

inline constexpr int kMaxTokens = 256;  // rows of x that a launch takes

// Calls of(row, root) in one lane for the root of every row, from(row) its first element. Whole block.
template <class T, class From, class Of>
__device__ __forceinline__ void find_row_roots(int rows, int64_t size, float eps, From&& from, Of&& of) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize, half = lane_id() / kNormLanes;
  for (int row = 2 * warp_id(); row < rows; row += 2 * warps) {
    const int mine = min(row + half, rows - 1);
    const float root = row_root(static_cast<const T*>(from(mine)), size, eps);
    if (lane_id() % kNormLanes == 0 && row + half < rows) of(mine, root);
  }
}

// The plan's: one behind the other, all at one stride.
template <class T>
class StridedRows {
 public:
  static constexpr int kMostRows = kMaxTokens, kMostNormed = kMaxFusedNormRows;

  __device__ __forceinline__ StridedRows(const StreamPlan& plan, float* roots) : plan_(plan), roots_(roots) {}

  __device__ __forceinline__ bool normalises() const { return plan_.norm_weight; }
  __device__ __forceinline__ bool vectors() const { return plan_.x_vectors; }
  __device__ __forceinline__ bool norm_vectors() const { return plan_.norm_vectors; }
  __device__ __forceinline__ const T* at(int token, int64_t k) const {
    return static_cast<const T*>(plan_.x) + token * plan_.x_stride + k;
  }
  __device__ __forceinline__ const T* weight_at(int64_t k) const {
    return static_cast<const T*>(plan_.norm_weight) + k;
  }
  __device__ __forceinline__ float root(int token, int64_t) const { return roots_[token]; }
  __device__ __forceinline__ void find_roots() const {
    find_row_roots<T>(
        plan_.m, plan_.k, plan_.norm_eps, [&](int row) { return at(row, 0); },
        [&](int row, float root) { roots_[row] = root; });
  }

 private:
  const StreamPlan& plan_;
  float* roots_;
};

// In shared memory: rows anywhere, of one segment or of two, each with its own norm. Everything begins at a
// multiple of 16 bytes and is a multiple of 16 bytes long.
inline constexpr int kMaxTableRows = 64;
struct RowTable {
  const void* row[2][kMaxTableRows];
  float root[2][kMaxTableRows];
  const void* norm[2];  // nullptr: none; then of both
  int64_t size[2];      // columns of a segment; the second's may be 0
};

template <class T>
class TableRows {
 public:
  static constexpr int kMostRows = kMaxTableRows, kMostNormed = kMaxTableRows;

  __device__ __forceinline__ TableRows(const StreamPlan& plan, RowTable& table)
      : plan_(plan), table_(table) {}

  __device__ __forceinline__ bool normalises() const { return table_.norm[0]; }
  __device__ __forceinline__ bool vectors() const { return true; }
  __device__ __forceinline__ bool norm_vectors() const { return true; }
  __device__ __forceinline__ const T* at(int token, int64_t k) const {
    const int second = segment(k);
    return static_cast<const T*>(table_.row[second][token]) + within(k, second);
  }
  __device__ __forceinline__ const T* weight_at(int64_t k) const {
    const int second = segment(k);
    return static_cast<const T*>(table_.norm[second]) + within(k, second);
  }
  __device__ __forceinline__ float root(int token, int64_t k) const { return table_.root[segment(k)][token]; }
  __device__ __forceinline__ void find_roots() const {
    for (int s = 0; s < 2; ++s) {
      if (table_.size[s] == 0) continue;
      find_row_roots<T>(
          plan_.m, table_.size[s], plan_.norm_eps, [&](int row) { return table_.row[s][row]; },
          [&](int row, float root) { table_.root[s][row] = root; });
    }
  }

 private:
  // Columns behind the last are not read: they may count to either segment.
  __device__ __forceinline__ int segment(int64_t k) const {
    return k >= table_.size[0] && table_.size[1] != 0;
  }
  __device__ __forceinline__ int64_t within(int64_t k, int second) const {
    return k - second * table_.size[0];
  }

  const StreamPlan& plan_;
  RowTable& table_;
};

}  // namespace eagle::cuda
