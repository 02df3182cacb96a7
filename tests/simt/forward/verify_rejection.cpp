// cpu::verify_rejection through its CUDA kernel.
#include <algorithm>

#include "eagle_cuda/verify.h"
#include "simt/emulator.h"

namespace {

// Rows of nodes that exist, one by one while they are few and apart, so that a read beside a row is out of
// bounds; else what all of them span.
void add_rows(std::vector<simt::Region>& regions, const char* name, const float* probs,
              const int64_t (&strides)[2], const eagle::VerifyRejectionParams& p) {
  const int64_t rows = int64_t{p.batch_size} * p.max_nodes;
  const auto row = [&](int64_t b, int64_t n) { return probs + b * strides[0] + n * strides[1]; };
  const bool apart = (p.max_nodes == 1 || strides[1] >= p.vocab_size) &&
                     (p.batch_size == 1 || strides[0] >= p.max_nodes * strides[1]);
  if (!probs || rows == 0) return;
  if (rows <= 64 && apart) {
    for (int64_t b = 0; b < p.batch_size; ++b)
      for (int64_t n = 0; n < std::min(p.num_nodes[b], p.max_nodes); ++n)
        regions.push_back(simt::in(name, row(b, n), p.vocab_size));
  } else {
    const float *low = row(0, 0), *high = low;
    for (int64_t b : {0, p.batch_size - 1})
      for (int64_t n : {0, p.max_nodes - 1}) low = std::min(low, row(b, n)), high = std::max(high, row(b, n));
    regions.push_back(simt::in(name, low, high - low + p.vocab_size));
  }
}

}  // namespace

void eagle::cpu::verify_rejection(const VerifyRejectionParams& p) {
  const int64_t b = p.batch_size, nodes = b * p.max_nodes;
  std::vector<simt::Region> regions = {
      simt::in("tokens", p.tokens, nodes),
      simt::in("first_child", p.first_child, nodes),
      simt::in("next_sibling", p.next_sibling, nodes),
      simt::in("num_nodes", p.num_nodes, b),
      simt::in("coins", p.coins, nodes),
      simt::in("final_coins", p.final_coins, b),
      simt::in("seeds", p.seeds, b),
      simt::in("stop_tokens", p.stop_tokens, b * p.num_stop_tokens),
      simt::in("budget", p.budget, b),
      simt::out("path", p.path, b * p.max_path),
      simt::out("emitted", p.emitted, b * p.max_path),
      simt::out("num_accepted", p.num_accepted, b),
      simt::out("next_tokens", p.next_tokens, b),
      simt::out("finished", p.finished, b),
      simt::out("flags", p.flags, b),
  };
  add_rows(regions, "target_probs", p.target_probs, p.target_strides, p);
  add_rows(regions, "draft_probs", p.draft_probs, p.draft_strides, p);
  if (p.new_seq_lens == p.seq_lens) {
    regions.push_back(simt::inout("seq_lens", p.new_seq_lens, b));
  } else {
    regions.push_back(simt::in("seq_lens", p.seq_lens, b));
    regions.push_back(simt::out("new_seq_lens", p.new_seq_lens, b));
  }
  simt::Memory memory("verify_rejection", regions);
  cuda::verify_rejection(p, nullptr);
  memory.finish();
}
