#include "simt/order.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simt/checker.h"
#include "simt/emulator.h"
#include "simt/names.h"

namespace simt::checker {

namespace {

// Blocks that were resident together share their slots with other waves; their times tell them apart.
struct Wave {
  uint32_t start, first_block;
};

// What a word that threads synchronise through passes on to those who acquire it.
struct Passed {
  Clock device, proxied;
  std::vector<std::pair<uint32_t, Clock>> blocks;  // to threads of the same block

  Clock& block(uint32_t number) {
    for (auto& [block, clock] : blocks)
      if (block == number) return clock;
    return blocks.emplace_back(number, Clock()).second;
  }
  void add(const Thread& thread, const Published& published) {
    if (published.device) device.join(published.device);
    if (published.block) block(thread.home().number).join(published.block);
    if (published.proxied) proxied.join(published.proxied);
  }
};

uint32_t latest = 0;        // of all times
uint32_t launch_floor = 0;  // what came before this launch
std::vector<Wave> waves;
uint32_t first_agent = 0;  // slots from here on: of copies that land by themselves
std::unordered_map<uint64_t, Passed> words;

void advance(ThreadClock& clock) { latest = std::max(latest, ++clock.now); }

// Everything that the thread knows and did so far. What it does next is not part of it.
Published publish(Thread& thread, Scope scope) {
  Published published;
  published.block = thread.clock.known;
  published.block.raise(thread.slot, thread.clock.now);
  if (scope == Scope::kDevice) published.device = published.block;
  published.proxied = thread.clock.proxied;
  advance(thread.clock);
  return published;
}

Published passed_to(const Thread& thread, const void* p) {
  Published seen;
  const auto found = words.find(reinterpret_cast<uint64_t>(p));
  if (found == words.end()) return seen;
  seen.device = found->second.device;
  seen.proxied = found->second.proxied;
  for (const auto& [block, clock] : found->second.blocks)
    if (block == thread.home().number) seen.block = clock;
  return seen;
}

void join_new(Clock& clock, const Clock& seen, Clock& last) {
  if (!seen || seen == last) return;
  clock.join(seen);
  last = seen;
}

void learn(ThreadClock& clock, const Published& seen, Scope scope) {
  join_new(clock.known, seen.block, clock.last_learned.block);
  if (scope == Scope::kDevice) join_new(clock.known, seen.device, clock.last_learned.device);
  join_new(clock.proxied, seen.proxied, clock.last_learned.proxied);
}

// Known after a fence.
void observe(ThreadClock& clock, const Published& seen) {
  join_new(clock.observed.block, seen.block, clock.last_observed.block);
  join_new(clock.observed.device, seen.device, clock.last_observed.device);
  join_new(clock.observed.proxied, seen.proxied, clock.last_observed.proxied);
}

bool acquires(Order order) { return order == Order::kAcquire || order == Order::kAcquireRelease; }
bool releases(Order order) { return order == Order::kRelease || order == Order::kAcquireRelease; }

void read_word(Thread& thread, const void* p, Order order, Scope scope) {
  const Published seen = passed_to(thread, p);
  if (acquires(order))
    learn(thread.clock, seen, scope);
  else
    observe(thread.clock, seen);
}

void write_word(Thread& thread, const void* p, Order order, Scope scope) {
  if (releases(order))
    words[reinterpret_cast<uint64_t>(p)].add(thread, publish(thread, scope));
  else if (thread.clock.fenced.block)
    words[reinterpret_cast<uint64_t>(p)].add(thread, thread.clock.fenced);
}

template <class ForEach>
void meet_all(ForEach for_each) {
  Clock together, last, proxied, last_proxied;  // most threads hold the clock of their last meeting
  for_each([&](Thread& t) {
    join_new(together, t.clock.known, last);
    join_new(proxied, t.clock.proxied, last_proxied);
  });
  for_each([&](Thread& t) {
    together.raise(t.slot, t.clock.now);
    advance(t.clock);
  });
  for_each([&](Thread& t) {
    t.clock.known = together;
    t.clock.proxied = proxied;
  });
}

template <class Visit>
void for_lanes(Warp& warp, uint32_t lanes, Visit visit) {
  for (; lanes; lanes &= lanes - 1) visit(*warp.lanes[__builtin_ctz(lanes)]);
}

}  // namespace

bool earlier_launch(const Epoch& access) { return access.time() <= launch_floor; }

bool ordered(const Epoch& earlier, const Thread& thread) {
  if (earlier_launch(earlier)) return true;
  if (earlier.slot() == thread.slot && earlier.time() >= waves.back().start) return true;  // its own
  return earlier.time() <= thread.clock.known[earlier.slot()];
}

std::string accessor(const Epoch& access) {
  if (access.slot() >= first_agent) return "a copy that landed by itself";
  uint32_t first_block = 0;
  for (const Wave& wave : waves)
    if (wave.start <= access.time()) first_block = wave.first_block;
  return thread_name(first_block + access.slot() / running.block_threads,
                     access.slot() % running.block_threads);
}

void restart_time() { latest = launch_floor = 0; }

void begin_launch() {
  if (!checked()) return;
  launch_floor = latest;
  waves.clear();
  first_agent = running.resident * running.block_threads;
  Clock::set_width(size_t(first_agent) + size_t(running.resident) * kAgents);
}

void begin_wave_clocks() {
  waves.push_back({++latest, running.first_block});
  Clock past;
  past.fill(launch_floor);
  const size_t threads = size_t(running.resident) * running.block_threads;
  for (size_t i = 0; i < threads; ++i) running.threads[i].clock = {past, {}, latest, {}, {}, {}, {}};
}

void end_launch() {
  if (!checked()) return;
  words.clear();
  for (Thread& thread : running.threads) thread.clock = {};
}

void meet(Warp& warp, uint32_t lanes) {
  if (!checked()) return;
  meet_all([&](auto visit) { for_lanes(warp, lanes, visit); });
}

void meet(Block& block) {
  if (!checked()) return;
  meet_all([&](auto visit) {
    for (Warp& warp : block.warps) for_lanes(warp, warp.alive, visit);
  });
}

void fence(Thread& thread, Scope scope) {
  learn(thread.clock, thread.clock.observed, scope);
  const Published published = publish(thread, scope);
  thread.clock.fenced.block = published.block;
  if (scope == Scope::kDevice) thread.clock.fenced.device = published.device;
  thread.clock.fenced.proxied = published.proxied;
}

void load(Thread& thread, const void* p, Order order, Scope scope) { read_word(thread, p, order, scope); }

// The reader of a stored value knows what its writer published, and nothing of who wrote before.
void store(Thread& thread, const void* p, Order order, Scope scope) {
  words.erase(reinterpret_cast<uint64_t>(p));
  write_word(thread, p, order, scope);
}

// ---- copies that land by themselves, and the barriers that tell of it -------------------------------------

void fence_proxy(Thread& thread) {
  thread.clock.proxied.join(thread.clock.known);
  thread.clock.proxied.raise(thread.slot, thread.clock.now);
  advance(thread.clock);
}

bool shown_to_proxy(const Epoch& access, const Thread& thread) {
  if (earlier_launch(access) || access.slot() >= first_agent) return true;
  return thread.clock.proxied && access.time() <= thread.clock.proxied[access.slot()];
}

void arrive(Thread& thread, Published& at) {
  const Published published = publish(thread, Scope::kBlock);
  at.block.join(published.block);
  if (published.proxied) at.proxied.join(published.proxied);
}

void learn(Thread& thread, const Published& from) { learn(thread.clock, from, Scope::kBlock); }

Epoch next_of_agent(const Block& block, uint32_t agent) {
  return {++latest, first_agent + block.slot * kAgents + agent % kAgents, false, 15};
}

void arrive(const Epoch& landed, Published& at) { at.block.raise(landed.slot(), landed.time()); }

// Adds to what the word passes on already.
void read_modify_write(Thread& thread, const void* p, Order order, Scope scope) {
  read_word(thread, p, order, scope);
  write_word(thread, p, order, scope);
}

}  // namespace simt::checker
