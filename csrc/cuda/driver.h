#pragma once
// What launch.cpp asks when a call of the CUDA runtime failed.

namespace eagle::cuda {

// Throws if the machine or the build is the cause of this cudaError_t, not the call: no driver, no device, a
// GPU for which there is no code. Twin without a driver: no_driver.cpp.
void explain_failure(int status);

}  // namespace eagle::cuda
