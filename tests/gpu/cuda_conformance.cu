// What CUDA C++ itself offers a kernel and the emulator does in its own way: shuffles, votes, reductions,
// matches, atomics, block votes; and the arithmetic of common/, which must give the host's bits on a GPU.
#include <algorithm>
#include <cstring>
#include <limits>

#include "common/numeric.h"
#include "common/philox.h"
#include "conformance.h"
#include "cuda/device/block.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"

namespace conformance {
namespace {

using namespace eagle;
using namespace eagle::cuda;

// A kernel of one function: out[i] = F(in[i], i) for warps of 32 threads, with the same in plain C++ over
// whole warps.
template <class F>
__global__ void __launch_bounds__(128) map_kernel(const uint32_t* in, uint32_t* out, F f) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  store(out + i, f(load(in + i), static_cast<int>(i % 32)));
}
template <class F>
void map(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(map_kernel<F>, {.grid = kWords / 128, .block = 128, .stream = stream}, in, out, F{});
}
template <class F>
void map_by_hand(const uint32_t* in, uint32_t* out) {
  for (int warp = 0; warp < kWords; warp += 32)
    for (int lane = 0; lane < 32; ++lane) out[warp + lane] = F::expected(in + warp, lane);
}
template <class F>
Case mapped(const char* name) {
  return {name, map<F>, map_by_hand<F>};
}

// ---- shuffles --------------------------------------------------------------------------------------------

template <int kWidth>
struct Shuffle {
  __device__ uint32_t operator()(uint32_t value, int lane) const {
    return __shfl_sync(kFullMask, value, lane * 5 + 3, kWidth);
  }
  static uint32_t expected(const uint32_t* v, int lane) {
    return v[lane / kWidth * kWidth + (lane * 5 + 3) % kWidth];
  }
};
template <int kDistance, int kWidth>
struct ShuffleUp {
  __device__ uint32_t operator()(uint32_t value, int) const {
    return __shfl_up_sync(kFullMask, value, kDistance, kWidth);
  }
  static uint32_t expected(const uint32_t* v, int lane) {
    return lane % kWidth >= kDistance ? v[lane - kDistance] : v[lane];
  }
};
template <int kDistance, int kWidth>
struct ShuffleDown {
  __device__ uint32_t operator()(uint32_t value, int) const {
    return __shfl_down_sync(kFullMask, value, kDistance, kWidth);
  }
  static uint32_t expected(const uint32_t* v, int lane) {
    return lane % kWidth + kDistance < kWidth ? v[lane + kDistance] : v[lane];
  }
};
struct ShuffleXor {
  __device__ uint32_t operator()(uint32_t value, int) const {
    const uint64_t wide = __shfl_xor_sync(kFullMask, uint64_t{value} << 32 | ~value, 11);
    return static_cast<uint32_t>(wide >> 32) ^ static_cast<uint32_t>(wide) >> 1;
  }
  static uint32_t expected(const uint32_t* v, int lane) { return v[lane ^ 11] ^ ~v[lane ^ 11] >> 1; }
};

// ---- votes, reductions and matches, of whole warps and of the odd lanes ----------------------------------

constexpr uint32_t kOdd = 0xaaaaaaaau;

// Folds `op` over the lanes of `mask`.
template <class T, class Op>
T fold(const uint32_t* v, uint32_t mask, T value, Op op) {
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) value = op(value, v[lane], lane);
  return value;
}

