// What single threads compute: atomics, vector types, bit functions, and where a thread stands.
#include <bit>
#include <limits>
#include <thread>

#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

// ---- atomics, one after the other ----------------------------------------------------------------------

constexpr int kSteps = 10;

// Old values of a fixed sequence, then the last value.
template <class T>
__device__ void atomic_sequence(T* word, T* y) {
  store(y, atomicExch(word, T(5)));
  store(y + 1, atomicAdd(word, T(7)));
  if constexpr (std::is_integral_v<T>) {
    store(y + 2, atomicCAS(word, T(12), T(-3)));
    store(y + 3, atomicCAS(word, T(12), T(99)));
    store(y + 4, atomicMin(word, T(6)));
    store(y + 5, atomicMax(word, T(40)));
    store(y + 6, atomicAnd(word, T(57)));
    store(y + 7, atomicOr(word, T(3)));
    store(y + 8, atomicXor(word, T(-1)));
  }
  store(y + kSteps - 1, atomicExch(word, T(0)));
}

template <class T>
struct Word {
  T value;
};

template <class T>
__global__ void __launch_bounds__(32) atomic_sequence_kernel(T* word, T* y, bool in_shared_memory) {
  if (threadIdx.x != 0) return;
  if (!in_shared_memory) return atomic_sequence(word, y);
  auto& shared = shared_memory<Word<T>>();
  shared.value = T(2);
  atomic_sequence(&shared.value, y);
}

template <class T, bool kInSharedMemory>
bool atomic_steps() {
  Buffer<T> word(1, T(2)), y(kSteps, T(0));
  emulate({word.inout("word"), y.out("y")}, [&] {
    launch(atomic_sequence_kernel<T>, {.grid = 1, .block = 32, .shared_bytes = sizeof(Word<T>)}, word.data(),
           y.data(), kInSharedMemory);
  });
  if (y[0] != T(2) || y[1] != T(5)) return false;
  if constexpr (!std::is_integral_v<T>) {
    return y[kSteps - 1] == T(12);
  } else {
    const T after_min = T(-3) < T(6) ? T(-3) : T(6);  // -3 is large where T is unsigned
    const T after_max = after_min > T(40) ? after_min : T(40);
    const T after_and = after_max & T(57), after_or = after_and | T(3);
    return y[2] == T(12) && y[3] == T(-3) && y[4] == T(-3) && y[5] == after_min && y[6] == after_max &&
           y[7] == after_and && y[8] == after_or && y[9] == T(~uint64_t(after_or));
  }
}

// ---- atomics, by everybody at once ---------------------------------------------------------------------

constexpr int kBlocks = 3, kThreads = 64;

template <class T>
__global__ void __launch_bounds__(kThreads) atomic_totals_kernel(T* y) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  atomicAdd(y, T(i));
  if constexpr (std::is_integral_v<T>) {
    atomicMin(y + 1, T(i));
    atomicMax(y + 2, T(i));
    atomicAnd(y + 3, T(~(1 << i % 7)));
    atomicOr(y + 4, T(1 << i % 7));
    atomicXor(y + 5, T(i));
    T seen = 0;  // a sum by compare-and-swap, begun with a guess
    for (T before; (before = atomicCAS(y + 6, seen, T(seen + 2))) != seen;) seen = before;
  }
}

template <class T>
bool atomic_totals() {
  constexpr int n = kBlocks * kThreads;
  Buffer<T> y(7, T(0));
  y[1] = T(1000);
  y[3] = T(0xff);
  emulate({y.inout("y")},
          [&] { launch(atomic_totals_kernel<T>, {.grid = kBlocks, .block = kThreads}, y.data()); });
  if (y[0] != T(n * (n - 1) / 2)) return false;
  if constexpr (std::is_integral_v<T>) {
    T odd = 0;
    for (int i = 0; i < n; ++i) odd ^= T(i);
    return y[1] == T(0) && y[2] == T(n - 1) && y[3] == T(0x80) && y[4] == T(0x7f) && y[5] == odd &&
           y[6] == T(2 * n);
  }
  return true;
}

// ---- vector types --------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(32) copy_kernel(const T* x, T* y) {
  const int t = threadIdx.x;
  store(y + 31 - t, eagle::cuda::load_read_only(x + t));
}

template <class T, size_t kBytes>
bool copy() {
  static_assert(sizeof(T) == kBytes && alignof(T) == kBytes);
  Buffer<T> x(32), y(32);
  auto* x_bytes = reinterpret_cast<uint8_t*>(x.data());
  auto* y_bytes = reinterpret_cast<uint8_t*>(y.data());
  for (size_t i = 0; i < 32 * kBytes; ++i) x_bytes[i] = uint8_t(i * 5 + 1);
  emulate({x.in("x"), y.out("y")},
          [&] { launch(copy_kernel<T>, {.grid = 1, .block = 32}, x.data(), y.data()); });
  for (size_t i = 0; i < 32 * kBytes; ++i)
    if (y_bytes[i] != x_bytes[(31 - i / kBytes) * kBytes + i % kBytes]) return false;
  return true;
}

