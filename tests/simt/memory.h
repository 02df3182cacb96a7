#pragma once
// The global memory of the op that runs: its regions, looked up by address.
#include <cstdint>
#include <string>

#include "simt/emulator.h"

namespace simt::checker {
struct Cell;
}

namespace simt::memory {

// Regions that share bytes are one extent, writable if one of them is.
struct Extent {
  uint64_t begin, end;
  bool writable, initialised;  // from the start
  // Checked builds: one cell per 4 bytes, from the multiple of 4 at or before `begin`; null where nothing is
  // written.
  checker::Cell* cells = nullptr;
  bool contains(uint64_t address, uint64_t bytes) const { return address >= begin && address + bytes <= end; }
};

// The extent that holds the first byte, or null.
const Extent* find(uint64_t address);

// "tokens + 12 bytes of 256", or how far the address lies from the nearest region.
std::string place(uint64_t address);

}  // namespace simt::memory
