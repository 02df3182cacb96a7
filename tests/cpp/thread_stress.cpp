// Stress of csrc/cpu/parallel.cpp: every piece runs exactly once, its effects are seen by the caller, and
// nothing hangs: spinning and sleeping workers, many callers, nesting, resizing between jobs, fork. Exit code
// 0, or 1 with a message.
//
// `thread_stress nofork` leaves fork() out (ThreadSanitizer does not follow it).
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/parallel.h"

namespace {

using eagle::cpu::parallel_for;

uint32_t random_state = 12345;
uint32_t next_random() { return random_state = random_state * 1664525u + 1013904223u; }

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "thread_stress: %s\n", what);
  std::exit(1);
}

// Plain stores: a piece run twice, left out or not yet visible shows in the count (and as a race to
// ThreadSanitizer). With `slow` set, pieces take microseconds, so that workers are still inside when the
// caller has run out of pieces.
void one_job(int64_t count, int64_t grain, bool slow = false) {
  std::vector<int64_t> hits(static_cast<size_t>(count), 0);
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    expect(begin >= 0 && begin < end && end <= count, "a piece lies outside the range");
    if (slow) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(20 + begin % 7 * 10);
      while (std::chrono::steady_clock::now() < until) {
      }
    }
    for (int64_t i = begin; i < end; ++i) hits[static_cast<size_t>(i)] += 1;
  });
  for (int64_t h : hits) expect(h == 1, "an index was not run exactly once");
}

void many_jobs(int jobs) {
  for (int j = 0; j < jobs; ++j) one_job(next_random() >> 24, 1 + (next_random() >> 28));
}

void sleeping_workers(int jobs) {
  for (int j = 0; j < jobs; ++j) {
    std::this_thread::sleep_for(
        std::chrono::microseconds(next_random() >> 22));  // 0 .. 1023: around the spinning time
    one_job(64, 1);
    one_job(8, 1, true);
  }
}

void many_callers(int callers, int jobs) {
  std::vector<std::thread> threads;
  for (int c = 0; c < callers; ++c)
    threads.emplace_back([=] {
      for (int j = 0; j < jobs; ++j) one_job(1 + (j * 37 + c) % 200, 1 + (j + c) % 5);
    });
  for (std::thread& t : threads) t.join();
}

void nested() {
  std::vector<int64_t> hits(64 * 64, 0);
  parallel_for(64, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      parallel_for(64, 1, [&](int64_t from, int64_t to) {
        for (int64_t j = from; j < to; ++j) hits[static_cast<size_t>(i * 64 + j)] += 1;
      });
  });
  for (int64_t h : hits) expect(h == 1, "a nested index was not run exactly once");
}

void resizing(int rounds) {
  for (int r = 0; r < rounds; ++r) {
    eagle::set_num_threads(1 + r % 4);
    if (r % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    one_job(100, 3);
  }
}

void forked_child_works() {
  eagle::set_num_threads(3);
  one_job(100, 1);
  const pid_t child = fork();
  expect(child >= 0, "fork failed");
  if (child == 0) {
    expect(eagle::num_threads() == 3, "the child has another number of threads");
    many_jobs(50);
    eagle::set_num_threads(2);  // must not wait for the parent's workers
    one_job(8, 1, true);
    _exit(0);
  }
  int status = 0;
  expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
         "the forked child failed");
  one_job(100, 1);
}

}  // namespace

int main(int argc, char** argv) {
  for (int threads : {1, 2, 3, 8}) {
    eagle::set_num_threads(threads);
    one_job(0, 1);
    one_job(1, 1);
    one_job(5, 100);
    one_job(7, 0);
    many_jobs(2000);
    sleeping_workers(100);
    nested();
    many_callers(4, 300);
  }
  resizing(200);
  if (argc < 2 || std::strcmp(argv[1], "nofork") != 0)
    for (int i = 0; i < 5; ++i) forked_child_works();
  // Workers still spin or sleep here: leaving main must not hang or crash.
  eagle::set_num_threads(8);
  one_job(1000, 1);
  std::puts("thread_stress: ok");
  return 0;
}
