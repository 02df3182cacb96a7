#pragma once
// The launch that runs: its threads, warps and blocks, and where each waits.
#include <cstdint>
#include <vector>

#include "simt/clock.h"
#include "simt/device.h"
#include "simt/fiber.h"
#include "simt/traffic.h"

namespace simt {

constexpr uint32_t kWarpLanes = 32, kMaxBlockThreads = 1024;
constexpr size_t kSharedBytes = 227 * 1024;  // largest dynamic shared memory of a block
constexpr size_t kSharedSlack = 5 * 1024;    // behind it: near misses are called shared memory too

struct Warp;
struct Block;

// What every switch and collective reads stands in the first two cache lines.
struct alignas(64) Thread : ThreadView {
  uint32_t lane, linear, slot;  // in the warp, the block, the wave
  Warp* warp;
  void* context;
  bool exited;

  // Where it waits, and its part in the collective or barrier there.
  const char* waits_in;  // when it last gave way; null: in the middle of its work
  const void* waits_at;
  bool at_grid_barrier;  // has arrived at a barrier of the grid, not passed it
  uint64_t value, result;
  int operand, width;

  ThreadClock clock;                 // checked builds
  std::vector<traffic::Access> log;  // since the warp last stood together

  Block& home() const;
};

// Lanes that wait for the rest of `mask`.
struct Gathering {
  uint32_t mask, arrived;
  Collective op;
  const void* pc;
};

struct Warp {
  Thread* lanes[kWarpLanes];
  uint32_t alive, ready;
  uint32_t present;   // lanes that the block has
  uint32_t log_full;  // lanes that wait for the log to be counted
  bool logged;
  int gathering_count;
  Gathering gatherings[kWarpLanes];
  Block* block;
  uint32_t index;          // in the block
  const void* barrier_pc;  // where its first lane stands in the block's barrier; null if none does
};

struct BlockBarrier {
  uint32_t arrived, predicates;
  Barrier op;
  const void* pc;
};

struct Block : BlockView {
  uint32_t number, slot;  // in the grid, the wave
  uint32_t threads, alive;
  uint32_t ready_warps;
  bool exit_reported;
  BlockBarrier barrier;
  std::vector<Warp> warps;
};

inline Block& Thread::home() const { return *static_cast<Block*>(block); }

struct Launch {
  const void* kernel;
  void (*call)(const void*);
  const void* arguments;
  size_t argument_bytes;
  uint32_t shared_bytes, block_threads;
  bool cooperative;

  // The blocks that are resident together, and their threads.
  std::vector<Thread> threads;
  std::vector<Block> blocks;
  std::vector<uint64_t> ready_blocks;  // one bit each
  uint32_t resident, blocks_left, first_block;

  Stacks stacks;
  void* host_context;
  void* os_thread;
  bool aborted;
  uint64_t polls;            // since memory last changed
  uint32_t polls_in_flight;  // while a copy is under way
  uint64_t unlogged_reads;   // plain ones of global memory
};

inline Launch running;

// The kernels' blockDim and gridDim.
extern dim3 block_dimensions __asm__("simt_block_dimensions");
extern dim3 grid_dimensions __asm__("simt_grid_dimensions");

inline Thread& self() { return *static_cast<Thread*>(current); }

// While the emulator itself works at length on a fiber (texts, symbols): the standard library's inline
// functions may be the instrumented copies of a kernel file.
class Unobserved {
 public:
  Unobserved() : thread_(current) { current = nullptr; }
  ~Unobserved() { current = thread_; }

 private:
  ThreadView* thread_;
};

}  // namespace simt
