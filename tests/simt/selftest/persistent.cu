// What a persistent kernel is made of: the barrier of the grid (csrc/cuda/device), and a ring through which
// weights arrive while blocks wait for each other.
#include <stdexcept>
#include <string>

#include "cuda/device/grid_barrier.cuh"
#include "simt/selftest/kernel.h"
#include "simt/selftest/ring.cuh"

namespace simt::selftest {
namespace {

using eagle::cuda::Cleared;
using eagle::cuda::GridBarrier;
using eagle::cuda::GridBarrierWord;
using eagle::cuda::tests::Ring;
using eagle::cuda::tests::RingBarriers;

constexpr int kBlocks = 4, kReaders = 64, kThreads = kReaders + 32;  // the last warp requests
constexpr int kPhases = 3, kSteps = 5;                               // steps of a block in a phase
constexpr int kRequests = kPhases * kSteps;
constexpr uint32_t kStageBytes = kReaders * sizeof(uint4);
constexpr int kStages = 3;

struct SharedMemory {
  RingBarriers barriers;
  alignas(128) unsigned char stage[kStages][kStageBytes];
};

enum class Gap {
  kNone,
  kNoBarrier,         // of the grid
  kOneMissing,        // a block that does not arrive
  kNotCleared,        // the word was left by another launch
  kNotTogether,       // launched as any kernel
  kReadsAhead,        // the stage behind the one that was waited for
  kReadsReleased,     // a stage that was released
  kTooManyExpected,   // bytes that never come
  kTooManyRequested,  // a stage that nobody reads
  kNoInitialisation,  // of the ring
};

__host__ __device__ constexpr int piece(int block, int request) {
  return ((request / kSteps * kBlocks + block) * kSteps + request % kSteps) * kReaders;
}
__host__ __device__ constexpr uint32_t mixed(uint32_t sum, uint4 weight) {
  return sum * 3 + (weight.x ^ weight.w);
}

// In each phase a block passes its weights over what the next block left in the phase before.
template <bool kBulk>
__global__ void __launch_bounds__(kThreads)
    phases_kernel(const uint4* weights, uint32_t* x, GridBarrierWord* word, Gap gap) {
  auto& shared = shared_memory<SharedMemory>();
  const int t = threadIdx.x, block = blockIdx.x;
  if (t == 0 && gap != Gap::kNoInitialisation)
    Ring<kBulk>::initialise(shared.barriers, kStages, 1, kReaders / 32);  // <- other: phases
  __syncthreads();
  Ring<kBulk> ring(shared.barriers, shared.stage[0], kStages, kStageBytes);
  GridBarrier barrier(word);  // <- reported: phases/not_together

  int asked = 0;
  const auto ask = [&](int until) {
    for (; asked < until && asked < kRequests + (gap == Gap::kTooManyRequested); ++asked) {
      const uint32_t more = gap == Gap::kTooManyExpected ? 16 : 0;
      unsigned char* const to = ring.begin_request(kStageBytes + more);       // <- reported: phases
      ring.copy(to, weights + piece(block, asked % kRequests), kStageBytes);  // <- reported: phases
      ring.end_request();                                                     // <- reported: phases
    }
  };

  for (int phase = 0; phase < kPhases; ++phase) {
    const uint32_t* const from = x + phase * kBlocks * kReaders;
    if (t >= kReaders) {
      ask((phase + 1) * kSteps);
    } else {
      uint32_t sum = load(from + (block + 1) % kBlocks * kReaders + t);  // <- reported: phases
      for (int step = 0; step < kSteps; ++step) {
        const uint4* stage = reinterpret_cast<const uint4*>(ring.wait());  // <- reported: phases
        if (gap == Gap::kReadsAhead && step == 1) stage = reinterpret_cast<const uint4*>(shared.stage[2]);
        if (gap == Gap::kReadsReleased) ring.release();  // <- reported: phases
        const uint4 weight = stage[kReaders - 1 - t];    // <- reported: phases
        sum = mixed(sum, weight);
        if (gap != Gap::kReadsReleased) ring.release();  // <- reported: phases
      }
      store(x + (phase + 1) * kBlocks * kReaders + block * kReaders + t, sum);  // <- other: phases
    }
    if (gap == Gap::kNoBarrier || (gap == Gap::kOneMissing && block == 1)) continue;
    barrier.arrive();
    if (t >= kReaders) ask((phase + 1) * kSteps + kStages);
    barrier.wait();  // <- reported: phases/one_missing
  }
}

struct Phases {
  Buffer<uint4> weights{kRequests * kBlocks * kReaders};
  Buffer<uint32_t> x{(kPhases + 1) * kBlocks * kReaders, 7};
  Buffer<GridBarrierWord> word{1};

