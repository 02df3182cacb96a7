#pragma once
// Vector clocks: what each thread knows of every other thread's past.
#include <cstddef>
#include <cstdint>
#include <utility>

namespace simt {

// One time per thread of the wave. Shared between holders and copied when written; empty knows nothing.
class Clock {
 public:
  // Every clock must be empty. Clocks of another width cannot be mixed.
  static void set_width(size_t threads);

  Clock() = default;
  Clock(const Clock& other) : times_(other.times_) {
    if (times_) ++times_->holders;
  }
  Clock(Clock&& other) noexcept : times_(std::exchange(other.times_, nullptr)) {}
  Clock& operator=(Clock other) noexcept {
    std::swap(times_, other.times_);
    return *this;
  }
  ~Clock() {
    if (times_ && --times_->holders == 0) recycle(times_);
  }

  explicit operator bool() const { return times_; }
  bool operator==(const Clock& other) const { return times_ == other.times_; }  // the same object
  uint32_t operator[](uint32_t slot) const { return times_->at[slot]; }

  void fill(uint32_t time);
  void join(const Clock& other);
  void raise(uint32_t slot, uint32_t time);

 private:
  struct Times {
    uint32_t holders;
    uint32_t at[1];  // as many as the wave has threads
  };
  static Times* obtain();
  static void recycle(Times* times);
  void own();  // to be written by this holder alone

  Times* times_ = nullptr;
};

// What releases and fences made known: to every thread of the device, and to those of one block; and of that,
// what a fence.proxy.async has shown to the asynchronous proxy.
struct Published {
  Clock device, block, proxied;
};

struct ThreadClock {
  Clock known;
  Clock proxied;       // what bulk copies see if this thread starts them: behind a fence.proxy.async
  uint32_t now;        // this thread's own time; rises when something of it is published
  Published fenced;    // what the last fence lets later relaxed writes publish
  Published observed;  // what relaxed reads have seen: known after the next fence
  // The last of each kind that was taken in: who polls sees the same again and again.
  Published last_observed, last_learned;
};

}  // namespace simt
