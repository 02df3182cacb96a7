// The target's own token for every row of logits: argmax, or argmax of the noisy logits (Gumbel-max).
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/check.h"
#include "common/numeric.h"
#include "cpu/parallel.h"
#include "cpu/sampling/row_kernels.h"
#include "cpu/sampling/state.h"
#include "cpu/sampling/support.h"
#include "cpu/scratch.h"
#include "eagle_cuda/sampling.h"

namespace eagle::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kWorkGrain = 16384;  // logits that are worth waking a thread for

struct Settings {
  float temperature, top_p, min_p;
  int64_t top_k;
  uint64_t seed;
};

// Values that make no sense (negative, NaN) mean "off", as documented; written so that NaN takes that branch.
Settings settings(const SampleTokensParams& p, int64_t request) {
  Settings s{};
  const float temperature = p.temperature[request];
  s.temperature = temperature >= 1e-5f ? std::min(temperature, std::numeric_limits<float>::max()) : 0.0f;
  const int64_t top_k = p.top_k ? p.top_k[request] : 0;
  s.top_k = top_k > 0 && top_k < p.vocab_size ? top_k : 0;
  const float top_p = p.top_p ? p.top_p[request] : 1.0f;
  s.top_p = top_p < 1.0f ? top_p : 1.0f;
  const float min_p = p.min_p ? p.min_p[request] : 0.0f;
  s.min_p = min_p > 0.0f ? std::min(min_p, 1.0f) : 0.0f;
  s.seed = static_cast<uint64_t>(p.seeds[request]);
  return s;
}

// Logits of a request's row: its own, or in scratch memory with the state applied.
struct Logits {
  DType dtype;
  const void* data;
};

// The chosen token of a row whose largest logit is `top`, at temperature > 0.
int32_t sample_row(const SampleTokensParams& p, const Logits& l, const Settings& s, int32_t position,
                   ScoredToken top) {
  const float z_max = top.score / s.temperature + 0.0f;
  if (top.score == kInfinity || z_max == -kInfinity) return top.token;
  const RowKernels& kernels = row_kernels();
  const int64_t padded = padded_row(p.vocab_size);
  struct Row;
  float* const z = scratch<float, Row>(2 * padded);
  float* const e = z + padded;
  if (z_max ==
      kInfinity) {  // beats every noise; several finite logits may overflow together: the lowest token
    kernels.scale(l.dtype, l.data, p.vocab_size, s.temperature, 0.0f, z, e);
    return static_cast<int32_t>(std::find(z, z + p.vocab_size, z_max) - z);
  }
  kernels.scale(l.dtype, l.data, p.vocab_size, s.temperature, z_max, z, e);
  if (s.top_k > 0 || s.top_p < 1.0f || s.min_p > 0.0f) {
    Support support{-kInfinity, std::numeric_limits<int32_t>::max()};
    if (s.top_k > 0 || s.top_p < 1.0f)
      support = find_support(z, e, padded, z_max, s.top_k, s.top_p, p.top_k_top_p);
    kernels.keep(z, padded, support.z, support.token, s.min_p, e);
  }
  // Division may make neighbours equal, so that a lower token than `top.token` is the one that stays.
  int32_t first = top.token;
  if (e[first] == 0.0f) first = static_cast<int32_t>(std::find(z, z + first, z_max) - z);
  return kernels.noise_argmax(z, e, padded, s.seed, position, z_max, first);
}

float load(const Logits& l, int64_t i) {
  if (l.dtype == DType::kFloat32) return static_cast<const float*>(l.data)[i];
  if (l.dtype == DType::kBFloat16) return to_float(static_cast<const bf16_t*>(l.data)[i]);
  return to_float(static_cast<const half_t*>(l.data)[i]);
}

// log_softmax of a row at one of its logits; at most 0, and -inf where it is not a number.
struct LogSoftmax {
  float max, log_sum = 0.0f;

