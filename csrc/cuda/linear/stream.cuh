#pragma once
// The streaming core: weights flow through a ring in shared memory, past all rows of x.
//
// A block walks through its passes (work.cuh). A step is 2 KiB of each of the pass's row tiles and the same
// columns of every row of x. Each iteration waits for the step after the one it multiplies, asks for the one
// that takes the place of the last, and lets every warp multiply its tiles; one barrier does for all. The
// ring runs on from pass to pass. x is normalised in place, one step ahead. Where the device has bulk copies,
// they bring the weights, a tile's step each, and a barrier in shared memory for each place of the ring tells
// that they are there.
//
// A kernel of several products asks for the first steps of the next one's weights (prefetch) before it knows
// that x is there; run() then asks for x alone. The barriers' parities run on from product to product.
#include <cuda_runtime.h>

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/linear/products.cuh"
#include "cuda/linear/rows.cuh"
#include "cuda/linear/sources.cuh"
#include "cuda/linear/work.cuh"

namespace eagle::cuda {

inline constexpr int kMaxRing = 16;

// At the beginning of shared memory; behind it the ring, and behind that what the kernel wants.
struct StreamShared {
  float root[kMaxFusedNormRows];
  Mbarrier arrived[kMaxRing];  // the weights of a step, where bulk copies bring them
};

// Bytes of one step in the ring: weights, x (whole tiles of tokens), the norm's weight.
EAGLE_INLINE int step_bytes(int tile_bytes, int row_bytes, int pass_tiles, int token_tiles) {
  return tile_bytes * pass_tiles + row_bytes * (8 * token_tiles + 1);
}

// kRows row tiles and up to kTokens token tiles a warp, of rows of a Source (sources.cuh); where these are
// more than it normalises, there is no norm.
template <class Products, int kRows, int kTokens, class Source = StridedRows<typename Products::Element>>
class Stream {
 public:
  using T = typename Products::Element;
  static constexpr bool kIntegers = Products::kIntegers;
  using Sums = float[kRows][kTokens][4];
  static constexpr int kPieces = Products::kPieces, kRowBytes = kPieces * 16;
  static constexpr bool kFusesNorm = 8 * kTokens <= Source::kMostNormed && !kIntegers;

  // `parities`: a bit for each place of the ring, of the phase that its barrier is in.
  __device__ __forceinline__ Stream(const StreamPlan& plan, const Source& source, Mbarrier* arrived,
                                    unsigned char* ring, uint32_t parities = 0)
      : plan_(plan),
        source_(source),
        arrived_(arrived),
        ring_(ring),
        parities_(parities),
        step_bytes_(step_bytes(tile_bytes(), kRowBytes, plan.pass_tiles, plan.token_tiles())) {
    if constexpr (Source::kMostRows <= 8 * kTokens) {
      first_row_ = warp_id() * kRows;
      first_token_tile_ = 0;
    } else {
      const int row_warps = static_cast<int>(blockDim.x) / kWarpSize / plan.token_groups;
      first_row_ = warp_id() % row_warps * kRows;
      first_token_tile_ = warp_id() / row_warps * kTokens;
    }
    token_tiles_ = min(plan.token_tiles() - first_token_tile_, kTokens);
  }

  // This warp's first row tile within a pass and its first token tile.
  __device__ __forceinline__ int first_row() const { return first_row_; }
  __device__ __forceinline__ int first_token_tile() const { return first_token_tile_; }
  __device__ __forceinline__ int token_tiles() const { return token_tiles_; }

