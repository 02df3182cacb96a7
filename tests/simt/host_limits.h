#pragma once
#include "simt/host.h"

namespace simt {

// What a device of compute capability 9.0 refuses to launch.
cudaError_t check_limits(const cudaLaunchConfig_t& config, const void* kernel, bool cooperative);

}  // namespace simt
