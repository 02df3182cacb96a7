// The block's barrier, and what an exiting thread means for those that wait.
#include <string>

#include "simt/checker.h"
#include "simt/emulator.h"
#include "simt/names.h"
#include "simt/report.h"
#include "simt/scheduler.h"
#include "simt/waits.h"

namespace simt {

namespace {

const char* name(Barrier op) {
  static constexpr const char* kNames[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and",
                                           "__syncthreads_or"};
  return kNames[static_cast<int>(op)];
}

uint64_t result_of(const BlockBarrier& b) {
  switch (b.op) {
    case Barrier::kCount:
      return b.predicates;
    case Barrier::kAnd:
      return b.predicates == b.arrived;
    case Barrier::kOr:
      return b.predicates != 0;
    default:
      return 0;
  }
}

// Hardware lets the others pass; product kernels leave together, so that a barrier is always the whole
// block's.
void report_exited(Block& block) {
  if (block.alive == block.threads || block.exit_reported) return;
  block.exit_reported = true;
  Unobserved guard;
  report("barrier with exited threads", block.barrier.pc, nullptr,
         std::to_string(block.threads - block.alive) + " of " + std::to_string(block.threads) +
             " threads of " + block_name(block) + " had exited when the others met in " +
             name(block.barrier.op));
}

// The lanes of a warp must come together. The compiler may have copied one call of the source to several
// places.
void report_two_places(Thread& me, const void* pc) {
  const void*& first = me.warp->barrier_pc;
  if (!first) first = pc;
  if (first == pc) return;
  Unobserved guard;
  report_unless_same_line("divergent barrier", pc, first,
                          simt::name(me) + " arrives at another barrier than the first lane of its warp");
}

// Every thread alive stands in the barrier.
void complete(Block& block) {
  report_exited(block);
  ++counters().barriers;
  const uint64_t result = result_of(block.barrier);
  block.barrier.arrived = block.barrier.predicates = 0;
  checker::meet(block);
  for (Warp& warp : block.warps) {
    account_traffic(warp);
    warp.barrier_pc = nullptr;
    for (uint32_t lanes = warp.alive; lanes; lanes &= lanes - 1)
      warp.lanes[__builtin_ctz(lanes)]->result = result;
    make_ready(warp, warp.alive);
  }
}

}  // namespace

int barrier(Barrier op, int predicate) {
  const void* pc = __builtin_return_address(0);
  Thread& me = self();
  Block& block = me.home();
  BlockBarrier& b = block.barrier;
  if (b.arrived == 0) {
    b.op = op;
    b.pc = pc;
  } else if (b.op != op) {
    {
      Unobserved guard;
      report("divergent barrier", pc, b.pc,
             simt::name(me) + " arrives at " + name(op) + " while " + std::to_string(b.arrived) +
                 " threads wait in " + name(b.op));
    }
    abort_launch();
  }
  report_two_places(me, pc);
  ++b.arrived;
  b.predicates += predicate != 0;
  if (b.arrived == block.alive) {
    complete(block);
    reschedule();
  } else {
    wait(name(op), pc);
  }
  return int(me.result);
}

void release_waiters_of(Thread& exited) {
  complete_gatherings(*exited.warp);
  Block& block = exited.home();
  if (block.barrier.arrived > 0 && block.barrier.arrived == block.alive) complete(block);
}

}  // namespace simt
