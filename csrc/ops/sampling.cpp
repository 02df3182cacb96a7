#include "eagle_cuda/sampling.h"

#include <limits>

#include "common/check.h"

namespace eagle {
namespace {

const DType kLogitTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// [B] of `dtype`, or absent.
template <class T>
const T* per_request(const char* what, const TensorView& t, DType dtype, int64_t batch,
                     const TensorView& device) {
  if (!t.present()) return nullptr;
  Expect(what, t).dtype(dtype).shape({batch}).contiguous().same_device(device);
  return t.as<T>();
}

template <class T>
T* per_node(const char* what, const TensorView& t, DType dtype, int64_t batch, int64_t nodes,
            const TensorView& device) {
  if (!t.present()) return nullptr;
  Expect(what, t).dtype(dtype).shape({batch, nodes}).contiguous().writable().same_device(device);
  return t.as<T>();
}

int size_of_dimension(const char* what, int64_t n) {
  check(n <= std::numeric_limits<int>::max(), what, ": expected a dimension below 2^31, got ", n);
  return static_cast<int>(n);
}

}  // namespace

void sample_tokens(TensorView logits, TensorView num_nodes, TensorView temperature, TensorView top_k,
                   TensorView top_p, TensorView min_p, TensorView seeds, TensorView positions,
                   TopKTopP top_k_top_p, TensorView tokens, TensorView log_probs, TensorView flags,
                   CUstream_st* stream) {
  Expect("logits", logits)
      .dtype({kLogitTypes[0], kLogitTypes[1], kLogitTypes[2]})
      .rank(3)
      .last_dim_contiguous();
  const int64_t b = logits.shape[0], n = logits.shape[1];
  check(logits.shape[2] >= 1, "logits: expected a vocabulary of at least 1, got ", logits.shape[2]);
  Expect("temperature", temperature).dtype(DType::kFloat32).shape({b}).contiguous().same_device(logits);
  Expect("seeds", seeds).dtype(DType::kInt64).shape({b}).contiguous().same_device(logits);
  Expect("positions", positions).dtype(DType::kInt32).shape({b, n}).contiguous().same_device(logits);
  Expect("tokens", tokens).dtype(DType::kInt32).shape({b, n}).contiguous().writable().same_device(logits);

  SampleTokensParams p{};
  p.batch_size = size_of_dimension("logits", b);
  p.max_nodes = size_of_dimension("logits", n);
  p.vocab_size = logits.shape[2];
  p.logits_dtype = logits.dtype;
  p.top_k_top_p = top_k_top_p;
  p.logits = logits.data;
  p.logits_strides[0] = logits.strides[0];
  p.logits_strides[1] = logits.strides[1];
  p.num_nodes = per_request<const int32_t>("num_nodes", num_nodes, DType::kInt32, b, logits);
  p.temperature = temperature.as<const float>();
  p.top_k = per_request<const int32_t>("top_k", top_k, DType::kInt32, b, logits);
  p.top_p = per_request<const float>("top_p", top_p, DType::kFloat32, b, logits);
  p.min_p = per_request<const float>("min_p", min_p, DType::kFloat32, b, logits);
  p.seeds = seeds.as<const int64_t>();
  p.positions = positions.as<const int32_t>();
  p.tokens = tokens.as<int32_t>();
  p.log_probs = per_node<float>("log_probs", log_probs, DType::kFloat32, b, n, logits);
  p.flags = per_node<int32_t>("flags", flags, DType::kInt32, b, n, logits);
  logits.device == DeviceType::kCPU ? cpu::sample_tokens(p) : cuda::sample_tokens(p, stream);
}

void gumbel_noise(TensorView seeds, TensorView positions, TensorView out, CUstream_st* stream) {
  Expect("seeds", seeds).dtype(DType::kInt64).rank(1).contiguous();
  const int64_t rows = seeds.shape[0];
  Expect("positions", positions).dtype(DType::kInt32).shape({rows}).contiguous().same_device(seeds);
  Expect("out", out).dtype(DType::kFloat32).shape({rows, -1}).contiguous().writable().same_device(seeds);

  GumbelNoiseParams p{};
  p.rows = rows;
  p.vocab_size = out.shape[1];
  p.seeds = seeds.as<const int64_t>();
  p.positions = positions.as<const int32_t>();
  p.out = out.as<float>();
  seeds.device == DeviceType::kCPU ? cpu::gumbel_noise(p) : cuda::gumbel_noise(p, stream);
}

}  // namespace eagle
