// Cases on a GPU.
#include "conformance.h"
#include "cuda/launch.h"

namespace conformance {

void run(const Case& c, const std::vector<uint32_t>& in, std::vector<uint32_t>& out) {
  const size_t bytes = in.size() * sizeof(uint32_t);
  static uint32_t* memory = nullptr;  // input and output, for all cases
  if (!memory) EAGLE_CUDA_CHECK(cudaMalloc(&memory, 2 * bytes));
  uint32_t* const results = memory + in.size();
  EAGLE_CUDA_CHECK(cudaMemcpy(memory, in.data(), bytes, cudaMemcpyHostToDevice));
  EAGLE_CUDA_CHECK(cudaMemcpy(results, out.data(), bytes, cudaMemcpyHostToDevice));
  c.launch(memory, results, nullptr);
  EAGLE_CUDA_CHECK(cudaDeviceSynchronize());
  EAGLE_CUDA_CHECK(cudaMemcpy(out.data(), results, bytes, cudaMemcpyDeviceToHost));
}

}  // namespace conformance
