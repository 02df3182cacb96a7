#pragma once
// The streaming core: weights flow through a ring in shared memory, past all rows of x.
//
// A block walks through its passes (work.cuh). A stage is some 2 KiB of each of the pass's row tiles, which
// is one step or several, and the same columns of every row of x. Each iteration waits for the x of the stage
// after the one it multiplies, asks for the stages that take the place of the last, and lets every warp
// multiply its tiles; one barrier does for all. The rings run on from pass to pass. x is normalised in place,
// one stage ahead. Where the device has bulk copies, they bring the weights, a tile's stage each, and a
// barrier in shared memory for each place of the ring tells that they are there.
//
// Weights have a ring of their own behind that of x: they come from far away, and the more bytes are on their
// way the better; x comes from the cache on the chip, is the larger of the two where there are many rows, and
// needs to be ahead by little. So warp 0 asks for weights further on than the block asks for x, and keeps
// where it is in shared memory: registers are scarce.
//
// A kernel of several products asks for the first stages of the next one's weights (prefetch) before it knows
// that x is there; run() then asks for x alone. The barriers' parities run on from product to product. The
// first stage may stand anywhere in the ring, so that what is in use of its beginning meanwhile comes last.
#include <cuda_runtime.h>

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/linear/products.cuh"
#include "cuda/linear/rows.cuh"
#include "cuda/linear/sources.cuh"
#include "cuda/linear/work.cuh"

