#pragma once
// A barrier of all blocks of a launch by launch_together (cuda/launch.h).
//
// One word counts arrivals and never goes back: the n-th barrier is over once n times the grid's blocks have
// arrived, so that it can be used any number of times. Each block keeps n for itself. launch_together clears
// the word before the launch, whatever an aborted one left in it.
//
// Between arrive() and wait() a block does what depends on nobody: it asks for the next phase's weights.
// Stores before arrive() are seen by loads behind wait(), in every thread of every block; by bulk copies only
// with a fence_proxy_async() between the two.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx.cuh"

namespace eagle::cuda {

// The word has a line of its own: what lies beside it would be in the way of those who poll.
struct GridBarrierWord {
  alignas(128) uint32_t arrived;
};

class GridBarrier {
 public:
  // `passed`: barriers at this word that the launch has behind it.
  __device__ __forceinline__ explicit GridBarrier(GridBarrierWord* word, uint32_t passed = 0)
      : arrived_(&word->arrived), wanted_(passed * blocks()) {
    need_whole_grid();
  }

  // Both by all threads of every block, in turn.
  __device__ __forceinline__ void arrive() {
    wanted_ += blocks();
    __syncthreads();
    arrives_at_grid();
    if (!is_first()) return;
    add_release<Scope::kDevice>(arrived_, 1u);
  }
  __device__ __forceinline__ void wait() const {
    if (is_first())  // compared by distance: the count may wrap around
      while (static_cast<int32_t>(load_acquire<Scope::kDevice>(arrived_) - wanted_) < 0) {
      }
    __syncthreads();
    passes_grid();
  }
  __device__ __forceinline__ void sync() {
    arrive();
    wait();
  }

 private:
  __device__ __forceinline__ static uint32_t blocks() { return gridDim.x * gridDim.y * gridDim.z; }
  __device__ __forceinline__ static bool is_first() {
    return threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
  }

  uint32_t* arrived_;
  uint32_t wanted_;
};

}  // namespace eagle::cuda
