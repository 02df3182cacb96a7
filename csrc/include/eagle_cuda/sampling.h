#pragma once
// sampling: the target's own token for every row of logits, a pure function of (logits, parameters, seed,
// position).
#include <cstdint>

#include "eagle_cuda/tensor_view.h"

namespace eagle {

enum class TopKTopP : uint8_t { kSequential, kJoint };

// Order: temperature, top-k, top-p, min-p, noise, argmax (NUMERICS.md, choosing a token). With z = l / T and
// w_i = uint64(exp(z_i - max z) * 2^32):
//   top-k: the k largest z, ties to the lower id. top_k <= 0 or >= V: off.
//   top-p: in order (z descending, id ascending), token i stays while the mass before it is <
//   floor(double(top_p) * total);
//          the first always stays. total is the sum of w over the top-k survivors (sequential) or over all
//          (joint). top_p >= 1: off.
//   min-p: exp(z_i - max z) >= min_p stays. min_p <= 0: off.
//   noise: argmax of z_i + g(seed, position, id) over the survivors, ties to the lower id.
// temperature < 1e-5 or NaN: argmax of l, nothing else is applied. NaN in top_p or min_p: off; min_p > 1
// counts as 1. NaN logits count as -inf. If no logit is above -inf, token 0 is returned and the row is
// flagged.
struct SampleTokensParams {
  int batch_size;      // B
  int max_nodes;       // N, rows of logits per request
  int64_t vocab_size;  // V
  DType logits_dtype;  // float32, bfloat16, float16
  TopKTopP top_k_top_p;

  const void* logits;  // [B, N, V]  strides batch, node; last dimension contiguous
  int64_t logits_strides[2];
  const int32_t* num_nodes;  // [B] or nullptr: all N; rows at and beyond: token 0, log-probability 0, flag 0
  const float* temperature;  // [B]
  const int32_t* top_k;      // [B] or nullptr
  const float* top_p;        // [B] or nullptr
  const float* min_p;        // [B] or nullptr
  const int64_t* seeds;      // [B]  bits of the 64-bit seed
  const int32_t* positions;  // [B, N]  absolute index of the token to be produced

  int32_t* tokens;   // [B, N]
  float* log_probs;  // [B, N]  log_softmax of the untouched logits at the token; may be nullptr
  int32_t* flags;    // [B, N]  1: no usable logit; may be nullptr
};

// g(seed, position, token) for token in [0, vocab_size): the noise itself, for tests and for other
// frameworks.
struct GumbelNoiseParams {
  int64_t rows, vocab_size;
  const int64_t* seeds;      // [rows]
  const int32_t* positions;  // [rows]
  float* out;                // [rows, V]
};

void validate(const SampleTokensParams& p);
void validate(const GumbelNoiseParams& p);

namespace cpu {
void sample_tokens(const SampleTokensParams& p);
void gumbel_noise(const GumbelNoiseParams& p);
}  // namespace cpu

namespace cuda {
void sample_tokens(const SampleTokensParams& p, CUstream_st* stream);
void gumbel_noise(const GumbelNoiseParams& p, CUstream_st* stream);
}  // namespace cuda

// Tensor forms. `num_nodes`, `top_k`, `top_p`, `min_p`, `log_probs`, `flags` may be absent.
void sample_tokens(TensorView logits, TensorView num_nodes, TensorView temperature, TensorView top_k,
                   TensorView top_p, TensorView min_p, TensorView seeds, TensorView positions,
                   TopKTopP top_k_top_p, TensorView tokens, TensorView log_probs, TensorView flags,
                   CUstream_st* stream);
void gumbel_noise(TensorView seeds, TensorView positions, TensorView out, CUstream_st* stream);

}  // namespace eagle
