#pragma once
// The happens-before checker of checked builds: which accesses are ordered by barriers, fences and
// synchronising accesses, and which of two that touch the same bytes are not. Does nothing in fast builds.
#include <vector>

#include "simt/access.h"
#include "simt/machine.h"
#include "simt/memory.h"

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

void fence(Thread& thread, Scope scope);
void load(Thread& thread, const void* p, Order order, Scope scope);
void store(Thread& thread, const void* p, Order order, Scope scope);
void read_modify_write(Thread& thread, const void* p, Order order, Scope scope);

}  // namespace simt::checker