  // Once a launch, before everything else.
  __device__ __forceinline__ void init_barriers() const {
    if (!plan_.bulk) return;
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < plan_.ring; ++slot) mbarrier_init(&arrived_[slot], 1);
      mbarrier_init_fence();
    }
    __syncthreads();
  }

  // Asks for as many steps of weights as run() begins with.
  __device__ __forceinline__ void prefetch(int block, int blocks) const {
    Walk ahead = Walk::begin(plan_, block, blocks);
    for (int slot = 0; slot + 1 < plan_.ring && ahead.more(); ++slot) {
      issue_weights(slot, ahead);
      ahead.advance(plan_);
    }
  }

  // Instead of run(): waits for what prefetch() asked for.
  __device__ __forceinline__ void drop(int block, int blocks) {
    Walk ahead = Walk::begin(plan_, block, blocks);
    for (int slot = 0; slot + 1 < plan_.ring && ahead.more(); ++slot) {
      if (plan_.bulk) mbarrier_wait(&arrived_[slot], parities_ >> slot & 1);
      parities_ ^= 1u << slot;
      ahead.advance(plan_);
    }
    copy_async_commit();
    copy_async_wait<0>();
  }

  // Calls finish(walk, sums) in every warp at the end of every pass.
  template <bool kPrefetched = false, class Finish>
  __device__ __forceinline__ void run(int block, int blocks, Finish&& finish) {
    Walk here = Walk::begin(plan_, block, blocks), ahead = here;
    clear_padding();
    for (int slot = 0; slot + 1 < plan_.ring; ++slot) issue<!kPrefetched>(slot, ahead);
    if constexpr (kFusesNorm) {
      if (normalises()) {
        source_.find_roots();
        wait(plan_.ring - 2);
        __syncthreads();
        if (here.more()) normalise(0, here.step);
      }
    }

    Sums sum;
    clear(sum);
    int slot = 0, last = plan_.ring - 1;
    uint32_t parity = 0;  // whether `slot` is used for the second, fourth, ... time
    while (here.more()) {
      wait(plan_.ring - 3);
      __syncthreads();
      issue<true>(last, ahead);
      const uint32_t arriving = parity ^ (parities_ >> slot & 1);
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
    // Places before `slot` were used once more than the others; behind the ring none was, and another
    // product's ring may be longer.
    parities_ ^= (parity != 0 ? (1u << plan_.ring) - 1 : 0u) ^ ((1u << slot) - 1);
  }

  // Behind all calls: for the next product.
  __device__ __forceinline__ uint32_t parities() const { return parities_; }

 private:
  __device__ __forceinline__ bool normalises() const { return kFusesNorm && source_.normalises(); }
  // 0 of products that learn the format when they run.
  __device__ __forceinline__ int tile_bytes() const {
    return Products::kTileBytes != 0 ? Products::kTileBytes : plan_.tile_bytes;
  }
  __device__ __forceinline__ unsigned char* slot_at(int slot) const { return ring_ + slot * step_bytes_; }
  __device__ __forceinline__ uint4* x_at(int slot) const {
    return reinterpret_cast<uint4*>(slot_at(slot) + tile_bytes() * plan_.pass_tiles);
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

  __device__ __forceinline__ void issue_weights(int slot, const Walk& walk) const {
    const int64_t tile_stride = int64_t{plan_.steps} * tile_bytes();
    const unsigned char* const weight =
        plan_.weight + walk.first_tile * tile_stride + int64_t{walk.step} * tile_bytes();
    uint4* const to = reinterpret_cast<uint4*>(slot_at(slot));
    const int pieces = tile_bytes() / 16;
    if (plan_.bulk) {
      if (warp_id() == 0) {  // a tile a lane: pass_tiles is at most 32
        if (lane_id() == 0)
          mbarrier_arrive_expect(&arrived_[slot], static_cast<uint32_t>(walk.tiles * tile_bytes()));
        __syncwarp();
        if (lane_id() < walk.tiles)
          copy_bulk(to + lane_id() * pieces, weight + lane_id() * tile_stride,
                    static_cast<uint32_t>(tile_bytes()), &arrived_[slot]);
      }
    } else if constexpr (Products::kTileBytes != 0) {
      for (int i = static_cast<int>(threadIdx.x); i < walk.tiles * pieces; i += static_cast<int>(blockDim.x))
        copy_async(to + i, weight + i / pieces * tile_stride + i % pieces * 16, 16);
    } else {
      for (int tile = warp_id(); tile < walk.tiles; tile += static_cast<int>(blockDim.x) / kWarpSize)
        for (int i = lane_id(); i < pieces; i += kWarpSize)
          copy_async(to + tile * pieces + i, weight + tile * tile_stride + i * 16, 16);
    }
  }

  // Asks for the step at `walk`, if there is one, and moves on.
  template <bool kWeights>
  __device__ __forceinline__ void issue(int slot, Walk& walk) const {
    if (walk.more()) {
      if constexpr (kWeights) issue_weights(slot, walk);
      const int64_t first_k = int64_t{walk.step} * Products::kStepK;
      for (int i = static_cast<int>(threadIdx.x); i < plan_.m * kPieces; i += static_cast<int>(blockDim.x)) {
        const int token = i / kPieces, piece = i % kPieces;
        const int64_t k = first_k + piece * Piece<T>::kElements;
        copy_elements(x_at(slot) + piece_at<kPieces>(token, piece), source_.at(token, k < plan_.k ? k : 0),
                      plan_.k - k, source_.vectors());
      }
      if (normalises() && threadIdx.x < kPieces) {
        const int64_t k = first_k + threadIdx.x * Piece<T>::kElements;
        copy_elements(norm_at(slot) + threadIdx.x, source_.weight_at(k < plan_.k ? k : 0), plan_.k - k,
                      source_.norm_vectors());
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

  __device__ __forceinline__ void normalise(int slot, int step) const {
    constexpr int kElements = Piece<T>::kElements;
    for (int i = static_cast<int>(threadIdx.x); i < plan_.m * kPieces; i += static_cast<int>(blockDim.x)) {
      const int token = i / kPieces, piece = i % kPieces;
      const int64_t k = int64_t{step} * Products::kStepK + piece * kElements, left = plan_.k - k;
      Piece<T>* const at = reinterpret_cast<Piece<T>*>(x_at(slot) + piece_at<kPieces>(token, piece));
      const Piece<T> weight = reinterpret_cast<const Piece<T>*>(norm_at(slot))[piece];
      Piece<T> x = *at;
      const float root = source_.root(token, k);
#pragma unroll
      for (int j = 0; j < kElements; ++j)  // zeros behind K stay zeros, whatever the root
        if (j < left) x.element[j] = normalised(x.element[j], root, weight.element[j]);
      *at = x;
    }
  }

  __device__ __forceinline__ void multiply(int slot, uint32_t parity, const Walk& walk, Sums& sum) const {
    if (first_row_ >= walk.tiles) return;
    if (plan_.bulk) mbarrier_wait(&arrived_[slot], parity);
    const uint4* weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)  // one that the pass lacks is multiplied as the last, for nobody
      weight[r] =
          reinterpret_cast<const uint4*>(slot_at(slot) + min(first_row_ + r, walk.tiles - 1) * tile_bytes());
    const uint4* const x = x_at(slot) + kPieces * 8 * first_token_tile_;
    if constexpr (Products::kTileBytes != 0)
      Products::multiply(sum, weight, x, token_tiles_);
    else
      Products::multiply(plan_.format, sum, weight, x, token_tiles_);
  }

  const StreamPlan& plan_;
  const Source source_;
  Mbarrier* arrived_;
  unsigned char* ring_;
  uint32_t parities_;
  int step_bytes_;
  int first_row_, first_token_tile_, token_tiles_;
};

}  // namespace eagle::cuda
