// Who must stand where: lanes of a collective, threads of a barrier, and launches that can never end.
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

constexpr int kThreads = 64;

// ---- shuffles ------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(32) half_shuffle_kernel(const int32_t* x, int32_t* y, int source) {
  const int t = threadIdx.x;
  const int32_t mine = load(x + t);
  int32_t got = -1;
  if (t < 16) got = __shfl_sync(0x0000ffffu, mine, source);  // <- reported: half_shuffle
  store(y + t, got);
}

template <int kSource>
bool half_shuffle() {
  auto x = counting(32);
  Buffer<int32_t> y(32, -1);
  emulate({x.in("x"), y.out("y")},
          [&] { launch(half_shuffle_kernel, {.grid = 1, .block = 32}, x.data(), y.data(), kSource); });
  return y[0] == kSource && y[15] == kSource && y[16] == -1;
}

// A lane that its own mask does not name.
__global__ void __launch_bounds__(32) own_lane_kernel(const int32_t* x, int32_t* y, unsigned mask) {
  const int t = threadIdx.x;
  store(y + t, __shfl_xor_sync(mask, load(x + t), 1));  // <- reported: own_lane
}

template <unsigned kMask>
bool own_lane() {
  auto x = counting(32);
  Buffer<int32_t> y(32, -1);
  emulate({x.in("x"), y.out("y")},
          [&] { launch(own_lane_kernel, {.grid = 1, .block = 32}, x.data(), y.data(), kMask); });
  return y[0] == 1 && y[31] == 30;
}

__global__ void __launch_bounds__(32) early_exit_kernel(const int32_t* x, int32_t* y, unsigned mask) {
  const int t = threadIdx.x;
  if (t >= 16) return;
  store(y + t, __shfl_xor_sync(mask, load(x + t), 1));  // <- reported: early_exit
}

template <unsigned kMask>
bool early_exit() {
  auto x = counting(32);
  Buffer<int32_t> y(32, -1);
  emulate({x.in("x"), y.out("y")},
          [&] { launch(early_exit_kernel, {.grid = 1, .block = 32}, x.data(), y.data(), kMask); });
  return y[0] == 1 && y[15] == 14;
}

// The last warp of a block that is no multiple of 32; a mask may name lanes that never were.
__global__ void __launch_bounds__(40) short_warp_kernel(int32_t* y, bool own_mask) {
  const int t = threadIdx.x;
  const unsigned mask = own_mask && t >= 32 ? 0xffu : kFullMask;
  store(y + t, int32_t(__ballot_sync(mask, 1)));
}

template <bool kOwnMask>
bool short_warp() {
  Buffer<int32_t> y(40, -1);
  emulate({y.out("y")}, [&] { launch(short_warp_kernel, {.grid = 1, .block = 40}, y.data(), kOwnMask); });
  return y[0] == -1 && y[32] == 0xff;
}

// ---- one warp, two ways --------------------------------------------------------------------------------

enum class Ways { kTogether, kTwoKinds, kTwoMasks, kHalfMissing };

__global__ void __launch_bounds__(32) ways_kernel(int32_t* y, Ways ways) {
  const int t = threadIdx.x;
  int32_t got = 0;
  if (ways == Ways::kTwoKinds && t >= 16)
    got = __reduce_add_sync(kFullMask, 1);  // <- reported: ways/two_kinds
  else if (ways == Ways::kTwoMasks && t >= 16)
    got = __any_sync(0xffff0000u, 1);  // these find each other; the others wait for them in vain
  else if (ways != Ways::kHalfMissing || t < 16)
    got = __any_sync(kFullMask, 1);  // <- reported: ways
  store(y + t, got);
}

template <Ways kWays>
bool ways() {
  Buffer<int32_t> y(32, -1);
  emulate({y.out("y")}, [&] { launch(ways_kernel, {.grid = 1, .block = 32}, y.data(), kWays); });
  return y[0] == 1 && y[31] == 1;
}

// ---- barriers ------------------------------------------------------------------------------------------

enum class Barriers { kUniform, kHalfWarp, kOneWarp, kTwoPlaces, kTwoKinds, kCrossed };

