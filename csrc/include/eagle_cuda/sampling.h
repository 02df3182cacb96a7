#pragma once
// sampling: the target's own token for every row of logits, a pure function of (logits, parameters, seed,
// position).
#include <cstdint>

#include "eagle_cuda/tensor_view.h"

namespace eagle {

enum class TopKTopP : uint8_t { kSequential, kJoint };

// What a request's constraints and its tokens so far do to its logits, before the temperature. Every array
// may be nullptr: off; counts that are absent are 0, negative ones count as 0. In this order, for a token x
// with the logit l:
//   bias: l += bias_values of every entry whose id is x, in the order of the list; ids outside [0, V) are
//     unused entries. A CUDA block goes through the list once for each of its entries: a mask is for many.
//   repetition penalty r: where x occurs in the prompt or the output, l = l > 0 ? l / r : l * r. 1, NaN, 0
//     and below: off.
//   frequency and presence penalty: where the output holds x, l -= frequency * its count, then l -= presence.
//     0, NaN: off.
//   min_new_tokens: a stop token is not allowed where positions < prompt_lens + min_new_tokens.
//   token_mask: x is allowed where bit x % 32 of word x / 32 is set (the layout of xgrammar).
// The output at a node is what output_counts holds, the tokens of the node's ancestors below the root, and
// the node's own. Ancestors are followed while 0 <= parent < node: a bad parent ends the walk. A token that
// is not allowed counts as -inf, and so does NaN. If no allowed token has a logit above -inf, the lowest
// allowed id is returned (0 if there is none) and the row is flagged.
struct SamplingState {
  int max_bias;         // M
  int num_stop_tokens;  // S

  const int32_t* prompt_counts;     // [B, V]
  const int32_t* output_counts;     // [B, V]  up to and with the root
  const float* repetition_penalty;  // [B]
  const float* presence_penalty;    // [B]
  const float* frequency_penalty;   // [B]
  const int32_t* bias_tokens;       // [B, M]  with bias_values
  const float* bias_values;         // [B, M]  may be infinite
  const int32_t* min_new_tokens;    // [B]  with prompt_lens and stop_tokens
  const int32_t* prompt_lens;       // [B]
  const int32_t* stop_tokens;       // [B, S]  -1 unused
  const int32_t* token_mask;        // [B, N, ceil(V/32)]  strides batch, node; last dimension contiguous
  int64_t token_mask_strides[2];    // 0 over the nodes: one mask for all of them
};

inline constexpr int kMaxTop = 32;

// Order: the state, temperature, top-k, top-p, min-p, noise, argmax. With z = l / T and
// w_i = uint64(exp(z_i - max z) * 2^32):
//   top-k: the k largest z, ties to the lower id. top_k <= 0 or >= V: off.
//   top-p: in order (z descending, id ascending), token i stays while the mass before it is <
//   floor(double(top_p) * total);
//          the first always stays. total is the sum of w over the top-k survivors (sequential) or over all
//          (joint). top_p >= 1: off.
//   min-p: exp(z_i - max z) >= min_p stays. min_p <= 0: off.
//   noise: argmax of z_i + g(seed, position, id) over the survivors, ties to the lower id.
// temperature < 1e-5 or NaN: argmax of l, nothing else is applied. NaN in top_p or min_p: off; min_p > 1
// counts as 1. NaN logits count as -inf. If no logit is above -inf, token 0 is returned (with a state: the
// lowest allowed one) and the row is flagged.
// Log-probabilities are of the untouched logits: log_softmax, its sum in one pass as common/exp_sum.h defines
// it; -inf where the largest logit is not finite.
struct SampleTokensParams {
  int batch_size;      // B
  int max_nodes;       // N, rows of logits per request
  int64_t vocab_size;  // V
  DType logits_dtype;  // float32, bfloat16, float16
  TopKTopP top_k_top_p;

  const void* logits;  // [B, N, V]  strides batch, node; last dimension contiguous
  int64_t logits_strides[2];
  const int32_t* num_nodes;  // [B] or nullptr: all N; rows at and beyond: token 0, log-probability 0, flag 0
                             // (and so the n best)
  const float* temperature;  // [B]
  const int32_t* top_k;      // [B] or nullptr
  const float* top_p;        // [B] or nullptr
  const float* min_p;        // [B] or nullptr
  const int64_t* seeds;      // [B]  bits of the 64-bit seed
  const int32_t* positions;  // [B, N]  absolute index of the token to be produced

  // The tree whose nodes the rows are: who a node's ancestors are. Penalties read it, and need it where N
  // > 1.
  const int32_t* tree_tokens;   // [B, N] or nullptr
  const int32_t* tree_parents;  // [B, N] or nullptr
  SamplingState state;

  int32_t* tokens;       // [B, N]
  float* log_probs;      // [B, N]  of the token; may be nullptr
  int32_t* flags;        // [B, N]  1: no usable logit; may be nullptr
  int num_top;           // n, at most kMaxTop and V; 0: off
  int32_t* top_tokens;   // [B, N, n]  the largest untouched logits, ties to the lower id
  float* top_log_probs;  // [B, N, n]
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

// Tensor forms. `num_nodes`, `top_k`, `top_p`, `min_p`, the tree, every view of the state, `log_probs`,
// `flags` and the n best may be absent; n is the last dimension of `top_tokens`.
struct SamplingStateViews {
  TensorView prompt_counts, output_counts, repetition_penalty, presence_penalty, frequency_penalty;
  TensorView bias_tokens, bias_values, min_new_tokens, prompt_lens, stop_tokens, token_mask;
};
void sample_tokens(TensorView logits, TensorView num_nodes, TensorView temperature, TensorView top_k,
                   TensorView top_p, TensorView min_p, TensorView seeds, TensorView positions,
                   TopKTopP top_k_top_p, TensorView tree_tokens, TensorView tree_parents,
                   const SamplingStateViews& state, TensorView tokens, TensorView log_probs, TensorView flags,
                   TensorView top_tokens, TensorView top_log_probs, CUstream_st* stream);
void gumbel_noise(TensorView seeds, TensorView positions, TensorView out, CUstream_st* stream);

}  // namespace eagle