  Phases() {
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = {uint32_t(i) * 2654435761u, 1, 2, uint32_t(i)};
    word[0].arrived = 1000;  // as an aborted launch may leave it
  }
  bool right() {
    for (int phase = 0; phase < kPhases; ++phase)
      for (int block = 0; block < kBlocks; ++block)
        for (int t = 0; t < kReaders; ++t) {
          uint32_t sum = x[(phase * kBlocks + (block + 1) % kBlocks) * kReaders + t];
          for (int step = 0; step < kSteps; ++step)
            sum = mixed(sum, weights[piece(block, phase * kSteps + step) + kReaders - 1 - t]);
          if (x[((phase + 1) * kBlocks + block) * kReaders + t] != sum) return false;
        }
    return true;
  }
};

template <bool kBulk, Gap kGap>
bool phases() {
  Phases p;
  const uint64_t polls = options().max_polls;
  options().max_polls = 100000;
  try {
    emulate({p.weights.in("weights"), p.x.inout("x"), p.word.inout("word")}, [&] {
      const eagle::cuda::LaunchConfig config{
          .grid = kBlocks, .block = kThreads, .shared_bytes = sizeof(SharedMemory)};
      if (kGap == Gap::kNotTogether) {
        launch(phases_kernel<kBulk>, config, p.weights.data(), p.x.data(), p.word.data(), kGap);
        return;
      }
      const Cleared cleared{p.word.data(), kGap == Gap::kNotCleared ? 0 : sizeof(GridBarrierWord)};
      for (int twice = 0; twice < (kGap == Gap::kNone ? 2 : 1); ++twice)
        eagle::cuda::launch_together(phases_kernel<kBulk>, config, cleared, p.weights.data(), p.x.data(),
                                     p.word.data(), kGap);
    });
  } catch (...) {
    options().max_polls = polls;
    throw;
  }
  options().max_polls = polls;
  // Every weight once a launch, beside what the readers load.
  const uint64_t bytes = 2ull * (kRequests * kBlocks * kStageBytes + kPhases * kBlocks * kReaders * 4);
  return p.right() && (kGap != Gap::kNone || counters().global_load_bytes == bytes);
}

// ---- warps that request for themselves: each its half of a stage, and reads the other's too --------------

enum class Ahead { kAsFarAsFree, kTooFar, kOneIdle };

template <bool kBulk>
__global__ void __launch_bounds__(kReaders)
    own_requests_kernel(const uint4* weights, uint32_t* y, Ahead ahead) {
  auto& shared = shared_memory<SharedMemory>();
  const int t = threadIdx.x, warp = t / 32;
  if (t == 0) Ring<kBulk>::initialise(shared.barriers, kStages, kReaders / 32, kReaders / 32);
  __syncthreads();
  Ring<kBulk> ring(shared.barriers, shared.stage[0], kStages, kStageBytes);
  constexpr uint32_t kHalf = kStageBytes / 2;

  int asked = 0;
  uint32_t sum = 0;
  for (int step = 0; step < kRequests; ++step) {
    for (; asked < kRequests && asked < step + kStages + (ahead == Ahead::kTooFar); ++asked) {
      // Warp 0 brings all of it when the other has nothing to bring.
      const uint32_t bytes = ahead == Ahead::kOneIdle ? (warp == 0 ? kStageBytes : 0) : kHalf;
      unsigned char* const to = ring.begin_request(bytes);  // <- reported: own
      if (bytes) ring.copy(to + warp * kHalf, weights + asked * kReaders + warp * kReaders / 2, bytes);
      ring.end_request();  // <- reported: own
    }
    sum = mixed(sum, reinterpret_cast<const uint4*>(ring.wait())[kReaders - 1 - t]);
    ring.release();
  }
  store(y + t, sum);
}

template <bool kBulk, Ahead kAhead>
bool own_requests() {
  Phases p;
  Buffer<uint32_t> y(kReaders);
  emulate({p.weights.in("weights"), y.out("y")}, [&] {
    launch(own_requests_kernel<kBulk>, {.grid = 1, .block = kReaders, .shared_bytes = sizeof(SharedMemory)},
           p.weights.data(), y.data(), kAhead);
  });
  for (int t = 0; t < kReaders; ++t) {
    uint32_t sum = 0;
    for (int step = 0; step < kRequests; ++step)
      sum = mixed(sum, p.weights[step * kReaders + kReaders - 1 - t]);
    if (y[t] != sum) return false;
  }
  return true;
}

// ---- a barrier that is used often, and whose count wraps around ------------------------------------------

__global__ void __launch_bounds__(32) often_kernel(uint32_t* x, GridBarrierWord* word, int rounds) {
  GridBarrier barrier(word);
  const int t = threadIdx.x, block = blockIdx.x, blocks = gridDim.x;
  uint32_t mine = uint32_t(block * 32 + t);
  for (int round = 0; round < rounds; ++round) {
    uint32_t* const side = x + round % 2 * blocks * 32;
    store(side + block * 32 + t, mine);
    barrier.sync();
    mine += load(side + (block + 1) % blocks * 32 + t);
  }
  store(x + 2 * blocks * 32 + block * 32 + t, mine);
}

bool often() {
  constexpr int kMany = 7, kRounds = 50;
  Buffer<uint32_t> x(3 * kMany * 32, 0);
  Buffer<GridBarrierWord> word(1);
  emulate({x.inout("x"), word.out("word")}, [&] {
    eagle::cuda::launch_together(often_kernel, {.grid = kMany, .block = 32},
                                 {word.data(), sizeof(GridBarrierWord)}, x.data(), word.data(), kRounds);
  });
  std::vector<uint32_t> mine(kMany * 32);
  for (int i = 0; i < kMany * 32; ++i) mine[i] = uint32_t(i);
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<uint32_t> before = mine;
    for (int i = 0; i < kMany * 32; ++i) mine[i] += before[(i + 32) % (kMany * 32)];
  }
  for (int i = 0; i < kMany * 32; ++i)
    if (x[2 * kMany * 32 + i] != mine[i]) return false;
  return word[0].arrived == kMany * kRounds;
}

// ---- a grid that cannot run at once ----------------------------------------------------------------------

std::string refusal(unsigned blocks, size_t shared_bytes) {
  Buffer<uint32_t> x(1, 0);
  Buffer<GridBarrierWord> word(1);
  const uint64_t launches = counters().launches;
  try {
    emulate({x.inout("x"), word.out("word")}, [&] {
      eagle::cuda::launch_together(often_kernel, {.grid = blocks, .block = 32, .shared_bytes = shared_bytes},
                                   {word.data(), sizeof(GridBarrierWord)}, x.data(), word.data(), 0);
    });
  } catch (const std::runtime_error& error) {
    return counters().launches == launches ? error.what() : "launched";
  }
  return "";
}

__global__ void __launch_bounds__(32) idle_kernel(GridBarrierWord* word) {
  GridBarrier barrier(word);
  barrier.sync();
}

bool too_large() {
  const std::string words =
      "eagle_cuda: expected a grid that runs at once, got 265 blocks of 32 threads and 102400 bytes of "
      "shared "
      "memory; this device holds 264 on 132 multiprocessors";
  if (refusal(265, 100 * 1024) != words) return false;
  if (eagle::cuda::resident_blocks(idle_kernel, 32, 100 * 1024) != 264) return false;
  device_model().multiprocessors = 2;
  const bool refused = refusal(5, 100 * 1024).find("got 5 blocks") != std::string::npos;
  Buffer<GridBarrierWord> word(1);
  emulate({word.out("word")}, [&] {  // as many as it holds
    eagle::cuda::launch_together(idle_kernel, {.grid = 4, .block = 32, .shared_bytes = 100 * 1024},
                                 {word.data(), sizeof(GridBarrierWord)}, word.data());
  });
  device_model() = {};
  return refused && word[0].arrived == 4;
}

}  // namespace

