#include "eagle_cuda/sampling.h"

#include <algorithm>
#include <limits>

#include "common/check.h"
#include "eagle_cuda/device.h"
#include "eagle_cuda/tree.h"

namespace eagle {
namespace {

const DType kLogitTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// An input of `shape`, or absent. One without elements says nothing: nullptr, whatever its framework points
// to.
template <class T>
const T* optional(const char* what, const TensorView& t, DType dtype, std::initializer_list<int64_t> shape,
                  const TensorView& device) {
  if (!t.present()) return nullptr;
  Expect(what, t).dtype(dtype).shape(shape).contiguous().same_device(device);
  return std::find(t.shape, t.shape + t.ndim, 0) == t.shape + t.ndim ? t.as<T>() : nullptr;
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

// Two arguments that mean something only together.
void check_together(const char* one, const TensorView& a, const char* other, const TensorView& b) {
  check(a.present() || !b.present(), one, ": expected a tensor with ", other, ", got None");
  check(b.present() || !a.present(), other, ": expected a tensor with ", one, ", got None");
}

SamplingState checked_state(const SamplingStateViews& v, const TensorView& logits) {
  const int64_t b = logits.shape[0], n = logits.shape[1], vocab = logits.shape[2];
  const auto integers = [&](const char* what, const TensorView& t, std::initializer_list<int64_t> shape) {
    return optional<int32_t>(what, t, DType::kInt32, shape, logits);
  };
  const auto floats = [&](const char* what, const TensorView& t, std::initializer_list<int64_t> shape) {
    return optional<float>(what, t, DType::kFloat32, shape, logits);
  };
  SamplingState s{};
  s.prompt_counts = integers("state.prompt_counts", v.prompt_counts, {b, vocab});
  s.output_counts = integers("state.output_counts", v.output_counts, {b, vocab});
  s.repetition_penalty = floats("state.repetition_penalty", v.repetition_penalty, {b});
  s.presence_penalty = floats("state.presence_penalty", v.presence_penalty, {b});
  s.frequency_penalty = floats("state.frequency_penalty", v.frequency_penalty, {b});

  check_together("state.bias_tokens", v.bias_tokens, "state.bias_values", v.bias_values);
  s.bias_tokens = integers("state.bias_tokens", v.bias_tokens, {b, -1});
  if (v.bias_tokens.present()) s.max_bias = size_of_dimension("state.bias_tokens", v.bias_tokens.shape[1]);
  s.bias_values = floats("state.bias_values", v.bias_values, {b, s.max_bias});

  check_together("state.min_new_tokens", v.min_new_tokens, "state.prompt_lens", v.prompt_lens);
  check_together("state.min_new_tokens", v.min_new_tokens, "state.stop_tokens", v.stop_tokens);
  s.min_new_tokens = integers("state.min_new_tokens", v.min_new_tokens, {b});
  s.prompt_lens = integers("state.prompt_lens", v.prompt_lens, {b});
  s.stop_tokens = integers("state.stop_tokens", v.stop_tokens, {b, -1});
  if (v.stop_tokens.present())
    s.num_stop_tokens = size_of_dimension("state.stop_tokens", v.stop_tokens.shape[1]);
  if (v.token_mask.present()) {
    const TensorView& mask = v.token_mask;
    Expect("state.token_mask", mask)
        .dtype(DType::kInt32)
        .shape({b, n, (vocab + 31) / 32})
        .last_dim_contiguous()
        .same_device(logits);
    if (b > 0 && n > 0) s.token_mask = mask.as<int32_t>();
    s.token_mask_strides[0] = mask.strides[0];
    s.token_mask_strides[1] = mask.strides[1];
  }
  return s;
}

// The n best: their tokens say how many.
void set_top(SampleTokensParams& p, const TensorView& tokens, const TensorView& log_probs,
             const TensorView& device) {
  check_together("top_tokens", tokens, "top_log_probs", log_probs);
  if (!tokens.present()) return;
  const int64_t b = p.batch_size, n = p.max_nodes;
  Expect("top_tokens", tokens)
      .dtype(DType::kInt32)
      .shape({b, n, -1})
      .contiguous()
      .writable()
      .same_device(device);
  const int64_t most = std::min<int64_t>(kMaxTop, p.vocab_size);
  check(tokens.shape[2] <= most, "top_tokens: expected a last dimension of at most ", most, ", got ",
        tokens.shape[2]);
  Expect("top_log_probs", log_probs)
      .dtype(DType::kFloat32)
      .shape({b, n, tokens.shape[2]})
      .contiguous()
      .writable()
      .same_device(device);
  p.num_top = static_cast<int>(tokens.shape[2]);
  p.top_tokens = tokens.as<int32_t>();
  p.top_log_probs = log_probs.as<float>();
}

// Two arrays of the state that mean something only together.
void check_both(const char* one, const void* a, const char* other, const void* b) {
  check((a == nullptr) == (b == nullptr), "state.", a ? other : one, ": expected an array with state.",
        a ? one : other, ", got nullptr");
}

void validate_state(const SampleTokensParams& p) {
  const SamplingState& s = p.state;
  check(s.max_bias >= 0, "state.max_bias: expected at least 0, got ", s.max_bias);
  check(s.num_stop_tokens >= 0, "state.num_stop_tokens: expected at least 0, got ", s.num_stop_tokens);
  check_both("bias_tokens", s.bias_tokens, "bias_values", s.bias_values);
  if (s.num_stop_tokens > 0) {
    check_both("min_new_tokens", s.min_new_tokens, "prompt_lens", s.prompt_lens);
    check_both("min_new_tokens", s.min_new_tokens, "stop_tokens", s.stop_tokens);
  }
  const std::pair<const char*, const float*> penalties[] = {{"repetition_penalty", s.repetition_penalty},
                                                            {"presence_penalty", s.presence_penalty},
                                                            {"frequency_penalty", s.frequency_penalty}};
  for (const auto& [name, values] : penalties) {
    check(!values || p.max_nodes <= kMaxTreeNodes, "state.", name, ": expected at most ", kMaxTreeNodes,
          " nodes per request, got ", p.max_nodes);
    check(!values || p.max_nodes <= 1 || (p.tree_tokens && p.tree_parents), "tree: expected one with state.",
          name, " over ", p.max_nodes, " nodes per request, got None");
  }
  check(p.num_top >= 0 && p.num_top <= std::min<int64_t>(kMaxTop, p.vocab_size), "num_top: expected 0 to ",
        std::min<int64_t>(kMaxTop, p.vocab_size), ", got ", p.num_top);
  check(p.num_top == 0 || (p.top_tokens && p.top_log_probs) || p.batch_size == 0 || p.max_nodes == 0,
        "top_tokens, top_log_probs: expected arrays with num_top = ", p.num_top, ", got nullptr");
}

}  // namespace

void validate(const SampleTokensParams& p) {
  check(p.batch_size >= 0, "batch_size: expected at least 0, got ", p.batch_size);
  check(p.max_nodes >= 0, "max_nodes: expected at least 0, got ", p.max_nodes);
  check(p.vocab_size >= 1 && p.vocab_size <= std::numeric_limits<int32_t>::max() - 64,
        "vocab_size: expected 1 to 2^31 - 65, got ", p.vocab_size);
  check(p.logits_dtype == DType::kFloat32 || p.logits_dtype == DType::kBFloat16 ||
            p.logits_dtype == DType::kFloat16,
        "logits: expected a dtype of float32, bfloat16, float16, got ", name(p.logits_dtype));
  validate_state(p);
}

void validate(const GumbelNoiseParams& p) {
  check(p.rows >= 0, "rows: expected at least 0, got ", p.rows);
  check(p.vocab_size >= 0 && p.vocab_size <= std::numeric_limits<int32_t>::max() - 64,
        "vocab_size: expected 0 to 2^31 - 65, got ", p.vocab_size);
}

void sample_tokens(TensorView logits, TensorView num_nodes, TensorView temperature, TensorView top_k,
                   TensorView top_p, TensorView min_p, TensorView seeds, TensorView positions,
                   TopKTopP top_k_top_p, TensorView tree_tokens, TensorView tree_parents,
                   const SamplingStateViews& state, TensorView tokens, TensorView log_probs, TensorView flags,
                   TensorView top_tokens, TensorView top_log_probs, CUstream_st* stream) {
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
  p.num_nodes = optional<int32_t>("num_nodes", num_nodes, DType::kInt32, {b}, logits);
  p.temperature = temperature.as<const float>();
  p.top_k = optional<int32_t>("top_k", top_k, DType::kInt32, {b}, logits);
  p.top_p = optional<float>("top_p", top_p, DType::kFloat32, {b}, logits);
  p.min_p = optional<float>("min_p", min_p, DType::kFloat32, {b}, logits);
  p.seeds = seeds.as<const int64_t>();
  p.positions = positions.as<const int32_t>();
  check_together("tree.tokens", tree_tokens, "tree.parents", tree_parents);
  p.tree_tokens = optional<int32_t>("tree.tokens", tree_tokens, DType::kInt32, {b, n}, logits);
  p.tree_parents = optional<int32_t>("tree.parents", tree_parents, DType::kInt32, {b, n}, logits);
  p.state = checked_state(state, logits);
  p.tokens = tokens.as<int32_t>();
  p.log_probs = per_node<float>("log_probs", log_probs, DType::kFloat32, b, n, logits);
  p.flags = per_node<int32_t>("flags", flags, DType::kInt32, b, n, logits);
  set_top(p, top_tokens, top_log_probs, logits);
  check_disjoint({{"tokens", tokens},
                  {"log_probs", log_probs},
                  {"flags", flags},
                  {"top_tokens", top_tokens},
                  {"top_log_probs", top_log_probs}});
  const DeviceGuard guard(logits);
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
  const DeviceGuard guard(seeds);
  seeds.device == DeviceType::kCPU ? cpu::gumbel_noise(p) : cuda::gumbel_noise(p, stream);
}

}  // namespace eagle
