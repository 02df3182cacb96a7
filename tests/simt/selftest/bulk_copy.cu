// Barriers with phases, and copies that end at one: a ring between a warp that requests and warps that read.
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

using eagle::cuda::copy_async;
using eagle::cuda::copy_async_arrive;
using eagle::cuda::copy_bulk;
using eagle::cuda::fence_proxy_async;
using eagle::cuda::Mbarrier;
using eagle::cuda::mbarrier_arrive;
using eagle::cuda::mbarrier_arrive_expect;
using eagle::cuda::mbarrier_init;
using eagle::cuda::mbarrier_init_fence;
using eagle::cuda::mbarrier_try_wait;
using eagle::cuda::mbarrier_wait;

// ---- a ring ----------------------------------------------------------------------------------------------

constexpr int kThreads = 96;  // one warp requests, two read
constexpr int kReaders = 64, kStages = 2, kRounds = 5;

struct Ring {
  Mbarrier full[kStages], empty[kStages];
  alignas(16) uint4 piece[kStages][kReaders];
};

enum class Gap {
  kNone,
  kPolls,            // try_wait in a loop
  kNoWait,           // readers do not wait
  kWrongParity,      // they wait for the phase before
  kNoRelease,        // the requester does not wait for them
  kWaitsForCopies,   // it waits until the copy before is there, not until it was read
  kEarlyRelease,     // one lane releases while others read
  kNothingExpected,  // the arrival expects no bytes
  kTooFew,           // it expects too few
  kTooMany,          // or too many
  kExtraArrival,     // a second arrival in a phase of one
  kNoInitFence,      // bulk copies need not see the barriers
  kNoBarrier,        // the block does not meet behind the initialisation
  kNotInitialised,   // the stage's barrier was forgotten
  kTwice,            // or made twice
  kZeroed,           // the ring's bytes are stored to before: behind a fence
  kZeroedNoFence,    // without one
  kLeaves,           // nobody waits for the last copy
  kPlainRead,        // the barrier's word is read
};

__global__ void __launch_bounds__(kThreads) ring_kernel(const uint4* x, uint32_t* y, Gap gap) {
  auto& shared = shared_memory<Ring>();
  const int t = threadIdx.x;
  constexpr uint32_t kBytes = sizeof shared.piece[0];
  if (t == 0) {
    for (int i = 0; i < kStages; ++i) {
      if (gap != Gap::kNotInitialised || i == 0) mbarrier_init(&shared.full[i], 1);  // <- other: ring
      mbarrier_init(&shared.empty[i], kReaders / 32);                                // <- other: ring
    }
    if (gap == Gap::kTwice) mbarrier_init(&shared.full[0], 1);  // <- reported: ring/twice
    if (gap != Gap::kNoInitFence) mbarrier_init_fence();
  }
  if (gap == Gap::kZeroed || gap == Gap::kZeroedNoFence) {
    if (t < kReaders) shared.piece[1][t] = {0, 0, 0, 0};  // <- other: ring/zeroed_no_fence
    if (gap == Gap::kZeroed) fence_proxy_async();
  }
  if (gap != Gap::kNoBarrier) __syncthreads();

  if (t >= kReaders) {
    if (t > kReaders) return;
    for (int round = 0; round < kRounds; ++round) {
      const int stage = round % kStages;
      const uint32_t parity = round / kStages % 2;
      if (gap == Gap::kWaitsForCopies) {
        if (round >= kStages)
          mbarrier_wait(&shared.full[stage], parity ^ 1);  // <- other: ring/waits_for_copies
      } else if (gap != Gap::kNoRelease) {
        mbarrier_wait(&shared.empty[stage], parity ^ 1);  // <- reported: ring
      }
      const uint32_t expected = gap == Gap::kTooFew    ? kBytes - 16
                                : gap == Gap::kTooMany ? kBytes + 16
                                                       : kBytes;
      if (gap == Gap::kNothingExpected)
        mbarrier_arrive(&shared.full[stage]);  // <- reported: ring
      else
        mbarrier_arrive_expect(&shared.full[stage], expected);              // <- reported: ring
      if (gap == Gap::kExtraArrival) mbarrier_arrive(&shared.full[stage]);  // <- reported: ring/extra_arrival
      copy_bulk(shared.piece[stage], x + round * kReaders, kBytes, &shared.full[stage]);  // <- reported: ring
    }
    return;
  }

  uint32_t sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    const int stage = round % kStages;
    const uint32_t parity = (round / kStages % 2) ^ (gap == Gap::kWrongParity);
    if (gap == Gap::kLeaves && round == kRounds - 1) break;
    if (gap == Gap::kPolls) {
      while (!mbarrier_try_wait(&shared.full[stage], parity)) {
      }
    } else if (gap != Gap::kNoWait) {
      mbarrier_wait(&shared.full[stage], parity);  // <- reported: ring
    }
    if (gap == Gap::kEarlyRelease && t % 32 == 0) mbarrier_arrive(&shared.empty[stage]);  // <- reported: ring
    sum += shared.piece[stage][kReaders - 1 - t].x;                                       // <- reported: ring
    __syncwarp();                                                                         // <- other: ring
    if (gap != Gap::kEarlyRelease && t % 32 == 0) mbarrier_arrive(&shared.empty[stage]);  // <- reported: ring
  }
  if (gap == Gap::kPlainRead) sum += uint32_t(shared.full[0].state >> 63);  // <- reported: ring/plain_read
  store(y + t, sum);
}

