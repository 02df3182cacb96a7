#pragma once
// The only way a kernel is launched. Never `<<<>>>`: this form carries attributes, checks the result once,
// and is plain C++ that a host compiler can parse too (tests/simt).
#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>
#include <utility>

namespace eagle::cuda {

void check_cuda(cudaError_t status, const char* expression, const char* file, int line);
#define EAGLE_CUDA_CHECK(expression) ::eagle::cuda::check_cuda((expression), #expression, __FILE__, __LINE__)

struct LaunchConfig {
  dim3 grid, block;
  CUstream_st* stream = nullptr;
  size_t shared_bytes = 0;  // sizeof the kernel's SharedMemory struct
};

// ---- what the current device has --------------------------------------------------------------------------

int multiprocessors();
size_t shared_memory_limit();  // bytes that a block may ask for
bool has_bulk_copies();        // copy_bulk of device/ptx.cuh: compute capability 9.0 or newer

template <class... Expected, class... Args>
void launch(void (*kernel)(Expected...), const LaunchConfig& c, Args&&... args) {
  if (c.grid.x == 0 || c.grid.y == 0 || c.grid.z == 0) return;  // an empty problem is not an error
  if (c.shared_bytes > 48 * 1024)
    EAGLE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(c.shared_bytes)));
  cudaLaunchConfig_t config{};
  config.gridDim = c.grid;
  config.blockDim = c.block;
  config.dynamicSmemBytes = c.shared_bytes;
  config.stream = c.stream;
  EAGLE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

}  // namespace eagle::cuda
