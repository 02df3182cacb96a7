// What collectives compute: shuffles of every kind, type and width, votes, matches, reductions.
#include <bit>
#include <cstring>

#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

constexpr int kKinds = 4;   // idx, up, down, xor
constexpr int kWidths = 6;  // 1, 2, 4 ... 32
constexpr int kOperands = 32;

// ---- shuffles ------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(32) shuffles_kernel(const T* x, T* y) {
  const int lane = threadIdx.x;
  const T mine = load(x + lane);
  for (int i = 0; i < kWidths * kOperands; ++i) {
    const int width = 1 << i / kOperands, operand = i % kOperands;
    T* row = y + int64_t(i) * kKinds * 32 + lane;
    store(row, __shfl_sync(kFullMask, mine, operand, width));
    store(row + 32, __shfl_up_sync(kFullMask, mine, operand, width));
    store(row + 64, __shfl_down_sync(kFullMask, mine, operand, width));
    store(row + 96, __shfl_xor_sync(kFullMask, mine, operand, width));
  }
}

// The PTX rule: a segment of `width` lanes, own value where the source lies outside it; xor may read lower
// segments.
int source_lane(int kind, int lane, int operand, int width) {
  const int first = lane / width * width, last = first + width - 1;
  const int source = kind == 0   ? first + operand % width
                     : kind == 1 ? lane - operand
                     : kind == 2 ? lane + operand
                                 : lane ^ operand;
  return (kind == 1 ? source < first : source > last) ? lane : source;
}

template <class T>
bool shuffles() {
  Buffer<T> x(32), y(size_t(kWidths) * kOperands * kKinds * 32);
  for (int i = 0; i < 32; ++i) {  // every byte of every lane is different
    uint8_t bytes[sizeof(T)];
    for (size_t k = 0; k < sizeof(T); ++k) bytes[k] = uint8_t(i * sizeof(T) + k + 1);
    std::memcpy(&x[i], bytes, sizeof(T));
  }
  emulate({x.in("x"), y.out("y")},
          [&] { launch(shuffles_kernel<T>, {.grid = 1, .block = 32}, x.data(), y.data()); });
  for (size_t i = 0; i < y.size(); ++i) {
    const int lane = i % 32, kind = i / 32 % kKinds, operand = i / 32 / kKinds % kOperands;
    const int width = 1 << i / 32 / kKinds / kOperands;
    if (std::memcmp(&y[i], &x[source_lane(kind, lane, operand, width)], sizeof(T)) != 0) return false;
  }
  return true;
}

// ---- votes, matches, reductions, within masks ----------------------------------------------------------

constexpr unsigned kMasks[] = {0xffffffffu, 0x0000ffffu, 0xaaaaaaaau, 0x80000001u, 0x00000020u};
constexpr int kMaskCount = 5;
constexpr unsigned kPredicates[] = {0u, 0xffffffffu, 0x12345678u, 0x80000000u, 0x0000ffffu, 0xaaaaaaaau};
constexpr int kPredicateCount = 6;

__global__ void __launch_bounds__(32) votes_kernel(const unsigned* predicates, unsigned mask, uint32_t* y) {
  const int lane = threadIdx.x;
  if (!(mask >> lane & 1)) return;
  for (int i = 0; i < kPredicateCount; ++i) {
    const int predicate = load(predicates + i) >> lane & 1;
    uint32_t* row = y + i * 3 * 32 + lane;
    store(row, __ballot_sync(mask, predicate));
    store(row + 32, uint32_t(__any_sync(mask, predicate * 6)));
    store(row + 64, uint32_t(__all_sync(mask, predicate * -1)));
  }
}

bool votes() {
  for (unsigned mask : kMasks) {
    Buffer<unsigned> predicates(kPredicateCount);
    for (int i = 0; i < kPredicateCount; ++i) predicates[i] = kPredicates[i];
    Buffer<uint32_t> y(kPredicateCount * 3 * 32, 99);
    emulate({predicates.in("predicates"), y.out("y")},
            [&] { launch(votes_kernel, {.grid = 1, .block = 32}, predicates.data(), mask, y.data()); });
    for (int i = 0; i < kPredicateCount; ++i)
      for (int lane = 0; lane < 32; ++lane) {
        const uint32_t* row = y.data() + i * 3 * 32 + lane;
        const unsigned ballot = kPredicates[i] & mask;
        const bool in_mask = mask >> lane & 1;
        if (row[0] != (in_mask ? ballot : 99) || row[32] != (in_mask ? ballot != 0 : 99) ||
            row[64] != (in_mask ? ballot == mask : 99))
          return false;
      }
  }
  return true;
}

template <class T>
__global__ void __launch_bounds__(32) match_kernel(const T* x, unsigned mask, uint32_t* y) {
  const int lane = threadIdx.x;
  if (!(mask >> lane & 1)) return;
  store(y + lane, uint32_t(__match_any_sync(mask, load(x + lane))));
}

// Values that differ in one half only.
template <class T, int kShift>
bool match() {
  Buffer<T> x(32);
  for (int lane = 0; lane < 32; ++lane) x[lane] = T(T(lane * 7 % 5) << kShift) + 3;
  for (unsigned mask : kMasks) {
    Buffer<uint32_t> y(32, 0);
    emulate({x.in("x"), y.out("y")},
            [&] { launch(match_kernel<T>, {.grid = 1, .block = 32}, x.data(), mask, y.data()); });
    for (int lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1)) continue;
      uint32_t same = 0;
      for (int other = 0; other < 32; ++other)
        same |= uint32_t(mask >> other & 1 && x[other] == x[lane]) << other;
      if (y[lane] != same) return false;
    }
  }
  return true;
}