struct Ballot {
  __device__ uint32_t operator()(uint32_t value, int lane) const {
    const uint32_t all = __ballot_sync(kFullMask, value & 1);
    const uint32_t odd = lane % 2 ? __ballot_sync(kOdd, value & 2) : 0;
    return all ^ odd * 3;
  }
  static uint32_t expected(const uint32_t* v, int lane) {
    const auto bits = [&](uint32_t mask, uint32_t bit) {
      return fold(v, mask, 0u, [=](uint32_t b, uint32_t x, int i) { return b | (x & bit ? 1u << i : 0u); });
    };
    return bits(kFullMask, 1) ^ (lane % 2 ? bits(kOdd, 2) : 0) * 3;
  }
};
struct AnyAll {
  __device__ uint32_t operator()(uint32_t value, int) const {
    return __any_sync(kFullMask, value % 64 == 0) * 2 + __all_sync(kFullMask, value % 64 != 1);
  }
  static uint32_t expected(const uint32_t* v, int) {
    const uint32_t any =
        fold(v, kFullMask, 0u, [](uint32_t a, uint32_t x, int) { return a | (x % 64 == 0); });
    const uint32_t all =
        fold(v, kFullMask, 1u, [](uint32_t a, uint32_t x, int) { return a & (x % 64 != 1); });
    return any * 2 + all;
  }
};
struct Match {
  __device__ uint32_t operator()(uint32_t value, int) const { return __match_any_sync(kFullMask, value % 5); }
  static uint32_t expected(const uint32_t* v, int lane) {
    const uint32_t own = v[lane] % 5;
    return fold(v, kFullMask, 0u,
                [=](uint32_t b, uint32_t x, int i) { return b | (x % 5 == own ? 1u << i : 0u); });
  }
};
struct Reduce {
  __device__ uint32_t operator()(uint32_t value, int) const {
    const int number = static_cast<int>(value);
    return __reduce_add_sync(kFullMask, value) ^ __reduce_min_sync(kFullMask, value) << 1 ^
           __reduce_max_sync(kFullMask, value) << 2 ^ __reduce_and_sync(kFullMask, value | 0xff) << 3 ^
           __reduce_or_sync(kFullMask, value & 0xffff) << 4 ^ __reduce_xor_sync(kFullMask, value) << 5 ^
           static_cast<uint32_t>(__reduce_min_sync(kFullMask, number)) << 6 ^
           static_cast<uint32_t>(__reduce_max_sync(kFullMask, number)) << 7;
  }
  static uint32_t expected(const uint32_t* v, int) {
    uint32_t sum = 0, least = v[0], most = v[0], all = ~0u, any = 0, parity = 0;
    int low = static_cast<int>(v[0]), high = low;
    for (int i = 0; i < 32; ++i) {
      sum += v[i], least = std::min(least, v[i]), most = std::max(most, v[i]);
      all &= v[i] | 0xff, any |= v[i] & 0xffff, parity ^= v[i];
      low = std::min(low, static_cast<int>(v[i])), high = std::max(high, static_cast<int>(v[i]));
    }
    return sum ^ least << 1 ^ most << 2 ^ all << 3 ^ any << 4 ^ parity << 5 ^
           static_cast<uint32_t>(low) << 6 ^ static_cast<uint32_t>(high) << 7;
  }
};
struct WarpWords {
  __device__ uint32_t operator()(uint32_t value, int) const {
    const uint32_t most = warp_reduce(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    return warp_inclusive_sum(value) ^ most;
  }
  static uint32_t expected(const uint32_t* v, int lane) {
    uint32_t sum = 0;
    for (int i = 0; i <= lane; ++i) sum += v[i];
    return sum ^ *std::max_element(v, v + 32);
  }
};

// ---- atomics and block votes -----------------------------------------------------------------------------

constexpr int kCounters = 16, kThreads = 256;

__global__ void __launch_bounds__(kThreads) atomic_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, value = load(in + i), slot = value % kCounters;
  atomicAdd(out + slot, value);
  atomicMin(out + kCounters + slot, value);
  atomicMax(reinterpret_cast<int*>(out) + 2 * kCounters + slot, static_cast<int>(value));
  atomicOr(out + 3 * kCounters + slot, value);
  atomicAnd(out + 4 * kCounters + slot, value);
  atomicXor(out + 5 * kCounters + slot, value);
  atomicExch(out + 6 * kCounters, 11u);
  atomicCAS(out + 7 * kCounters, 0u, 5u);
  const auto wide = reinterpret_cast<unsigned long long*>(out + 8 * kCounters);
  atomicAdd(wide + slot, static_cast<unsigned long long>(value) << 16);
}
__global__ void __launch_bounds__(kThreads) fill_kernel(uint32_t* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, array = i / kCounters;
  store(out + i, array == 1 || array == 4 ? ~0u : array == 2 ? 0x80000000u : 0u);
}
void atomics(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(fill_kernel, {.grid = kWords / kThreads, .block = kThreads, .stream = stream}, out);
  launch(atomic_kernel, {.grid = kWords / kThreads, .block = kThreads, .stream = stream}, in, out);
}
void atomics_by_hand(const uint32_t* in, uint32_t* out) {
  std::memset(out, 0, kWords * 4);
  for (int s = 0; s < kCounters; ++s) {
    uint64_t wide = 0;
    uint32_t least = ~0u, all = ~0u, any = 0, parity = 0, sum = 0;
    int most = std::numeric_limits<int>::min();
    for (int i = 0; i < kWords; ++i) {
      if (in[i] % kCounters != static_cast<uint32_t>(s)) continue;
      sum += in[i], wide += uint64_t{in[i]} << 16, least = std::min(least, in[i]), all &= in[i];
      any |= in[i], parity ^= in[i], most = std::max(most, static_cast<int>(in[i]));
    }
    const uint32_t words[] = {sum, least, static_cast<uint32_t>(most), any, all, parity};
    for (int a = 0; a < 6; ++a) out[a * kCounters + s] = words[a];
    std::memcpy(out + 8 * kCounters + 2 * s, &wide, 8);
  }
  out[6 * kCounters] = 11, out[7 * kCounters] = 5;
}

