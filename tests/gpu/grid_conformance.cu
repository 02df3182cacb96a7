// The barrier of the grid (csrc/cuda/device) and a ring against plain C++, as in ptx_conformance.cu: phases
// in which blocks read what others left in the phase before, while the next phase's weights arrive.
#include <cstring>

#include "../simt/selftest/ring.cuh"
#include "conformance.h"
#include "cuda/device/grid_barrier.cuh"
#include "cuda/launch.h"

namespace conformance {
namespace {

using namespace eagle::cuda;
using tests::Ring;
using tests::RingBarriers;

constexpr int kBlocks = 6, kReaders = 64, kPhases = 4, kSteps = 5, kStages = 3;
constexpr int kSide = kBlocks * kReaders;       // words that a phase leaves
constexpr uint32_t kStageBytes = kReaders * 4;  // a word a thread
constexpr int kWord = 2048;                     // of the output: the barrier's

struct SharedMemory {
  RingBarriers barriers;
  alignas(128) unsigned char stage[kStages][kStageBytes];
};

// The first word of the input that a block streams in one step of a phase.
__host__ __device__ constexpr int weight_at(int block, int phase, int step) {
  return (block * 1009 + phase * 401 + step * 97) % ((kWords - kReaders) / 4) * 4;
}

template <bool kBulk>
__global__ void __launch_bounds__(kReaders + 32) phases_kernel(const uint32_t* in, uint32_t* out) {
  auto& shared = shared_memory<SharedMemory>();
  const int t = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  if (t == 0) Ring<kBulk>::initialise(shared.barriers, kStages, 1, kReaders / 32);
  __syncthreads();
  Ring<kBulk> ring(shared.barriers, shared.stage[0], kStages, static_cast<int>(kStageBytes));
  GridBarrier barrier(reinterpret_cast<GridBarrierWord*>(out + kWord));

  int asked = 0;
  const auto ask = [&](int until) {
    for (; asked < until && asked < kPhases * kSteps; ++asked) {
      unsigned char* const to = ring.begin_request(kStageBytes);
      ring.copy(to, in + weight_at(block, asked / kSteps, asked % kSteps), kStageBytes);
      ring.end_request();
    }
  };
  for (int phase = 0; phase < kPhases; ++phase) {
    if (t >= kReaders) {
      ask((phase + 1) * kSteps);
    } else {
      uint32_t sum = phase == 0 ? static_cast<uint32_t>(t)
                                : load(out + (phase - 1) * kSide + (block + 1) % kBlocks * kReaders + t);
      for (int step = 0; step < kSteps; ++step) {
        sum = sum * 3 + reinterpret_cast<const uint32_t*>(ring.wait())[kReaders - 1 - t];
        ring.release();
      }
      store(out + phase * kSide + block * kReaders + t, sum);
    }
    barrier.arrive();
    if (t >= kReaders) ask((phase + 1) * kSteps + kStages);
    barrier.wait();
  }
}

template <bool kBulk>
void phases(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  const LaunchConfig config{
      .grid = kBlocks, .block = kReaders + 32, .stream = stream, .shared_bytes = sizeof(SharedMemory)};
  const Cleared cleared{out + kWord, sizeof(GridBarrierWord)};
  if (kBulk && has_bulk_copies())
    launch_together(phases_kernel<true>, config, cleared, in, out);
  else
    launch_together(phases_kernel<false>, config, cleared, in, out);
}

void phases_by_hand(const uint32_t* in, uint32_t* out) {
  for (int phase = 0; phase < kPhases; ++phase)
    for (int block = 0; block < kBlocks; ++block)
      for (int t = 0; t < kReaders; ++t) {
        uint32_t sum = phase == 0 ? static_cast<uint32_t>(t)
                                  : out[(phase - 1) * kSide + (block + 1) % kBlocks * kReaders + t];
        for (int step = 0; step < kSteps; ++step)
          sum = sum * 3 + in[weight_at(block, phase, step) + kReaders - 1 - t];
        out[phase * kSide + block * kReaders + t] = sum;
      }
  std::memset(out + kWord, 0, sizeof(GridBarrierWord));
  out[kWord] = kBlocks * kPhases;
}

// ---- many rounds, and as many blocks as the device holds of a kernel with much shared memory -------------

constexpr int kRounds = 40, kSharedBytes = 96 * 1024;

__global__ void __launch_bounds__(32) rounds_kernel(uint32_t* out, int blocks) {
  need_whole_grid();
  GridBarrier barrier(reinterpret_cast<GridBarrierWord*>(out + kWord));
  const int block = static_cast<int>(blockIdx.x);
  for (int round = 0; round < kRounds; ++round) {
    // Each in turn adds what all before it have; the others look on.
    if (round % blocks == block && threadIdx.x == 0) store(out + 1, load(out + 1) * 3 + 1);
    barrier.sync();
  }
}

__global__ void __launch_bounds__(256) clear_kernel(uint32_t* out) {
  store(out + blockIdx.x * blockDim.x + threadIdx.x, 0u);
}

void rounds(const uint32_t*, uint32_t* out, CUstream_st* stream) {
  const int held = resident_blocks(rounds_kernel, 32, kSharedBytes);
  const int blocks = held < 16 ? held : 16;
  launch(clear_kernel, {.grid = kWords / 256, .block = 256, .stream = stream}, out);
  launch_together(
      rounds_kernel,
      {.grid = static_cast<unsigned>(blocks), .block = 32, .stream = stream, .shared_bytes = kSharedBytes},
      {out + kWord, sizeof(GridBarrierWord)}, out, blocks);
  // The count is the grid's; the rest is everyone's.
  launch(clear_kernel, {.grid = (kWords - kWord) / 256, .block = 256, .stream = stream}, out + kWord);
}

void rounds_by_hand(const uint32_t*, uint32_t* out) {
  std::memset(out, 0, kWords * 4);
  for (int round = 0; round < kRounds; ++round) out[1] = out[1] * 3 + 1;
}

}  // namespace

std::vector<Case> grid_cases() {
  return {
      {"grid barrier and ring, bulk", phases<true>, phases_by_hand},
      {"grid barrier and ring, cp.async", phases<false>, phases_by_hand},
      {"grid barrier, many rounds", rounds, rounds_by_hand},
  };
}

}  // namespace conformance
