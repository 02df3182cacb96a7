// Order by one word: a flag that says data are ready, a lock.
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

constexpr int kBlocks = 4;
constexpr int kThreads = 64;
constexpr int kCount = kBlocks * kThreads;

enum class Gap { kNone, kProducer, kConsumer, kBoth, kSyncBefore, kSyncAfter };

// ---- ways to raise a flag and to wait for it -------------------------------------------------------------

// A relaxed write behind a fence is a release, a relaxed read before one an acquire. A volatile read yields
// in checked builds only: in the fast build it would spin for ever.

struct Volatile {
  static __device__ void raise(uint32_t* flag, Gap gap) {
    if (gap != Gap::kProducer && gap != Gap::kBoth) __threadfence();
    *static_cast<volatile uint32_t*>(flag) = 1;
  }
  static __device__ void wait(uint32_t* flag, Gap gap) {
    while (*static_cast<volatile uint32_t*>(flag) == 0) {
    }
    if (gap != Gap::kConsumer && gap != Gap::kBoth) __threadfence();
  }
};

struct Atomic {
  static __device__ void raise(uint32_t* flag, Gap gap) {
    if (gap != Gap::kProducer && gap != Gap::kBoth) __threadfence();
    atomicExch(flag, 1u);
  }
  static __device__ void wait(uint32_t* flag, Gap gap) {
    while (atomicOr(flag, 0u) == 0) {
    }
    if (gap != Gap::kConsumer && gap != Gap::kBoth) __threadfence();
  }
};

template <Scope kScope>
struct Ordered {
  static __device__ void raise(uint32_t* flag, Gap gap) {
    if (gap != Gap::kProducer && gap != Gap::kBoth)
      store_release<kScope>(flag, 1u);
    else
      atomicExch(flag, 1u);
  }
  static __device__ void wait(uint32_t* flag, Gap gap) {
    if (gap != Gap::kConsumer && gap != Gap::kBoth)
      while (load_acquire<kScope>(flag) == 0) {
      }
    else
      while (atomicOr(flag, 0u) == 0) {
      }
  }
};

// ---- between blocks ------------------------------------------------------------------------------------

// Block 0 publishes 64 words, the others wait for the flag.
template <class Way>
__global__ void __launch_bounds__(kThreads) flag_kernel(int32_t* x, uint32_t* flag, int32_t* y, Gap gap) {
  const int t = threadIdx.x;
  if (blockIdx.x == 0) {
    store(x + t, t);  // <- other: flag
    if (gap != Gap::kSyncBefore) __syncthreads();
    if (t == 0) Way::raise(flag, gap);
    return;
  }
  if (t == 0) Way::wait(flag, gap);
  if (gap != Gap::kSyncAfter) __syncthreads();
  store(y + blockIdx.x * kThreads + t, load(x + (t + 1) % kThreads));  // <- reported: flag
}

template <class Way, Gap kGap>
bool flag() {
  Buffer<int32_t> x(kThreads, -1), y(kCount, -1);
  Buffer<uint32_t> ready(1, 0);
  emulate({x.inout("x"), y.out("y"), ready.inout("ready")}, [&] {
    launch_together(flag_kernel<Way>, kBlocks, kThreads, x.data(), ready.data(), y.data(), kGap);
  });
  for (int i = kThreads; i < kCount; ++i)
    if (y[i] != (i + 1) % kThreads) return false;
  return true;
}

// ---- within a block: its own scope is enough -----------------------------------------------------------

struct OneFlag {
  int32_t value[32];
  uint32_t flag;
};

template <class Way>
__global__ void __launch_bounds__(kThreads) warp_flag_kernel(int32_t* y, Gap gap) {
  auto& shared = shared_memory<OneFlag>();
  const int t = threadIdx.x;
  if (t == 0) shared.flag = 0;
  __syncthreads();
  if (t < 32) {
    shared.value[t] = t;  // <- other: warp_flag
    __syncwarp();
    if (t == 0) Way::raise(&shared.flag, gap);
    store(y + t, -1);
  } else {
    if (t == 32) Way::wait(&shared.flag, gap);
    __syncwarp();
    store(y + t, shared.value[63 - t]);  // <- reported: warp_flag
  }
}

