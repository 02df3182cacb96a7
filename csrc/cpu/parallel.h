#pragma once
// The thread pool of the CPU backend.
//
// The caller takes part; a worker that the system has not scheduled yet is never waited for, because workers
// join a job by themselves and pieces are handed out dynamically. Workers spin for kSpinMicroseconds after a
// job (ops follow each other closely in a decoding step), then sleep, so they do not fight other thread
// pools. Nothing that changes bits may depend on which thread runs a piece.
#include <cstdint>
#include <type_traits>

#include "eagle_cuda/threads.h"

namespace eagle::cpu {

// Calls body(context, begin, end) for pieces of at most `grain` that cover [0, count), in any order, on any
// thread. Nested calls and calls while another thread's job runs are executed by the caller alone. `body`
// must not throw.
void parallel_run(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context);

template <class F>
inline void parallel_for(int64_t count, int64_t grain, F&& f) {
  if (count <= 0) return;
  if (count <= grain || num_threads() == 1) return f(int64_t{0}, count);
  using Body = std::remove_reference_t<F>;
  parallel_run(
      count, grain, [](void* c, int64_t begin, int64_t end) { (*static_cast<Body*>(c))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace eagle::cpu
