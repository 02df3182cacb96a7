#include "simt/scheduler.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <string>

#include "simt/async_copy.h"
#include "simt/emulator.h"
#include "simt/landing.h"
#include "simt/mbarrier.h"
#include "simt/names.h"
#include "simt/report.h"
#include "simt/waits.h"

namespace simt {

ThreadView* current = nullptr;
dim3 block_dimensions(1, 1, 1), grid_dimensions(1, 1, 1);

namespace {

constexpr size_t kLogLimit = 4096;

uint64_t random_state = 1;
bool random_schedule = false;
uint32_t preempt_one_in = 0;  // of the memory accesses; 0: none

constexpr uint32_t bit(uint32_t i) { return 1u << i; }
constexpr uint32_t above(uint32_t i) { return i >= 31 ? 0 : ~0u << (i + 1); }

// The first set bit behind `i`, from the beginning when there is none.
uint32_t next_bit(uint32_t mask, uint32_t i) {
  const uint32_t later = mask & above(i);
  return std::countr_zero(later ? later : mask);
}

uint32_t random_bit(uint32_t mask) {
  for (uint32_t skip = random_number() % std::popcount(mask); skip > 0; --skip) mask &= mask - 1;
  return std::countr_zero(mask);
}

Thread* first_ready(Warp& warp) { return warp.lanes[std::countr_zero(warp.ready)]; }
Thread* first_ready(Block& block) { return first_ready(block.warps[std::countr_zero(block.ready_warps)]); }

// The first block with a ready thread from `slot` on, cyclically.
Thread* first_ready_from(uint32_t slot) {
  const size_t words = running.ready_blocks.size();
  for (size_t k = 0; k <= words; ++k) {
    const size_t word = (slot / 64 + k) % words;
    const uint64_t ready = running.ready_blocks[word] & (k == 0 ? ~0ull << slot % 64 : ~0ull);
    if (ready) return first_ready(running.blocks[word * 64 + std::countr_zero(ready)]);
  }
  return nullptr;
}

// Close to the running thread: its warp, its block, the others. `behind`: only forward within the block, so
// that every thread has its turn before this one has the next.
Thread* next_in_order(const Thread& me, bool behind) {
  Warp& warp = *me.warp;
  Block& block = me.home();
  const uint32_t lanes = warp.ready & (behind ? above(me.lane) : ~0u);
  if (lanes) return warp.lanes[next_bit(lanes, me.lane)];
  const uint32_t warps = block.ready_warps & (behind ? above(warp.index) : ~0u);
  if (warps) return first_ready(block.warps[next_bit(warps, warp.index)]);
  return first_ready_from((block.slot + 1) % running.resident);
}

Thread* random_thread(Block& block) {
  Warp& warp = block.warps[random_bit(block.ready_warps)];
  return warp.lanes[random_bit(warp.ready)];
}

// Mostly within the warp, sometimes within the block, seldom anywhere; `behind`: anywhere.
Thread* next_at_random(const Thread& me, bool behind) {
  Block& block = me.home();
  if (!behind) {
    if (me.warp->ready && random_number() % 8) return me.warp->lanes[random_bit(me.warp->ready)];
    if (block.ready_warps && random_number() % 16) return random_thread(block);
  }
  Thread* somewhere = first_ready_from(random_number() % running.resident);
  return somewhere ? random_thread(somewhere->home()) : nullptr;
}

Thread* next(const Thread& me, bool behind) {
  return random_schedule ? next_at_random(me, behind) : next_in_order(me, behind);
}

void switch_to(Thread& me, Thread& other) {
  if (&other == &me) return;
  current = &other;
  simt_switch_context(&me.context, other.context);
}

void clear_ready(Thread& me) {
  Warp& warp = *me.warp;
  warp.ready &= ~bit(me.lane);
  if (warp.ready) return;
  Block& block = me.home();
  block.ready_warps &= ~bit(warp.index);
  if (!block.ready_warps) running.ready_blocks[block.slot / 64] &= ~(1ull << block.slot % 64);
}

// Room is kept while it will be filled again; thousands of threads would hold more than a machine has.
void empty(std::vector<traffic::Access>& log, bool for_good) {
  constexpr size_t kSmall = 256;
  if (for_good && log.capacity() > kSmall)
    std::vector<traffic::Access>().swap(log);
  else
    log.clear();
}

// Lanes whose log was full go on once no lane of the warp can run before them.
void count_full_logs(Warp& warp) {
  account_traffic(warp);
  const uint32_t lanes = warp.log_full;
  warp.log_full = 0;
  make_ready(warp, lanes);
}

// Ends the launch: nobody can run, or nobody gets anywhere.
[[noreturn]] void report_stuck(const char* kind, const void* pc) {
  {
    Unobserved guard;
    struct Group {
      uint64_t threads = 0;
      std::string first;
    };
    std::map<std::string, Group> groups;
    for (size_t i = 0; i < size_t(running.resident) * running.block_threads; ++i) {
      const Thread& thread = running.threads[i];
      if (thread.exited) continue;
      std::string place = thread.waits_in ? thread.waits_in : "the middle of its work";
      if (thread.waits_at) place += " at " + mention(thread.waits_at);
      Group& group = groups[place];
      if (group.threads++ == 0) group.first = name(thread);
    }
    std::string message;
    for (const auto& [place, group] : groups)
      message += (message.empty() ? "" : "; ") + std::to_string(group.threads) + " in " + place + ", first " +
                 group.first;
    report(kind, pc, nullptr, message + mbarrier::states());
  }
  abort_launch();
}

Thread& first_waiting() {
  const auto begin = running.threads.begin();
  return *std::find_if(begin, begin + std::ptrdiff_t(running.resident) * running.block_threads,
                       [](const Thread& thread) { return !thread.exited; });
}

// Where nobody can run, copies land until someone can.
Thread* next_or_landing(Thread& me) {
  Thread* other = next(me, false);
  while (!other && landing::land_one(false)) other = next(me, false);
  return other;
}

void land_at_random() {
  if (random_schedule && landing::in_flight && random_number() % 4 == 0) landing::land_one(true);
}

[[noreturn]] void run_others(Thread& me) {
  Thread* other = next_or_landing(me);
  if (!other) report_stuck("deadlock", first_waiting().waits_at);
  current = other;
  simt_switch_context(&me.context, other->context);
  std::abort();
}

}  // namespace

void begin_schedule(const Options& options) {
  random_schedule = options.seed != 0;
  preempt_one_in = uint32_t(std::max(options.preempt, 0));
  random_state = options.seed * 0x9e3779b97f4a7c15 + 1;
  for (int i = 0; i < 8; ++i) random_number();
}

uint32_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t(random_state >> 11);
}

