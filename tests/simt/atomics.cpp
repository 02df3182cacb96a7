// Accesses that synchronise: read-modify-writes, acquire loads, release stores, fences. Threads share one OS
// thread and are switched at known points only, so that each is atomic by nature; its meaning is kept for the
// checker.
#include <algorithm>
#include <cstring>
#include <string>

#include "simt/access.h"
#include "simt/checker.h"
#include "simt/emulator.h"
#include "simt/report.h"
#include "simt/scheduler.h"

namespace simt {

namespace {

uint32_t size_of(Number type) {
  return type == Number::kInt32 || type == Number::kUint32 || type == Number::kFloat ? 4 : 8;
}

void touch_any(Thread& me, const void* p, uint32_t size, bool write, const void* pc, bool modify = false) {
  const Touch touch{reinterpret_cast<uint64_t>(p), size, write, true, pc, Path::kCoherent, modify};
  if (in_shared(me, touch.address))
    touch_shared(me, touch);
  else
    touch_global(me, touch);
  require_aligned(me, touch);
}

template <class T>
T combine(Atomic op, T old, T operand, T expected) {
  switch (op) {
    case Atomic::kAdd:
      return T(old + operand);
    case Atomic::kExchange:
      return operand;
    case Atomic::kCompareAndSwap:
      return std::memcmp(&old, &expected, sizeof(T)) == 0 ? operand : old;
    case Atomic::kMin:
      return std::min(old, operand);
    case Atomic::kMax:
      return std::max(old, operand);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case Atomic::kAnd:
        return old & operand;
      case Atomic::kOr:
        return old | operand;
      default:
        return old ^ operand;
    }
  }
  return old;
}

template <class T>
uint64_t combine_bits(Atomic op, uint64_t old, uint64_t operand, uint64_t expected) {
  using Signless = Word<T>;
  uint64_t bits = 0;
  const T result = combine(op, __builtin_bit_cast(T, Signless(old)), __builtin_bit_cast(T, Signless(operand)),
                           __builtin_bit_cast(T, Signless(expected)));
  std::memcpy(&bits, &result, sizeof(T));
  return bits;
}

uint64_t combine_bits(Number type, Atomic op, uint64_t old, uint64_t operand, uint64_t expected) {
  switch (type) {
    case Number::kInt32:
      return combine_bits<int32_t>(op, old, operand, expected);
    case Number::kUint32:
      return combine_bits<uint32_t>(op, old, operand, expected);
    case Number::kInt64:
      return combine_bits<int64_t>(op, old, operand, expected);
    case Number::kUint64:
      return combine_bits<uint64_t>(op, old, operand, expected);
    case Number::kFloat:
      return combine_bits<float>(op, old, operand, expected);
    default:
      return combine_bits<double>(op, old, operand, expected);
  }
}

}  // namespace

uint64_t atomic(Atomic op, Number type, void* p, uint64_t operand, uint64_t expected, Order order,
                Scope scope) {
  const void* pc = __builtin_return_address(0);
  Thread& me = self();
  const uint32_t size = size_of(type);
  const uint64_t polls = running.polls;
  touch_any(me, p, size, true, pc, op != Atomic::kExchange);  // an exchange may give memory its first value
  ++counters().atomics;
  if (checked()) checker::read_modify_write(me, p, order, scope);
  uint64_t old = 0;
  std::memcpy(&old, p, size);
  const uint64_t changed = combine_bits(type, op, old, operand, expected);
  std::memcpy(p, &changed, size);
  if (changed == old) {
    // A spin lock or a counter that waits: the one it waits for must run.
    running.polls = polls;
    poll_at(pc);
  } else {
    maybe_preempt();
  }
  return old;
}

uint64_t ordered_load(const void* p, uint32_t size, Order order, Scope scope) {
  const void* pc = __builtin_return_address(0);
  Thread& me = self();
  poll_at(pc);
  touch_any(me, p, size, false, pc);
  if (checked()) checker::load(me, p, order, scope);
  uint64_t value = 0;
  std::memcpy(&value, p, size);
  return value;
}

void ordered_store(void* p, uint32_t size, uint64_t value, Order order, Scope scope) {
  const void* pc = __builtin_return_address(0);
  Thread& me = self();
  touch_any(me, p, size, true, pc);
  if (checked()) checker::store(me, p, order, scope);
  std::memcpy(p, &value, size);
  maybe_preempt();
}

void fence(Scope scope) {
  if (checked()) checker::fence(self(), scope);
}

void poll() { poll_at(__builtin_return_address(0)); }

void need_whole_grid() {
  if (running.cooperative) return;
  const void* pc = __builtin_return_address(0);
  {
    Unobserved guard;
    report("grid barrier in a launch that is not cooperative", pc, nullptr,
           "its blocks need not run at once");
  }
  abort_launch();
}

void arrives_at_grid() {
  Thread& me = self();
  me.at_grid_barrier = true;
  counters().grid_arrivals += me.linear == 0;
}

void passes_grid() { self().at_grid_barrier = false; }

void need(Feature feature) {
  constexpr int kFirst = 90;
  if (device_model().compute_capability >= kFirst) return;
  const void* pc = __builtin_return_address(0);
  {
    Unobserved guard;
    report(feature == Feature::kBulkCopies ? "bulk copy on an older device" : "stmatrix on an older device",
           pc, nullptr, "compute capability " + std::to_string(device_model().compute_capability));
  }
  abort_launch();
}

void trap() {
  const void* pc = __builtin_return_address(0);
  {
    Unobserved guard;
    report("trap", pc, nullptr, "__trap()");
  }
  abort_launch();
}

}  // namespace simt