std::vector<Case> persistent_cases() {
  constexpr auto kChecked = Builds::kChecked;
  constexpr auto kTooEarly = "uninitialised read or read of a copy in flight or race";
  constexpr auto kTooLate = "read of a copy in flight or race";
  constexpr auto kAlone = "grid barrier in a launch that is not cooperative";
  return {
      {"phases/bulk", "", phases<true, Gap::kNone>},
      {"phases/cp_async", "", phases<false, Gap::kNone>},
      {"phases/no_barrier", "race", phases<true, Gap::kNoBarrier>, kChecked},
      {"phases/one_missing", "livelock", phases<true, Gap::kOneMissing>, kChecked},
      {"phases/not_cleared", "race", phases<true, Gap::kNotCleared>, kChecked},
      {"phases/not_together", kAlone, phases<true, Gap::kNotTogether>},
      {"phases/reads_ahead", kTooEarly, phases<true, Gap::kReadsAhead>, kChecked},
      {"phases/reads_ahead_cp_async", kTooEarly, phases<false, Gap::kReadsAhead>, kChecked},
      {"phases/reads_released", kTooLate, phases<true, Gap::kReadsReleased>, kChecked},
      {"phases/reads_released_cp_async", kTooLate, phases<false, Gap::kReadsReleased>, kChecked},
      {"phases/too_many_expected", "deadlock", phases<true, Gap::kTooManyExpected>},
      {"phases/too_many_requested", "exit with copies in flight", phases<true, Gap::kTooManyRequested>},
      {"phases/no_initialisation", "mbarrier not initialised", phases<true, Gap::kNoInitialisation>},
      {"own/bulk", "", own_requests<true, Ahead::kAsFarAsFree>},
      {"own/cp_async", "", own_requests<false, Ahead::kAsFarAsFree>},
      {"own/one_idle", "", own_requests<true, Ahead::kOneIdle>},
      {"own/one_idle_cp_async", "", own_requests<false, Ahead::kOneIdle>},
      {"own/too_far", "deadlock", own_requests<true, Ahead::kTooFar>},
      {"own/too_far_cp_async", "deadlock", own_requests<false, Ahead::kTooFar>},
      {"often/many_rounds", "", often},
      {"grid/too_large", "", too_large},
  };
}

}  // namespace simt::selftest
