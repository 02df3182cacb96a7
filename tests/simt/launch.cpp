// A launch: blocks become resident in waves, their threads run as fibers, and the host waits for the last of
// them.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "simt/async_copy.h"
#include "simt/checker.h"
#include "simt/emulator.h"
#include "simt/host.h"
#include "simt/host_limits.h"
#include "simt/landing.h"
#include "simt/mbarrier.h"
#include "simt/scheduler.h"

namespace simt {

namespace {

// Checked launches keep so many threads resident, all of them if the grid is no larger: only threads that are
// resident together meet in every order.
constexpr uint64_t kCheckedThreads = 8192;

unsigned char* shared_memory_of(uint32_t slot) {
  static std::vector<unsigned char*> buffers;
  while (buffers.size() <= slot) {
    void* buffer = std::aligned_alloc(4096, kSharedBytes + kSharedSlack);
    if (!buffer) throw std::bad_alloc();
    buffers.push_back(static_cast<unsigned char*>(buffer));
  }
  return buffers[slot];
}

void enter() {
  running.call(running.arguments);
  exit_thread();
}

bool cooperative(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeCooperative && config.attrs[i].val.cooperative) return true;
  return false;
}

uint64_t resident_blocks_of(const cudaLaunchConfig_t& config, uint64_t blocks) {
  if (cooperative(config)) return blocks;
  return checked() ? std::clamp<uint64_t>(kCheckedThreads / running.block_threads, 1, blocks) : 1;
}

void prepare_thread(Thread& thread, Block& block, Warp& warp, uint32_t linear) {
  const dim3& size = block_dimensions;
  thread.index = {linear % size.x, linear / size.x % size.y, linear / size.x / size.y};
  thread.block = &block;
  thread.warp = &warp;
  thread.lane = linear % kWarpLanes;
  thread.linear = linear;
  thread.slot = block.slot * running.block_threads + linear;
  thread.context = running.stacks.prepare(thread.slot, enter);
  thread.exited = false;
  thread.at_grid_barrier = false;
  thread.waits_in = nullptr;
  thread.waits_at = nullptr;
  thread.log.clear();  // what an aborted launch left
  warp.lanes[thread.lane] = &thread;
  warp.present |= 1u << thread.lane;
}

void prepare_block(uint32_t slot, uint32_t number) {
  Block& block = running.blocks[slot];
  const dim3& grid = grid_dimensions;
  block.index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
  block.shared = shared_memory_of(slot);
  std::memset(block.shared, 0xff, running.shared_bytes);
  block.number = number;
  block.slot = slot;
  block.threads = block.alive = running.block_threads;
  block.ready_warps = 0;
  block.exit_reported = false;
  block.barrier = {};
  block.warps.resize((running.block_threads + kWarpLanes - 1) / kWarpLanes);
  for (uint32_t w = 0; w < block.warps.size(); ++w) {
    Warp& warp = block.warps[w];
    warp.present = warp.ready = warp.log_full = 0;
    warp.logged = false;
    warp.gathering_count = 0;
    warp.barrier_pc = nullptr;
    warp.block = &block;
    warp.index = w;
    const uint32_t first = w * kWarpLanes, end = std::min(first + kWarpLanes, running.block_threads);
    for (uint32_t linear = first; linear < end; ++linear)
      prepare_thread(running.threads[size_t(slot) * running.block_threads + linear], block, warp, linear);
    warp.alive = warp.present;
    make_ready(warp, warp.present);
  }
}

void run_wave(uint32_t first_block, uint32_t blocks) {
  running.first_block = first_block;
  running.resident = running.blocks_left = blocks;
  running.ready_blocks.assign((blocks + 63) / 64, 0);
  for (uint32_t slot = 0; slot < blocks; ++slot) prepare_block(slot, first_block + slot);
  checker::begin_wave();
  const size_t threads = size_t(blocks) * running.block_threads;
  start(running.threads[options().seed ? random_number() % threads : 0]);
  landing::clear();
  mbarrier::clear();
}

}  // namespace

Options& options() {
  static Options all;
  return all;
}

Counters& counters() {
  static Counters all{};
  return all;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, void (*call)(const void*),
                   const void* arguments, size_t argument_bytes) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (const cudaError_t error = check_limits(config, kernel, cooperative(config))) return error;
  // What an aborted launch left undone would only bring further reports.
  if (running.aborted) return cudaSuccess;

  grid_dimensions = grid;
  block_dimensions = block;
  running.kernel = kernel;
  running.call = call;
  running.arguments = arguments;
  running.argument_bytes = argument_bytes;
  running.shared_bytes = uint32_t(config.dynamicSmemBytes);
  running.block_threads = block.x * block.y * block.z;
  running.cooperative = cooperative(config);
  running.polls = running.unlogged_reads = running.polls_in_flight = 0;
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z, resident = resident_blocks_of(config, blocks);
  running.stacks.reserve(resident * running.block_threads);
  if (running.threads.size() < resident * running.block_threads)
    running.threads.resize(resident * running.block_threads);
  if (running.blocks.size() < resident) running.blocks.resize(resident);
  ++counters().launches;
  counters().threads += blocks * running.block_threads;

  begin_schedule(options());
  running.resident = uint32_t(resident);
  checker::begin_launch();
  async_copy::begin_launch();
  for (uint64_t first = 0; first < blocks && !running.aborted; first += resident)
    run_wave(uint32_t(first), uint32_t(std::min(resident, blocks - first)));
  checker::end_launch();
  return cudaSuccess;
}

}  // namespace simt
