#pragma once
// What the machine offers beyond CUDA C++: every instruction with a name, each beside its twin under the
// emulator (tests/simt). Inline PTX stands nowhere else, and no other device file asks which compiler it is.
//
// Global memory that matters is read and written through load and store: one instruction each, of 1, 2, 4, 8
// or 16 bytes, which is what the traffic counters count. Words through which threads synchronise are read by
// load_acquire (polling included), written by store_release and counted by atomic_add_acq_rel.
#include <cuda_runtime.h>

#include <cstdint>

namespace eagle::cuda {

enum class Scope { kBlock, kDevice };  // whose threads take part: PTX's .cta and .gpu

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

#endif

}  // namespace eagle::cuda
