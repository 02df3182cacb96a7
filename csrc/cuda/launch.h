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
bool has_bulk_copies();        // copy_bulk and store_matrices: compute capability 9.0 or newer

// How many blocks of the kernel the device holds at once.
int resident_blocks(const void* kernel, unsigned block_threads, size_t shared_bytes);
template <class... Expected>
int resident_blocks(void (*kernel)(Expected...), unsigned block_threads, size_t shared_bytes) {
  return resident_blocks(reinterpret_cast<const void*>(kernel), block_threads, shared_bytes);
}

// ---- launches ---------------------------------------------------------------------------------------------

// What both launches do before: more than 48 KiB of shared memory need permission.
cudaLaunchConfig_t prepare_launch(const void* kernel, const LaunchConfig& c);
inline bool is_empty(const LaunchConfig& c) { return c.grid.x == 0 || c.grid.y == 0 || c.grid.z == 0; }

template <class... Expected, class... Args>
void launch(void (*kernel)(Expected...), const LaunchConfig& c, Args&&... args) {
  if (is_empty(c)) return;  // an empty problem is not an error
  const cudaLaunchConfig_t config = prepare_launch(reinterpret_cast<const void*>(kernel), c);
  EAGLE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// Words through which a launch synchronises: zero when it begins, whatever an aborted one left there.
struct Cleared {
  void* data;
  size_t bytes;
};

// All blocks run at once and can wait for each other (device/grid_barrier.cuh). A grid that the device does
// not hold at once is refused.
void check_resident(const void* kernel, const LaunchConfig& c);

template <class... Expected, class... Args>
void launch_together(void (*kernel)(Expected...), const LaunchConfig& c, Cleared words, Args&&... args) {
  if (is_empty(c)) return;
  cudaLaunchConfig_t config = prepare_launch(reinterpret_cast<const void*>(kernel), c);
  check_resident(reinterpret_cast<const void*>(kernel), c);
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  config.attrs = &together;
  config.numAttrs = 1;
  EAGLE_CUDA_CHECK(cudaMemsetAsync(words.data, 0, words.bytes, c.stream));
  EAGLE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

}  // namespace eagle::cuda
