#pragma once
// Copies that land by themselves and tell a barrier in shared memory: bulk copies, and cp.async whose arrival
// is left to them. They land as late as the program allows: when nobody else can run; with a seed, also at
// random.
#include <cstdint>

#include "simt/access.h"

namespace simt::landing {

inline uint64_t in_flight = 0;  // over all blocks of the launch

void clear();

// A copy of the block that lands at `to` and, when the last piece of its flight has, counts at `barrier`.
struct Piece {
  uint64_t to, from;
  uint32_t bytes;  // of the source
  uint32_t total;  // of the destination: zeros behind
  const void* pc;
};
class Flight;
Flight& start(Thread& thread, const void* barrier, bool counts_bytes, const void* pc);
void add(Flight& flight, const Piece& piece, const void* value);

// Lands one copy, if one is under way that somebody waits for (or any, if `any`). False: there is none.
bool land_one(bool any);

// The running thread touches shared memory: not where a copy is to arrive.
void touch(Thread& thread, const Touch& touch);

// The last thread of a block is gone: nothing may be under way.
void exit(Block& block, const Thread& last);

}  // namespace simt::landing