  LogSoftmax(const SampleTokensParams& p, const Logits& l, float max) : max(max) {
    if (std::isfinite(max)) log_sum = row_kernels().log_sum_exp(l.dtype, l.data, p.vocab_size, max);
  }
  float at(float logit) const {
    if (!std::isfinite(max)) return -kInfinity;
    const float value = (logit - max) - log_sum;
    return value <= 0.0f ? value : (value > 0.0f ? 0.0f : -kInfinity);
  }
};

// The n largest logits in order, ties to the lower token. Blocks without a large one are passed over.
void find_top(const SampleTokensParams& p, const Logits& l, ScoredToken* top) {
  constexpr int64_t kBlock = 8 * kRowBlock;
  const int n = p.num_top;
  int found = 0;
  for (int64_t begin = 0; begin < p.vocab_size; begin += kBlock) {
    const int64_t end = std::min(p.vocab_size, begin + kBlock);
    const char* const data = static_cast<const char*>(l.data) + begin * element_size(l.dtype);
    if (found == n && !(row_kernels().argmax(l.dtype, data, end - begin).score > top[n - 1].score)) continue;
    for (int64_t i = begin; i < end; ++i) {
      const float x = load(l, i), score = (x == x ? x : -kInfinity) + 0.0f;
      if (found == n && !(score > top[n - 1].score)) continue;
      int at = found < n ? found++ : n - 1;
      for (; at > 0 && top[at - 1].score < score; --at) top[at] = top[at - 1];
      top[at] = {score, static_cast<int32_t>(i)};
    }
  }
}

void store_top(const SampleTokensParams& p, int64_t row, const Logits& l, const LogSoftmax& log_softmax) {
  ScoredToken top[kMaxTop];
  find_top(p, l, top);
  for (int i = 0; i < p.num_top; ++i) {
    p.top_tokens[row * p.num_top + i] = top[i].token;
    p.top_log_probs[row * p.num_top + i] = log_softmax.at(top[i].score);
  }
}

void sample_one(const SampleTokensParams& p, int64_t row) {
  const int64_t request = row / p.max_nodes, node = row % p.max_nodes;
  if (p.num_nodes && node >= p.num_nodes[request]) {
    p.tokens[row] = 0;
    if (p.log_probs) p.log_probs[row] = 0.0f;
    if (p.flags) p.flags[row] = 0;
    std::fill_n(p.top_tokens + row * p.num_top, p.num_top, 0);
    std::fill_n(p.top_log_probs + row * p.num_top, p.num_top, 0.0f);
    return;
  }
  const int64_t offset = request * p.logits_strides[0] + node * p.logits_strides[1];
  const Logits untouched{p.logits_dtype,
                         static_cast<const char*>(p.logits) + offset * element_size(p.logits_dtype)};
  const bool with_state = has_state(p, request, node);
  const Logits l =
      with_state ? Logits{DType::kFloat32, apply_state(p, request, node, untouched.data)} : untouched;
  const Settings s = settings(p, request);
  const ScoredToken top = row_kernels().argmax(l.dtype, l.data, p.vocab_size);
  int32_t token = top.token;
  const bool usable = top.score > -kInfinity;
  if (!usable && with_state) token = lowest_allowed(p, request, node);
  if (usable && s.temperature > 0.0f) token = sample_row(p, l, s, p.positions[row], top);
  p.tokens[row] = token;
  if (p.flags) p.flags[row] = usable ? 0 : 1;
  if (!p.log_probs && p.num_top == 0) return;
  const float max =
      with_state ? row_kernels().argmax(untouched.dtype, untouched.data, p.vocab_size).score : top.score;
  const LogSoftmax log_softmax(p, untouched, max);
  if (p.log_probs) p.log_probs[row] = log_softmax.at(load(untouched, token));
  if (p.num_top > 0) store_top(p, row, untouched, log_softmax);
}

}  // namespace

void sample_tokens(const SampleTokensParams& p) {
  validate(p);
  const int64_t grain = std::max<int64_t>(1, kWorkGrain / p.vocab_size);
  parallel_for(int64_t{p.batch_size} * p.max_nodes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) sample_one(p, row);
  });
}

}  // namespace eagle::cpu
