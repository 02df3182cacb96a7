// Every function of csrc/cuda/device/ptx.cuh: what its PTX does on a GPU and what its twin does under the
// emulator are compared with plain C++ and with each other (tests/test_conformance.py, tools/gpu_check.py).
#include <cstring>

#include "conformance.h"
#include "cuda/device/ptx.cuh"
#include "cuda/launch.h"

namespace conformance {
namespace {

using namespace eagle::cuda;

// ---- load, load_read_only, store: one element a thread, in another order ---------------------------------

constexpr int kStep = 37;  // coprime to every number of elements here

template <class T, bool kReadOnly>
__global__ void __launch_bounds__(256) copy_kernel(const uint32_t* in, uint32_t* out, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const T* from = reinterpret_cast<const T*>(in) + int64_t{i} * kStep % count;
  store(reinterpret_cast<T*>(out) + i, kReadOnly ? load_read_only(from) : load(from));
}

template <class T, bool kReadOnly>
void copy(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  constexpr int kCount = kWords * 4 / sizeof(T);
  launch(copy_kernel<T, kReadOnly>, {.grid = (kCount + 255) / 256, .block = 256, .stream = stream}, in, out,
         kCount);
}

template <class T>
void copied(const uint32_t* in, uint32_t* out) {
  constexpr int kCount = kWords * 4 / sizeof(T);
  for (int i = 0; i < kCount; ++i)
    std::memcpy(reinterpret_cast<char*>(out) + i * sizeof(T),
                reinterpret_cast<const char*>(in) + int64_t{i} * kStep % kCount * sizeof(T), sizeof(T));
}

// ---- shared_memory: a struct per block, also above the 48 KiB that need no permission --------------------

template <int kBytes>
struct Shared {
  uint8_t odd;
  alignas(16) uint4 wide[64];
  uint32_t words[256];
  uint8_t rest[kBytes];
};

template <int kBytes>
__global__ void __launch_bounds__(256) shared_kernel(const uint32_t* in, uint32_t* out) {
  auto& shared = shared_memory<Shared<kBytes>>();
  const int i = static_cast<int>(threadIdx.x), base = static_cast<int>(blockIdx.x) * 256;
  if (i == 0) shared.odd = 7;
  if (i < 64) shared.wide[i] = load(reinterpret_cast<const uint4*>(in + base) + i);
  shared.words[255 - i] = load(in + base + i);
  shared.rest[kBytes - 1 - i] = static_cast<uint8_t>(i);
  __syncthreads();
  const uint4 wide = shared.wide[63 - i / 4];
  const uint32_t part[4] = {wide.x, wide.y, wide.z, wide.w};
  store(out + base + i, part[i % 4] ^ shared.words[(i + 1) % 256] ^
                            (uint32_t{shared.rest[kBytes - 256 + i]} << 8) ^ shared.odd);
}

template <int kBytes>
void shared(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(shared_kernel<kBytes>,
         {.grid = kWords / 256, .block = 256, .stream = stream, .shared_bytes = sizeof(Shared<kBytes>)}, in,
         out);
}

void shared_by_hand(const uint32_t* in, uint32_t* out) {
  for (int base = 0; base < kWords; base += 256)
    for (int i = 0; i < 256; ++i)
      out[base + i] = in[base + (63 - i / 4) * 4 + i % 4] ^ in[base + 255 - (i + 1) % 256] ^
                      (static_cast<uint32_t>(255 - i) << 8) ^ 7u;
}

// ---- load_acquire, store_release, atomic_add_acq_rel -----------------------------------------------------

constexpr int kPolls = 1 << 24;

// out[0] is the flag, out[kData + i] the data. The writer passes on in[i] + 1, the reader copies it to
// out[kCopy + i]: warps of a block, or blocks of a grid.
constexpr int kData = 64, kCopy = 128;

template <Scope kScope>
__global__ void __launch_bounds__(64) message_kernel(const uint32_t* in, uint32_t* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int side =
      kScope == Scope::kBlock ? static_cast<int>(threadIdx.x) / 32 : static_cast<int>(blockIdx.x);
  if (side == 0) {
    store(out + kData + lane, load(in + lane) + 1);
    __syncwarp();
    if (lane == 0) store_release<kScope>(out, 1u);
  } else {
    bool seen = false;
    if (lane == 0)
      for (int i = 0; i < kPolls && !seen; ++i) seen = load_acquire<kScope>(out) == 1u;
    __syncwarp();
    if (__shfl_sync(0xffffffffu, static_cast<int>(seen), 0))
      store(out + kCopy + lane, load(out + kData + lane));
  }
}

__global__ void __launch_bounds__(256) clear_kernel(uint32_t* out) {
  store(out + blockIdx.x * blockDim.x + threadIdx.x, 0u);
}
void clear(uint32_t* out, CUstream_st* stream) {
  launch(clear_kernel, {.grid = kWords / 256, .block = 256, .stream = stream}, out);
}

template <Scope kScope>
void message(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  clear(out, stream);
  const bool block = kScope == Scope::kBlock;
  launch(message_kernel<kScope>, {.grid = block ? 1u : 2u, .block = block ? 64u : 32u, .stream = stream}, in,
         out);
}

void message_by_hand(const uint32_t* in, uint32_t* out) {
  std::memset(out, 0, kWords * 4);
  out[0] = 1;
  for (int i = 0; i < 32; ++i) out[kData + i] = out[kCopy + i] = in[i] + 1;
}

// A ticket a thread from the counter out[0]: every ticket is given once, and the last thread sees what all
// others wrote.
constexpr int kTickets = 256, kSum = 1;

template <Scope kScope>
__global__ void __launch_bounds__(kTickets) ticket_kernel(const uint32_t* in, uint32_t* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  store(out + kTickets + i, load(in + i));
  const uint32_t ticket = atomic_add_acq_rel<kScope>(out, 1u);
  store(out + 2 * kTickets + ticket % kTickets, 1u);
  if (ticket == kTickets - 1) {
    uint32_t sum = 0;
    for (int j = 0; j < kTickets; ++j) sum += load(out + kTickets + j);
    store(out + kSum, sum);
  }
}

template <Scope kScope>
void tickets(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  clear(out, stream);
  const unsigned blocks = kScope == Scope::kBlock ? 1 : 8;
  launch(ticket_kernel<kScope>, {.grid = blocks, .block = kTickets / blocks, .stream = stream}, in, out);
}

void tickets_by_hand(const uint32_t* in, uint32_t* out) {
  std::memset(out, 0, kWords * 4);
  out[0] = kTickets;
  for (int i = 0; i < kTickets; ++i) {
    out[kTickets + i] = in[i];
    out[2 * kTickets + i] = 1;
    out[kSum] += in[i];
  }
}

}  // namespace

std::vector<Case> memory_cases() {
  return {
      {"load store 1", copy<uint8_t, false>, copied<uint8_t>},
      {"load store 2", copy<uint16_t, false>, copied<uint16_t>},
      {"load store 4", copy<uint32_t, false>, copied<uint32_t>},
      {"load store 8", copy<uint2, false>, copied<uint2>},
      {"load store 16", copy<uint4, false>, copied<uint4>},
      {"load_read_only 1", copy<uint8_t, true>, copied<uint8_t>},
      {"load_read_only 2", copy<uint16_t, true>, copied<uint16_t>},
      {"load_read_only 4", copy<float, true>, copied<float>},
      {"load_read_only 8", copy<uint2, true>, copied<uint2>},
      {"load_read_only 16", copy<uint4, true>, copied<uint4>},
      {"shared_memory 2 KiB", shared<256>, shared_by_hand},
      {"shared_memory 96 KiB", shared<96 * 1024>, shared_by_hand},
      {"store_release load_acquire block", message<Scope::kBlock>, message_by_hand},
      {"store_release load_acquire device", message<Scope::kDevice>, message_by_hand},
      {"atomic_add_acq_rel block", tickets<Scope::kBlock>, tickets_by_hand},
      {"atomic_add_acq_rel device", tickets<Scope::kDevice>, tickets_by_hand},
  };
}

}  // namespace conformance
