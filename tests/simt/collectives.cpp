// Warp collectives: each lane leaves its value and waits; the last one computes every lane's result.
#include <algorithm>
#include <bit>
#include <string>

#include "simt/checker.h"
#include "simt/collective_at.h"
#include "simt/emulator.h"
#include "simt/matrix.h"
#include "simt/names.h"
#include "simt/report.h"
#include "simt/scheduler.h"
#include "simt/waits.h"

namespace simt {

namespace {

constexpr uint64_t kGarbage = 0xdeadbeefdeadbeef;

const char* name(Collective op) {
  static constexpr const char* kNames[] = {
      "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",
      "__ballot_sync",     "__any_sync",        "__all_sync",        "__match_any_sync",
      "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync",
      "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync",
      "__syncwarp",        "ldmatrix",          "ldmatrix.trans",    "stmatrix",
      "stmatrix.trans",    "mma.bf16",          "mma.f16",           "mma.s8"};
  return kNames[static_cast<int>(op)];
}

template <class Visit>
void for_lanes(const Warp& warp, uint32_t lanes, Visit visit) {
  for (; lanes; lanes &= lanes - 1) visit(*warp.lanes[std::countr_zero(lanes)]);
}

// The lane that `me` reads. The instruction takes five bits of a distance.
uint32_t shuffle_source(Collective op, const Thread& me) {
  const int lane = int(me.lane), width = me.width, first = lane & -width;
  switch (op) {
    case Collective::kShuffle:
      return first | (me.operand & (width - 1));
    case Collective::kShuffleUp: {
      const int source = lane - (me.operand & 31);
      return source < first ? lane : source;
    }
    case Collective::kShuffleDown: {
      const int source = lane + (me.operand & 31);
      return source >= first + width ? lane : source;
    }
    default: {
      const int source = lane ^ (me.operand & 31);
      return source >= first + width ? lane : source;
    }
  }
}

void shuffle(const Warp& warp, const Gathering& g) {
  for_lanes(warp, g.arrived, [&](Thread& me) {
    const uint32_t source = shuffle_source(g.op, me);
    if (g.arrived >> source & 1) {
      me.result = warp.lanes[source]->value;
      return;
    }
    me.result = kGarbage;
    Unobserved guard;
    report("shuffle from an inactive lane", g.pc, nullptr,
           simt::name(me) + ", lane " + std::to_string(me.lane) + ", reads lane " + std::to_string(source) +
               " in " + name(g.op) + " of lanes " + hex(g.arrived));
  });
}

void match(const Warp& warp, uint32_t lanes) {
  for_lanes(warp, lanes, [&](Thread& me) {
    me.result = 0;
    for_lanes(warp, lanes,
              [&](Thread& other) { me.result |= uint64_t(other.value == me.value) << other.lane; });
  });
}

uint32_t combine(Collective op, uint32_t a, uint32_t b) {
  switch (op) {
    case Collective::kAdd:
      return a + b;
    case Collective::kMin:
      return uint32_t(std::min(int32_t(a), int32_t(b)));
    case Collective::kMax:
      return uint32_t(std::max(int32_t(a), int32_t(b)));
    case Collective::kMinUnsigned:
      return std::min(a, b);
    case Collective::kMaxUnsigned:
      return std::max(a, b);
    case Collective::kAnd:
      return a & b;
    case Collective::kOr:
      return a | b;
    default:
      return a ^ b;
  }
}

uint32_t vote(Collective op, const Warp& warp, uint32_t lanes) {
  uint32_t ballot = 0;
  for_lanes(warp, lanes, [&](Thread& me) { ballot |= uint32_t(me.value != 0) << me.lane; });
  if (op == Collective::kBallot) return ballot;
  return op == Collective::kAny ? ballot != 0 : ballot == lanes;
}

uint32_t reduce(Collective op, const Warp& warp, uint32_t lanes) {
  uint32_t total = uint32_t(warp.lanes[std::countr_zero(lanes)]->value);
  for_lanes(warp, lanes & (lanes - 1), [&](Thread& me) { total = combine(op, total, uint32_t(me.value)); });
  return total;
}

void execute(Warp& warp, const Gathering& g) {
  switch (g.op) {
    case Collective::kShuffle:
    case Collective::kShuffleUp:
    case Collective::kShuffleDown:
    case Collective::kShuffleXor:
      shuffle(warp, g);
      break;
    case Collective::kMatchAny:
      match(warp, g.arrived);
      break;
    case Collective::kSyncWarp:
      // The only collective that orders memory: the others say nothing about earlier writes.
      checker::meet(warp, g.arrived);
      break;
    case Collective::kLoadMatrices:
    case Collective::kLoadTransposed:
      matrix::load(warp, g.arrived, g.op == Collective::kLoadTransposed);
      break;
    case Collective::kStoreMatrices:
    case Collective::kStoreTransposed:
      matrix::store(warp, g.arrived, g.op == Collective::kStoreTransposed);
      break;
    case Collective::kMultiplyBf16:
    case Collective::kMultiplyHalf:
      matrix::multiply_add(warp, g.arrived, g.op == Collective::kMultiplyBf16);
      break;
    case Collective::kMultiplyInt8:
      matrix::multiply_add_int8(warp, g.arrived);
      break;
    default: {
      const bool votes = g.op <= Collective::kAll;
      const uint32_t result = votes ? vote(g.op, warp, g.arrived) : reduce(g.op, warp, g.arrived);
      for_lanes(warp, g.arrived, [&](Thread& me) { me.result = result; });
    }
  }
}

void complete(Warp& warp, int index) {
  const Gathering g = warp.gatherings[index];
  warp.gatherings[index] = warp.gatherings[--warp.gathering_count];
  if (const uint32_t gone = g.mask & ~warp.alive) {
    Unobserved guard;
    report("collective names exited lanes", g.pc, nullptr,
           std::string(name(g.op)) + " names lanes " + hex(g.mask) + " of " + warp_name(warp) +
               ", of which " + hex(gone) + " have exited");
  }
  ++(g.op == Collective::kSyncWarp ? counters().warp_barriers : counters().collectives);
  // Not of those alive: a half warp whose other half has exited in one schedule waits for it in another.
  if (g.mask == warp.present) account_traffic(warp);
  execute(warp, g);
  make_ready(warp, g.arrived);
}

bool complete(const Gathering& g, const Warp& warp) { return (g.mask & warp.alive & ~g.arrived) == 0; }

Gathering& gathering_of(Warp& warp, Collective op, uint32_t mask, const void* pc) {
  for (int i = 0; i < warp.gathering_count; ++i)
    if (warp.gatherings[i].mask == mask) return warp.gatherings[i];
  Gathering& fresh = warp.gatherings[warp.gathering_count++];  // every one holds a lane: at most 32
  fresh = {mask, 0, op, pc};
  return fresh;
}

// Apart, so that the frame of collective() stays small: every lane switches away from there.
[[noreturn]] __attribute__((noinline)) void refuse_absent(const Thread& me, Collective op, uint32_t mask,
                                                          const void* pc) {
  {
    Unobserved guard;
    report("collective without its caller", pc, nullptr,
           simt::name(me) + ", lane " + std::to_string(me.lane) + ", calls " + name(op) + " for lanes " +
               hex(mask));
  }
  abort_launch();
}

[[noreturn]] __attribute__((noinline)) void refuse_divergent(const Thread& me, Collective op,
                                                             const Gathering& g, const void* pc) {
  {
    Unobserved guard;
    report("divergent collective", pc, g.pc,
           simt::name(me) + ", lane " + std::to_string(me.lane) + ", arrives at " + name(op) +
               " while lanes " + hex(g.arrived) + " wait in " + name(g.op) + ", both of lanes " +
               hex(g.mask));
  }
  abort_launch();
}

// Matrix instructions are `.aligned`: all lanes execute the same one.
bool is_aligned(Collective op) { return op >= Collective::kLoadMatrices; }

// The compiler may have copied one call of the source to several places.
__attribute__((noinline)) void report_two_places(const Thread& me, Collective op, const void* first,
                                                 const void* pc) {
  Unobserved guard;
  report_unless_same_line(
      "divergent collective", pc, first,
      simt::name(me) + " arrives at another " + name(op) + " than the first lane of its warp");
}

}  // namespace

void complete_gatherings(Warp& warp) {
  for (int i = warp.gathering_count - 1; i >= 0; --i)
    if (complete(warp.gatherings[i], warp)) complete(warp, i);
}

uint64_t collective(Collective op, uint32_t mask, uint64_t value, int operand, int width) {
  return collective_at(op, mask, value, operand, width, __builtin_return_address(0));
}

uint64_t collective_at(Collective op, uint32_t mask, uint64_t value, int operand, int width, const void* pc) {
  Thread& me = self();
  Warp& warp = *me.warp;
  me.value = value;
  me.operand = operand;
  me.width = width;
  mask &= warp.present;
  if (!(mask >> me.lane & 1)) refuse_absent(me, op, mask, pc);
  Gathering& g = gathering_of(warp, op, mask, pc);
  if (g.op != op) refuse_divergent(me, op, g, pc);
  if (g.pc != pc && is_aligned(op)) report_two_places(me, op, g.pc, pc);
  g.arrived |= 1u << me.lane;
  if (complete(g, warp)) {
    complete(warp, int(&g - warp.gatherings));
    reschedule();
  } else {
    wait(name(op), pc);
  }
  return me.result;
}

}  // namespace simt
