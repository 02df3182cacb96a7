// Barriers in shared memory and the copies that end at one (csrc/cuda/device/ptx.cuh) against plain C++, as
// in ptx_conformance.cu. Where a device has no bulk copies, cp.async brings the same bytes.
#include <cstring>

#include "conformance.h"
#include "cuda/device/ptx.cuh"
#include "cuda/launch.h"

namespace conformance {
namespace {

using namespace eagle::cuda;

constexpr int kPieces = kWords / 4;  // of 16 bytes

// ---- a ring of two stages, from which two warps read what a third one requests: copies of several sizes and
// at several offsets, more rounds than stages, both ways of waiting

constexpr int kReaders = 64, kStages = 2, kRounds = 8;
constexpr int kRequester = kReaders;  // its first lane requests bulk copies, all of them cp.async

struct Ring {
  Mbarrier full[kStages], empty[kStages];
  alignas(128) uint4 piece[kStages][kReaders];
};

__host__ __device__ constexpr int source(int block, int round) {
  return (block * 997 + round * 131) % (kPieces - kReaders);
}

template <bool kBulk>
__global__ void __launch_bounds__(kReaders + 32) ring_kernel(const uint32_t* in, uint32_t* out) {
  auto& shared = shared_memory<Ring>();
  const int t = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  const uint4* const from = reinterpret_cast<const uint4*>(in);
  if (t == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], kBulk ? 1 : 32);
      mbarrier_init(&shared.empty[i], kReaders / 32);
    }
    mbarrier_init_fence();
  }
  if (t < kReaders) shared.piece[1][t] = {1, 2, 3, 4};
  fence_proxy_async();
  __syncthreads();

  uint4 sum{0, 0, 0, 0};
  for (int round = 0; round < kRounds; ++round) {
    const int stage = round % kStages;
    const uint32_t parity = static_cast<uint32_t>(round / kStages % 2);
    if (t >= kRequester) {
      mbarrier_wait(&shared.empty[stage], parity ^ 1u);
      const uint4* const pieces = from + source(block, round);
      if (kBulk && t == kRequester) {
        constexpr uint32_t kBytes = sizeof shared.piece[0];
        mbarrier_arrive_expect(&shared.full[stage], kBytes);
        copy_bulk(shared.piece[stage], pieces, 16, &shared.full[stage]);
        copy_bulk(&shared.piece[stage][1], pieces + 1, 3 * 16, &shared.full[stage]);
        copy_bulk(&shared.piece[stage][4], pieces + 4, kBytes - 4 * 16, &shared.full[stage]);
      }
      if (!kBulk) {
        for (int i = t - kRequester; i < kReaders; i += 32)
          copy_async(&shared.piece[stage][i], pieces + i, 16);
        copy_async_arrive(&shared.full[stage]);
      }
      __syncwarp();  // no lane sleeps through two phases
    } else {
      if (t < 32)
        mbarrier_wait(&shared.full[stage], parity);
      else
        while (!mbarrier_try_wait(&shared.full[stage], parity)) {
        }
      const uint4 piece = shared.piece[stage][(t * 5 + 3) % kReaders];
      sum = {sum.x * 3 + piece.x, sum.y * 5 + piece.y, sum.z ^ piece.z, sum.w + piece.w};
      __syncwarp();
      if (t % 32 == 0) mbarrier_arrive(&shared.empty[stage]);
    }
  }
  if (t < kReaders) store(reinterpret_cast<uint4*>(out) + block * kReaders + t, sum);
}

template <bool kBulk>
void ring(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  const LaunchConfig config{
      .grid = kPieces / kReaders, .block = kReaders + 32, .stream = stream, .shared_bytes = sizeof(Ring)};
  if (kBulk && has_bulk_copies())
    launch(ring_kernel<true>, config, in, out);
  else
    launch(ring_kernel<false>, config, in, out);
}

void ring_by_hand(const uint32_t* in, uint32_t* out) {
  for (int i = 0; i < kPieces; ++i) {
    uint32_t* const sum = out + 4 * i;
    std::memset(sum, 0, 16);
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t* const piece =
          in + 4 * (source(i / kReaders, round) + (i % kReaders * 5 + 3) % kReaders);
      sum[0] = sum[0] * 3 + piece[0];
      sum[1] = sum[1] * 5 + piece[1];
      sum[2] ^= piece[2];
      sum[3] += piece[3];
    }
  }
}

