// Cost of starting and joining a job of the thread pool, in nanoseconds: an empty body, workers spinning and
// workers asleep. Prints `threads spinning_ns sleeping_ns`, minima of many (benchmarks/bench_threads.py).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "cpu/parallel.h"

namespace {

using Clock = std::chrono::steady_clock;

template <class F>
double nanoseconds(F&& f) {
  const auto begin = Clock::now();
  f();
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

}  // namespace

int main() {
  // Every piece waits until all threads hold one: the whole hand-over and its way back are inside the time.
  for (int threads : {1, 2}) {
    eagle::set_num_threads(threads);
    std::atomic<int> arrived{0};
    const auto job = [&] {
      arrived.store(0, std::memory_order_relaxed);
      eagle::cpu::parallel_for(threads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          arrived.fetch_add(1, std::memory_order_relaxed);
          // A worker that the system does not schedule must not hang the measurement.
          for (int spins = 0; arrived.load(std::memory_order_relaxed) < threads && spins < 100000; ++spins) {
          }
        }
      });
    };
    double spinning = 1e9;
    std::vector<double> sleeping;
    for (int round = 0; round < 20; ++round) {
      job();
      for (int i = 0; i < 1000; ++i) spinning = std::min(spinning, nanoseconds(job));
      for (int i = 0; i < 10; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        sleeping.push_back(nanoseconds(job));
      }
    }
    std::nth_element(sleeping.begin(), sleeping.begin() + sleeping.size() / 2, sleeping.end());
    std::printf("%d %.0f %.0f\n", threads, spinning, sleeping[sleeping.size() / 2]);
  }
}
