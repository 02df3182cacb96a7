// What -fsanitize=thread calls at every access of an instrumented kernel, in place of the compiler's own
// runtime. Outside a launch (host code in kernel files) nothing is looked at.
#include <cstdint>

#include "simt/access.h"
#include "simt/checker.h"
#include "simt/emulator.h"
#include "simt/scheduler.h"

// The loaded file that this code is part of.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[];
extern "C" __attribute__((visibility("hidden"))) const char _end[];

namespace simt {

namespace {

bool instrumented = false;

bool within(uint64_t address, uint64_t size, const void* begin, uint64_t bytes) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(begin);
  return offset < bytes && size <= bytes - offset;
}

// Constants of this file and the kernel's parameters are anybody's to read.
bool readable(const Touch& touch) {
  return within(touch.address, touch.size, __ehdr_start, uint64_t(_end - __ehdr_start)) ||
         within(touch.address, touch.size, running.arguments, running.argument_bytes);
}

// Global memory is counted where device/ptx.cuh reads and writes it; a plain access to it is checked alone.
inline void observe(Thread& me, const Touch& touch, bool whole_word) {
  if (in_shared(me, touch.address)) {
    touch_shared(me, touch);
    if (whole_word) require_aligned(me, touch);
    log_access(me, {touch.address, touch.pc, touch.size, touch.write, true});
  } else if (within(touch.address, touch.size, running.stacks.low(me.slot), Stacks::kBytes)) {
    return;
  } else if (!touch.write && readable(touch)) {
    return;
  } else {
    touch_global(me, touch);
    if (whole_word) require_aligned(me, touch);
    if (!touch.write) note_unlogged_read(touch.pc);
  }
  maybe_preempt();
}

// Host code of this OS thread runs outside launches; that of others, at any time.
inline bool in_launch() { return current && __builtin_thread_pointer() == running.os_thread; }

inline void observe(const void* p, uint64_t size, bool write, bool whole_word, const void* pc) {
  if (!in_launch() || size == 0) return;
  observe(self(), {reinterpret_cast<uint64_t>(p), uint32_t(size), write, false, pc}, whole_word);
}

// A volatile access is a relaxed one: it races with nothing of its kind and orders nothing without a fence.
inline void observe_volatile(const void* p, uint32_t size, bool write, const void* pc) {
  if (!in_launch()) return;
  Thread& me = self();
  if (within(reinterpret_cast<uint64_t>(p), size, running.stacks.low(me.slot), Stacks::kBytes)) return;
  if (!write) poll_at(pc);
  observe(me, {reinterpret_cast<uint64_t>(p), size, write, true, pc}, true);
  if (write)
    checker::store(me, p, Order::kRelaxed, Scope::kDevice);
  else
    checker::load(me, p, Order::kRelaxed, Scope::kDevice);
}

}  // namespace

bool checked() { return instrumented; }

}  // namespace simt

#define SIMT_ACCESSES(size)                                                                             \
  void __tsan_read##size(void* p) { simt::observe(p, size, false, true, __builtin_return_address(0)); } \
  void __tsan_write##size(void* p) { simt::observe(p, size, true, true, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##size(void* p) {                                                           \
    simt::observe(p, size, false, false, __builtin_return_address(0));                                  \
  }                                                                                                     \
  void __tsan_unaligned_write##size(void* p) {                                                          \
    simt::observe(p, size, true, false, __builtin_return_address(0));                                   \
  }                                                                                                     \
  void __tsan_volatile_read##size(void* p) {                                                            \
    simt::observe_volatile(p, size, false, __builtin_return_address(0));                                \
  }                                                                                                     \
  void __tsan_volatile_write##size(void* p) {                                                           \
    simt::observe_volatile(p, size, true, __builtin_return_address(0));                                 \
  }

// Host code of kernel files may hold atomics of the standard library (guards of local statics, reference
// counts): plain calls here. Device code has atomics of its own.
#define SIMT_HOST_ATOMICS(bits, T)                                                                        \
  T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                                             \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                       \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                                            \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                    \
  }                                                                                                       \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                                            \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                                    \
  }                                                                                                       \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T v, int) {                                            \
    return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);                                                    \
  }                                                                                                       \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T v, int) {                                             \
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                                       \
  T __tsan_atomic##bits##_fetch_xor(volatile T* p, T v, int) {                                            \
    return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST);                                                    \
  }                                                                                                       \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {          \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);        \
  }                                                                                                       \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {            \
    return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);         \
  }

extern "C" {

void __tsan_init() { simt::instrumented = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

SIMT_ACCESSES(1)
SIMT_ACCESSES(2)
SIMT_ACCESSES(4)
SIMT_ACCESSES(8)
SIMT_ACCESSES(16)
void __tsan_read_range(void* p, unsigned long bytes) {
  simt::observe(p, bytes, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
  simt::observe(p, bytes, true, false, __builtin_return_address(0));
}

SIMT_HOST_ATOMICS(8, uint8_t)
SIMT_HOST_ATOMICS(16, uint16_t)
SIMT_HOST_ATOMICS(32, uint32_t)
SIMT_HOST_ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
