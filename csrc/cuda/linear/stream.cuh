#pragma once
// The streaming core: weights flow through a ring in shared memory, past all rows of x.
//
// A block walks through its passes (work.cuh). A step is 2 KiB of each of the pass's row tiles and the same
// columns of every row of x. Each iteration waits for the step after the one it multiplies, asks for the one
// that takes the place of the last, and lets every warp multiply its tiles; one barrier does for all. The
// ring runs on from pass to pass. x is normalised in place, one step ahead. Where the device has bulk copies,
// they bring the weights, a tile's step each, and a barrier in shared memory for each place of the ring tells
// that they are there.
#include <cuda_runtime.h>

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/linear/products.cuh"
#include "cuda/linear/rows.cuh"
#include "cuda/linear/work.cuh"

namespace eagle::cuda {

inline constexpr int kMaxRing = 16;
inline constexpr int kMaxFusedNormRows =
    32;                                 // beyond, blocks that normalise for themselves do too much twice
inline constexpr int kMaxTokens = 256;  // rows of x that a launch takes

// At the beginning of shared memory; behind it the ring, and behind that what the kernel wants.
struct StreamShared {
  float root[kMaxFusedNormRows];
  Mbarrier arrived[kMaxRing];  // the weights of a step, where bulk copies bring them
};

// Bytes of one step in the ring: weights, x (whole tiles of tokens), the norm's weight.
EAGLE_INLINE int step_bytes(int tile_bytes, int row_bytes, int pass_tiles, int token_tiles) {
  return tile_bytes * pass_tiles + row_bytes * (8 * token_tiles + 1);
}

// kRows row tiles and up to kTokens token tiles a warp; where these are more rows than a block normalises,
// there is no norm.
template <class Products, int kRows, int kTokens>
class Stream {
 public:
  using T = typename Products::Element;
  static constexpr bool kIntegers = Products::kIntegers;
  using Sums = float[kRows][kTokens][4];
  static constexpr int kPieces = Products::kPieces, kRowBytes = kPieces * 16;
  static constexpr bool kFusesNorm = 8 * kTokens <= kMaxFusedNormRows && !kIntegers;

  __device__ __forceinline__ Stream(const StreamPlan& plan, StreamShared& shared, unsigned char* ring)
      : plan_(plan),
        shared_(shared),
        ring_(ring),
        step_bytes_(step_bytes(Products::kTileBytes, kRowBytes, plan.pass_tiles, plan.token_tiles())) {
    const int row_warps = static_cast<int>(blockDim.x) / kWarpSize / plan.token_groups;
    first_row_ = warp_id() % row_warps * kRows;
    first_token_tile_ = warp_id() / row_warps * kTokens;
    token_tiles_ = min(plan.token_tiles() - first_token_tile_, kTokens);
  }

  // This warp's first row tile within a pass and its first token tile.
  __device__ __forceinline__ int first_row() const { return first_row_; }
  __device__ __forceinline__ int first_token_tile() const { return first_token_tile_; }
  __device__ __forceinline__ int token_tiles() const { return token_tiles_; }

  // Calls finish(walk, sums) in every warp at the end of every pass.
  template <class Finish>
  __device__ __forceinline__ void run(int block, int blocks, Finish&& finish) {
    Walk here = Walk::begin(plan_, block, blocks), ahead = here;
    clear_padding();
    if (plan_.bulk) init_barriers();
    for (int slot = 0; slot + 1 < plan_.ring; ++slot) issue(slot, ahead);
    if constexpr (kFusesNorm) {
      if (normalises()) {
        find_roots();
        wait(plan_.ring - 2);
        __syncthreads();
        if (here.more()) normalise(0, here.step);
      }
    }

    Sums sum;
    clear(sum);
    int slot = 0, last = plan_.ring - 1;
    uint32_t parity = 0;  // of the phase that `slot` is in
    while (here.more()) {
      wait(plan_.ring - 3);
      __syncthreads();
      issue(last, ahead);
      const uint32_t arriving = parity;
      last = slot;
      slot = slot + 1 == plan_.ring ? 0 : slot + 1;
      parity ^= slot == 0 ? 1u : 0u;
      if constexpr (kFusesNorm) {
        if (normalises()) {
          Walk next = here;
          next.advance(plan_);
          if (next.more()) normalise(slot, next.step);
        }
      }
      multiply(last, arriving, here, sum);
      if (here.ends_pass()) {
        finish(here, sum);
        clear(sum);
      }
      here.advance(plan_);
    }
    copy_async_wait<0>();
  }

 private:
  __device__ __forceinline__ bool normalises() const { return kFusesNorm && plan_.norm_weight; }
  __device__ __forceinline__ unsigned char* slot_at(int slot) const { return ring_ + slot * step_bytes_; }
  __device__ __forceinline__ uint4* x_at(int slot) const {
    return reinterpret_cast<uint4*>(slot_at(slot) + Products::kTileBytes * plan_.pass_tiles);
  }
  __device__ __forceinline__ uint4* norm_at(int slot) const {
    return x_at(slot) + kPieces * 8 * plan_.token_tiles();
  }

