#pragma once
// Which thread runs next. By default in order: the lanes of a warp, the warps of a block, the blocks of the
// grid; with a seed, at random.
#include "simt/emulator.h"
#include "simt/machine.h"

namespace simt {

void begin_schedule(const Options& options);
uint32_t random_number();

void make_ready(Warp& warp, uint32_t lanes);

// The running thread stands in `what` until made ready.
void wait(const char* what, const void* pc);

// Lets the threads behind this one run before it continues. Counts towards a livelock by `cost`.
void poll_at(const void* pc, uint64_t cost = 1);

// A point where the running thread could go on: another may go first when schedules are random.
void reschedule();
void maybe_preempt();

void start(Thread& first);         // from the host, until the wave is done or aborted
[[noreturn]] void exit_thread();   // the running thread is done
[[noreturn]] void abort_launch();  // back to the host at once; no fiber of this launch runs again

// Memory changed: whoever polls has something to see.
inline void note_progress() { running.polls = 0; }

// Adds what the lanes of the warp accessed since they last stood together to the traffic counters.
void account_traffic(Warp& warp);
void log_access(Thread& thread, const traffic::Access& access);
void note_unlogged_read(const void* pc);

}  // namespace simt
