// Two planted faults, to see whether compute-sanitizer works on this machine: `memcheck` a write out of
// bounds, `racecheck` a race in shared memory.
#include <cuda_runtime.h>

#include <cstring>

__global__ void out_of_bounds_kernel(int* p) { p[1 << 20] = 1; }

__global__ void race_kernel(int* p) {
  __shared__ int words[64];
  words[threadIdx.x] = static_cast<int>(threadIdx.x);
  p[threadIdx.x] = words[63 - threadIdx.x];  // of another warp, without __syncthreads
}

int main(int argc, char** argv) {
  int* memory = nullptr;
  if (argc < 2 || cudaMalloc(&memory, 1024) != cudaSuccess) return 2;
  if (std::strcmp(argv[1], "memcheck") == 0)
    out_of_bounds_kernel<<<1, 1>>>(memory);
  else
    race_kernel<<<1, 64>>>(memory);
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
