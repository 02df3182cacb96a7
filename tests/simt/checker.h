#pragma once
// The happens-before checker of checked builds: which accesses are ordered by barriers, fences and
// synchronising accesses, and which of two that touch the same bytes are not. Does nothing in fast builds.
#include <vector>

#include "simt/access.h"
#include "simt/machine.h"
#include "simt/memory.h"
#include "simt/shadow.h"

namespace simt::checker {

// An op brings its memory, and gives every word of it that can be written a cell.
void begin_op(std::vector<memory::Extent>& extents);
void end_op(std::vector<memory::Extent>& extents);

// A launch knows all that earlier ones did; blocks of one wave know nothing of an earlier wave of the same
// launch.
void begin_launch();
void begin_wave();
void end_launch();

// A write by the host between launches, as cudaMemsetAsync makes.
void write_by_host(const memory::Extent& extent, uint64_t address, uint64_t bytes);

void touch_global(Thread& thread, const Touch& touch, const memory::Extent& extent);
void touch_shared(Thread& thread, const Touch& touch);

// Threads that met know each other's past.
void meet(Warp& warp, uint32_t lanes);
void meet(Block& block);

// A bulk copy starts that writes or reads these bytes: what other threads and this one did to them must have
// been shown to the asynchronous proxy.
void touch_by_proxy(Thread& thread, const Touch& touch);
// A copy landed here: nobody may touch the bytes who has not learnt of `landed`.
void land(const Block& block, uint64_t address, uint32_t size, const Epoch& landed, const void* pc);

void end_read(uint64_t address, uint32_t size, const Epoch& landed, const void* pc);  // of its source

// Arrivals at a barrier in shared memory, and what those who wait for them learn.
void arrive(Thread& thread, Published& at);
void learn(Thread& thread, const Published& from);
void fence_proxy(Thread& thread);

void fence(Thread& thread, Scope scope);
void load(Thread& thread, const void* p, Order order, Scope scope);
void store(Thread& thread, const void* p, Order order, Scope scope);
void read_modify_write(Thread& thread, const void* p, Order order, Scope scope);

}  // namespace simt::checker
