#pragma once
// The emulator's face towards the tests: what memory a launch may touch, how it is scheduled, what was found
// and counted. Kernels never see this file; they see include/cuda_runtime.h.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simt {

struct Options {
  uint64_t seed = 0;  // 0: lanes, warps and blocks in order; else random schedules
  int preempt = 0;    // > 0: a switch at one of so many memory accesses, at random (fast builds: global ones)
  uint64_t max_polls = 20000000;  // polls without a write anywhere: a livelock
};
Options& options();

// The device as launchers see it. What a kernel computes must not depend on it.
struct DeviceModel {
  int multiprocessors = 132;
  int compute_capability = 90;  // below: no bulk copies, less shared memory
};
DeviceModel& device_model();

// What device code may touch, for the life of the object. Bytes of an `out` region are uninitialised until a
// kernel writes them; whatever lies in no region is out of bounds.
enum class Access : uint8_t { kIn, kOut, kInOut };
struct Region {
  const char* name;
  const void* data;
  size_t bytes;
  Access access;
};
template <class T>
Region in(const char* name, const T* data, int64_t count) {
  return {name, data, data ? size_t(count) * sizeof(T) : 0, Access::kIn};
}
template <class T>
Region out(const char* name, T* data, int64_t count) {
  return {name, data, data ? size_t(count) * sizeof(T) : 0, Access::kOut};
}
template <class T>
Region inout(const char* name, T* data, int64_t count) {
  return {name, data, data ? size_t(count) * sizeof(T) : 0, Access::kInOut};
}
inline Region bytes(const char* name, const void* data, int64_t count, Access access) {
  return {name, data, data ? size_t(count) : 0, access};
}

// The memory of one op, while its kernels are launched. One op at a time in a process: others wait for the
// end of this object. Regions that share bytes count as one, writable if one of them is.
//
// A launch is given up at what cannot be done (out of bounds, misaligned, deadlock ...); those after it in
// the same op do nothing. Who polls must read through load_acquire of device/ptx.cuh or an atomic: fast
// builds do not see other reads, so that no other thread would run.
class Memory {
 public:
  Memory(const char* op, std::vector<Region> regions);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void finish();  // throws std::runtime_error with every report if something was found
};

// Counted at load and store of device/ptx.cuh (global memory), and in checked builds at every access (shared
// memory); the same in every run.
struct Counters {
  uint64_t launches, threads;
  uint64_t global_load_bytes, global_load_sectors, global_load_requests;
  uint64_t global_store_bytes, global_store_sectors, global_store_requests;
  uint64_t shared_load_requests, shared_load_waves, shared_load_ideal;
  uint64_t shared_store_requests, shared_store_waves, shared_store_ideal;
  uint64_t barriers, warp_barriers, collectives, atomics;
  uint64_t grid_arrivals;     // of blocks at barriers of the grid
  uint64_t grid_asked_bytes;  // for copies, between arriving at such a barrier and passing it
};
Counters& counters();

struct Report {
  std::string kind;     // "race read-after-write", "out-of-bounds write", "uninitialised read", ...
  std::string message;  // what, where, who, and file and line of both sides
  uint64_t count;       // how often
};
const std::vector<Report>& reports();      // of the last op
bool checked();                            // whether the kernels of this build are instrumented
uint64_t launches(const std::string& op);  // how often the op ran here, empty problems included

}  // namespace simt
