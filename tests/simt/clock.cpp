#include "simt/clock.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace simt {

namespace {
size_t width = 0;
std::vector<void*> unused;
}  // namespace

void Clock::set_width(size_t threads) {
  if (threads == width) return;
  for (void* times : unused) std::free(times);
  unused.clear();
  width = threads;
}

Clock::Times* Clock::obtain() {
  void* memory;
  if (!unused.empty()) {
    memory = unused.back();
    unused.pop_back();
  } else {
    memory = std::malloc(sizeof(uint32_t) * (1 + width));
    if (!memory) throw std::bad_alloc();
  }
  Times* times = static_cast<Times*>(memory);
  times->holders = 1;
  return times;
}

void Clock::recycle(Times* times) { unused.push_back(times); }

void Clock::own() {
  if (times_ && times_->holders == 1) return;
  Times* mine = obtain();
  if (times_) {
    std::memcpy(mine->at, times_->at, sizeof(uint32_t) * width);
    --times_->holders;
  } else {
    std::memset(mine->at, 0, sizeof(uint32_t) * width);
  }
  times_ = mine;
}

void Clock::fill(uint32_t time) {
  own();
  std::fill_n(times_->at, width, time);
}

void Clock::join(const Clock& other) {
  if (!other || other == *this) return;
  if (!times_) {
    *this = other;
    return;
  }
  own();
  uint32_t* at = times_->at;
  const uint32_t* theirs = other.times_->at;
  for (size_t i = 0; i < width; ++i) at[i] = std::max(at[i], theirs[i]);
}

void Clock::raise(uint32_t slot, uint32_t time) {
  own();
  times_->at[slot] = std::max(times_->at[slot], time);
}

}  // namespace simt
