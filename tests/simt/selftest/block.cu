// Order within a block: __syncthreads between warps, __syncwarp between lanes.
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

constexpr int kThreads = 64;  // two warps
constexpr int kRounds = 3;

struct Values {
  int32_t value[kThreads];
};

enum class Barrier { kNone, kBlock, kWarp, kCount, kAnd, kOr };

__device__ void pass(Barrier barrier) {
  if (barrier == Barrier::kBlock) __syncthreads();
  if (barrier == Barrier::kWarp) __syncwarp();
  if (barrier == Barrier::kCount) __syncthreads_count(1);
  if (barrier == Barrier::kAnd) __syncthreads_and(1);
  if (barrier == Barrier::kOr) __syncthreads_or(0);
}

// ---- what another thread wrote -------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) reverse_kernel(const int32_t* x, int32_t* y, Barrier barrier) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  shared.value[t] = load(x + t);  // <- other: reverse
  pass(barrier);
  const int32_t mine = shared.value[kThreads - 1 - t];  // <- reported: reverse
  store(y + t, mine);
}

template <Barrier kBarrier>
bool reverse() {
  auto x = counting(kThreads);
  Buffer<int32_t> y(kThreads, -1);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(reverse_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Values)}, x.data(), y.data(),
           kBarrier);
  });
  for (int t = 0; t < kThreads; ++t)
    if (y[t] != kThreads - 1 - t) return false;
  return true;
}

// ---- what another thread has yet to read ---------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) rounds_kernel(const int32_t* x, int32_t* y, Barrier barrier) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  int32_t sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    shared.value[t] = load(x + round * kThreads + t);  // <- reported: rounds
    __syncthreads();
    sum += shared.value[kThreads - 1 - t];  // <- other: rounds
    pass(barrier);
  }
  store(y + t, sum);
}

template <Barrier kBarrier>
bool rounds() {
  auto x = counting(kRounds * kThreads);
  Buffer<int32_t> y(kThreads, -1);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(rounds_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Values)}, x.data(), y.data(),
           kBarrier);
  });
  for (int t = 0; t < kThreads; ++t)
    if (y[t] != kRounds * (kThreads - 1 - t) + kThreads * kRounds * (kRounds - 1) / 2) return false;
  return true;
}

// ---- what another thread overwrites --------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) overwrite_kernel(const int32_t* x, int32_t* y, Barrier barrier) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  shared.value[kThreads - 1 - t] = -1;  // <- other: overwrite
  pass(barrier);
  shared.value[t] = load(x + t);  // <- reported: overwrite
  __syncthreads();
  store(y + t, shared.value[t]);
}

template <Barrier kBarrier>
bool overwrite() {
  auto x = counting(kThreads);
  Buffer<int32_t> y(kThreads, -1);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(overwrite_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Values)}, x.data(),
           y.data(), kBarrier);
  });
  for (int t = 0; t < kThreads; ++t)
    if (y[t] != t) return false;
  return true;
}

// ---- hand-offs between the lanes of a warp -------------------------------------------------------------

enum class Between { kNothing, kSyncwarp, kShuffle, kBallot, kHalves };

__global__ void __launch_bounds__(32) hand_off_kernel(const int32_t* x, int32_t* y, Between between) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  const int32_t sent = load(x + t);
  shared.value[t] = sent;  // <- other: hand_off
  int32_t unused = 0;
  if (between == Between::kSyncwarp) __syncwarp();
  if (between == Between::kShuffle) unused = __shfl_xor_sync(kFullMask, sent, 1) & 0;
  if (between == Between::kBallot) unused = int32_t(__ballot_sync(kFullMask, sent >= 0)) & 0;
  if (between == Between::kHalves) __syncwarp(t < 16 ? 0xffffu : 0xffff0000u);
  // What moves through registers does not order memory.
  const int32_t mine = shared.value[31 - t];  // <- reported: hand_off
  store(y + t, mine + unused);
}

template <Between kBetween>
bool hand_off() {
  auto x = counting(32);
  Buffer<int32_t> y(32, -1);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(hand_off_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Values)}, x.data(), y.data(),
           kBetween);
  });
  for (int t = 0; t < 32; ++t)
    if (y[t] != 31 - t) return false;
  return true;
}

