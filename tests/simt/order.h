#pragma once
// What is ordered before what: times of threads, and what fences and synchronising accesses publish.
#include <string>

#include "simt/machine.h"
#include "simt/shadow.h"

namespace simt::checker {

// Whether the running launch orders an earlier access before whatever `thread` does now.
bool ordered(const Epoch& earlier, const Thread& thread);
bool earlier_launch(const Epoch& access);

// The thread that made an access of this launch.
std::string accessor(const Epoch& access);

// Whether a copy that `thread` starts sees the access: a fence.proxy.async lies between the two, or the
// access was itself such a copy.
bool shown_to_proxy(const Epoch& access, const Thread& thread);

// Copies of a block that land by themselves are agents with times of their own, by barrier.
constexpr uint32_t kAgents = 32;
Epoch next_of_agent(const Block& block, uint32_t agent);
void arrive(const Epoch& landed, Published& at);

void restart_time();       // forgets every launch
void begin_wave_clocks();  // of the threads now resident

}  // namespace simt::checker