void make_ready(Warp& warp, uint32_t lanes) {
  if (!lanes) return;
  Block& block = *warp.block;
  warp.ready |= lanes;
  block.ready_warps |= bit(warp.index);
  running.ready_blocks[block.slot / 64] |= 1ull << block.slot % 64;
}

void wait(const char* what, const void* pc) {
  Thread& me = self();
  Warp& warp = *me.warp;
  me.waits_in = what;
  me.waits_at = pc;
  if (const uint32_t others = warp.ready & ~bit(me.lane); others && !random_schedule) [[likely]] {
    warp.ready = others;
    switch_to(me, *warp.lanes[next_bit(others, me.lane)]);
    return;
  }
  clear_ready(me);
  land_at_random();
  if (!warp.ready && warp.log_full) count_full_logs(warp);
  Thread* other = next_or_landing(me);
  if (!other) report_stuck("deadlock", pc);
  switch_to(me, *other);
}

void poll_at(const void* pc, uint64_t cost) {
  Thread& me = self();
  me.waits_in = "a polling loop";
  me.waits_at = pc;
  running.polls += cost;
  if (running.polls > options().max_polls) report_stuck("livelock", pc);
  if (me.warp->log_full) count_full_logs(*me.warp);
  constexpr uint32_t kPollsPerLanding = 32;
  if (landing::in_flight && ++running.polls_in_flight % kPollsPerLanding == 0) landing::land_one(true);
  switch_to(me, *next(me, true));
}

void reschedule() {
  if (!random_schedule) return;
  land_at_random();
  Thread& me = self();
  me.waits_in = nullptr;
  switch_to(me, *next(me, false));
}

void maybe_preempt() {
  if (preempt_one_in == 0 || random_number() % preempt_one_in != 0) return;
  Thread& me = self();
  me.waits_in = nullptr;
  switch_to(me, *next(me, !random_schedule));
}

void start(Thread& first) {
  running.os_thread = __builtin_thread_pointer();
  current = &first;
  simt_switch_context(&running.host_context, first.context);
  current = nullptr;
}

void abort_launch() {
  Thread& me = self();
  running.aborted = true;
  current = nullptr;
  simt_switch_context(&me.context, running.host_context);
  std::abort();
}

void exit_thread() {
  Thread& me = self();
  Warp& warp = *me.warp;
  Block& block = me.home();
  if (!running.stacks.intact(me.slot)) {
    {
      Unobserved guard;
      report("stack overflow", nullptr, nullptr,
             name(me) + " used more than " + std::to_string(Stacks::kBytes) + " bytes of stack");
    }
    abort_launch();
  }
  async_copy::exit(me);
  note_progress();
  clear_ready(me);
  me.exited = true;
  warp.alive &= ~bit(me.lane);
  --block.alive;
  release_waiters_of(me);
  if (!warp.alive) account_traffic(warp);
  if (!warp.ready && warp.log_full) count_full_logs(warp);
  if (block.alive == 0 && mbarrier::any()) landing::exit(block, me);
  if (block.alive == 0 && --running.blocks_left == 0) {
    current = nullptr;
    simt_switch_context(&me.context, running.host_context);
    std::abort();
  }
  run_others(me);
}

void account_traffic(Warp& warp) {
  if (!warp.logged) return;
  warp.logged = false;
  Unobserved guard;
  const std::vector<traffic::Access>* logs[kWarpLanes] = {};
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane)
    if (warp.present & bit(lane)) logs[lane] = &warp.lanes[lane]->log;
  traffic::account(logs);
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane)
    if (warp.present & bit(lane)) empty(warp.lanes[lane]->log, warp.alive == 0);
}

void log_access(Thread& thread, const traffic::Access& access) {
  Warp& warp = *thread.warp;
  warp.logged = true;
  thread.log.push_back(access);
  if (thread.log.size() < kLogLimit) return;
  // Whoever reads so long without meeting the others may be polling with plain loads.
  warp.log_full |= bit(thread.lane);
  wait("a long stretch of accesses", access.pc);
  poll_at(access.pc, kLogLimit);
}

// The same for reads that no log holds.
void note_unlogged_read(const void* pc) {
  if (++running.unlogged_reads % kLogLimit == 0) poll_at(pc, kLogLimit);
}

}  // namespace simt
