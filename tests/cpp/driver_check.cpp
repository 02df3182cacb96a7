// csrc/cuda/driver.cpp and launch.h over a CUDA runtime written here: which device is current when, and what
// is said of each failure. Prints "driver_check: ok".
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "eagle_cuda/device.h"

namespace {

// ---- the runtime -------------------------------------------------------------------------------------

struct Runtime {
  int devices = 2, current = 0, driver = 13000;
  cudaError_t next = cudaSuccess;  // what the next call that may fail returns
  std::vector<int> made_current;
  int launches = 0, allowed_shared = 0;
  size_t cleared = 0;  // bytes
  cudaLaunchConfig_t config{};
} runtime;

cudaError_t answer() { return std::exchange(runtime.next, cudaSuccess); }

}  // namespace

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) {
  *count = runtime.devices;
  return answer();
}
cudaError_t cudaGetDevice(int* device) {
  *device = runtime.current;
  return answer();
}
cudaError_t cudaSetDevice(int device) {
  if (device >= runtime.devices) return cudaErrorInvalidDevice;
  runtime.made_current.push_back(device);
  runtime.current = device;
  return answer();
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = runtime.driver, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13010, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 10 + device : 3;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "words of the runtime";
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return runtime.allowed_shared = value, answer();
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 2, answer();
}
cudaError_t cudaMemsetAsync(void*, int value, size_t bytes, cudaStream_t) {
  return runtime.cleared += value == 0 && runtime.launches == 0 ? bytes : 0, answer();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  ++runtime.launches;
  runtime.config = *config;
  return answer();
}
}

namespace {

// ---- the checks --------------------------------------------------------------------------------------

void expect(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("driver_check: %s\n", what.c_str());
  std::exit(1);
}

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

eagle::TensorView on(eagle::DeviceType type, int id) {
  eagle::TensorView t;
  t.device = type;
  t.device_id = id;
  return t;
}

void devices_are_restored() {
  const auto cuda_0 = on(eagle::DeviceType::kCUDA, 0), cuda_1 = on(eagle::DeviceType::kCUDA, 1);
  runtime = {};
  {
    const eagle::DeviceGuard guard(on(eagle::DeviceType::kCPU, 0));
  }
  {
    const eagle::DeviceGuard guard(cuda_0);
  }
  expect(runtime.made_current.empty(), "a device was made current that was current already");
  {
    const eagle::DeviceGuard guard(cuda_1);
    expect(runtime.current == 1, "the tensor's device is not current");
    const eagle::DeviceGuard inner(cuda_0);
    expect(runtime.current == 0, "the inner tensor's device is not current");
  }
  expect(runtime.made_current == std::vector<int>{1, 0, 1, 0}, "guards: another order of devices");
  error_of([&] {
    const eagle::DeviceGuard guard(cuda_1);
    throw std::runtime_error("an op that fails");
  });
  expect(runtime.current == 0, "the device is not restored after an exception");

  runtime = {};
  const std::string words =
      error_of([&] { const eagle::DeviceGuard guard(on(eagle::DeviceType::kCUDA, 7)); });
  expect(words.rfind("eagle_cuda: words of the runtime (csrc/cuda/", 0) == 0,
         "a device that does not exist: " + words);
  expect(runtime.made_current.empty(), "a device was restored that was never left");
}

void failures_are_explained() {
  runtime = {};
  expect(eagle::cuda_error().empty(), "a reason although there are devices");
  runtime.devices = 0;
  expect(eagle::cuda_error() ==
             "no usable CUDA device: no CUDA-capable device is detected (this build: CUDA 13.1; driver: CUDA "
             "13.0)",
         eagle::cuda_error());
  const auto guard = [] { const eagle::DeviceGuard guard(on(eagle::DeviceType::kCUDA, 0)); };
  runtime = {};
  runtime.driver = 0;
  runtime.next = cudaErrorInsufficientDriver;
  std::string words = error_of(guard);
  expect(words ==
             "eagle_cuda: no usable CUDA device: no driver: words of the runtime (this build: CUDA 13.1); "
             "pass CPU "
             "tensors",
         words);

  const auto launch = [] {
    void (*const kernel)(int) = nullptr;
    eagle::cuda::launch(kernel, {.grid = 1, .block = 32}, 5);
  };
  for (const cudaError_t error : {cudaErrorNoKernelImageForDevice, cudaErrorUnsupportedPtxVersion}) {
    runtime = {};
    runtime.next = error;
    words = error_of(launch);
    expect(words ==
               "eagle_cuda: no CUDA code for cuda:0, a GPU of compute capability 10.3: this build has "
               "80-real,90a-real; build with EAGLE_CUDA_ARCHITECTURES=103 (words of the runtime)",
           words);
  }
  runtime = {};
  runtime.next = cudaErrorLaunchFailure;
  words = error_of(launch);
  expect(words.rfind("eagle_cuda: words of the runtime (csrc/cuda/", 0) == 0 &&
             words.find("launch.h:") != std::string::npos,
         words);
}

void launches_carry_their_shape() {
  void (*const kernel)(int) = nullptr;
  runtime = {};
  const auto stream = reinterpret_cast<CUstream_st*>(64);
  eagle::cuda::launch(kernel, {.grid = dim3(0), .block = 32}, 5);
  eagle::cuda::launch(kernel, {.grid = dim3(3, 0), .block = 32}, 5);
  expect(runtime.launches == 0, "an empty grid was launched");
  eagle::cuda::launch(kernel, {.grid = dim3(3, 2), .block = 64, .stream = stream, .shared_bytes = 1024}, 5);
  const cudaLaunchConfig_t& c = runtime.config;
  expect(runtime.launches == 1 && c.gridDim.x == 3 && c.gridDim.y == 2 && c.blockDim.x == 64 &&
             c.stream == stream && c.dynamicSmemBytes == 1024,
         "another launch than asked for");
  expect(runtime.allowed_shared == 0, "48 KiB of shared memory need no attribute");
  eagle::cuda::launch(kernel, {.grid = 1, .block = 64, .shared_bytes = 65536}, 5);
  expect(runtime.allowed_shared == 65536, "more than 48 KiB need the attribute");
}

void grids_that_wait_for_each_other_are_resident() {
  void (*const kernel)(int) = nullptr;
  uint32_t words[4];
  runtime = {};
  const auto launch = [&](unsigned blocks) {
    return error_of([&] {
      eagle::cuda::launch_together(kernel, {.grid = blocks, .block = 64}, {words, sizeof(words)}, 5);
    });
  };
  expect(
      launch(7) ==
          "eagle_cuda: expected a grid that runs at once, got 7 blocks of 64 threads and 0 bytes of shared "
          "memory; this device holds 6 on 3 multiprocessors",
      launch(7));
  expect(runtime.launches == 0, "a grid that is not resident was launched");
  expect(launch(6).empty() && runtime.launches == 1, "a grid that fits was not launched");
  expect(runtime.config.numAttrs == 1 && runtime.cleared == sizeof(words),
         "no cooperative launch behind cleared words");
}

}  // namespace

int main() {
  devices_are_restored();
  failures_are_explained();
  launches_carry_their_shape();
  grids_that_wait_for_each_other_are_resident();
  std::puts("driver_check: ok");
  return 0;
}
