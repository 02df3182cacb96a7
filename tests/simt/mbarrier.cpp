// mbarrier: threads arrive and wait, copies add the bytes they brought. The barrier's own 8 bytes stay as
// they are; what it counts stands here. For the checker an arrival releases and a wait that succeeds
// acquires, at the scope of the block.
#include "simt/mbarrier.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "simt/access.h"
#include "simt/checker.h"
#include "simt/emulator.h"
#include "simt/names.h"
#include "simt/order.h"
#include "simt/report.h"
#include "simt/scheduler.h"

namespace simt {

namespace mbarrier {

namespace {

constexpr uint32_t kBytes = 8;
constexpr uint32_t kMostArrivals = (1u << 20) - 1;
constexpr int64_t kMostBytes = (1 << 20) - 1;

std::unordered_map<uint64_t, Mbarrier> barriers;  // by address
uint64_t lowest = ~uint64_t{0}, highest = 0;      // of their offsets in shared memory

uint64_t offset_of(const Mbarrier& b) { return b.address - reinterpret_cast<uint64_t>(b.block->shared); }

std::string text(const Mbarrier& b) {
  return "the mbarrier at shared memory + " + std::to_string(offset_of(b)) + " bytes of " +
         block_name(*b.block);
}

[[noreturn]] void refuse(const char* kind, const Thread& thread, const void* pc, const std::string& message) {
  {
    Unobserved guard;
    report(kind, pc, nullptr, message + " by " + name(thread));
  }
  abort_launch();
}

Touch touch_of(const void* p, bool write, bool atomic, const void* pc) {
  return {reinterpret_cast<uint64_t>(p), kBytes, write, atomic, pc};
}

// A phase that is over wakes those who wait for it.
void finish_phase(Mbarrier& b) {
  if (b.missing != 0 || b.missing_bytes != 0) return;
  ++b.phase;
  b.missing = b.arrivals;
  b.passed = b.gathered;
  note_progress();
  for (Thread* waiter : b.waiters) make_ready(*waiter->warp, 1u << waiter->lane);
  b.waiters.clear();
}

bool over(const Mbarrier& b, uint32_t parity) { return b.phase % 2 != (parity & 1); }

void see_end(Thread& me, Mbarrier& b) {
  if (b.phase >= b.awaited) b.awaited = 0;
  if (checked()) checker::learn(me, b.passed);
}

void arrive(Thread& me, Mbarrier& b, uint32_t bytes, const void* pc) {
  touch_shared(me, touch_of(reinterpret_cast<void*>(b.address), true, true, pc));
  if (checked()) checker::arrive(me, b.gathered);
  b.missing_bytes += bytes;
  if (b.missing_bytes > kMostBytes)
    refuse("too many bytes for an mbarrier", me, pc, std::to_string(b.missing_bytes) + " expected");
  note_progress();
  count_arrival(b, pc);
}

}  // namespace

void clear() {
  barriers.clear();
  lowest = ~uint64_t{0};
  highest = 0;
}

const void* unseen_copy(const Block& block) {
  for (const auto& [address, b] : barriers)
    if (b.block == &block && b.awaited) return b.awaited_at;
  return nullptr;
}

bool any() { return !barriers.empty(); }

Mbarrier& find(Thread& thread, const void* p, const void* pc) {
  require_aligned(thread, touch_of(p, false, true, pc));
  const auto found = barriers.find(reinterpret_cast<uint64_t>(p));
  if (found == barriers.end() || !in_shared(thread, reinterpret_cast<uint64_t>(p)))
    refuse("mbarrier not initialised", thread, pc, place(thread, reinterpret_cast<uint64_t>(p)));
  Mbarrier& b = found->second;
  if (checked() && !checker::ordered(b.made, thread)) {
    Unobserved guard;
    report("race read-after-write", pc, b.made_at,
           text(b) + " used by " + name(thread) + ", initialised by " + checker::accessor(b.made) +
               ", not ordered");
  }
  return b;
}

void count_bytes(Mbarrier& b, uint32_t bytes) {
  b.missing_bytes -= bytes;
  finish_phase(b);
}

void count_arrival(Mbarrier& b, const void* pc) {
  if (b.missing == 0) {  // what is left of the phase are bytes
    Unobserved guard;
    report("too many arrivals at an mbarrier", pc, b.made_at,
           "more than " + std::to_string(b.arrivals) + " in phase " + std::to_string(b.phase) + " of " +
               text(b));
  } else {
    --b.missing;
  }
  finish_phase(b);
}

void touch(const Thread& thread, uint64_t address, uint32_t size, bool write, const void* pc) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(thread.block->shared);
  if (offset >= highest || offset + size <= lowest) return;
  for (uint64_t word = address & ~uint64_t{kBytes - 1}; word < address + size; word += kBytes) {
    const auto found = barriers.find(word);
    if (found == barriers.end()) continue;
    Unobserved guard;
    report("plain access to an mbarrier", pc, found->second.made_at,
           std::string(write ? "a write" : "a read") + " of " + text(found->second) + " by " + name(thread));
  }
}

std::string states() {
  std::string all;
  for (const auto& [address, b] : barriers) {
    if (b.waiters.empty()) continue;
    all += "; " + text(b) + " misses " + std::to_string(b.missing) + " of " + std::to_string(b.arrivals) +
           " arrivals and " + std::to_string(b.missing_bytes) + " bytes in phase " + std::to_string(b.phase);
  }
  return all;
}

}  // namespace mbarrier

// ---- called by device code --------------------------------------------------------------------------------

void mbarrier_init(void* p, uint32_t arrivals) {
  using namespace mbarrier;
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  if (!in_shared(me, address)) refuse("mbarrier outside shared memory", me, pc, place(me, address));
  require_aligned(me, touch_of(p, true, false, pc));
  if (arrivals == 0 || arrivals > kMostArrivals)
    refuse("mbarrier without arrivals", me, pc, std::to_string(arrivals) + " expected");
  const auto before = barriers.find(address);
  if (before != barriers.end()) {
    Unobserved guard;
    report("mbarrier initialised twice", pc, before->second.made_at,
           text(before->second) + " by " + name(me));
    return;
  }
  touch_shared(me, touch_of(p, true, false, pc));
  uint32_t number = 0;
  for (const auto& entry : barriers) number += entry.second.block == me.block;
  Mbarrier b{address, &me.home(), arrivals, arrivals, 0, 0, number, {}, pc, {}, {}, {}, 0, nullptr};
  if (checked()) b.made = checker::Epoch(me.clock.now, me.slot, false, 15);
  lowest = std::min(lowest, offset_of(b));
  highest = std::max(highest, offset_of(b) + kBytes);
  barriers.emplace(address, std::move(b));
}

void mbarrier_arrive(void* p, uint32_t bytes) {
  using namespace mbarrier;
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  arrive(me, find(me, p, pc), bytes, pc);
  maybe_preempt();
}

bool mbarrier_try_wait(const void* p, uint32_t parity) {
  using namespace mbarrier;
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  poll_at(pc);
  Mbarrier& b = find(me, p, pc);
  touch_shared(me, touch_of(p, false, true, pc));
  if (!over(b, parity)) return false;
  see_end(me, b);
  return true;
}

void mbarrier_wait(const void* p, uint32_t parity) {
  using namespace mbarrier;
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  Mbarrier& b = find(me, p, pc);
  touch_shared(me, touch_of(p, false, true, pc));
  while (!over(b, parity)) {
    b.waiters.push_back(&me);
    wait("an mbarrier", pc);
  }
  see_end(me, b);
  reschedule();
}

}  // namespace simt