template <class Way, Gap kGap>
bool warp_flag() {
  Buffer<int32_t> y(kThreads, -1);
  emulate({y.out("y")}, [&] {
    launch(warp_flag_kernel<Way>, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(OneFlag)}, y.data(),
           kGap);
  });
  for (int t = 32; t < kThreads; ++t)
    if (y[t] != 63 - t) return false;
  return true;
}

// ---- a lock --------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(32) lock_kernel(uint32_t* lock, int32_t* total, Gap gap) {
  if (threadIdx.x != 0) return;
  while (atomicCAS(lock, 0u, 1u) != 0u) {
  }
  if (gap != Gap::kConsumer) __threadfence();
  store(total, load(total) + 1);  // <- reported: lock
  if (gap != Gap::kProducer) __threadfence();
  atomicExch(lock, 0u);
}

template <Gap kGap>
bool lock() {
  Buffer<uint32_t> taken(1, 0);
  Buffer<int32_t> total(1, 0);
  emulate({taken.inout("lock"), total.inout("total")},
          [&] { launch_together(lock_kernel, kBlocks, 32, taken.data(), total.data(), kGap); });
  return total[0] == kBlocks;
}

}  // namespace

std::vector<Case> flag_cases() {
  constexpr auto kChecked = Builds::kChecked;
  constexpr auto kRace = "race read-after-write";
  using Device = Ordered<Scope::kDevice>;
  using Block = Ordered<Scope::kBlock>;
  return {
      {"flag/volatile", "", flag<Volatile, Gap::kNone>, kChecked},
      {"flag/volatile_no_producer_fence", kRace, flag<Volatile, Gap::kProducer>, kChecked},
      {"flag/volatile_no_consumer_fence", kRace, flag<Volatile, Gap::kConsumer>, kChecked},
      {"flag/volatile_no_fence", kRace, flag<Volatile, Gap::kBoth>, kChecked},
      {"flag/atomic", "", flag<Atomic, Gap::kNone>},
      {"flag/atomic_no_producer_fence", kRace, flag<Atomic, Gap::kProducer>, kChecked},
      {"flag/atomic_no_consumer_fence", kRace, flag<Atomic, Gap::kConsumer>, kChecked},
      {"flag/atomic_no_fence", kRace, flag<Atomic, Gap::kBoth>, kChecked},
      {"flag/release_acquire", "", flag<Device, Gap::kNone>},
      {"flag/no_release", kRace, flag<Device, Gap::kProducer>, kChecked},
      {"flag/no_acquire", kRace, flag<Device, Gap::kConsumer>, kChecked},
      {"flag/neither", kRace, flag<Device, Gap::kBoth>, kChecked},
      {"flag/scope_of_a_block", kRace, flag<Block, Gap::kNone>, kChecked},
      {"flag/no_syncthreads_before", "race", flag<Device, Gap::kSyncBefore>, kChecked},
      {"flag/no_syncthreads_after", "race", flag<Device, Gap::kSyncAfter>, kChecked},
      {"warp_flag/release_acquire", "", warp_flag<Block, Gap::kNone>},
      {"warp_flag/no_release", kRace, warp_flag<Block, Gap::kProducer>, kChecked},
      {"warp_flag/no_acquire", kRace, warp_flag<Block, Gap::kConsumer>, kChecked},
      {"lock/complete", "", lock<Gap::kNone>},
      {"lock/no_fence_after_taking", kRace, lock<Gap::kConsumer>, kChecked},
      {"lock/no_fence_before_leaving", kRace, lock<Gap::kProducer>, kChecked},
  };
}

}  // namespace simt::selftest
