// Order between blocks: none by itself; grid barriers, the last block, kernel boundaries.
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

constexpr int kBlocks = 4;
constexpr int kThreads = 64;
constexpr int kCount = kBlocks * kThreads;

// ---- nothing orders blocks by itself -------------------------------------------------------------------

// Each block reads the words of the next one.
__global__ void __launch_bounds__(kThreads) neighbour_kernel(int32_t* x, int32_t* y, int distance) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  store(x + i, i);                                             // <- other: neighbour
  store(y + i, load(x + (i + distance * kThreads) % kCount));  // <- reported: neighbour
}

template <int kDistance>
bool neighbour() {
  Buffer<int32_t> x(kCount, -1), y(kCount, -1);
  emulate({x.inout("x"), y.out("y")}, [&] {
    launch(neighbour_kernel, {.grid = kBlocks, .block = kThreads}, x.data(), y.data(), kDistance);
  });
  for (int i = 0; i < kCount; ++i)
    if (y[i] != (i + kDistance * kThreads) % kCount) return false;
  return true;
}

__global__ void __launch_bounds__(kThreads) one_writer_kernel(int32_t* y, int words_per_block) {
  store(y + blockIdx.x * words_per_block + threadIdx.x, int32_t(threadIdx.x));  // <- reported: one_writer
}

template <int kWordsPerBlock>
bool one_writer() {
  Buffer<int32_t> y(kCount, -1);
  emulate({y.out("y")},
          [&] { launch(one_writer_kernel, {.grid = kBlocks, .block = kThreads}, y.data(), kWordsPerBlock); });
  for (int i = 0; i < kCount; ++i)
    if (y[i] != i % kThreads) return false;
  return true;
}

// Bytes of one word by several threads are no race; the word itself by several is.
__global__ void __launch_bounds__(kThreads) bytes_kernel(uint8_t* y, int step) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  store(y + i / step, uint8_t(i / step));  // <- reported: bytes
}

template <int kStep>
bool bytes_of_one_word() {
  Buffer<uint8_t> y(kCount);
  emulate({y.out("y")}, [&] { launch(bytes_kernel, {.grid = kBlocks, .block = kThreads}, y.data(), kStep); });
  for (int i = 0; i < kCount / kStep; ++i)
    if (y[i] != i) return false;
  return true;
}

__global__ void __launch_bounds__(kThreads) count_kernel(int32_t* total, bool atomic) {
  if (atomic)
    atomicAdd(total, 1);
  else
    store(total, load(total) + 1);  // <- reported: count
}

template <bool kAtomic>
bool count() {
  Buffer<int32_t> total(1, 0);
  emulate({total.inout("total")},
          [&] { launch(count_kernel, {.grid = kBlocks, .block = kThreads}, total.data(), kAtomic); });
  return total[0] == kCount;
}

// ---- a barrier of the whole grid -----------------------------------------------------------------------

enum class Gap { kNone, kAll, kProducer, kConsumer, kBoth, kSyncBefore, kSyncAfter };

// Relaxed accesses between fences. The volatile read yields in checked builds only: in the fast build it
// would spin on.
__device__ void meet_by_fences(uint32_t* arrived, Gap gap) {
  if (gap != Gap::kProducer && gap != Gap::kBoth) __threadfence();
  atomicAdd(arrived, 1u);
  while (*static_cast<volatile uint32_t*>(arrived) < gridDim.x) {
  }
  if (gap != Gap::kConsumer && gap != Gap::kBoth) __threadfence();
}

// Accesses that order by themselves, or relaxed ones in their place.
__device__ void meet_by_order(uint32_t* arrived, Gap gap) {
  if (gap != Gap::kProducer && gap != Gap::kBoth)
    atomic_add_acq_rel<Scope::kDevice>(arrived, 1u);
  else
    atomicAdd(arrived, 1u);
  if (gap != Gap::kConsumer && gap != Gap::kBoth)
    while (load_acquire<Scope::kDevice>(arrived) < gridDim.x) {
    }
  else
    while (atomicAdd(arrived, 0u) < gridDim.x) {
    }
}

// As a barrier of the product does: who arrives does not ask for the count.
__device__ void meet_by_reduction(uint32_t* arrived, Gap gap) {
  if (gap != Gap::kProducer)
    eagle::cuda::add_release<Scope::kDevice>(arrived, 1u);
  else
    atomicAdd(arrived, 1u);
  while (load_acquire<Scope::kDevice>(arrived) < gridDim.x) {
  }
}

template <void (*kMeet)(uint32_t*, Gap)>
__global__ void __launch_bounds__(kThreads)
    grid_barrier_kernel(int32_t* x, int32_t* y, uint32_t* arrived, Gap gap) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  store(x + i, i);  // <- other: grid_barrier
  if (gap != Gap::kAll) {
    if (gap != Gap::kSyncBefore) __syncthreads();
    if (threadIdx.x == 0) kMeet(arrived, gap);
    if (gap != Gap::kSyncAfter) __syncthreads();
  }
  store(y + i, load(x + kCount - 1 - i));  // <- reported: grid_barrier
}

template <void (*kMeet)(uint32_t*, Gap), Gap kGap>
bool exchange() {
  Buffer<int32_t> x(kCount, -1), y(kCount, -1);
  Buffer<uint32_t> arrived(1, 0);
  emulate({x.out("x"), y.out("y"), arrived.inout("arrived")}, [&] {
    launch_together(grid_barrier_kernel<kMeet>, kBlocks, kThreads, x.data(), y.data(), arrived.data(), kGap);
  });
  for (int i = 0; i < kCount; ++i)
    if (y[i] != kCount - 1 - i) return false;
  return true;
}