__global__ void __launch_bounds__(kThreads) barriers_kernel(int32_t* y, Barriers barriers) {
  const int t = threadIdx.x;
  store(y + t, t);
  switch (barriers) {
    case Barriers::kUniform:
      __syncthreads();
      break;
    case Barriers::kHalfWarp:            // lanes 16 to 31 of each warp leave the kernel
      if (t % 32 < 16) __syncthreads();  // <- reported: barriers/half_warp
      break;
    case Barriers::kOneWarp:        // the other warp leaves the kernel
      if (t < 32) __syncthreads();  // <- reported: barriers/one_warp
      break;
    case Barriers::kTwoPlaces:
      if (t % 2 == 0) {
        __syncthreads();  // <- reported: barriers/two_places
      } else {
        store(y + t, t);  // without it the compiler would make one call of both
        __syncthreads();  // <- reported: barriers/two_places
      }
      break;
    case Barriers::kTwoKinds:
      if (t < 32)
        __syncthreads();  // <- reported: barriers/two_kinds
      else
        store(y + t, t * __syncthreads_and(1));  // <- reported: barriers/two_kinds
      break;
    case Barriers::kCrossed:  // lane 0 waits for its warp, which waits for lane 0
      if (t == 32)
        __syncwarp();  // <- reported: barriers/crossed
      else
        __syncthreads();  // <- reported: barriers/crossed
      break;
  }
}

template <Barriers kBarriers>
bool barriers() {
  Buffer<int32_t> y(kThreads, -1);
  emulate({y.out("y")},
          [&] { launch(barriers_kernel, {.grid = 1, .block = kThreads}, y.data(), kBarriers); });
  return y[kThreads - 1] == kThreads - 1;
}

// ---- a flag that nobody sets ---------------------------------------------------------------------------

__global__ void __launch_bounds__(32) wait_kernel(uint32_t* flag, int32_t* y, bool set) {
  if (blockIdx.x == 1 && set && threadIdx.x == 0) atomicExch(flag, 1u);
  if (blockIdx.x == 0 && threadIdx.x == 0)
    while (load_acquire<Scope::kDevice>(flag) == 0) {  // <- reported: wait
    }
  store(y + blockIdx.x * 32 + threadIdx.x, 1);
}

template <bool kSet>
bool wait() {
  Buffer<uint32_t> flag(1, 0);
  Buffer<int32_t> y(64, -1);
  options().max_polls = 20000;
  emulate({flag.inout("flag"), y.out("y")},
          [&] { launch_together(wait_kernel, 2, 32, flag.data(), y.data(), kSet); });
  return y[0] == 1 && y[63] == 1;
}

__global__ void __launch_bounds__(32) spin_kernel(uint32_t* lock, int32_t* y) {
  while (atomicCAS(lock, 0u, 1u) != 0u) {  // <- reported: spin
  }
  store(y + threadIdx.x, 1);
  if (threadIdx.x == 0) atomicExch(lock, 0u);
}

// Every lane but the first keeps the lock.
bool spin() {
  Buffer<uint32_t> lock(1, 0);
  Buffer<int32_t> y(32, -1);
  options().max_polls = 20000;
  emulate({lock.inout("lock"), y.out("y")},
          [&] { launch(spin_kernel, {.grid = 1, .block = 32}, lock.data(), y.data()); });
  return true;
}

// A walk along links that may lead round in a circle. Fast builds see the reads of global memory that go
// through load, and would hang at the others.
enum class Links { kShared, kGlobal, kPlainGlobal };

struct Chain {
  int32_t next[kThreads];
};

template <Links kLinks>
__global__ void __launch_bounds__(kThreads) cycle_kernel(const int32_t* x, int32_t* links, int32_t* y) {
  auto& shared = shared_memory<Chain>();
  const int t = threadIdx.x;
  shared.next[t] = load(x + t);
  store(links + t, load(x + t));
  __syncthreads();
  int at = t, steps = 0;
  for (; at >= 0; ++steps) {
    if constexpr (kLinks == Links::kShared) at = shared.next[at];   // <- reported: cycle/shared
    if constexpr (kLinks == Links::kGlobal) at = load(links + at);  // <- reported: cycle/global
    if constexpr (kLinks == Links::kPlainGlobal) at = links[at];    // <- reported: cycle/plain_global
  }
  store(y + t, steps);
}

template <Links kLinks, int kLast>
bool cycle() {
  Buffer<int32_t> x(kThreads), links(kThreads, -1), y(kThreads, -1);
  for (int i = 0; i < kThreads; ++i) x[i] = i == 0 ? kLast : i - 1;
  options().max_polls = 200000;
  emulate({x.in("x"), links.out("links"), y.out("y")}, [&] {
    launch(cycle_kernel<kLinks>, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Chain)}, x.data(),
           links.data(), y.data());
  });
  for (int t = 0; t < kThreads; ++t)
    if (y[t] != t + 1) return false;
  return true;
}