__global__ void __launch_bounds__(kThreads) block_vote_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, value = load(in + i);
  const int count = __syncthreads_count(value % 3 == 0);
  const int all = __syncthreads_and(value % 512 != 1), any = __syncthreads_or(value % 512 == 2);
  store(out + i, static_cast<uint32_t>(count * 4 + (all != 0) * 2 + (any != 0)));
}
void block_votes(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(block_vote_kernel, {.grid = kWords / kThreads, .block = kThreads, .stream = stream}, in, out);
}
void block_votes_by_hand(const uint32_t* in, uint32_t* out) {
  for (int base = 0; base < kWords; base += kThreads) {
    uint32_t count = 0, all = 1, any = 0;
    for (int i = base; i < base + kThreads; ++i)
      count += in[i] % 3 == 0, all &= in[i] % 512 != 1, any |= in[i] % 512 == 2;
    std::fill(out + base, out + base + kThreads, count * 4 + all * 2 + any);
  }
}

// ---- the arithmetic of common/: bits of the host ---------------------------------------------------------

template <float (*kFunction)(float)>
struct Arithmetic {
  __device__ uint32_t operator()(uint32_t bits, int) const { return canonical(kFunction(bits_float(bits))); }
  static uint32_t expected(const uint32_t* v, int lane) { return canonical(kFunction(bits_float(v[lane]))); }
  EAGLE_INLINE static uint32_t canonical(float x) { return x != x ? 0x7fc00000u : float_bits(x); }
};
EAGLE_INLINE float exp_of(float x) { return exp_f32(x); }
EAGLE_INLINE float exp_of_small(float x) { return exp_f32(x * 1e-36f); }
EAGLE_INLINE float log_of(float x) { return log_f32(x); }
EAGLE_INLINE float log1p_of(float x) { return log1p_f32(x); }
EAGLE_INLINE float rsqrt_of(float x) { return rsqrt_f32(x); }
EAGLE_INLINE float silu_of(float x) { return silu_f32(x); }
EAGLE_INLINE float half_of(float x) { return to_float(from_float<half_t>(x)); }
EAGLE_INLINE float bf16_of(float x) { return to_float(from_float<bf16_t>(x)); }
EAGLE_INLINE float quotient_of(float x) { return x / 0.7f; }
EAGLE_INLINE float product_of(float x) { return x * 3.3f + 1.1f; }  // not contracted
EAGLE_INLINE float gumbel_of(float x) { return gumbel(float_bits(x) * 0x9e3779b97f4a7c15ull, 77, 12345); }

}  // namespace

std::vector<Case> collective_cases() {
  return {
      mapped<Shuffle<32>>("shfl 32"),
      mapped<Shuffle<8>>("shfl 8"),
      mapped<ShuffleUp<3, 32>>("shfl_up 32"),
      mapped<ShuffleUp<5, 8>>("shfl_up 8"),
      mapped<ShuffleDown<7, 32>>("shfl_down 32"),
      mapped<ShuffleDown<3, 16>>("shfl_down 16"),
      mapped<ShuffleXor>("shfl_xor of 8 bytes"),
      mapped<Ballot>("ballot"),
      mapped<AnyAll>("any all"),
      mapped<Match>("match_any"),
      mapped<Reduce>("reduce"),
      mapped<WarpWords>("warp_reduce warp_inclusive_sum"),
      {"atomics", atomics, atomics_by_hand},
      {"block votes", block_votes, block_votes_by_hand},
      mapped<Arithmetic<exp_of>>("exp"),
      mapped<Arithmetic<exp_of_small>>("exp of small numbers"),
      mapped<Arithmetic<log_of>>("log"),
      mapped<Arithmetic<log1p_of>>("log1p"),
      mapped<Arithmetic<rsqrt_of>>("rsqrt"),
      mapped<Arithmetic<silu_of>>("silu"),
      mapped<Arithmetic<half_of>>("float16"),
      mapped<Arithmetic<bf16_of>>("bfloat16"),
      mapped<Arithmetic<quotient_of>>("quotient"),
      mapped<Arithmetic<product_of>>("product and sum"),
      mapped<Arithmetic<gumbel_of>>("gumbel"),
  };
}

}  // namespace conformance
