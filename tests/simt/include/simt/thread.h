#pragma once
// What CUDA C++ gives a thread: its place, barriers, warp collectives, atomics, fences.
#include <type_traits>

#include "simt/device.h"

#define threadIdx (::simt::thread_index())
#define blockIdx (::simt::block_index())
#define warpSize 32

// Equal for all threads of a launch, hence constants to device code (which the instrumentation leaves alone);
// the emulator writes them by their other name. No macros: launch configurations have members of these names.
#pragma GCC visibility push(hidden)
extern const dim3 blockDim __asm__("simt_block_dimensions");
extern const dim3 gridDim __asm__("simt_grid_dimensions");
#pragma GCC visibility pop

// ---- barriers and fences ----------------------------------------------------------------------------------

__forceinline__ void __syncthreads() { simt::barrier(simt::Barrier::kSync, 0); }
__forceinline__ int __syncthreads_count(int predicate) {
  return simt::barrier(simt::Barrier::kCount, predicate);
}
__forceinline__ int __syncthreads_and(int predicate) { return simt::barrier(simt::Barrier::kAnd, predicate); }
__forceinline__ int __syncthreads_or(int predicate) { return simt::barrier(simt::Barrier::kOr, predicate); }
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) {
  simt::collective(simt::Collective::kSyncWarp, mask, 0, 0, 32);
}
__forceinline__ void __threadfence() { simt::fence(simt::Scope::kDevice); }
__forceinline__ void __threadfence_block() { simt::fence(simt::Scope::kBlock); }
__forceinline__ void __nanosleep(unsigned) { simt::poll(); }
__forceinline__ void __trap() { simt::trap(); }

// ---- warp collectives -------------------------------------------------------------------------------------

namespace simt {

template <class T>
__forceinline__ T shuffle(Collective op, unsigned mask, T value, int operand, int width) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
  const uint64_t result = collective(op, mask, __builtin_bit_cast(Word<T>, value), operand, width);
  return __builtin_bit_cast(T, Word<T>(result));
}
template <class T>
__forceinline__ T reduce(Collective op, unsigned mask, T value) {
  return T(collective(op, mask, uint32_t(value), 0, 32));
}

}  // namespace simt

template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return simt::shuffle(simt::Collective::kShuffle, mask, value, lane, width);
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  return simt::shuffle(simt::Collective::kShuffleUp, mask, value, int(distance), width);
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  return simt::shuffle(simt::Collective::kShuffleDown, mask, value, int(distance), width);
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32) {
  return simt::shuffle(simt::Collective::kShuffleXor, mask, value, distance, width);
}

__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
  return unsigned(simt::collective(simt::Collective::kBallot, mask, predicate != 0, 0, 32));
}
__forceinline__ int __any_sync(unsigned mask, int predicate) {
  return int(simt::collective(simt::Collective::kAny, mask, predicate != 0, 0, 32));
}
__forceinline__ int __all_sync(unsigned mask, int predicate) {
  return int(simt::collective(simt::Collective::kAll, mask, predicate != 0, 0, 32));
}
template <class T>
__forceinline__ unsigned __match_any_sync(unsigned mask, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a match compares 4 or 8 bytes");
  return unsigned(
      simt::collective(simt::Collective::kMatchAny, mask, __builtin_bit_cast(simt::Word<T>, value), 0, 32));
}

__forceinline__ int __reduce_add_sync(unsigned mask, int v) {
  return simt::reduce(simt::Collective::kAdd, mask, v);
}
__forceinline__ int __reduce_min_sync(unsigned mask, int v) {
  return simt::reduce(simt::Collective::kMin, mask, v);
}
__forceinline__ int __reduce_max_sync(unsigned mask, int v) {
  return simt::reduce(simt::Collective::kMax, mask, v);
}
__forceinline__ unsigned __reduce_add_sync(unsigned mask, unsigned v) {
  return simt::reduce(simt::Collective::kAdd, mask, v);
}
__forceinline__ unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  return simt::reduce(simt::Collective::kMinUnsigned, mask, v);
}
__forceinline__ unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  return simt::reduce(simt::Collective::kMaxUnsigned, mask, v);
}
__forceinline__ unsigned __reduce_and_sync(unsigned mask, unsigned v) {
  return simt::reduce(simt::Collective::kAnd, mask, v);
}
__forceinline__ unsigned __reduce_or_sync(unsigned mask, unsigned v) {
  return simt::reduce(simt::Collective::kOr, mask, v);
}
__forceinline__ unsigned __reduce_xor_sync(unsigned mask, unsigned v) {
  return simt::reduce(simt::Collective::kXor, mask, v);
}

unsigned __activemask() = delete;  // says which lanes happen to run together: not what a program may rely on

// ---- atomics: relaxed, device scope -----------------------------------------------------------------------

namespace simt {

template <class T>
constexpr Number number() {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "an atomic moves 4 or 8 bytes");
  if constexpr (std::is_floating_point_v<T>)
    return sizeof(T) == 4 ? Number::kFloat : Number::kDouble;
  else if constexpr (std::is_signed_v<T>)
    return sizeof(T) == 4 ? Number::kInt32 : Number::kInt64;
  else
    return sizeof(T) == 4 ? Number::kUint32 : Number::kUint64;
}
template <class T>
__forceinline__ T atomic(Atomic op, T* p, T operand, T expected = T(), Order order = Order::kRelaxed,
                         Scope scope = Scope::kDevice) {
  const uint64_t old = atomic(op, number<T>(), p, __builtin_bit_cast(Word<T>, operand),
                              __builtin_bit_cast(Word<T>, expected), order, scope);
  return __builtin_bit_cast(T, Word<T>(old));
}
// The value is converted to the word's type, as with CUDA's overloads.
template <class T>
using Same = std::type_identity_t<T>;

}  // namespace simt

template <class T>
__forceinline__ T atomicAdd(T* p, simt::Same<T> v) {
  return simt::atomic(simt::Atomic::kAdd, p, v);
}
template <class T>
__forceinline__ T atomicExch(T* p, simt::Same<T> v) {
  return simt::atomic(simt::Atomic::kExchange, p, v);
}
template <class T>
__forceinline__ T atomicCAS(T* p, simt::Same<T> expected, simt::Same<T> v) {
  return simt::atomic(simt::Atomic::kCompareAndSwap, p, v, expected);
}
template <class T>
__forceinline__ T atomicMin(T* p, simt::Same<T> v) {
  static_assert(std::is_integral_v<T>);
  return simt::atomic(simt::Atomic::kMin, p, v);
}
template <class T>
__forceinline__ T atomicMax(T* p, simt::Same<T> v) {
  static_assert(std::is_integral_v<T>);
  return simt::atomic(simt::Atomic::kMax, p, v);
}
template <class T>
__forceinline__ T atomicAnd(T* p, simt::Same<T> v) {
  static_assert(std::is_integral_v<T>);
  return simt::atomic(simt::Atomic::kAnd, p, v);
}
template <class T>
__forceinline__ T atomicOr(T* p, simt::Same<T> v) {
  static_assert(std::is_integral_v<T>);
  return simt::atomic(simt::Atomic::kOr, p, v);
}
template <class T>
__forceinline__ T atomicXor(T* p, simt::Same<T> v) {
  static_assert(std::is_integral_v<T>);
  return simt::atomic(simt::Atomic::kXor, p, v);
}

template <class T>
__forceinline__ T __ldg(const T* p) {
  return simt::global_load(p, simt::Path::kReadOnly);
}
