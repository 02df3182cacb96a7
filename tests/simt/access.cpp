#include "simt/access.h"

#include <cstring>
#include <string>

#include "simt/async_copy.h"
#include "simt/checker.h"
#include "simt/landing.h"
#include "simt/mbarrier.h"
#include "simt/memory.h"
#include "simt/names.h"
#include "simt/report.h"
#include "simt/scheduler.h"

namespace simt {

namespace {

void complain(const char* kind, const Thread& thread, const Touch& touch) {
  Unobserved guard;
  report(kind, touch.pc, nullptr,
         std::to_string(touch.size) + " bytes at " + place(thread, touch.address) + " by " + name(thread));
}

[[noreturn]] void refuse(const char* kind, const Thread& thread, const Touch& touch) {
  complain(kind, thread, touch);
  abort_launch();
}

}  // namespace

std::string place(const Thread& thread, uint64_t address) {
  if (!in_shared(thread, address)) return memory::place(address);
  return "shared memory + " + std::to_string(address - reinterpret_cast<uint64_t>(thread.block->shared)) +
         " bytes of " + std::to_string(running.shared_bytes);
}

void require_aligned(const Thread& thread, const Touch& touch) {
  if (touch.address & (touch.size - 1)) refuse("misaligned access", thread, touch);
}

void touch_global(Thread& thread, const Touch& touch) {
  const memory::Extent* extent = memory::find(touch.address);
  if (!extent || !extent->contains(touch.address, touch.size))
    refuse(touch.write ? "out-of-bounds write" : "out-of-bounds read", thread, touch);
  if (touch.write) {
    if (!extent->writable) refuse("write to an input", thread, touch);
    note_progress();
  }
  if (extent->cells) checker::touch_global(thread, touch, *extent);
}

void touch_shared(Thread& thread, const Touch& touch) {
  const uint64_t offset = touch.address - reinterpret_cast<uint64_t>(thread.block->shared);
  if (offset > running.shared_bytes || touch.size > running.shared_bytes - offset) {
    // Harmless here: the buffer is as large as any block may ask for.
    complain(touch.write ? "out-of-bounds write" : "out-of-bounds read", thread, touch);
    constexpr size_t kBuffer = kSharedBytes + kSharedSlack;
    if (offset > kBuffer || touch.size > kBuffer - offset) abort_launch();  // also what lies before it
    return;
  }
  if (touch.write) note_progress();
  if (async_copy::in_flight) async_copy::touch(thread, touch);
  if (landing::in_flight) landing::touch(thread, touch);
  if (!touch.atomic && mbarrier::any())
    mbarrier::touch(thread, touch.address, touch.size, touch.write, touch.pc);
  if (checked()) checker::touch_shared(thread, touch);
}

// ---- called by device code --------------------------------------------------------------------------------

Bits load_bits(const void* p, uint32_t size, Path path) {
  Thread& me = self();
  const Touch touch{reinterpret_cast<uint64_t>(p), size, false, false, __builtin_return_address(0), path};
  touch_global(me, touch);
  require_aligned(me, touch);
  log_access(me, {touch.address, touch.pc, size, false, false});
  maybe_preempt();
  Bits bits = 0;
  switch (size) {
    case 1:
      std::memcpy(&bits, p, 1);
      break;
    case 2:
      std::memcpy(&bits, p, 2);
      break;
    case 4:
      std::memcpy(&bits, p, 4);
      break;
    case 8:
      std::memcpy(&bits, p, 8);
      break;
    default:
      std::memcpy(&bits, p, 16);
      break;
  }
  return bits;
}

void store_bits(void* p, uint32_t size, Bits bits) {
  Thread& me = self();
  const Touch touch{reinterpret_cast<uint64_t>(p), size, true, false, __builtin_return_address(0)};
  touch_global(me, touch);
  require_aligned(me, touch);
  log_access(me, {touch.address, touch.pc, size, true, false});
  maybe_preempt();
  switch (size) {
    case 1:
      std::memcpy(p, &bits, 1);
      break;
    case 2:
      std::memcpy(p, &bits, 2);
      break;
    case 4:
      std::memcpy(p, &bits, 4);
      break;
    case 8:
      std::memcpy(p, &bits, 8);
      break;
    default:
      std::memcpy(p, &bits, 16);
      break;
  }
}

void* dynamic_shared(size_t bytes, size_t alignment) {
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  constexpr size_t kGuaranteedAlignment = 128;
  if (bytes > running.shared_bytes) {
    Unobserved guard;
    report("too little shared memory", pc, nullptr,
           "the kernel's needs " + std::to_string(bytes) + " bytes, the launch gave " +
               std::to_string(running.shared_bytes));
  }
  if (alignment > kGuaranteedAlignment) {
    Unobserved guard;
    report("misaligned shared memory", pc, nullptr,
           "the kernel's needs " + std::to_string(alignment) + " bytes, " +
               std::to_string(kGuaranteedAlignment) + " are given");
  }
  if (bytes > kSharedBytes) abort_launch();
  return me.block->shared;
}

}  // namespace simt
