// The target's own token for every row of logits: argmax, or argmax of the noisy logits (Gumbel-max).
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/check.h"
#include "common/numeric.h"
#include "cpu/parallel.h"
#include "cpu/sampling/row_kernels.h"
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

// The chosen token of a row whose largest logit is `top`, at temperature > 0.
int32_t sample_row(const SampleTokensParams& p, const void* logits, const Settings& s, int32_t position,
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
    kernels.scale(p.logits_dtype, logits, p.vocab_size, s.temperature, 0.0f, z, e);
    return static_cast<int32_t>(std::find(z, z + p.vocab_size, z_max) - z);
  }
  kernels.scale(p.logits_dtype, logits, p.vocab_size, s.temperature, z_max, z, e);
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

// log_softmax of the untouched logits at `token`; at most 0, and -inf where it is not a number.
float log_prob(const SampleTokensParams& p, const void* logits, float max, float logit) {
  if (!std::isfinite(max)) return -kInfinity;
  const float value = (logit - max) - row_kernels().log_sum_exp(p.logits_dtype, logits, p.vocab_size, max);
  return value <= 0.0f ? value : (value > 0.0f ? 0.0f : -kInfinity);
}

float load(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kBFloat16) return to_float(static_cast<const bf16_t*>(data)[i]);
  return to_float(static_cast<const half_t*>(data)[i]);
}

void sample_one(const SampleTokensParams& p, int64_t row) {
  const int64_t request = row / p.max_nodes, node = row % p.max_nodes;
  int32_t token = 0, flag = 0;
  float lp = 0.0f;
  if (!p.num_nodes || node < p.num_nodes[request]) {
    const int64_t offset = request * p.logits_strides[0] + node * p.logits_strides[1];
    const void* const logits = static_cast<const char*>(p.logits) + offset * element_size(p.logits_dtype);
    const Settings s = settings(p, request);
    const ScoredToken top = row_kernels().argmax(p.logits_dtype, logits, p.vocab_size);
    token = top.token;
    flag = top.score == -kInfinity;
    if (!flag && s.temperature > 0.0f) token = sample_row(p, logits, s, p.positions[row], top);
    if (p.log_probs) lp = log_prob(p, logits, top.score, load(p.logits_dtype, logits, token));
  }
  p.tokens[row] = token;
  if (p.log_probs) p.log_probs[row] = lp;
  if (p.flags) p.flags[row] = flag;
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
