#pragma once
// What the checker remembers of every 4 bytes: who wrote and who read them last.
#include <cstdint>

namespace simt::checker {

// One access: by which thread of its wave, at which of its times, of which bytes of the word.
class Epoch {
 public:
  Epoch() = default;
  Epoch(uint32_t time, uint32_t slot, bool atomic, uint32_t bytes)
      : bits_(uint64_t(time) << 32 | uint64_t(slot) << 8 | uint64_t(atomic) << 4 | bytes) {}

  bool operator==(const Epoch& other) const { return bits_ == other.bits_; }
  uint32_t time() const { return uint32_t(bits_ >> 32); }
  uint32_t slot() const { return uint32_t(bits_ >> 8) & 0xffffff; }
  bool atomic() const { return bits_ >> 4 & 1; }
  uint32_t bytes() const { return uint32_t(bits_) & 15; }

 private:
  uint64_t bits_ = 0;  // touches no bytes
};

// Zero: never touched by a kernel. A third reader takes the place of the second: a later write that races
// with the one forgotten may pass unseen in this schedule. Writes to single bytes of one half likewise.
struct Cell {
  Epoch writes[3];  // of the lower and the upper two bytes; an atomic one of another thread before the last
  Epoch reads[2];
  uint32_t write_place, read_places[2];   // in the code
  uint32_t read_only_time, read_only_at;  // of the last load through the read-only path, and its place
  uint8_t read_only;                      // bytes that the launch of that time loaded so
  uint8_t written;                        // bytes that hold a value
};

}  // namespace simt::checker
