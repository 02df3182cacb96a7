#pragma once
// What a request asks for, with what makes no sense taken as "off".
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "eagle_cuda/sampling.h"

namespace eagle::cuda {

struct Settings {
  bool exists;        // whether the request has this row; if not, nothing else is set
  float temperature;  // 0: the largest logit
  float top_p;        // 1: off
  float min_p;        // 0: off
  uint32_t top_k;     // 0: off
  bool joint;
  uint64_t seed;
  int32_t position;
};

// Written so that NaN takes the branch of "off".
__device__ __forceinline__ Settings load_settings(const SampleTokensParams& p, int64_t request, int64_t row) {
  Settings s{};
  s.exists = !p.num_nodes || row - request * p.max_nodes < load_read_only(p.num_nodes + request);
  if (!s.exists) return s;
  const float temperature = load_read_only(p.temperature + request);
  s.temperature = temperature >= 1e-5f ? fminf(temperature, 3.40282347e+38f) : 0.0f;
  const int32_t top_k = p.top_k ? load_read_only(p.top_k + request) : 0;
  s.top_k = top_k > 0 && top_k < p.vocab_size ? static_cast<uint32_t>(top_k) : 0;
  const float top_p = p.top_p ? load_read_only(p.top_p + request) : 1.0f;
  s.top_p = top_p < 1.0f ? top_p : 1.0f;
  const float min_p = p.min_p ? load_read_only(p.min_p + request) : 0.0f;
  s.min_p = min_p > 0.0f ? fminf(min_p, 1.0f) : 0.0f;
  s.joint = p.top_k_top_p == TopKTopP::kJoint;
  s.seed = static_cast<uint64_t>(load_read_only(p.seeds + request));
  s.position = load_read_only(p.positions + row);
  return s;
}

}  // namespace eagle::cuda
