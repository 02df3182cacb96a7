#pragma once
// What a file of self-test kernels includes: the same headers as a kernel of csrc/cuda, and the cases.
//
// Marks, read by test_simt.py: `// <- reported: case` is a line at which a planted bug must be reported, `//
// <- other: case` one that its reports may name besides. The part of a case's name before the slash stands
// for all of them.
#include "simt/selftest/case.h"

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"

namespace simt::selftest {

using eagle::cuda::atomic_add_acq_rel;
using eagle::cuda::kFullMask;
using eagle::cuda::launch;
using eagle::cuda::load;
using eagle::cuda::load_acquire;
using eagle::cuda::load_read_only;
using eagle::cuda::Scope;
using eagle::cuda::shared_memory;
using eagle::cuda::store;
using eagle::cuda::store_release;

// All blocks resident at once, which a barrier of the grid needs.
template <class... Expected, class... Args>
void launch_together(void (*kernel)(Expected...), dim3 grid, dim3 block, Args... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{grid, block, 0, nullptr, &attribute, 1};
  EAGLE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace simt::selftest
