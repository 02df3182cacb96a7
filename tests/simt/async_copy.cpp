// cp.async at its worst: what is copied arrives as late as the program allows,
// and until then the destination holds NaN. Its bytes may be touched by nobody
// before the thread that started the copy has waited for it, and by other
// threads only behind a barrier after that: for the checker the wait is what
// writes them. The source must stay as it was.
#include "simt/async_copy.h"

#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "simt/landing.h"
#include "simt/names.h"
#include "simt/report.h"
#include "simt/scheduler.h"

namespace simt {

namespace async_copy {

namespace {

constexpr uint32_t kCopyBytes = 16;

struct Copy {
  uint64_t to, from;
  uint32_t bytes;  // of the source; the others become zero
  uint32_t group;
  const void* pc;
  unsigned char value[kCopyBytes];
};

struct Copies {
  std::vector<Copy> pending;  // oldest first
  uint32_t groups = 0;        // committed
};

std::vector<Copies> of_thread;                         // by slot
std::unordered_map<uint64_t, const void*> started_at;  // by destination: where its copy was started

Copies& copies_of(const Thread& thread) {
  if (of_thread.size() <= thread.slot) of_thread.resize(running.threads.size());
  return of_thread[thread.slot];
}

void deliver(Thread& me, const Copy& copy, const void* pc) {
  started_at.erase(copy.to);
  --in_flight;
  if (copy.bytes && std::memcmp(reinterpret_cast<const void*>(copy.from), copy.value, copy.bytes) != 0) {
    Unobserved guard;
    report("source changed under a copy", copy.pc, pc, name(me) + " copies " + place(me, copy.from));
  }
  touch_shared(me, {copy.to, kCopyBytes, true, false, copy.pc});
  std::memcpy(reinterpret_cast<void*>(copy.to), copy.value, kCopyBytes);
}

}  // namespace

void begin_launch() {
  of_thread.clear();
  started_at.clear();
  in_flight = 0;
}

void touch(Thread& thread, const Touch& touch) {
  for (uint64_t to = touch.address & ~uint64_t{kCopyBytes - 1}; to < touch.address + touch.size;
       to += kCopyBytes) {
    const auto found = started_at.find(to);
    if (found == started_at.end()) continue;
    Unobserved guard;
    report(touch.write ? "write to a copy in flight" : "read of a copy in flight", touch.pc, found->second,
           name(thread) + ", " + std::to_string(touch.size) + " bytes at " + place(thread, touch.address));
  }
}

void exit(Thread& thread) {
  if (of_thread.size() <= thread.slot) return;
  Copies& copies = of_thread[thread.slot];
  if (!copies.pending.empty()) {
    Unobserved guard;
    report("exit with copies in flight", copies.pending.front().pc, nullptr,
           std::to_string(copies.pending.size()) + " of " + name(thread));
  }
  for (const Copy& copy : copies.pending) {
    started_at.erase(copy.to);
    --in_flight;
  }
  copies = {};
}

}  // namespace async_copy

// ---- called by device code -------------------------------------------------------------------------------

void copy_async(void* to, const void* from, int bytes) {
  using namespace async_copy;
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  const Touch destination{reinterpret_cast<uint64_t>(to), kCopyBytes, true, false, pc};
  const Touch source{reinterpret_cast<uint64_t>(from), kCopyBytes, false, false, pc};
  require_aligned(me, destination);
  if (!in_shared(me, destination.address)) {
    {
      Unobserved guard;
      report("copy to other than shared memory", pc, nullptr,
             name(me) + ", " + place(me, destination.address));
    }
    abort_launch();
  }
  touch_shared(me, destination);
  log_access(me, {destination.address, pc, kCopyBytes, true, true});
  Copy copy{destination.address, source.address, uint32_t(bytes), copies_of(me).groups, pc, {}};
  if (bytes > 0) {
    require_aligned(me, source);
    const Touch read{source.address, uint32_t(bytes), false, false, pc};
    touch_global(me, read);
    log_access(me, {source.address, pc, uint32_t(bytes), false, false});
    std::memcpy(copy.value, from, size_t(bytes));
    if (me.at_grid_barrier) counters().grid_asked_bytes += uint64_t(bytes);
  }
  std::memset(to, 0xff, kCopyBytes);
  started_at[copy.to] = pc;
  ++in_flight;
  copies_of(me).pending.push_back(copy);
  maybe_preempt();
}

void copy_async_commit() {
  Thread& me = self();
  ++async_copy::copies_of(me).groups;
}

void copy_async_wait(int pending_groups) {
  using namespace async_copy;
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  Copies& copies = copies_of(me);
  size_t done = 0;
  while (done < copies.pending.size() &&
         int64_t(copies.pending[done].group) + pending_groups < int64_t(copies.groups))
    deliver(me, copies.pending[done++], pc);
  copies.pending.erase(copies.pending.begin(), copies.pending.begin() + std::ptrdiff_t(done));
}

// The thread's copies so far land by themselves, and then arrive at the barrier once.
void copy_async_arrive(void* barrier) {
  using namespace async_copy;
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  Copies& copies = copies_of(me);
  landing::Flight& flight = landing::start(me, barrier, false, pc);
  for (const Copy& copy : copies.pending) {
    started_at.erase(copy.to);
    --in_flight;
    landing::add(flight, {copy.to, copy.from, copy.bytes, kCopyBytes, copy.pc}, copy.value);
  }
  copies.pending.clear();
  maybe_preempt();
}

}  // namespace simt
