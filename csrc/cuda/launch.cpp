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

}  // namespace

int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

size_t shared_memory_limit() {
  return static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

bool has_bulk_copies() { return attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

}  // namespace eagle::cuda
