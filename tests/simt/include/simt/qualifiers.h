#pragma once
// Qualifiers that mean nothing to the host compiler, the vector types and the types of the runtime: the
// toolkit's own where it is installed, so that its fp16, bf16 and fp8 headers work beside them and our
// declarations cannot drift.
#include <cstddef>
#include <cstdint>

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>
#else
#include "simt/runtime_types.h"
#include "simt/vector_types.h"
#endif

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