// ---- a bulk copy of what the launch itself wrote, behind a fence; and words passed on by arrivals

struct Landing {
  Mbarrier full;
  alignas(16) uint32_t word[256];
};

template <bool kBulk>
__global__ void __launch_bounds__(64) written_kernel(const uint32_t* in, uint32_t* out) {
  auto& shared = shared_memory<Landing>();
  const int t = static_cast<int>(threadIdx.x), base = static_cast<int>(blockIdx.x) * 256;
  if (t == 0) {
    mbarrier_init(&shared.full, kBulk ? 1 : 64);
    mbarrier_init_fence();
  }
  for (int i = t; i < 256; i += 64) store(out + base + i, load(in + base + i) + 1);
  fence_proxy_async();
  __syncthreads();
  if (kBulk && t == 0) {
    mbarrier_arrive_expect(&shared.full, sizeof shared.word);
    copy_bulk(shared.word, out + base, sizeof shared.word, &shared.full);
  }
  if (!kBulk) {
    for (int i = t; i < 256; i += 64) shared.word[i] = load(out + base + i);
    mbarrier_arrive(&shared.full);
  }
  mbarrier_wait(&shared.full, 0);
  for (int i = t; i < 256; i += 64) store(out + base + i, shared.word[255 - i]);
}

template <bool kBulk>
void written(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  const LaunchConfig config{
      .grid = kWords / 256, .block = 64, .stream = stream, .shared_bytes = sizeof(Landing)};
  if (kBulk && has_bulk_copies())
    launch(written_kernel<true>, config, in, out);
  else
    launch(written_kernel<false>, config, in, out);
}

void written_by_hand(const uint32_t* in, uint32_t* out) {
  for (int i = 0; i < kWords; ++i) out[i] = in[i / 256 * 256 + 255 - i % 256] + 1;
}

// ---- add_release: as many as are wanted, and whoever sees the last sees what all wrote

constexpr int kAdders = 256, kSum = 1;

template <Scope kScope>
__global__ void __launch_bounds__(kAdders) reduction_kernel(const uint32_t* in, uint32_t* out) {
  constexpr int kPolls = 1 << 24;
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  store(out + kAdders + i, load(in + i));
  add_release<kScope>(out, 3u);
  if (i != 0) return;
  bool seen = false;
  for (int poll = 0; poll < kPolls && !seen; ++poll) seen = load_acquire<kScope>(out) == 3u * kAdders;
  uint32_t sum = 0;
  for (int j = 0; seen && j < kAdders; ++j) sum += load(out + kAdders + j);
  store(out + kSum, sum);
}

__global__ void __launch_bounds__(256) clear_kernel(uint32_t* out) {
  store(out + blockIdx.x * blockDim.x + threadIdx.x, 0u);
}

template <Scope kScope>
void reduction(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(clear_kernel, {.grid = kWords / 256, .block = 256, .stream = stream}, out);
  const unsigned blocks = kScope == Scope::kBlock ? 1 : 8;
  launch(reduction_kernel<kScope>, {.grid = blocks, .block = kAdders / blocks, .stream = stream}, in, out);
}

void reduction_by_hand(const uint32_t* in, uint32_t* out) {
  std::memset(out, 0, kWords * 4);
  out[0] = 3 * kAdders;
  for (int i = 0; i < kAdders; ++i) {
    out[kAdders + i] = in[i];
    out[kSum] += in[i];
  }
}

}  // namespace

std::vector<Case> bulk_cases() {
  return {
      {"copy_bulk ring", ring<true>, ring_by_hand},
      {"copy_async_arrive ring", ring<false>, ring_by_hand},
      {"copy_bulk of written words", written<true>, written_by_hand},
      {"mbarrier_arrive", written<false>, written_by_hand},
      {"add_release block", reduction<Scope::kBlock>, reduction_by_hand},
      {"add_release device", reduction<Scope::kDevice>, reduction_by_hand},
  };
}

}  // namespace conformance
