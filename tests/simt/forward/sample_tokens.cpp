// cpu::sample_tokens through its CUDA kernel.
#include <algorithm>

#include "common/check.h"
#include "eagle_cuda/sampling.h"
#include "simt/emulator.h"

namespace {

// Rows that exist, one by one while they are few and apart, so that a read beside a row is out of bounds;
// else what all of them span.
void add_logits(std::vector<simt::Region>& regions, const eagle::SampleTokensParams& p) {
  const int64_t size = eagle::element_size(p.logits_dtype), rows = int64_t{p.batch_size} * p.max_nodes;
  const auto row = [&](int64_t b, int64_t n) {
    return static_cast<const char*>(p.logits) + (b * p.logits_strides[0] + n * p.logits_strides[1]) * size;
  };
  const bool apart = (p.max_nodes == 1 || p.logits_strides[1] >= p.vocab_size) &&
                     (p.batch_size == 1 || p.logits_strides[0] >= p.max_nodes * p.logits_strides[1]);
  if (rows <= 64 && apart) {
    for (int64_t b = 0; b < p.batch_size; ++b)
      for (int64_t n = 0; n < p.max_nodes; ++n)
        if (!p.num_nodes || n < p.num_nodes[b])
          regions.push_back(simt::bytes("logits", row(b, n), p.vocab_size * size, simt::Access::kIn));
  } else if (rows > 0) {
    const char *low = row(0, 0), *high = low;
    for (int64_t b : {0, p.batch_size - 1})
      for (int64_t n : {0, p.max_nodes - 1}) low = std::min(low, row(b, n)), high = std::max(high, row(b, n));
    regions.push_back(simt::bytes("logits", low, high - low + p.vocab_size * size, simt::Access::kIn));
  }
}

// All that the masks of the nodes span: several nodes may share one.
void add_masks(std::vector<simt::Region>& regions, const eagle::SampleTokensParams& p) {
  if (!p.state.token_mask || p.batch_size == 0 || p.max_nodes == 0) return;
  const int64_t *strides = p.state.token_mask_strides, words = (p.vocab_size + 31) / 32;
  const int64_t last = (p.batch_size - 1) * strides[0] + (p.max_nodes - 1) * strides[1];
  regions.push_back(simt::in("token_mask", p.state.token_mask, last + words));
}

}  // namespace

void eagle::cpu::sample_tokens(const SampleTokensParams& p) {
  validate(p);
  const int64_t b = p.batch_size, nodes = b * p.max_nodes;
  std::vector<simt::Region> regions = {
      simt::in("num_nodes", p.num_nodes, b),
      simt::in("temperature", p.temperature, b),
      simt::in("top_k", p.top_k, b),
      simt::in("top_p", p.top_p, b),
      simt::in("min_p", p.min_p, b),
      simt::in("seeds", p.seeds, b),
      simt::in("positions", p.positions, nodes),
      simt::in("tree.tokens", p.tree_tokens, nodes),
      simt::in("tree.parents", p.tree_parents, nodes),
      simt::in("prompt_counts", p.state.prompt_counts, b * p.vocab_size),
      simt::in("output_counts", p.state.output_counts, b * p.vocab_size),
      simt::in("repetition_penalty", p.state.repetition_penalty, b),
      simt::in("presence_penalty", p.state.presence_penalty, b),
      simt::in("frequency_penalty", p.state.frequency_penalty, b),
      simt::in("bias_tokens", p.state.bias_tokens, b * p.state.max_bias),
      simt::in("bias_values", p.state.bias_values, b * p.state.max_bias),
      simt::in("min_new_tokens", p.state.min_new_tokens, b),
      simt::in("prompt_lens", p.state.prompt_lens, b),
      simt::in("stop_tokens", p.state.stop_tokens, b * p.state.num_stop_tokens),
      simt::out("tokens", p.tokens, nodes),
      simt::out("log_probs", p.log_probs, nodes),
      simt::out("flags", p.flags, nodes),
      simt::out("top_tokens", p.top_tokens, nodes * p.num_top),
      simt::out("top_log_probs", p.top_log_probs, nodes * p.num_top),
  };
  add_logits(regions, p);
  add_masks(regions, p);
  simt::Memory memory("sample_tokens", regions);
  cuda::sample_tokens(p, nullptr);
  memory.finish();
}