// ---- the block that finishes last sums up --------------------------------------------------------------

struct LastBlock {
  int32_t is_last;
};

__global__ void __launch_bounds__(32)
    last_block_kernel(int32_t* part, int32_t* sum, uint32_t* finished, Gap gap) {
  auto& shared = shared_memory<LastBlock>();
  if (threadIdx.x == 0) {
    store(part + blockIdx.x, int32_t(blockIdx.x) + 1);  // <- other: last_block
    if (gap != Gap::kProducer) __threadfence();
    shared.is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
    if (gap != Gap::kConsumer) __threadfence();
  }
  __syncthreads();
  if (!shared.is_last) return;
  int32_t mine = threadIdx.x < gridDim.x ? load(part + threadIdx.x) : 0;  // <- reported: last_block
  mine = eagle::cuda::warp_reduce(mine, [](int32_t a, int32_t b) { return a + b; });
  if (threadIdx.x == 0) store(sum, mine);
}

template <Gap kGap>
bool last_block() {
  constexpr int kManyBlocks = 8;
  Buffer<int32_t> part(kManyBlocks, -1), sum(1, -1);
  Buffer<uint32_t> finished(1, 0);
  emulate({part.out("part"), sum.out("sum"), finished.inout("finished")}, [&] {
    launch(last_block_kernel, {.grid = kManyBlocks, .block = 32, .shared_bytes = sizeof(LastBlock)},
           part.data(), sum.data(), finished.data(), kGap);
  });
  return sum[0] == kManyBlocks * (kManyBlocks + 1) / 2;
}

// ---- the end of a kernel orders everything -------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) fill_kernel(int32_t* x, int32_t add) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  store(x + i, i + add);
}
__global__ void __launch_bounds__(kThreads) mirror_kernel(const int32_t* x, int32_t* y) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  store(y + i, load(x + kCount - 1 - i));
}

bool kernel_boundary() {
  Buffer<int32_t> x(kCount, -1), y(kCount, -1);
  bool right = true;
  emulate({x.out("x"), y.out("y")}, [&] {
    for (int add = 0; add < 3; ++add) {
      launch(fill_kernel, {.grid = kBlocks, .block = kThreads}, x.data(), add);
      launch(mirror_kernel, {.grid = kBlocks, .block = kThreads}, x.data(), y.data());
      for (int i = 0; i < kCount; ++i) right = right && y[i] == kCount - 1 - i + add;
    }
  });
  return right;
}

bool memory_set() {
  Buffer<int32_t> total(1, 77);
  emulate({total.out("total")}, [&] {
    EAGLE_CUDA_CHECK(cudaMemsetAsync(total.data(), 0, sizeof(int32_t), nullptr));
    launch(count_kernel, {.grid = kBlocks, .block = kThreads}, total.data(), true);
  });
  return total[0] == kCount;
}

}  // namespace

std::vector<Case> grid_cases() {
  constexpr auto kChecked = Builds::kChecked;
  return {
      {"neighbour/own_block", "", neighbour<0>},
      {"neighbour/next_block", "race read-after-write", neighbour<1>, kChecked},
      {"one_writer/apart", "", one_writer<kThreads>},
      {"one_writer/same_words", "race write-after-write", one_writer<0>, kChecked},
      {"bytes/one_each", "", bytes_of_one_word<1>},
      {"bytes/two_each", "race write-after-write", bytes_of_one_word<2>, kChecked},
      {"count/atomic", "", count<true>},
      {"count/plain", "race", count<false>, kChecked},
      {"grid_barrier/fences", "", exchange<meet_by_fences, Gap::kNone>, kChecked},
      {"grid_barrier/order", "", exchange<meet_by_order, Gap::kNone>},
      {"grid_barrier/reduction", "", exchange<meet_by_reduction, Gap::kNone>},
      {"grid_barrier/reduction_no_release", "race read-after-write",
       exchange<meet_by_reduction, Gap::kProducer>, kChecked},
      {"grid_barrier/missing", "race read-after-write", exchange<meet_by_order, Gap::kAll>, kChecked},
      {"grid_barrier/no_producer_fence", "race read-after-write", exchange<meet_by_fences, Gap::kProducer>,
       kChecked},
      {"grid_barrier/no_consumer_fence", "race read-after-write", exchange<meet_by_fences, Gap::kConsumer>,
       kChecked},
      {"grid_barrier/no_fence", "race read-after-write", exchange<meet_by_fences, Gap::kBoth>, kChecked},
      {"grid_barrier/no_release", "race read-after-write", exchange<meet_by_order, Gap::kProducer>, kChecked},
      {"grid_barrier/no_acquire", "race read-after-write", exchange<meet_by_order, Gap::kConsumer>, kChecked},
      {"grid_barrier/relaxed", "race read-after-write", exchange<meet_by_order, Gap::kBoth>, kChecked},
      {"grid_barrier/no_syncthreads_before", "race read-after-write",
       exchange<meet_by_order, Gap::kSyncBefore>, kChecked},
      {"grid_barrier/no_syncthreads_after", "race read-after-write", exchange<meet_by_order, Gap::kSyncAfter>,
       kChecked},
      {"last_block/complete", "", last_block<Gap::kNone>},
      {"last_block/no_producer_fence", "race read-after-write", last_block<Gap::kProducer>, kChecked},
      {"last_block/no_consumer_fence", "race read-after-write", last_block<Gap::kConsumer>, kChecked},
      {"kernel_boundary/three_rounds", "", kernel_boundary},
      {"kernel_boundary/memory_set", "", memory_set},
  };
}

}  // namespace simt::selftest