template <Gap kGap>
bool ring() {
  Buffer<uint4> x(kRounds * kReaders);
  for (size_t i = 0; i < x.size(); ++i) x[i] = {uint32_t(i), 1, 2, 3};
  Buffer<uint32_t> y(kReaders, 0);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(ring_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Ring)}, x.data(), y.data(),
           kGap);
  });
  for (int t = 0; t < kReaders; ++t) {
    uint32_t sum = 0;
    for (int round = 0; round < kRounds; ++round) sum += uint32_t(round * kReaders + kReaders - 1 - t);
    if (y[t] != sum) return false;
  }
  // One request a copy, of all its bytes.
  return counters().global_load_requests == kRounds &&
         counters().global_load_bytes == kRounds * kReaders * sizeof(uint4) &&
         counters().global_load_sectors == kRounds * kReaders / 2;
}

// ---- several blocks with a ring each: their copies are their own -----------------------------------------

__global__ void __launch_bounds__(32) own_ring_kernel(const uint4* x, uint4* y) {
  auto& shared = shared_memory<Ring>();
  const int t = threadIdx.x, base = blockIdx.x * 32;
  if (t == 0) {
    mbarrier_init(&shared.full[0], 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(&shared.full[0], 32 * sizeof(uint4));  // <- reported: older_device
    for (int part = 0; part < 4; ++part)
      copy_bulk(&shared.piece[0][8 * part], x + base + 8 * part, 8 * sizeof(uint4), &shared.full[0]);
  }
  __syncthreads();
  mbarrier_wait(&shared.full[0], 0);
  store(y + base + t, shared.piece[0][31 - t]);
}

bool own_ring() {
  constexpr int kBlocks = 300;  // several waves in checked builds
  Buffer<uint4> x(kBlocks * 32), y(kBlocks * 32);
  for (size_t i = 0; i < x.size(); ++i) x[i] = {uint32_t(i), 1, 2, 3};
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(own_ring_kernel, {.grid = kBlocks, .block = 32, .shared_bytes = sizeof(Ring)}, x.data(), y.data());
  });
  for (size_t i = 0; i < x.size(); ++i)
    if (y[i].x != i / 32 * 32 + 31 - i % 32) return false;
  return true;
}

// ---- words passed on by arrivals -------------------------------------------------------------------------

struct Message {
  Mbarrier full;
  int32_t value[32];
};
enum class Order { kRight, kArrivesFirst, kNoWait };

__global__ void __launch_bounds__(64) message_kernel(int32_t* y, Order order) {
  auto& shared = shared_memory<Message>();
  const int t = threadIdx.x;
  if (t == 0) mbarrier_init(&shared.full, 32);
  __syncthreads();
  if (t < 32) {
    if (order == Order::kArrivesFirst) mbarrier_arrive(&shared.full);
    shared.value[t] = t;  // <- other: message
    if (order != Order::kArrivesFirst) mbarrier_arrive(&shared.full);
    return;
  }
  if (order != Order::kNoWait) mbarrier_wait(&shared.full, 0);
  store(y + t - 32, shared.value[63 - t]);  // <- reported: message
}

template <Order kOrder>
bool message() {
  Buffer<int32_t> y(32, -1);
  emulate({y.out("y")}, [&] {
    launch(message_kernel, {.grid = 1, .block = 64, .shared_bytes = sizeof(Message)}, y.data(), kOrder);
  });
  for (int t = 0; t < 32; ++t)
    if (y[t] != 31 - t) return false;
  return true;
}

