// Copies that a thread starts and waits for: when their bytes may be touched, and by whom.
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

using eagle::cuda::copy_async;
using eagle::cuda::copy_async_commit;
using eagle::cuda::copy_async_wait;

constexpr int kThreads = 64;  // two warps
constexpr int kRounds = 5;

struct Tiles {
  uint4 piece[2][kThreads];
};

enum class Gap { kNone, kWeakWait, kNoWait, kNoCommit, kNoBarrier, kNoSecondBarrier, kEarlyWrite };

// Two buffers: while one round is read, the next one is on its way.
__global__ void __launch_bounds__(kThreads) stream_kernel(const uint4* x, uint32_t* y, Gap gap) {
  auto& shared = shared_memory<Tiles>();
  const int t = threadIdx.x;
  const auto start = [&](int round) {
    const uint4* const from = x + round * kThreads + t;
    uint4* const to = &shared.piece[round % 2][t];
    if (round < kRounds) copy_async(to, from, 16);  // <- other: stream, write_in_flight
    if (gap != Gap::kNoCommit) copy_async_commit();
  };
  start(0);
  uint32_t sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    start(round + 1);
    if (gap == Gap::kEarlyWrite && round == 2) shared.piece[0][t].y = 7;  // <- reported: write_in_flight
    if (gap == Gap::kWeakWait)
      copy_async_wait<2>();
    else if (gap != Gap::kNoWait)
      copy_async_wait<1>();
    if (gap != Gap::kNoBarrier) __syncthreads();
    const uint4& piece = shared.piece[round % 2][kThreads - 1 - t];
    sum += piece.x;  // <- reported: stream
    if (gap != Gap::kNoSecondBarrier) __syncthreads();
  }
  if (gap == Gap::kWeakWait) copy_async_wait<0>();
  store(y + t, sum);
}

template <Gap kGap>
bool stream() {
  Buffer<uint4> x(kRounds * kThreads);
  for (size_t i = 0; i < x.size(); ++i) x[i] = {uint32_t(i), 1, 2, 3};
  Buffer<uint32_t> y(kThreads, 0);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(stream_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Tiles)}, x.data(), y.data(),
           kGap);
  });
  for (int t = 0; t < kThreads; ++t) {
    uint32_t sum = 0;
    for (int round = 0; round < kRounds; ++round) sum += uint32_t(round * kThreads + kThreads - 1 - t);
    if (y[t] != sum) return false;
  }
  return true;
}

// ---- how many bytes, from where --------------------------------------------------------------------------

// Thread t copies t % 17 bytes; nothing is read for 0 bytes, wherever the source points.
__global__ void __launch_bounds__(kThreads) zero_fill_kernel(const uint4* x, uint4* y) {
  auto& shared = shared_memory<Tiles>();
  const int t = threadIdx.x, bytes = t % 17;
  copy_async(&shared.piece[0][t], bytes ? x + t : nullptr, bytes);
  copy_async_commit();
  copy_async_wait<0>();
  store(y + t, shared.piece[0][t]);
}

bool zero_fill() {
  Buffer<uint4> x(kThreads, uint4{~0u, ~0u, ~0u, ~0u}), y(kThreads);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(zero_fill_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Tiles)}, x.data(),
           y.data());
  });
  for (int t = 0; t < kThreads; ++t) {
    const auto* const got = reinterpret_cast<const unsigned char*>(&y[t]);
    for (int i = 0; i < 16; ++i)
      if (got[i] != (i < t % 17 ? 0xff : 0)) return false;
  }
  return true;
}

enum class Place { kSourceOutside, kSourceMisaligned, kTargetMisaligned };

__global__ void __launch_bounds__(32) place_kernel(const uint32_t* x, uint32_t* y, Place place) {
  auto& shared = shared_memory<Tiles>();
  const int t = threadIdx.x;
  const uint32_t* from = x + 4 * t + (place == Place::kSourceOutside ? 4 : place == Place::kSourceMisaligned);
  uint32_t* const to = &shared.piece[0][t].x + (place == Place::kTargetMisaligned);
  copy_async(to, from, 16);  // <- reported: place
  copy_async_commit();
  copy_async_wait<0>();
  store(y + t, *to);
}

template <Place kPlace>
bool place() {
  Buffer<uint32_t> x(4 * 32 + 4), y(32);
  emulate({in("x", x.data(), 4 * 32), y.out("y")}, [&] {
    launch(place_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Tiles)}, x.data(), y.data(), kPlace);
  });
  return true;
}

// ---- the source, and the end -----------------------------------------------------------------------------

__global__ void __launch_bounds__(32) source_kernel(uint32_t* x, uint32_t* y, bool changes, bool waits) {
  auto& shared = shared_memory<Tiles>();
  const int t = threadIdx.x;
  copy_async(&shared.piece[0][t], x + 4 * t, 16);  // <- reported: source
  copy_async_commit();
  if (changes) store(x + 4 * t, 1u);
  if (!waits) return;
  copy_async_wait<0>();  // <- other: source
  store(y + t, shared.piece[0][t].x);
}

template <bool kChanges, bool kWaits>
bool source() {
  Buffer<uint32_t> x(4 * 32, 5), y(32, 5);
  emulate({x.inout("x"), y.inout("y")}, [&] {
    launch(source_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Tiles)}, x.data(), y.data(),
           kChanges, kWaits);
  });
  return y[31] == 5;
}

}  // namespace

std::vector<Case> async_copy_cases() {
  constexpr auto kChecked = Builds::kChecked;
  return {
      {"stream/clean", "", stream<Gap::kNone>},
      {"stream/weak_wait", "read of a copy in flight", stream<Gap::kWeakWait>, kChecked},
      {"stream/no_wait", "read of a copy in flight", stream<Gap::kNoWait>, kChecked},
      {"stream/no_commit", "read of a copy in flight", stream<Gap::kNoCommit>, kChecked},
      {"stream/no_barrier", "race read-after-write", stream<Gap::kNoBarrier>, kChecked},
      {"stream/no_second_barrier", "race", stream<Gap::kNoSecondBarrier>, kChecked},
      {"write_in_flight/plain_store", "write to a copy in flight", stream<Gap::kEarlyWrite>, kChecked},
      {"zero_fill/all_sizes", "", zero_fill},
      {"place/source_outside", "out-of-bounds read", place<Place::kSourceOutside>},
      {"place/source_misaligned", "misaligned access", place<Place::kSourceMisaligned>},
      {"place/target_misaligned", "misaligned access", place<Place::kTargetMisaligned>},
      {"source/unchanged", "", source<false, true>},
      {"source/changed", "source changed under a copy", source<true, true>},
      {"source/never_waited_for", "exit with copies in flight", source<false, false>},
  };
}

}  // namespace simt::selftest