__global__ void __launch_bounds__(32) reduce_kernel(const int32_t* x, unsigned mask, uint32_t* y) {
  const int lane = threadIdx.x;
  if (!(mask >> lane & 1)) return;
  const int mine = load(x + lane);
  const unsigned bits = unsigned(mine);
  store(y + lane, uint32_t(__reduce_add_sync(mask, mine)));
  store(y + 32 + lane, uint32_t(__reduce_min_sync(mask, mine)));
  store(y + 64 + lane, uint32_t(__reduce_max_sync(mask, mine)));
  store(y + 96 + lane, __reduce_add_sync(mask, bits));
  store(y + 128 + lane, __reduce_min_sync(mask, bits));
  store(y + 160 + lane, __reduce_max_sync(mask, bits));
  store(y + 192 + lane, __reduce_and_sync(mask, bits));
  store(y + 224 + lane, __reduce_or_sync(mask, bits));
  store(y + 256 + lane, __reduce_xor_sync(mask, bits));
}

bool reduce() {
  Buffer<int32_t> x(32);
  for (int i = 0; i < 32; ++i) x[i] = (i % 3 - 1) * (i * 70000 + 11) | (i % 2) << 6;
  for (unsigned mask : kMasks) {
    Buffer<uint32_t> y(9 * 32, 0);
    emulate({x.in("x"), y.out("y")},
            [&] { launch(reduce_kernel, {.grid = 1, .block = 32}, x.data(), mask, y.data()); });
    uint32_t sum = 0, all = ~0u, any = 0, odd = 0, low = ~0u, high = 0;
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      const uint32_t bits = uint32_t(x[i]);
      sum += bits, all &= bits, any |= bits, odd ^= bits;
      low = std::min(low, bits), high = std::max(high, bits);
      least = std::min(least, x[i]), most = std::max(most, x[i]);
    }
    const uint32_t expected[9] = {sum, uint32_t(least), uint32_t(most), sum, low, high, all, any, odd};
    for (int i = 0; i < 9 * 32; ++i)
      if (mask >> i % 32 & 1 && y[i] != expected[i / 32]) return false;
  }
  return true;
}

// ---- votes of the block --------------------------------------------------------------------------------

constexpr int kThreads = 96;

__global__ void __launch_bounds__(kThreads) block_votes_kernel(int32_t* y, int true_threads) {
  const int t = threadIdx.x;
  const int predicate = t < true_threads ? 4 : 0;
  store(y + t, __syncthreads_count(predicate));
  store(y + kThreads + t, __syncthreads_and(predicate));
  store(y + 2 * kThreads + t, __syncthreads_or(predicate));
}

bool block_votes() {
  for (int true_threads : {0, 1, 33, kThreads - 1, kThreads}) {
    Buffer<int32_t> y(3 * kThreads, -1);
    emulate({y.out("y")},
            [&] { launch(block_votes_kernel, {.grid = 1, .block = kThreads}, y.data(), true_threads); });
    for (int t = 0; t < kThreads; ++t)
      if (y[t] != true_threads || (y[kThreads + t] != 0) != (true_threads == kThreads) ||
          (y[2 * kThreads + t] != 0) != (true_threads > 0))
        return false;
  }
  return true;
}

// ---- a sum of floats in a fixed order ------------------------------------------------------------------

struct WarpSums {
  float sum[kThreads / 32];
};

__global__ void __launch_bounds__(kThreads) sum_kernel(const float* x, float* y, int n) {
  auto& shared = shared_memory<WarpSums>();
  const int t = threadIdx.x;
  float sum = 0.0f;
  for (int i = t; i < n; i += kThreads) sum += load(x + i);
  sum = eagle::cuda::warp_reduce(sum, [](float a, float b) { return a + b; });
  if (t % 32 == 0) shared.sum[t / 32] = sum;
  __syncthreads();
  if (t == 0) store(y, shared.sum[0] + shared.sum[1] + shared.sum[2]);
}

bool sum() {
  constexpr int n = 1000;
  Buffer<float> x(n), y(1);
  for (int i = 0; i < n; ++i) x[i] = float(i * 37 % 101) * 0.1f - 3.0f;
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(sum_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(WarpSums)}, x.data(), y.data(),
           n);
  });
  float warp[3];
  for (int w = 0; w < 3; ++w) {
    float lanes[32] = {};
    for (int lane = 0; lane < 32; ++lane)
      for (int i = w * 32 + lane; i < n; i += kThreads) lanes[lane] += x[i];
    for (int distance = 16; distance > 0; distance /= 2)
      for (int lane = 0; lane < distance; ++lane) lanes[lane] += lanes[lane + distance];
    warp[w] = lanes[0];
  }
  return std::bit_cast<uint32_t>(y[0]) == std::bit_cast<uint32_t>(warp[0] + warp[1] + warp[2]);
}

}  // namespace

std::vector<Case> warp_number_cases() {
  return {
      {"shuffles/int32", "", shuffles<int32_t>},
      {"shuffles/uint32", "", shuffles<uint32_t>},
      {"shuffles/int64", "", shuffles<long long>},
      {"shuffles/uint64", "", shuffles<unsigned long long>},
      {"shuffles/float", "", shuffles<float>},
      {"shuffles/double", "", shuffles<double>},
      {"votes", "", votes},
      {"match/uint32", "", match<unsigned, 0>},
      {"match/uint64_low", "", match<unsigned long long, 0>},
      {"match/uint64_high", "", match<unsigned long long, 40>},
      {"reduce", "", reduce},
      {"block_votes", "", block_votes},
      {"sum", "", sum},
  };
}

}  // namespace simt::selftest
