#include "cpu/sampling/state.h"

#include <algorithm>
#include <limits>

#include "common/penalties.h"
#include "cpu/sampling/row_kernels.h"
#include "cpu/scratch.h"

namespace eagle::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Penalties penalties(const SampleTokensParams& p, int64_t request) {
  const SamplingState& s = p.state;
  return usable_penalties(s.repetition_penalty ? s.repetition_penalty[request] : 1.0f,
                          s.frequency_penalty ? s.frequency_penalty[request] : 0.0f,
                          s.presence_penalty ? s.presence_penalty[request] : 0.0f);
}

bool exists(const SampleTokensParams& p, int64_t token) { return token >= 0 && token < p.vocab_size; }

// f of every bias entry that names a token.
template <class F>
void for_each_bias(const SampleTokensParams& p, int64_t request, F&& f) {
  if (!p.state.bias_tokens) return;
  for (int64_t i = request * p.state.max_bias; i < (request + 1) * p.state.max_bias; ++i)
    if (exists(p, p.state.bias_tokens[i])) f(p.state.bias_tokens[i], p.state.bias_values[i]);
}

// f of the tokens that the output holds at the node, beyond what output_counts knows.
template <class F>
void for_each_ancestor(const SampleTokensParams& p, int64_t request, int64_t node, F&& f) {
  if (!p.tree_tokens || !p.tree_parents) return;
  const int32_t* const tokens = p.tree_tokens + request * p.max_nodes;
  const int32_t* const parents = p.tree_parents + request * p.max_nodes;
  while (node > 0) {
    if (exists(p, tokens[node])) f(tokens[node]);
    const int64_t parent = parents[node];
    if (parent < 0 || parent >= node) return;
    node = parent;
  }
}

bool stop_is_early(const SampleTokensParams& p, int64_t request, int64_t node) {
  const SamplingState& s = p.state;
  if (!s.stop_tokens || !s.min_new_tokens) return false;
  return p.positions[request * p.max_nodes + node] <
         int64_t{s.prompt_lens[request]} + s.min_new_tokens[request];
}

// f of every stop token, where none is allowed.
template <class F>
void for_each_early_stop(const SampleTokensParams& p, int64_t request, int64_t node, F&& f) {
  if (!stop_is_early(p, request, node)) return;
  const int64_t count = p.state.num_stop_tokens;
  for (int64_t i = request * count; i < (request + 1) * count; ++i)
    if (exists(p, p.state.stop_tokens[i])) f(p.state.stop_tokens[i]);
}

const int32_t* mask_of(const SampleTokensParams& p, int64_t request, int64_t node) {
  const SamplingState& s = p.state;
  return s.token_mask ? s.token_mask + request * s.token_mask_strides[0] + node * s.token_mask_strides[1]
                      : nullptr;
}

// A token that an ancestor of the node adds to the output.
struct Ancestor {
  int32_t token;
  float logit;  // bias included
};

void apply_penalties(const SampleTokensParams& p, int64_t request, int64_t node, float* row) {
  const Penalties penalty = penalties(p, request);
  if (off(penalty)) return;
  const int32_t* const prompt =
      p.state.prompt_counts ? p.state.prompt_counts + request * p.vocab_size : nullptr;
  const int32_t* const output =
      p.state.output_counts ? p.state.output_counts + request * p.vocab_size : nullptr;
  struct Ancestors;
  Ancestor* const ancestors = scratch<Ancestor, Ancestors>(p.max_nodes);
  int64_t count = 0;
  for_each_ancestor(p, request, node, [&](int32_t token) { ancestors[count++] = {token, row[token]}; });

  row_kernels().penalise(row, p.vocab_size, penalty, prompt, output);
  for (int64_t i = 0; i < count; ++i) {
    const auto [token, logit] = ancestors[i];
    const auto in_tree = std::count_if(ancestors, ancestors + count,
                                       [&](const Ancestor& other) { return other.token == token; });
    row[token] = penalised(logit, penalty, prompt ? usable_count(prompt[token]) : 0,
                           (output ? usable_count(output[token]) : 0) + static_cast<uint32_t>(in_tree));
  }
}

}  // namespace

bool has_state(const SampleTokensParams& p, int64_t request, int64_t node) {
  return p.state.token_mask || p.state.bias_tokens || !off(penalties(p, request)) ||
         stop_is_early(p, request, node);
}

const float* apply_state(const SampleTokensParams& p, int64_t request, int64_t node, const void* logits) {
  struct Adjusted;
  float* const row = scratch<float, Adjusted>(padded_row(p.vocab_size));
  row_kernels().widen(p.logits_dtype, logits, p.vocab_size, row);
  for_each_bias(p, request, [&](int32_t token, float value) { row[token] += value; });
  apply_penalties(p, request, node, row);
  for_each_early_stop(p, request, node, [&](int32_t token) { row[token] = -kInfinity; });
  if (const int32_t* const mask = mask_of(p, request, node)) row_kernels().mask(row, p.vocab_size, mask);
  return row;
}

int32_t lowest_allowed(const SampleTokensParams& p, int64_t request, int64_t node) {
  const int32_t* const mask = mask_of(p, request, node);
  for (int64_t token = 0; token < p.vocab_size; ++token) {
    bool allowed = !mask || static_cast<uint32_t>(mask[token / 32]) >> token % 32 & 1;
    for_each_early_stop(p, request, node, [&](int32_t stop) { allowed = allowed && stop != token; });
    if (allowed) return static_cast<int32_t>(token);
  }
  return 0;
}

}  // namespace eagle::cpu
