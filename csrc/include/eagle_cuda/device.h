#pragma once
// The CUDA devices of this machine, as far as this build can use them. Importing and the CPU backend ask no
// driver.
#include <string>

#include "eagle_cuda/tensor_view.h"

namespace eagle {

// What the CUDA code in this build was made for and with: "80-real,90a-real" and "13.0.88", empty where there
// is none. Asks no driver.
const char* cuda_architectures();
const char* cuda_toolkit();

// Why no CUDA device can be used, in one line; empty where one can. Starts the driver.
std::string cuda_error();

// Makes a tensor's device current for the calling thread, and at the end the one that was current before.
// Nothing for a tensor on the CPU. Throws where the device cannot be used.
class DeviceGuard {
 public:
  explicit DeviceGuard(const TensorView& t) {
    if (t.device == DeviceType::kCUDA) enter(t.device_id);
  }
  ~DeviceGuard() {
    if (previous_ >= 0) leave();
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void enter(int device_id);
  void leave();
  int previous_ = -1;  // -1: the device was current already
};

}  // namespace eagle
