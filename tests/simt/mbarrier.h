#pragma once
// Barriers in shared memory (mbarrier): a phase is over when all arrivals and all expected bytes are there.
#include <cstdint>
#include <string>
#include <vector>

#include "simt/machine.h"
#include "simt/shadow.h"

namespace simt::mbarrier {

struct Mbarrier {
  uint64_t address;
  Block* block;
  uint32_t arrivals;      // of a phase
  uint32_t missing;       // of them, in this one
  int64_t missing_bytes;  // expected and not there, or there and not expected yet
  uint32_t phase;         // how many are over
  uint32_t number;        // of the block's barriers
  checker::Epoch made;    // its initialisation, and where
  const void* made_at;
  Published gathered, passed;  // by arrivals so far; to those who see the last phase that is over
  std::vector<Thread*> waiters;
  uint32_t awaited;  // the phase that the latest copy belongs to, until a thread has seen its end; 0: none
  const void* awaited_at;  // where that copy was started
};

void clear();  // of the blocks that were resident

// A copy whose end nobody has seen, or null: where it was started.
const void* unseen_copy(const Block& block);

// The barrier that device code names at `pc`; the launch ends if there is none.
Mbarrier& find(Thread& thread, const void* p, const void* pc);

// For a copy: bytes that landed, or an arrival that stands for copies which landed.
void count_bytes(Mbarrier& barrier, uint32_t bytes);
void count_arrival(Mbarrier& barrier, const void* pc);

// Nothing but barrier instructions may touch its 8 bytes.
void touch(const Thread& thread, uint64_t address, uint32_t size, bool write, const void* pc);
bool any();

std::string states();  // of the barriers that threads wait at

}  // namespace simt::mbarrier