// ---- where from and where to -----------------------------------------------------------------------------

struct Landing {
  Mbarrier full;
  alignas(16) uint4 piece[32];
};
enum class Place { kRight, kSourceOutside, kTargetOutside, kSourceOdd, kTargetOdd, kSizeOdd, kGlobalTarget };

__global__ void __launch_bounds__(32) landing_kernel(uint32_t* x, uint32_t* y, Place place) {
  auto& shared = shared_memory<Landing>();
  const int t = threadIdx.x;
  uint32_t* from = x + (place == Place::kSourceOutside ? 4 : place == Place::kSourceOdd ? 1 : 0);
  uint32_t* to = &shared.piece[0].x + (place == Place::kTargetOutside ? 4
                                       : place == Place::kTargetOdd   ? 1
                                                                      : 0);
  if (place == Place::kGlobalTarget) to = y;
  const uint32_t bytes = sizeof shared.piece - (place == Place::kSizeOdd ? 4 : 0);
  if (t == 0) {
    mbarrier_init(&shared.full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(&shared.full, bytes);
    copy_bulk(to, from, bytes, &shared.full);  // <- reported: landing
  }
  __syncthreads();
  mbarrier_wait(&shared.full, 0);
  store(y + t, shared.piece[t].x);  // <- other: landing/target_outside
}

template <Place kPlace>
bool landing() {
  Buffer<uint32_t> x(4 * 32 + 4, 5), y(32);
  emulate({inout("x", x.data(), 4 * 32), y.out("y")}, [&] {
    launch(landing_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Landing)}, x.data(), y.data(),
           kPlace);
  });
  return y[31] == 5;
}

// ---- the source: written before, behind a fence; and not while it is copied ------------------------------

enum class Source { kFenced, kFencedByStarter, kNoFence, kChanges };

__global__ void __launch_bounds__(32) written_source_kernel(uint32_t* x, uint32_t* y, Source source) {
  auto& shared = shared_memory<Landing>();
  const int t = threadIdx.x;
  if (t == 0) {
    mbarrier_init(&shared.full, 1);
    mbarrier_init_fence();
  }
  __syncwarp();
  for (int i = 0; i < 4; ++i) store(x + i * 32 + t, uint32_t(t));  // <- other: written_source
  if (source == Source::kFenced) fence_proxy_async();
  __syncwarp();
  if (t == 0) {
    if (source == Source::kFencedByStarter || source == Source::kChanges) fence_proxy_async();
    mbarrier_arrive_expect(&shared.full, sizeof shared.piece);
    copy_bulk(shared.piece, x, sizeof shared.piece, &shared.full);  // <- reported: written_source
    if (source == Source::kChanges) store(x, 77u);                  // <- reported: written_source/changes
  }
  mbarrier_wait(&shared.full, 0);
  store(y + t, (&shared.piece[0].x)[t]);
}

template <Source kSource>
bool written_source() {
  Buffer<uint32_t> x(4 * 32), y(32);
  emulate({x.out("x"), y.out("y")}, [&] {
    launch(written_source_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Landing)}, x.data(),
           y.data(), kSource);
  });
  for (int t = 0; t < 32; ++t)
    if (y[t] != uint32_t(t)) return false;
  return true;
}

// ---- cp.async that arrives by itself ---------------------------------------------------------------------

__global__ void __launch_bounds__(64) arriving_kernel(const uint4* x, uint4* y, bool waits) {
  auto& shared = shared_memory<Landing>();
  const int t = threadIdx.x;
  if (t == 0) mbarrier_init(&shared.full, 32);
  __syncthreads();
  if (t < 32) {
    copy_async(&shared.piece[t], x + t, t % 2 ? 16 : 4);  // <- other: arriving
    copy_async_arrive(&shared.full);                      // <- other: arriving
    return;
  }
  if (waits) mbarrier_wait(&shared.full, 0);
  store(y + t - 32, shared.piece[63 - t]);  // <- reported: arriving
}

template <bool kWaits>
bool arriving() {
  Buffer<uint4> x(32), y(32);
  for (uint32_t i = 0; i < 32; ++i) x[i] = {i, i + 100, i + 200, i + 300};
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(arriving_kernel, {.grid = 1, .block = 64, .shared_bytes = sizeof(Landing)}, x.data(), y.data(),
           kWaits);
  });
  for (uint32_t t = 0; t < 32; ++t)
    if (y[t].x != 31 - t || y[t].w != (t % 2 ? 0 : 331 - t)) return false;
  return true;
}

