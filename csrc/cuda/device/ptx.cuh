#pragma once
// What the machine offers beyond CUDA C++: every instruction with a name, each beside its twin under the
// emulator (tests/simt); those of matrices in ptx_matrix.cuh. Inline PTX stands nowhere else, and no other
// file of kernels asks which compiler it is.
//
// Global memory that matters is read and written through load and store: one instruction each, of 1, 2, 4, 8
// or 16 bytes, which is what the traffic counters count. Words through which threads synchronise are read by
// load_acquire (polling included), written by store_release and counted by atomic_add_acq_rel or add_release.
//
// Bulk copies need compute capability 9.0: where a comment says so, code for older devices traps, and the
// host must choose another way (has_bulk_copies() of cuda/launch.h).
#include <cuda_runtime.h>

#include <cstdint>

namespace eagle::cuda {

enum class Scope { kBlock, kDevice };  // whose threads take part: PTX's .cta and .gpu

// A barrier in shared memory with phases. A phase is over when all arrivals and all bytes expected in it are
// there; the next one begins at once. Phases have parities 0, 1, 0, ...
struct Mbarrier {
  uint64_t state;
};

#if defined(__CUDACC__)

// The block's dynamic shared memory as the kernel's own struct; its sizeof is LaunchConfig::shared_bytes.
template <class T>
__device__ __forceinline__ T& shared_memory() {
  extern __shared__ __align__(128) unsigned char raw[];
  return *reinterpret_cast<T*>(raw);
}

template <class T>
__device__ __forceinline__ T load(const T* p) {
  return *p;
}

// Read once by this kernel: through the read-only path. The memory must not be written during the launch.
template <class T>
__device__ __forceinline__ T load_read_only(const T* p) {
  return __ldg(p);
}

template <class T>
__device__ __forceinline__ void store(T* p, T value) {
  *p = value;
}

template <Scope kScope>
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  if constexpr (kScope == Scope::kBlock)
    asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  else
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

template <Scope kScope>
__device__ __forceinline__ void store_release(uint32_t* p, uint32_t value) {
  if constexpr (kScope == Scope::kBlock)
    asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
  else
    asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// The word before the addition.
template <Scope kScope>
__device__ __forceinline__ uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t value) {
  uint32_t old;
  if constexpr (kScope == Scope::kBlock)
    asm volatile("atom.add.acq_rel.cta.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  else
    asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  return old;
}

// The same for who does not ask what the word was.
template <Scope kScope>
__device__ __forceinline__ void add_release(uint32_t* p, uint32_t value) {
  if constexpr (kScope == Scope::kBlock)
    asm volatile("red.release.cta.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
  else
    asm volatile("red.release.gpu.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers in shared memory ---------------------------------------------------------------------------

// Once a launch, by one thread; others may use it behind mbarrier_init_fence() of that thread and a barrier
// of the block.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// What this thread knows done before, it has done to the barrier and to what follows: release, acquire.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
      : "memory");
}

// Whether the phase of this parity is over; if so, everything that arrived in it is seen.
__device__ __forceinline__ bool mbarrier_try_wait(const Mbarrier* barrier, uint32_t parity) {
  uint32_t over;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred over;\nmbarrier.try_wait.parity.shared.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred over;\nmbarrier.test_wait.parity.shared.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return over != 0;
}

__device__ __forceinline__ void mbarrier_wait(const Mbarrier* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

#if __CUDA_ARCH__ >= 900

// Initialisations by this thread are seen by bulk copies too.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// What this thread knows written by loads and stores, bulk copies that start behind it see and may overwrite.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// From 9.0 on. Arrives, and expects so many more bytes in the phase.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// From 9.0 on. One thread copies `bytes` from global memory, which count at the barrier when they are there.
// Bytes and both addresses are multiples of 16. In flight until the phase is over; who waits for it sees
// them.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, Mbarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

#else

__device__ __forceinline__ void mbarrier_init_fence() {}
__device__ __forceinline__ void fence_proxy_async() {}
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier*, uint32_t) { __trap(); }
__device__ __forceinline__ void copy_bulk(void*, const void*, uint32_t, Mbarrier*) { __trap(); }

#endif

// ---- copies to shared memory that the thread waits for ---------------------------------------------------

// 16 bytes, past L1: the first `bytes` (0 to 16) from global memory, the others zero. Both addresses a
// multiple of 16. In flight until copy_async_wait; other threads see the bytes behind a barrier after that.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}

// The thread's copies so far arrive at the barrier, once, when they are all there: instead of a wait. The
// barrier counts one arrival for each thread that calls it.
__device__ __forceinline__ void copy_async_arrive(Mbarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most so many of the thread's latest groups are in flight.
template <int kGroups>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// For barriers of the grid: the launch must be a cooperative one. The emulator reports what is not; a GPU
// could hang.
__device__ __forceinline__ void need_whole_grid() {}
// A thread arrives at such a barrier, and has passed it: the emulator counts, and what is asked for between.
__device__ __forceinline__ void arrives_at_grid() {}
__device__ __forceinline__ void passes_grid() {}

// Memory accesses stay on their side: for loops whose loads, all hoisted, would not fit the registers.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// The same number, but what follows from it is computed where it stands: for loops in which registers are too
// scarce to hold it from outside.
__device__ __forceinline__ int computed_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

#else

template <class T>
__forceinline__ T& shared_memory() {
  return *static_cast<T*>(simt::dynamic_shared(sizeof(T), alignof(T)));
}

template <class T>
__forceinline__ T load(const T* p) {
  return simt::global_load(p);
}

template <class T>
__forceinline__ T load_read_only(const T* p) {
  return simt::global_load(p, simt::Path::kReadOnly);
}

template <class T>
__forceinline__ void store(T* p, T value) {
  simt::global_store(p, value);
}

template <Scope kScope>
__forceinline__ uint32_t load_acquire(const uint32_t* p) {
  return uint32_t(simt::ordered_load(p, 4, simt::Order::kAcquire, simt::Scope(kScope)));
}

template <Scope kScope>
__forceinline__ void store_release(uint32_t* p, uint32_t value) {
  simt::ordered_store(p, 4, value, simt::Order::kRelease, simt::Scope(kScope));
}

template <Scope kScope>
__forceinline__ uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t value) {
  return simt::atomic(simt::Atomic::kAdd, p, value, 0u, simt::Order::kAcquireRelease, simt::Scope(kScope));
}

template <Scope kScope>
__forceinline__ void add_release(uint32_t* p, uint32_t value) {
  simt::atomic(simt::Atomic::kAdd, p, value, 0u, simt::Order::kRelease, simt::Scope(kScope));
}

__forceinline__ void mbarrier_init(Mbarrier* barrier, uint32_t arrivals) {
  simt::mbarrier_init(barrier, arrivals);
}
__forceinline__ void mbarrier_init_fence() { simt::fence_proxy_async(); }
__forceinline__ void mbarrier_arrive(Mbarrier* barrier) { simt::mbarrier_arrive(barrier, 0); }
__forceinline__ void mbarrier_arrive_expect(Mbarrier* barrier, uint32_t bytes) {
  simt::need(simt::Feature::kBulkCopies);
  simt::mbarrier_arrive(barrier, bytes);
}
__forceinline__ bool mbarrier_try_wait(const Mbarrier* barrier, uint32_t parity) {
  return simt::mbarrier_try_wait(barrier, parity);
}
__forceinline__ void mbarrier_wait(const Mbarrier* barrier, uint32_t parity) {
  simt::mbarrier_wait(barrier, parity);
}
__forceinline__ void fence_proxy_async() { simt::fence_proxy_async(); }
__forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, Mbarrier* barrier) {
  simt::need(simt::Feature::kBulkCopies);
  simt::copy_bulk(to, from, bytes, barrier);
}
__forceinline__ void copy_async_arrive(Mbarrier* barrier) { simt::copy_async_arrive(barrier); }

__forceinline__ void copy_async(void* to, const void* from, int bytes) { simt::copy_async(to, from, bytes); }
__forceinline__ void copy_async_commit() { simt::copy_async_commit(); }
template <int kGroups>
__forceinline__ void copy_async_wait() {
  simt::copy_async_wait(kGroups);
}

__forceinline__ void need_whole_grid() { simt::need_whole_grid(); }
__forceinline__ void arrives_at_grid() { simt::arrives_at_grid(); }
__forceinline__ void passes_grid() { simt::passes_grid(); }
__forceinline__ void keep_order() {}
__forceinline__ int computed_here(int x) { return x; }

#endif

}  // namespace eagle::cuda