bool vector_types() {
  return copy<char2, 2>() && copy<uchar2, 2>() && copy<char4, 4>() && copy<uchar4, 4>() &&
         copy<short2, 4>() && copy<ushort2, 4>() && copy<short4, 8>() && copy<ushort4, 8>() &&
         copy<int2, 8>() && copy<uint2, 8>() && copy<float2, 8>() && copy<int4, 16>() && copy<uint4, 16>() &&
         copy<float4, 16>() && copy<double2, 16>() && copy<longlong2, 16>() && copy<ulonglong2, 16>() &&
         copy<uint8_t, 1>() && copy<uint16_t, 2>() && copy<float, 4>() && copy<double, 8>();
}

__global__ void __launch_bounds__(32) make_kernel(float4* f, uint4* u, int2* i) {
  const unsigned t = threadIdx.x;
  store(f + t, make_float4(float(t), 1.0f, 2.0f, 3.0f));
  store(u + t, make_uint4(t, 5, 6, 7));
  store(i + t, make_int2(-int(t), 9));
}

bool make_vectors() {
  Buffer<float4> f(32);
  Buffer<uint4> u(32);
  Buffer<int2> i(32);
  emulate({f.out("f"), u.out("u"), i.out("i")},
          [&] { launch(make_kernel, {.grid = 1, .block = 32}, f.data(), u.data(), i.data()); });
  return f[31].x == 31.0f && f[31].w == 3.0f && u[31].x == 31 && u[31].z == 6 && i[31].x == -31 &&
         i[31].y == 9;
}

// ---- bit functions and minima --------------------------------------------------------------------------

__global__ void __launch_bounds__(32) bits_kernel(const uint32_t* x, int32_t* y) {
  const int t = threadIdx.x;
  const uint32_t v = load(x + t);
  const uint64_t wide = uint64_t(v) << 17;
  int32_t* row = y + t * 8;
  store(row, __popc(v));
  store(row + 1, __clz(int(v)));
  store(row + 2, __ffs(int(v)));
  store(row + 3, int32_t(__brev(v)));
  store(row + 4, int32_t(__umulhi(v, 0x9e3779b9u)));
  store(row + 5, __popcll(wide) + 100 * __clzll((long long)wide) + 10000 * __ffsll((long long)wide));
  store(row + 6, int32_t(__float_as_uint(__uint_as_float(v >> 3))));
  store(row + 7, min(int(v), 5) + max(int(v & 0xffu), 7));
}

bool bits() {
  Buffer<uint32_t> x(32, 0);
  Buffer<int32_t> y(32 * 8, -1);
  for (int i = 0; i < 31; ++i) x[i] = 0x80000001u >> i | uint32_t(i) << 8;  // x[31] stays 0
  emulate({x.in("x"), y.out("y")},
          [&] { launch(bits_kernel, {.grid = 1, .block = 32}, x.data(), y.data()); });
  for (int i = 0; i < 32; ++i) {
    const uint32_t v = x[i];
    const uint64_t wide = uint64_t(v) << 17;
    uint32_t reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (v >> bit & 1) << (31 - bit);
    const int32_t expected[8] = {
        std::popcount(v),
        std::countl_zero(v),
        v ? std::countr_zero(v) + 1 : 0,
        int32_t(reversed),
        int32_t(uint64_t(v) * 0x9e3779b9u >> 32),
        std::popcount(wide) + 100 * std::countl_zero(wide) + 10000 * (wide ? std::countr_zero(wide) + 1 : 0),
        int32_t(v >> 3),
        std::min(int32_t(v), 5) + std::max(int32_t(v & 0xffu), 7)};
    for (int k = 0; k < 8; ++k)
      if (y[i * 8 + k] != expected[k]) return false;
  }
  return true;
}

// A number wins against NaN.
__global__ void __launch_bounds__(32) minima_kernel(const float* x, float* y) {
  if (threadIdx.x != 0) return;
  store(y, min(load(x), load(x + 1)));
  store(y + 1, max(load(x), load(x + 1)));
  store(y + 2, min(load(x + 1), load(x)));
  store(y + 3, max(load(x + 1), 2.0f));
}

bool minima() {
  Buffer<float> x(2, 1.5f), y(4);
  x[1] = std::numeric_limits<float>::quiet_NaN();
  emulate({x.in("x"), y.out("y")},
          [&] { launch(minima_kernel, {.grid = 1, .block = 32}, x.data(), y.data()); });
  return y[0] == 1.5f && y[1] == 1.5f && y[2] == 1.5f && y[3] == 2.0f;
}

// ---- where a thread stands -----------------------------------------------------------------------------

constexpr unsigned kX = 3, kY = 7, kZ = 2;  // 42 threads: two warps, one of them short