namespace eagle::cuda {

inline constexpr int kMaxRing = 24, kMaxRowRing = 16;  // stages
inline constexpr int kStageBytes = 2304;               // of a row tile: four steps of int4, one of bf16

// At the beginning of shared memory; behind it the rings, and behind those what the kernel wants.
struct StreamShared {
  float root[kMaxFusedNormRows];
  Mbarrier arrived[kMaxRing];  // the weights of a stage, where bulk copies bring them
  Walk ahead;                  // the stage whose weights warp 0 asks for next
};

// Bytes of one step of x in its ring: whole tiles of tokens, the norm's weight.
EAGLE_INLINE int row_step_bytes(int row_bytes, int token_tiles) { return row_bytes * (8 * token_tiles + 1); }
// Of its ring, and of both.
EAGLE_INLINE int row_ring_bytes(const StreamPlan& plan, int row_bytes, int token_tiles) {
  return plan.row_ring * plan.stage_steps * row_step_bytes(row_bytes, token_tiles);
}
EAGLE_INLINE int64_t ring_bytes(const StreamPlan& plan, int tile_bytes) {
  return plan.weights_at + int64_t{plan.ring} * plan.stage_steps * tile_bytes * plan.pass_tiles;
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

  // `parities`: a bit for each place of the ring, of the phase that its barrier is in. `first`: the place of
  // the first stage, 0 where weights do not come in bulk.
  __device__ __forceinline__ Stream(const StreamPlan& plan, const Source& source, Mbarrier* arrived,
                                    Walk* ahead, unsigned char* rings, uint32_t parities = 0, int first = 0)
      : plan_(plan),
        source_(source),
        arrived_(arrived),
        ahead_(ahead),
        rows_(rings),
        weights_(rings + plan.weights_at),
        parities_(parities),
        first_(first),
        row_step_bytes_(row_step_bytes(kRowBytes, plan.token_tiles())),
        stage_bytes_(stage_steps() * tile_bytes() * plan.pass_tiles) {
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

  // Asks for the weights of stages [begin, end); run() begins with those up to ring - 1, asked for in order.
  __device__ __forceinline__ void prefetch(int begin, int end, int block, int blocks) const {
    Walk ahead = Walk::begin(plan_, block, blocks);
    for (int stage = 0; stage < end && ahead.more(); ++stage) {
      if (stage >= begin) issue_weights(place_of(stage), ahead);
      ahead.advance(plan_);
    }
    if (threadIdx.x == 0) *ahead_ = ahead;
  }

  // Instead of run(): waits for what prefetch() asked for.
  __device__ __forceinline__ void drop(int block, int blocks) {
    Walk ahead = Walk::begin(plan_, block, blocks);
    for (int stage = 0; stage + 1 < plan_.ring && ahead.more(); ++stage) {
      const int slot = place_of(stage);
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
    if (!kPrefetched && plan_.bulk) prefetch(0, plan_.ring - 1, block, blocks);
    for (int slot = 0; slot + 1 < plan_.row_ring; ++slot) issue<!kPrefetched>(slot, ahead);
    if constexpr (kFusesNorm) {
      if (normalises()) {
        source_.find_roots();
        wait(plan_.row_ring - 2);
        __syncthreads();
        if (here.more()) normalise(0, here);
      }
    }

    Sums sum;
    clear(sum);
    int slot = first_, last = (first_ == 0 ? plan_.ring : first_) - 1;  // of weights
    int row_slot = 0, last_row = plan_.row_ring - 1;
    uint32_t parity = 0;              // whether `slot` is used for the second, fourth, ... time
    parities_ ^= (1u << first_) - 1;  // as though the places before `first_` had been used once
    while (here.more()) {
      wait(plan_.row_ring - 3);
      __syncthreads();
      if (plan_.bulk) issue_next_weights(last);
      issue<true>(last_row, ahead);
      const uint32_t arriving = parity ^ (parities_ >> slot & 1);
      last = slot;
      slot = slot + 1 == plan_.ring ? 0 : slot + 1;
      parity ^= slot == 0 ? 1u : 0u;
      last_row = row_slot;
      row_slot = row_slot + 1 == plan_.row_ring ? 0 : row_slot + 1;
      if constexpr (kFusesNorm) {
        if (normalises()) {
          Walk next = here;
          next.advance(plan_);
          if (next.more()) normalise(row_slot, next);
        }
      }
      multiply(last, last_row, arriving, here, sum);
      if (here.ends_pass(plan_)) {
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
  __device__ __forceinline__ int stage_steps() const {
    return Products::kTileBytes * 2 > kStageBytes ? 1 : plan_.stage_steps;
  }
  __device__ __forceinline__ int steps_of(const Walk& walk) const {
    return Products::kTileBytes * 2 > kStageBytes ? 1 : walk.steps(plan_);
  }
  __device__ __forceinline__ int place_of(int stage) const {
    const int place = first_ + stage;
    return place < plan_.ring ? place : place - plan_.ring;
  }
  __device__ __forceinline__ unsigned char* weights_at(int slot) const {
    return weights_ + slot * stage_bytes_;
  }
  // Of a step of the stage.
  __device__ __forceinline__ uint4* x_at(int slot, int step) const {
    return reinterpret_cast<uint4*>(rows_ + (slot * stage_steps() + step) * row_step_bytes_);
  }
  __device__ __forceinline__ uint4* norm_at(int slot, int step) const {
    return x_at(slot, step) + kPieces * 8 * plan_.token_tiles();
  }

  __device__ __forceinline__ static void clear(Sums& sum) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int n = 0; n < kTokens; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][n][i] = 0.0f;
  }

  // Tokens that do not exist are zeros, which arrive with the first stage; nobody writes there later. A step
  // of the ring a warp.
  __device__ __forceinline__ void clear_padding() const {
    const int first = plan_.m * kPieces, last = 8 * plan_.token_tiles() * kPieces;
    const int steps = plan_.row_ring * stage_steps(), warps = static_cast<int>(blockDim.x) / kWarpSize;
    for (int step = warp_id(); step < steps; step += warps)
      for (int i = first + lane_id(); i < last; i += kWarpSize)
        copy_async(x_at(0, step) + i, plan_.weight, 0);  // nothing of it: zeros
  }

  __device__ __forceinline__ void issue_weights(int slot, const Walk& walk) const {
    const int64_t tile_stride = int64_t{plan_.steps} * tile_bytes();
    const unsigned char* const weight =
        plan_.weight + walk.first_tile * tile_stride + int64_t{walk.step} * tile_bytes();
    unsigned char* const to = weights_at(slot);
    const int bytes = steps_of(walk) * tile_bytes(), stride = stage_steps() * tile_bytes();  // of a tile
    if (plan_.bulk) {
      if (warp_id() == 0) {  // a tile a lane: pass_tiles is at most 32
        if (lane_id() == 0)
          mbarrier_arrive_expect(&arrived_[slot], static_cast<uint32_t>(walk.tiles * bytes));
        __syncwarp();
        if (lane_id() < walk.tiles)
          copy_bulk(to + lane_id() * stride, weight + lane_id() * tile_stride, static_cast<uint32_t>(bytes),
                    &arrived_[slot]);
      }
    } else {
      for (int tile = warp_id(); tile < walk.tiles; tile += static_cast<int>(blockDim.x) / kWarpSize)
        for (int i = lane_id() * 16; i < bytes; i += kWarpSize * 16)
          copy_async(to + tile * stride + i, weight + tile * tile_stride + i, 16);
    }
  }

  // In bulk: for the next stage, if there is one. A barrier of the block lies between two calls.
  __device__ __forceinline__ void issue_next_weights(int slot) const {
    if (warp_id() != 0) return;
    Walk ahead = *ahead_;
    __syncwarp();
    if (!ahead.more()) return;
    issue_weights(slot, ahead);
    ahead.advance(plan_);
    if (lane_id() == 0) *ahead_ = ahead;
  }

  // Asks for the x of the stage at `walk`, if there is one, and moves on; where weights do not come in bulk,
  // they have as many places and come with it.
  template <bool kWeights>
  __device__ __forceinline__ void issue(int slot, Walk& walk) const {
    if (walk.more()) {
      if (kWeights && !plan_.bulk) issue_weights(slot, walk);
      const int steps = steps_of(walk);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const int64_t first_k = int64_t{walk.step + step} * Products::kStepK;
        uint4* const x = x_at(slot, step);
        for (int i = static_cast<int>(threadIdx.x); i < plan_.m * kPieces;
             i += static_cast<int>(blockDim.x)) {
          const int token = i / kPieces, piece = i % kPieces;
          const int64_t k = first_k + piece * Piece<T>::kElements;
          copy_elements(x + piece_at<kPieces>(token, piece), source_.at(token, k < plan_.k ? k : 0),
                        plan_.k - k, source_.vectors());
        }
        if (normalises() && threadIdx.x < kPieces) {
          const int64_t k = first_k + threadIdx.x * Piece<T>::kElements;
          copy_elements(norm_at(slot, step) + threadIdx.x, source_.weight_at(k < plan_.k ? k : 0),
                        plan_.k - k, source_.norm_vectors());
        }
      }
      walk.advance(plan_);
    }
    copy_async_commit();
  }

  // Until at most so many of the latest stages are on their way.
  __device__ __forceinline__ static void wait(int stages) {
    wait_for(stages, std::make_integer_sequence<int, kMaxRowRing - 1>{});
  }
  template <int... kStages>
  __device__ __forceinline__ static void wait_for(int stages, std::integer_sequence<int, kStages...>) {
    static_cast<void>(((stages == kStages && (copy_async_wait<kStages>(), true)) || ...));
  }

  __device__ __forceinline__ void normalise(int slot, const Walk& walk) const {
    constexpr int kElements = Piece<T>::kElements;
    const int steps = steps_of(walk);
#pragma unroll 1
    for (int step = 0; step < steps; ++step)
      for (int i = static_cast<int>(threadIdx.x); i < plan_.m * kPieces; i += static_cast<int>(blockDim.x)) {
        const int token = i / kPieces, piece = i % kPieces;
        const int64_t k = int64_t{walk.step + step} * Products::kStepK + piece * kElements,
                      left = plan_.k - k;
        Piece<T>* const at = reinterpret_cast<Piece<T>*>(x_at(slot, step) + piece_at<kPieces>(token, piece));
        const Piece<T> weight = reinterpret_cast<const Piece<T>*>(norm_at(slot, step))[piece];
        Piece<T> x = *at;
        const float root = source_.root(token, k);
#pragma unroll
        for (int j = 0; j < kElements; ++j)  // zeros behind K stay zeros, whatever the root
          if (j < left) x.element[j] = normalised(x.element[j], root, weight.element[j]);
        *at = x;
      }
  }

  __device__ __forceinline__ void multiply(int slot, int row_slot, uint32_t parity, const Walk& walk,
                                           Sums& sum) const {
    if (first_row_ >= walk.tiles) return;
    if (plan_.bulk) mbarrier_wait(&arrived_[slot], parity);
    const uint4* weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)  // one that the pass lacks is multiplied as the last, for nobody
      weight[r] = reinterpret_cast<const uint4*>(weights_at(slot) + min(first_row_ + r, walk.tiles - 1) *
                                                                        stage_steps() * tile_bytes());
    const uint4* x = x_at(row_slot, 0) + kPieces * 8 * first_token_tile_;
    // With two steps a stage ptxas for sm_80 has a register less to spare for x than it wants.
    constexpr bool kCounted =
        Products::kTileBytes * 2 <= kStageBytes && Products::kTileBytes * 4 > kStageBytes;
    const int steps = steps_of(walk);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if constexpr (Products::kTileBytes != 0)
        Products::multiply(sum, weight, x, token_tiles_);
      else
        Products::multiply(plan_.format, sum, weight, x, token_tiles_);
#pragma unroll
      for (int r = 0; r < kRows; ++r) weight[r] += tile_bytes() / 16;
      if constexpr (kCounted)
        x = x_at(row_slot, step + 1) + kPieces * 8 * first_token_tile_;
      else
        x += row_step_bytes_ / 16;
    }
  }

  const StreamPlan& plan_;
  const Source source_;
  Mbarrier* arrived_;
  Walk* ahead_;
  unsigned char *rows_, *weights_;
  uint32_t parities_;
  int first_;
  int row_step_bytes_, stage_bytes_;
  int first_row_, first_token_tile_, token_tiles_;
};

}  // namespace eagle::cuda
