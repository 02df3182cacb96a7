// eagle_cuda/device.h over the CUDA runtime. no_driver.cpp is linked instead where there are no CUDA devices:
// in builds without the CUDA backend and under the emulator.
#include "cuda/driver.h"

#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>

#include "cuda/launch.h"
#include "eagle_cuda/device.h"

namespace eagle {
namespace {

std::string version_text(int version) {  // 13000 -> "13.0"
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Failures for which neither the call nor the kernel is to blame.
bool no_device(cudaError_t status) {
  switch (status) {
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorInitializationError:
    case cudaErrorStubLibrary:
    case cudaErrorDevicesUnavailable:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorOperatingSystem:
      return true;
    default:
      return false;
  }
}

bool no_code(cudaError_t status) {
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
      return true;
    default:
      return false;
  }
}

std::string no_device_text(cudaError_t status) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::ostringstream text;
  text << "no usable CUDA device: " << (driver > 0 ? "" : "no driver: ") << cudaGetErrorString(status)
       << " (this build: CUDA " << version_text(runtime);
  if (driver > 0) text << "; driver: CUDA " << version_text(driver);
  text << ")";
  return text.str();
}

std::string no_code_text(cudaError_t status) {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  std::ostringstream text;
  text << "no CUDA code for cuda:" << device << ", a GPU of compute capability " << major << "." << minor
       << ": this build has " << cuda_architectures() << "; build with EAGLE_CUDA_ARCHITECTURES=" << major
       << minor << " (" << cudaGetErrorString(status) << ")";
  return text.str();
}

}  // namespace

const char* cuda_architectures() { return EAGLE_CUDA_ARCHITECTURES; }
const char* cuda_toolkit() { return EAGLE_CUDA_TOOLKIT; }

std::string cuda_error() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return "";
  cudaGetLastError();  // not for the next call to find
  return no_device_text(status == cudaSuccess ? cudaErrorNoDevice : status);
}

void DeviceGuard::enter(int device_id) {
  int current = 0;
  EAGLE_CUDA_CHECK(cudaGetDevice(&current));
  if (current == device_id) return;
  EAGLE_CUDA_CHECK(cudaSetDevice(device_id));
  previous_ = current;
}

void DeviceGuard::leave() { cudaSetDevice(previous_); }

namespace cuda {

void explain_failure(int code) {
  const auto status = static_cast<cudaError_t>(code);
  cudaGetLastError();  // not for the next call to find
  if (no_device(status))
    throw std::runtime_error("eagle_cuda: " + no_device_text(status) + "; pass CPU tensors");
  if (no_code(status)) throw std::runtime_error("eagle_cuda: " + no_code_text(status));
}

}  // namespace cuda
}  // namespace eagle
