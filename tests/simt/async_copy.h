#pragma once
// Copies from global to shared memory that a thread starts and later waits for
// (cp.async).
#include <cstdint>

#include "simt/access.h"

namespace simt::async_copy {

inline uint64_t in_flight = 0;  // copies, over all threads of the launch

void begin_launch();

// The running thread touches shared memory: not where a copy is to arrive.
void touch(Thread& thread, const Touch& touch);

// A thread must not end with copies under way.
void exit(Thread& thread);

}  // namespace simt::async_copy