  __device__ __forceinline__ static void clear(Sums& sum) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int n = 0; n < kTokens; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][n][i] = 0.0f;
  }

  // Tokens that do not exist are zeros, which arrive with the first step; nobody writes there later.
  __device__ __forceinline__ void clear_padding() const {
    const int first = plan_.m * kPieces, last = 8 * plan_.token_tiles() * kPieces;
    for (int slot = 0; slot < plan_.ring; ++slot)
      for (int i = first + static_cast<int>(threadIdx.x); i < last; i += static_cast<int>(blockDim.x))
        copy_async(x_at(slot) + i, plan_.weight, 0);  // nothing of it: zeros
  }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < plan_.ring; ++slot) mbarrier_init(&shared_.arrived[slot], 1);
      mbarrier_init_fence();
    }
    __syncthreads();
  }

  // Asks for the step at `walk`, if there is one, and moves on.
  __device__ __forceinline__ void issue(int slot, Walk& walk) const {
    if (walk.more()) {
      constexpr int kTilePieces = Products::kTileBytes / 16;
      const int64_t tile_stride = int64_t{plan_.steps} * Products::kTileBytes;
      const unsigned char* const weight =
          plan_.weight + walk.first_tile * tile_stride + int64_t{walk.step} * Products::kTileBytes;
      uint4* const to = reinterpret_cast<uint4*>(slot_at(slot));
      if (plan_.bulk) {
        if (warp_id() == 0) {  // a tile a lane: pass_tiles is at most 32
          if (lane_id() == 0)
            mbarrier_arrive_expect(&shared_.arrived[slot],
                                   static_cast<uint32_t>(walk.tiles) * Products::kTileBytes);
          __syncwarp();
          if (lane_id() < walk.tiles)
            copy_bulk(to + lane_id() * kTilePieces, weight + lane_id() * tile_stride, Products::kTileBytes,
                      &shared_.arrived[slot]);
        }
      } else {
        for (int i = static_cast<int>(threadIdx.x); i < walk.tiles * kTilePieces;
             i += static_cast<int>(blockDim.x))
          copy_async(to + i, weight + i / kTilePieces * tile_stride + i % kTilePieces * 16, 16);
      }

      const int64_t first_k = int64_t{walk.step} * Products::kStepK;
      for (int i = static_cast<int>(threadIdx.x); i < plan_.m * kPieces; i += static_cast<int>(blockDim.x)) {
        const int token = i / kPieces, piece = i % kPieces;
        const int64_t k = first_k + piece * Piece<T>::kElements;
        const T* const from = static_cast<const T*>(plan_.x) + token * plan_.x_stride + (k < plan_.k ? k : 0);
        copy_elements(x_at(slot) + piece_at<kPieces>(token, piece), from, plan_.k - k, plan_.x_vectors);
      }
      if (normalises() && threadIdx.x < kPieces) {
        const int64_t k = first_k + threadIdx.x * Piece<T>::kElements;
        const T* const from = static_cast<const T*>(plan_.norm_weight) + (k < plan_.k ? k : 0);
        copy_elements(norm_at(slot) + threadIdx.x, from, plan_.k - k, plan_.norm_vectors);
      }
      walk.advance(plan_);
    }
    copy_async_commit();
  }

  // Until at most so many of the latest steps are on their way.
  __device__ __forceinline__ static void wait(int steps) {
    wait_for(steps, std::make_integer_sequence<int, kMaxRing - 1>{});
  }
  template <int... kSteps>
  __device__ __forceinline__ static void wait_for(int steps, std::integer_sequence<int, kSteps...>) {
    static_cast<void>(((steps == kSteps && (copy_async_wait<kSteps>(), true)) || ...));
  }

  __device__ __forceinline__ void find_roots() const {
    const int warps = static_cast<int>(blockDim.x) / kWarpSize, half = lane_id() / kNormLanes;
    for (int row = 2 * warp_id(); row < plan_.m; row += 2 * warps) {
      const int mine = min(row + half, plan_.m - 1);
      const float root =
          row_root(static_cast<const T*>(plan_.x) + mine * plan_.x_stride, plan_.k, plan_.norm_eps);
      if (lane_id() % kNormLanes == 0 && row + half < plan_.m) shared_.root[mine] = root;
    }
  }

  __device__ __forceinline__ void normalise(int slot, int step) const {
    constexpr int kElements = Piece<T>::kElements;
    for (int i = static_cast<int>(threadIdx.x); i < plan_.m * kPieces; i += static_cast<int>(blockDim.x)) {
      const int token = i / kPieces, piece = i % kPieces;
      const int64_t left = plan_.k - (int64_t{step} * Products::kStepK + piece * kElements);
      Piece<T>* const at = reinterpret_cast<Piece<T>*>(x_at(slot) + piece_at<kPieces>(token, piece));
      const Piece<T> weight = reinterpret_cast<const Piece<T>*>(norm_at(slot))[piece];
      Piece<T> x = *at;
      const float root = shared_.root[token];
#pragma unroll
      for (int j = 0; j < kElements; ++j)  // zeros behind K stay zeros, whatever the root
        if (j < left) x.element[j] = normalised(x.element[j], root, weight.element[j]);
      *at = x;
    }
  }

  __device__ __forceinline__ void multiply(int slot, uint32_t parity, const Walk& walk, Sums& sum) const {
    if (first_row_ >= walk.tiles) return;
    if (plan_.bulk) mbarrier_wait(&shared_.arrived[slot], parity);
    const uint4* weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)  // one that the pass lacks is multiplied as the last, for nobody
      weight[r] = reinterpret_cast<const uint4*>(slot_at(slot) +
                                                 min(first_row_ + r, walk.tiles - 1) * Products::kTileBytes);
    Products::multiply(sum, weight, x_at(slot) + kPieces * 8 * first_token_tile_, token_tiles_);
  }

  const StreamPlan& plan_;
  StreamShared& shared_;
  unsigned char* ring_;
  int step_bytes_;
  int first_row_, first_token_tile_, token_tiles_;
};

}  // namespace eagle::cuda
