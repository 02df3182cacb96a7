#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "common/check.h"

namespace eagle {
namespace cpu {
namespace {

constexpr int kSpinMicroseconds = 100;
constexpr int kMaxThreads = 256;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

thread_local bool inside_job = false;

// One job at a time. `state_` holds the job's number, an open bit and the count of workers inside; a worker
// joins by adding one while the bit is set, and the caller clears the bit when no piece is left, then waits
// for those that joined.
class Pool {
 public:
  // Joins the workers; the next job starts as many as it needs. Waits for a job that runs on another thread.
  void resize(int threads) {
    std::lock_guard<std::mutex> lock(busy_);
    quit_.store(true, std::memory_order_seq_cst);
    wake_.fetch_add(1, std::memory_order_seq_cst);
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
    workers_.clear();
    quit_.store(false, std::memory_order_seq_cst);
    threads_.store(threads, std::memory_order_relaxed);
  }
  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void run(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) return body(context, 0, count);
    start();
    body_ = body;
    context_ = context;
    count_ = count;
    grain_ = grain;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t job = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    // No wake-up is missed: a worker first counts itself as a sleeper, then looks at state_; here it is the
    // other way round, all in one total order, so one of the two sees the other. (And a job is never lost:
    // the caller works on it.)
    state_.store(job << 32 | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      wake_.fetch_add(1, std::memory_order_seq_cst);
      wake_.notify_all();
    }
    inside_job = true;
    work();
    inside_job = false;
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; (state_.load(std::memory_order_acquire) & kCount) != 0; ++spins)
      spins < 2000 ? pause() : std::this_thread::yield();
  }

  // After fork() the child has no workers and its locks may be held by threads that do not exist.
  void forget_workers() {
    new (&workers_) std::vector<std::thread>();
    new (&busy_) std::mutex();
    state_.store(0);
    sleepers_.store(0);
    quit_.store(false);
  }

 private:
  static constexpr uint64_t kOpen = uint64_t{1} << 31, kCount = kOpen - 1;

  void start() {
    while (static_cast<int>(workers_.size()) < threads() - 1)
      workers_.emplace_back([this, seen = state_.load() >> 32] { worker(seen); });
  }

  void work() {
    for (int64_t begin; (begin = next_.fetch_add(grain_, std::memory_order_relaxed)) < count_;)
      body_(context_, begin, std::min(begin + grain_, count_));
  }

  bool try_join(uint64_t& seen) {
    uint64_t s = state_.load(std::memory_order_acquire);
    while ((s & kOpen) && (s >> 32) != seen)
      if (state_.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        seen = s >> 32;
        return true;
      }
    return false;
  }

  void worker(uint64_t seen) {
    inside_job = true;
    using Clock = std::chrono::steady_clock;
    auto spin_until = Clock::now() + std::chrono::microseconds(kSpinMicroseconds);
    while (!quit_.load(std::memory_order_relaxed)) {
      if (try_join(seen)) {
        work();
        state_.fetch_sub(1, std::memory_order_acq_rel);
        spin_until = Clock::now() + std::chrono::microseconds(kSpinMicroseconds);
        continue;
      }
      for (int i = 0; i < 32; ++i) pause();
      if (Clock::now() < spin_until) continue;
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t ticket = wake_.load(std::memory_order_seq_cst);
      const uint64_t s = state_.load(std::memory_order_seq_cst);
      if (!((s & kOpen) && (s >> 32) != seen) && !quit_.load(std::memory_order_seq_cst)) wake_.wait(ticket);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      spin_until = Clock::now() + std::chrono::microseconds(kSpinMicroseconds);
    }
  }

  std::mutex busy_;
  std::vector<std::thread> workers_;
  std::atomic<int> threads_{1};
  void (*body_)(void*, int64_t, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0, grain_ = 1;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> quit_{false};
};

// CPUs that the container's quota amounts to, rounded up. More threads than that are stopped in the middle of
// a job.
int container_limit() {
  double quota = -1, period = 0;
  if (std::FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
    if (std::fscanf(f, "%lf %lf", &quota, &period) != 2) quota = -1;  // "max 100000": no limit
    std::fclose(f);
  }
  return quota > 0 && period > 0 && quota < period * kMaxThreads
             ? static_cast<int>((quota + period - 1) / period)
             : kMaxThreads;
}

int default_threads() {
  if (const char* asked = std::getenv("EAGLE_NUM_THREADS"); asked && *asked) {
    char* end = nullptr;
    const long n = std::strtol(asked, &end, 10);
    check(*end == 0 && n >= 1 && n <= kMaxThreads, "EAGLE_NUM_THREADS: expected 1 to ", kMaxThreads, ", got ",
          asked);
    return static_cast<int>(n);
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::clamp(std::min(CPU_COUNT(&set), container_limit()), 1, kMaxThreads);
}

// Never destroyed: a worker may still be asleep in it when static objects go. Threads end with the process.
Pool& pool() {
  static Pool* const instance = [] {
    auto* p = new Pool;
    p->resize(default_threads());
    pthread_atfork(nullptr, nullptr, [] { pool().forget_workers(); });
    return p;
  }();
  return *instance;
}

}  // namespace

void parallel_run(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context) {
  if (inside_job || pool().threads() == 1) return body(context, 0, count);
  pool().run(count, std::max<int64_t>(grain, 1), body, context);
}

}  // namespace cpu

int num_threads() { return cpu::pool().threads(); }

void set_num_threads(int n) {
  check(n >= 1 && n <= cpu::kMaxThreads, "num_threads: expected 1 to ", cpu::kMaxThreads, ", got ", n);
  cpu::pool().resize(n);
}

}  // namespace eagle