// Neighbours within each half, ordered by a barrier of that half.
__global__ void __launch_bounds__(32) halves_kernel(const int32_t* x, int32_t* y) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  for (int round = 0; round < kRounds; ++round) {
    shared.value[t] = load(x + t) + round;
    __syncwarp(t < 16 ? 0xffffu : 0xffff0000u);
    const int32_t mine = shared.value[t ^ 15];
    __syncwarp(t < 16 ? 0xffffu : 0xffff0000u);
    store(y + round * 32 + t, mine);
  }
}

bool halves() {
  auto x = counting(32);
  Buffer<int32_t> y(32 * kRounds, -1);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(halves_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Values)}, x.data(), y.data());
  });
  for (int i = 0; i < 32 * kRounds; ++i)
    if (y[i] != (i % 32 ^ 15) + i / 32) return false;
  return true;
}

// ---- atomics on shared memory --------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    histogram_kernel(const int32_t* x, int32_t* y, Barrier clear, Barrier read) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  shared.value[kThreads - 1 - t] = 0;  // <- other: histogram/no_barrier_after_clear
  pass(clear);
  atomicAdd(&shared.value[load(x + t) % 4], 1);  // <- reported: histogram
  pass(read);
  store(y + t, shared.value[t]);  // <- other: histogram/no_barrier_before_read
}

template <Barrier kClear, Barrier kRead>
bool histogram() {
  auto x = counting(kThreads);
  Buffer<int32_t> y(kThreads, -1);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(histogram_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Values)}, x.data(),
           y.data(), kClear, kRead);
  });
  for (int t = 0; t < kThreads; ++t)
    if (y[t] != (t < 4 ? kThreads / 4 : 0)) return false;
  return true;
}

// ---- many readers of one word --------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) broadcast_kernel(const int32_t* x, int32_t* y, Barrier barrier) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  int32_t sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (t == round) shared.value[0] = load(x + round) + 1;  // <- reported: broadcast
    __syncthreads();
    sum += shared.value[0];  // <- other: broadcast
    pass(barrier);
  }
  store(y + t, sum);
}

template <Barrier kBarrier>
bool broadcast() {
  auto x = counting(kRounds);
  Buffer<int32_t> y(kThreads, -1);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(broadcast_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Values)}, x.data(),
           y.data(), kBarrier);
  });
  for (int t = 0; t < kThreads; ++t)
    if (y[t] != kRounds * (kRounds + 1) / 2) return false;
  return true;
}

}  // namespace

std::vector<Case> block_cases() {
  constexpr auto kChecked = Builds::kChecked;
  return {
      {"reverse/syncthreads", "", reverse<Barrier::kBlock>},
      {"reverse/syncthreads_count", "", reverse<Barrier::kCount>},
      {"reverse/syncthreads_and", "", reverse<Barrier::kAnd>},
      {"reverse/syncthreads_or", "", reverse<Barrier::kOr>},
      {"reverse/no_barrier", "race read-after-write", reverse<Barrier::kNone>, kChecked},
      {"reverse/syncwarp_only", "race read-after-write", reverse<Barrier::kWarp>, kChecked},
      {"rounds/syncthreads", "", rounds<Barrier::kBlock>},
      {"rounds/no_barrier", "race write-after-read", rounds<Barrier::kNone>, kChecked},
      {"overwrite/syncthreads", "", overwrite<Barrier::kBlock>},
      {"overwrite/no_barrier", "race write-after-write", overwrite<Barrier::kNone>, kChecked},
      {"broadcast/syncthreads", "", broadcast<Barrier::kBlock>},
      {"broadcast/no_barrier", "race", broadcast<Barrier::kNone>, kChecked},
      {"hand_off/syncwarp", "", hand_off<Between::kSyncwarp>},
      {"hand_off/no_barrier", "race read-after-write", hand_off<Between::kNothing>, kChecked},
      {"hand_off/shuffle_only", "race read-after-write", hand_off<Between::kShuffle>, kChecked},
      {"hand_off/ballot_only", "race read-after-write", hand_off<Between::kBallot>, kChecked},
      {"hand_off/syncwarp_by_halves", "race read-after-write", hand_off<Between::kHalves>, kChecked},
      {"halves/syncwarp", "", halves},
      {"histogram/syncthreads", "", histogram<Barrier::kBlock, Barrier::kBlock>},
      {"histogram/no_barrier_after_clear", "race", histogram<Barrier::kNone, Barrier::kBlock>, kChecked},
      {"histogram/no_barrier_before_read", "race", histogram<Barrier::kBlock, Barrier::kNone>, kChecked},
  };
}

}  // namespace simt::selftest
