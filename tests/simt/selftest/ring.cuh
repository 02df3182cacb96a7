#pragma once
// A ring of stages in shared memory through which warps stream global memory to others or to themselves: what
// barriers in shared memory and copies of both kinds are tried with, under the emulator and on a GPU.
//
// Requesting warps ask for stages in turn, each for its part, ahead of those who read them: as far as there
// are stages. The reading warps wait for a stage, read it, release it; a stage is asked for again once every
// reader has released it.
//
//   requesters: bytes = ring.begin_request(n); ring.copy(bytes, from, n); ...; ring.end_request();
//   readers:    bytes = ring.wait(); ...; ring.release();
//
// Two ways to copy: bulk copies (kBulk, where has_bulk_copies() of cuda/launch.h says so), started by one
// lane, or cp.async, 512 bytes an instruction. What is copied must be a multiple of 16 bytes long, at
// multiples of 16, and written before the launch or behind a fence_proxy_async(). A warp may be both
// requester and reader: it must not ask for a stage that it has not released.
//
// Not linear's ring (cuda/linear/stream.cuh): there x comes by cp.async and is normalised in place, which
// takes a barrier of the block each step anyway, and what readers release here as well does not fit the
// registers.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace eagle::cuda::tests {

inline constexpr int kMaxStages = 16;

// In shared memory.
struct RingBarriers {
  Mbarrier full[kMaxStages], empty[kMaxStages];
};

template <bool kBulk>
class Ring {
 public:
  // By one thread of the block, once a launch; a barrier of the block must follow. Both numbers are of warps.
  __device__ __forceinline__ static void initialise(RingBarriers& barriers, int stages, int requesters,
                                                    int readers) {
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(&barriers.full[i], static_cast<uint32_t>(requesters * (kBulk ? 1 : kWarpSize)));
      mbarrier_init(&barriers.empty[i], static_cast<uint32_t>(readers));
    }
    mbarrier_init_fence();
  }

  // Stages of `stage_bytes`, a multiple of 16, from `memory` on; every warp has its own view of the ring.
  __device__ __forceinline__ Ring(RingBarriers& barriers, unsigned char* memory, int stages, int stage_bytes)
      : barriers_(barriers), memory_(memory), stages_(stages), stage_bytes_(stage_bytes) {}

  // ---- the requesting warps: all lanes -------------------------------------------------------------------

  // Waits until the next stage is free. This warp's copies must bring exactly `bytes`, which may be none: the
  // stage is there when every requester has ended its request. Only lanes without which the stage cannot fill
  // wait here: another could sleep through two phases and never wake.
  __device__ __forceinline__ unsigned char* begin_request(uint32_t bytes) {
    if (!kBulk || lane_id() == 0) mbarrier_wait(&barriers_.empty[asked_.stage], asked_.parity ^ 1u);
    if (kBulk && lane_id() == 0) mbarrier_arrive_expect(&barriers_.full[asked_.stage], bytes);
    return memory_ + asked_.stage * stage_bytes_;
  }

  __device__ __forceinline__ void copy(unsigned char* to, const void* from, uint32_t bytes) const {
    if constexpr (kBulk) {
      if (lane_id() == 0) copy_bulk(to, from, bytes, &barriers_.full[asked_.stage]);
    } else {
      const unsigned char* const begin = static_cast<const unsigned char*>(from);
      for (uint32_t at = static_cast<uint32_t>(lane_id()) * 16; at < bytes; at += kWarpSize * 16)
        copy_async(to + at, begin + at, 16);
    }
  }

  __device__ __forceinline__ void end_request() {
    if constexpr (!kBulk) copy_async_arrive(&barriers_.full[asked_.stage]);
    __syncwarp();
    asked_.advance(stages_);
  }

  // ---- the reading warps: all lanes -----------------------------------------------------------------------

  // The next stage, once it is there. It stays until released.
  __device__ __forceinline__ const unsigned char* wait() const {
    mbarrier_wait(&barriers_.full[read_.stage], read_.parity);
    return memory_ + read_.stage * stage_bytes_;
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(&barriers_.empty[read_.stage]);
    read_.advance(stages_);
  }

 private:
  struct Place {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int stages) {
      if (++stage < stages) return;
      stage = 0;
      parity ^= 1u;
    }
  };

  RingBarriers& barriers_;
  unsigned char* memory_;
  int stages_, stage_bytes_;
  Place asked_, read_;
};

}  // namespace eagle::cuda::tests
