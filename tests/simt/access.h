#pragma once
// One access of device code: whose memory it is, whether it may be touched, and its place in the traffic log.
#include <cstdint>
#include <string>

#include "simt/machine.h"

namespace simt {

struct Touch {
  uint64_t address;
  uint32_t size;
  bool write, atomic;
  const void* pc;
  Path path = Path::kCoherent;
  bool modify = false;  // a write whose result depends on what was there
  bool starts = false;  // a read that ends elsewhere, and counts there
};

inline bool in_shared(const Thread& thread, uint64_t address) {
  return address - reinterpret_cast<uint64_t>(thread.block->shared) < kSharedBytes + kSharedSlack;
}

// Each returns if the access can be done; what cannot is reported and ends the launch.
void touch_global(Thread& thread, const Touch& touch);
void touch_shared(Thread& thread, const Touch& touch);

std::string place(const Thread& thread, uint64_t address);  // as reports call it

void require_aligned(const Thread& thread, const Touch& touch);

}  // namespace simt
