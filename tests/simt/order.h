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

void restart_time();       // forgets every launch
void begin_wave_clocks();  // of the threads now resident

}  // namespace simt::checker
