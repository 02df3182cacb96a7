#include "cuda/launch.h"

#include <string_view>

#include "cuda/driver.h"

namespace eagle::cuda {

void check_cuda(cudaError_t status, const char* expression, const char* file, int line) {
  if (status == cudaSuccess) return;
  explain_failure(static_cast<int>(status));
  const std::string_view path = file;  // of the machine that compiled this
  const size_t csrc = path.rfind("csrc/");
  std::ostringstream message;
  message << "eagle_cuda: " << cudaGetErrorString(status) << " (" << path.substr(csrc == path.npos ? 0 : csrc)
          << ":" << line << ": " << expression << ")";
  throw std::runtime_error(message.str());
}

namespace {

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  EAGLE_CUDA_CHECK(cudaGetDevice(&device));
  EAGLE_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

void allow_shared(const void* kernel, size_t bytes) {
  constexpr size_t kFree = 48 * 1024;
  if (bytes > kFree)
    EAGLE_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

}  // namespace

int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

size_t shared_memory_limit() {
  return static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

bool has_bulk_copies() { return attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

int resident_blocks(const void* kernel, unsigned block_threads, size_t shared_bytes) {
  int each = 0;
  allow_shared(kernel, shared_bytes);
  EAGLE_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &each, kernel, static_cast<int>(block_threads), shared_bytes));
  return each * multiprocessors();
}

cudaLaunchConfig_t prepare_launch(const void* kernel, const LaunchConfig& c) {
  allow_shared(kernel, c.shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = c.grid;
  config.blockDim = c.block;
  config.dynamicSmemBytes = c.shared_bytes;
  config.stream = c.stream;
  return config;
}

void check_resident(const void* kernel, const LaunchConfig& c) {
  const uint64_t blocks = uint64_t{c.grid.x} * c.grid.y * c.grid.z;
  const unsigned threads = c.block.x * c.block.y * c.block.z;
  const int held = resident_blocks(kernel, threads, c.shared_bytes);
  if (blocks <= static_cast<uint64_t>(held)) return;
  std::ostringstream message;
  message << "eagle_cuda: expected a grid that runs at once, got " << blocks << " blocks of " << threads
          << " threads and " << c.shared_bytes << " bytes of shared memory; this device holds " << held
          << " on " << multiprocessors() << " multiprocessors";
  throw std::runtime_error(message.str());
}

}  // namespace eagle::cuda
