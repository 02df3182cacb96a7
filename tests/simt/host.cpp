// The device as launchers see it.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "simt/checker.h"
#include "simt/emulator.h"
#include "simt/host_limits.h"
#include "simt/machine.h"
#include "simt/memory.h"
#include "simt/report.h"

namespace {

constexpr size_t kSharedWithoutOptIn = 48 * 1024;
constexpr size_t kSharedReserved = 1024;  // of each block
constexpr int kThreadsPerMultiprocessor = 2048, kBlocksPerMultiprocessor = 32;

size_t shared_per_multiprocessor() {
  switch (simt::device_model().compute_capability) {
    case 80:
      return 164 * 1024;
    case 86:
    case 89:
    case 120:
      return 100 * 1024;
    default:
      return simt::kSharedBytes + kSharedReserved;
  }
}
size_t most_shared() { return shared_per_multiprocessor() - kSharedReserved; }

std::map<const void*, size_t> shared_limits;
std::mutex shared_limits_mutex;

size_t shared_limit(const void* kernel) {
  std::lock_guard guard(shared_limits_mutex);
  const auto found = shared_limits.find(kernel);
  return found == shared_limits.end() ? kSharedWithoutOptIn : std::max(found->second, kSharedWithoutOptIn);
}

}  // namespace

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorCooperativeLaunchTooLarge:
      return "too many blocks in cooperative launch";
    default:
      return "unknown error";
  }
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return cudaErrorInvalidValue;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = simt::device_model().multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = simt::device_model().compute_capability / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = simt::device_model().compute_capability % 10;
      return cudaSuccess;
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = int(most_shared());
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  if (bytes == 0) return cudaSuccess;
  const uint64_t address = reinterpret_cast<uint64_t>(data);
  const simt::memory::Extent* extent = simt::memory::find(address);
  if (!extent || !extent->contains(address, bytes) || !extent->writable) {
    simt::report(extent && extent->contains(address, bytes) ? "write to an input" : "out-of-bounds write",
                 __builtin_return_address(0), nullptr,
                 "cudaMemsetAsync of " + std::to_string(bytes) + " bytes at " + simt::memory::place(address));
    return cudaSuccess;
  }
  std::memset(data, value, bytes);
  simt::checker::write_by_host(*extent, address, bytes);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || size_t(value) > most_shared())
    return cudaErrorInvalidValue;
  std::lock_guard guard(shared_limits_mutex);
  shared_limits[kernel] = size_t(value);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int block_threads,
                                                          size_t shared_bytes) {
  if (block_threads < 1 || block_threads > int(simt::kMaxBlockThreads)) return cudaErrorInvalidValue;
  const int by_shared = int(shared_per_multiprocessor() / (shared_bytes + kSharedReserved));
  *blocks = std::min({kThreadsPerMultiprocessor / block_threads, kBlocksPerMultiprocessor, by_shared});
  return cudaSuccess;
}

namespace simt {

DeviceModel& device_model() {
  static DeviceModel model;
  return model;
}

cudaError_t check_limits(const cudaLaunchConfig_t& config, const void* kernel, bool cooperative) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxBlockThreads || block.z > 64) return cudaErrorInvalidConfiguration;
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  if (blocks == 0 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  if (config.dynamicSmemBytes > shared_limit(kernel)) return cudaErrorInvalidValue;
  if (!cooperative) return cudaSuccess;
  int per_multiprocessor = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, int(threads),
                                                config.dynamicSmemBytes);
  return blocks > uint64_t(per_multiprocessor) * device_model().multiprocessors
             ? cudaErrorCooperativeLaunchTooLarge
             : cudaSuccess;
}

}  // namespace simt