__global__ void __launch_bounds__(kX * kY * kZ) place_kernel(uint32_t* y) {
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  uint32_t* row = y + (block * kX * kY * kZ + thread) * 2;
  store(row, threadIdx.x | threadIdx.y << 4 | threadIdx.z << 8 | blockIdx.x << 12 | blockIdx.y << 16 |
                 blockIdx.z << 20 | unsigned(warpSize) << 24);
  // Lanes are numbered with x fastest.
  const unsigned mask = thread < 32 ? kFullMask : (1u << (kX * kY * kZ - 32)) - 1;
  store(row + 1, uint32_t(__shfl_sync(mask, thread, thread < 32 ? 21 : 4)));
}

bool places() {
  constexpr unsigned kThreadCount = kX * kY * kZ, kBlockCount = 2 * 3 * 4;
  Buffer<uint32_t> y(kThreadCount * kBlockCount * 2, 0);
  emulate({y.out("y")},
          [&] { launch(place_kernel, {.grid = dim3(2, 3, 4), .block = dim3(kX, kY, kZ)}, y.data()); });
  for (unsigned block = 0; block < kBlockCount; ++block)
    for (unsigned t = 0; t < kThreadCount; ++t) {
      const uint32_t* row = y.data() + (block * kThreadCount + t) * 2;
      if (row[0] != (t % kX | t / kX % kY << 4 | t / kX / kY << 8 | block % 2 << 12 | block / 2 % 3 << 16 |
                     block / 6 << 20 | 32u << 24) ||
          row[1] != (t < 32 ? 21 : 36))
        return false;
    }
  return true;
}

// More blocks than are ever resident.
__global__ void __launch_bounds__(32) tally_kernel(uint32_t* y) {
  atomicAdd(y + blockIdx.x, 1 + threadIdx.x);
}

bool many_blocks() {
  constexpr int kMany = 700;
  Buffer<uint32_t> y(kMany, 0);
  emulate({y.inout("y")}, [&] { launch(tally_kernel, {.grid = kMany, .block = 32}, y.data()); });
  for (int i = 0; i < kMany; ++i)
    if (y[i] != 32 * 33 / 2) return false;
  return true;
}

// All the shared memory that a block can have.
struct Largest {
  uint32_t word[227 * 256];
};

__global__ void __launch_bounds__(1024) largest_kernel(uint32_t* y) {
  auto& shared = shared_memory<Largest>();
  constexpr int kWords = sizeof(Largest) / 4;
  const int t = threadIdx.x;
  for (int i = t; i < kWords; i += 1024) shared.word[i] = i;
  __syncthreads();
  store(y + t, shared.word[kWords - 1 - t]);
}

bool largest_shared_memory() {
  Buffer<uint32_t> y(1024, 0);
  emulate({y.out("y")}, [&] {
    launch(largest_kernel, {.grid = 1, .block = 1024, .shared_bytes = sizeof(Largest)}, y.data());
  });
  for (unsigned i = 0; i < 1024; ++i)
    if (y[i] != sizeof(Largest) / 4 - 1 - i) return false;
  return true;
}

// Ops from several OS threads take turns, and their host code is nobody's access.
bool host_threads() {
  bool right[3] = {};
  std::vector<std::thread> threads;
  for (bool& mine : right)
    threads.emplace_back([&mine] {
      bool all = true;
      for (int round = 0; round < 5; ++round) all = make_vectors() && bits() && all;
      mine = all;
    });
  for (std::thread& thread : threads) thread.join();
  return right[0] && right[1] && right[2];
}

bool launch_counts() {
  const uint64_t before = launches("selftest");
  const bool right = make_vectors();
  return right && launches("selftest") == before + 1 && counters().threads > 0 && counters().launches > 0;
}

}  // namespace

std::vector<Case> number_cases() {
  return {
      {"atomic_steps/int32", "", atomic_steps<int, false>},
      {"atomic_steps/uint32", "", atomic_steps<unsigned, false>},
      {"atomic_steps/uint64", "", atomic_steps<unsigned long long, false>},
      {"atomic_steps/float", "", atomic_steps<float, false>},
      {"atomic_steps/double", "", atomic_steps<double, false>},
      {"atomic_steps/shared_int32", "", atomic_steps<int, true>},
      {"atomic_steps/shared_uint32", "", atomic_steps<unsigned, true>},
      {"atomic_steps/shared_uint64", "", atomic_steps<unsigned long long, true>},
      {"atomic_steps/shared_float", "", atomic_steps<float, true>},
      {"atomic_totals/int32", "", atomic_totals<int>},
      {"atomic_totals/uint32", "", atomic_totals<unsigned>},
      {"atomic_totals/uint64", "", atomic_totals<unsigned long long>},
      {"atomic_totals/float", "", atomic_totals<float>},
      {"vector_types", "", vector_types},
      {"make_vectors", "", make_vectors},
      {"bits", "", bits},
      {"minima", "", minima},
      {"places", "", places},
      {"many_blocks", "", many_blocks},
      {"largest_shared_memory", "", largest_shared_memory},
      {"host_threads", "", host_threads},
      {"launch_counts", "", launch_counts},
  };
}

}  // namespace simt::selftest