__global__ void __launch_bounds__(32) trap_kernel(int32_t* y) {
  store(y + threadIdx.x, 1);
  if (threadIdx.x == 7) __trap();  // <- reported: trap
}

bool trap() {
  Buffer<int32_t> y(32, -1);
  emulate({y.out("y")}, [&] { launch(trap_kernel, {.grid = 1, .block = 32}, y.data()); });
  return true;
}

// ---- launches after one that was given up --------------------------------------------------------------

// The first op fails as `First` does; the second must know nothing of it.
template <bool (*kFirst)()>
bool after() {
  bool failed = false;
  try {
    kFirst();
  } catch (const std::runtime_error&) {
    failed = true;
  }
  return failed && barriers<Barriers::kUniform>() && half_shuffle<5>() && ways<Ways::kTogether>();
}

// ---- launches that must be refused ---------------------------------------------------------------------

bool refuses(dim3 grid, dim3 block, size_t shared_bytes) {
  Buffer<int32_t> y(kThreads, -1);
  try {
    emulate({y.out("y")}, [&] {
      launch(barriers_kernel, {.grid = grid, .block = block, .shared_bytes = shared_bytes}, y.data(),
             Barriers::kUniform);
    });
  } catch (const std::runtime_error&) {
    return y[0] == -1;
  }
  return false;
}

bool refused_launches() {
  return refuses(1, 1025, 0) && refuses(1, dim3(1, 1, 65), 0) && refuses(1, 0, 0) &&
         refuses(dim3(1, 65536), 64, 0) && refuses(1, kThreads, 227 * 1024 + 1);
}

// An empty grid is no launch.
bool empty_grid() {
  Buffer<int32_t> y(kThreads, -1);
  emulate({y.out("y")},
          [&] { launch(barriers_kernel, {.grid = 0, .block = kThreads}, y.data(), Barriers::kUniform); });
  return y[0] == -1;
}

}  // namespace

std::vector<Case> convergence_cases() {
  return {
      {"half_shuffle/lane_of_the_mask", "", half_shuffle<5>},
      {"half_shuffle/inactive_lane", "shuffle from an inactive lane", half_shuffle<20>},
      {"own_lane/named", "", own_lane<kFullMask>},
      {"own_lane/not_named", "collective without its caller", own_lane<0x7fffffffu>},
      {"early_exit/living_lanes", "", early_exit<0xffffu>},
      {"early_exit/exited_lanes", "collective names exited lanes", early_exit<kFullMask>},
      {"short_warp/own_lanes", "", short_warp<true>},
      {"short_warp/all_lanes", "", short_warp<false>},
      {"ways/together", "", ways<Ways::kTogether>},
      {"ways/two_kinds", "divergent collective", ways<Ways::kTwoKinds>},
      {"ways/two_masks", "collective names exited lanes", ways<Ways::kTwoMasks>},
      {"ways/half_missing", "collective names exited lanes", ways<Ways::kHalfMissing>},
      {"barriers/uniform", "", barriers<Barriers::kUniform>},
      {"barriers/half_warp", "barrier with exited threads", barriers<Barriers::kHalfWarp>},
      {"barriers/one_warp", "barrier with exited threads", barriers<Barriers::kOneWarp>},
      {"barriers/two_places", "divergent barrier", barriers<Barriers::kTwoPlaces>},
      {"barriers/two_kinds", "divergent barrier", barriers<Barriers::kTwoKinds>},
      {"barriers/crossed", "deadlock", barriers<Barriers::kCrossed>},
      {"wait/flag_set", "", wait<true>},
      {"wait/flag_never_set", "livelock", wait<false>},
      {"spin/lock_never_left", "livelock", spin},
      {"cycle/none_shared", "", cycle<Links::kShared, -1>},
      {"cycle/shared", "livelock", cycle<Links::kShared, 7>, Builds::kChecked},
      {"cycle/none_global", "", cycle<Links::kGlobal, -1>},
      {"cycle/global", "livelock", cycle<Links::kGlobal, 7>},
      {"cycle/none_plain_global", "", cycle<Links::kPlainGlobal, -1>},
      {"cycle/plain_global", "livelock", cycle<Links::kPlainGlobal, 7>, Builds::kChecked},
      {"trap", "trap", trap},
      {"after/deadlock", "", after<barriers<Barriers::kCrossed>>},
      {"after/livelock", "", after<wait<false>>},
      {"after/divergence", "", after<ways<Ways::kTwoKinds>>},
      {"after/trap", "", after<trap>},
      {"refused_launches", "", refused_launches},
      {"empty_grid", "", empty_grid},
  };
}

}  // namespace simt::selftest
