#pragma once
// Work over a long array that memory must deliver: every thread walks its own contiguous share, which the
// prefetchers can follow across pieces, and helps with another's share once its own is done.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/parallel.h"

namespace eagle::cpu {

class Streams {
 public:
  Streams(int64_t count, int64_t grain, int threads) : grain_(grain) {
    shares_ = int(std::clamp<int64_t>(std::min<int64_t>(threads, count / grain), 1, kMaxShares));
    for (int i = 0; i < shares_; ++i) {
      share_[i].next.store(count * i / shares_, std::memory_order_relaxed);
      share_[i].end = count * (i + 1) / shares_;
    }
  }
  Streams(const Streams&) = delete;

  // Calls f(begin, end) for pieces of at most `grain`, from share `own` first.
  template <class F>
  void take(int64_t own, F&& f) {
    for (int i = 0; i < shares_; ++i) {
      Share& share = share_[(own + i) % shares_];
      for (int64_t begin; (begin = share.next.fetch_add(grain_, std::memory_order_relaxed)) < share.end;)
        f(begin, std::min(begin + grain_, share.end));
    }
  }

  // Calls each(take) on every thread that comes, where take(f) hands it pieces.
  template <class F>
  void run(F&& each) {
    parallel_for(shares_, 1, [&](int64_t begin, int64_t end) {
      each([&](auto&& f) {
        for (int64_t own = begin; own < end; ++own) take(own, f);
      });
    });
  }

 private:
  static constexpr int kMaxShares = 64;
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Share share_[kMaxShares];
  int shares_;
  int64_t grain_;
};

}  // namespace eagle::cpu