// ---- an older device -------------------------------------------------------------------------------------

bool older_device() {
  device_model().compute_capability = 80;
  Buffer<uint4> x(32), y(32);
  const auto restore = [&] { device_model() = {}; };
  try {
    emulate({x.in("x"), y.out("y")}, [&] {
      launch(own_ring_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Ring)}, x.data(), y.data());
    });
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return true;
}

}  // namespace

std::vector<Case> bulk_copy_cases() {
  constexpr auto kChecked = Builds::kChecked;
  constexpr auto kRead = "read of a copy in flight or race";
  constexpr auto kOverwrite = "write to a copy in flight or race";
  constexpr auto kChanged = "source changed under a copy or race";
  constexpr auto kEarly = "mbarrier not initialised or race";
  constexpr auto kUnordered = "uninitialised read or race";
  constexpr auto kNotThere = "uninitialised read or read of a copy in flight or race";
  constexpr auto kProxy = "missing fence.proxy.async";
  return {
      {"ring/clean", "", ring<Gap::kNone>},
      {"ring/polls", "", ring<Gap::kPolls>},
      {"ring/no_wait", kRead, ring<Gap::kNoWait>, kChecked},
      {"ring/wrong_parity", kRead, ring<Gap::kWrongParity>, kChecked},
      {"ring/no_release", kOverwrite, ring<Gap::kNoRelease>, kChecked},
      {"ring/waits_for_copies", "race", ring<Gap::kWaitsForCopies>, kChecked},
      {"ring/early_release", "race", ring<Gap::kEarlyRelease>, kChecked},
      {"ring/nothing_expected", kRead, ring<Gap::kNothingExpected>, kChecked},
      {"ring/too_few", "deadlock", ring<Gap::kTooFew>},
      {"ring/too_many", "deadlock", ring<Gap::kTooMany>},
      {"ring/extra_arrival", "too many arrivals at an mbarrier", ring<Gap::kExtraArrival>},
      {"ring/no_init_fence", "missing mbarrier_init_fence", ring<Gap::kNoInitFence>, kChecked},
      {"ring/no_barrier", kEarly, ring<Gap::kNoBarrier>, kChecked},
      {"ring/not_initialised", "mbarrier not initialised", ring<Gap::kNotInitialised>},
      {"ring/twice", "mbarrier initialised twice", ring<Gap::kTwice>},
      {"ring/zeroed", "", ring<Gap::kZeroed>},
      {"ring/zeroed_no_fence", kProxy, ring<Gap::kZeroedNoFence>, kChecked},
      {"ring/leaves", "exit with copies in flight", ring<Gap::kLeaves>},
      {"ring/plain_read", "plain access to an mbarrier", ring<Gap::kPlainRead>, kChecked},
      {"own_ring/many_blocks", "", own_ring},
      {"message/clean", "", message<Order::kRight>},
      {"message/arrives_first", "race read-after-write", message<Order::kArrivesFirst>, kChecked},
      {"message/no_wait", kUnordered, message<Order::kNoWait>, kChecked},
      {"landing/right", "", landing<Place::kRight>},
      {"landing/source_outside", "out-of-bounds read", landing<Place::kSourceOutside>},
      {"landing/target_outside", "out-of-bounds write", landing<Place::kTargetOutside>},
      {"landing/source_odd", "misaligned access", landing<Place::kSourceOdd>},
      {"landing/target_odd", "misaligned access", landing<Place::kTargetOdd>},
      {"landing/size_odd", "misaligned access", landing<Place::kSizeOdd>},
      {"landing/global_target", "copy to other than shared memory", landing<Place::kGlobalTarget>},
      {"written_source/fenced", "", written_source<Source::kFenced>},
      {"written_source/fenced_by_starter", "", written_source<Source::kFencedByStarter>},
      {"written_source/no_fence", kProxy, written_source<Source::kNoFence>, kChecked},
      {"written_source/changes", kChanged, written_source<Source::kChanges>},
      {"arriving/clean", "", arriving<true>},
      {"arriving/no_wait", kNotThere, arriving<false>, kChecked},
      {"older_device/refused", "bulk copy on an older device", older_device},
  };
}

}  // namespace simt::selftest
