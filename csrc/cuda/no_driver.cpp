// Linked instead of driver.cpp where there are no CUDA devices: in builds without the CUDA backend and under
// the emulator.
#include <stdexcept>

#include "cuda/driver.h"
#include "eagle_cuda/device.h"

namespace eagle {

const char* cuda_architectures() { return ""; }
const char* cuda_toolkit() { return ""; }
std::string cuda_error() { return "no usable CUDA device: this build is without the CUDA backend"; }

void DeviceGuard::enter(int) {
  throw std::runtime_error(
      "eagle_cuda was built without the CUDA backend; pass CPU tensors, or rebuild with EAGLE_CUDA=ON");
}
void DeviceGuard::leave() {}

namespace cuda {
void explain_failure(int) {}
}  // namespace cuda

}  // namespace eagle
