// cpu::expand_tree through its CUDA kernel. Only what the level may touch is memory: the slices of this
// level, and of an absent request nothing that can be written.
#include "eagle_cuda/tree.h"
#include "simt/emulator.h"

void eagle::cpu::expand_tree(const ExpandTreeParams& p) {
  validate(p);
  const int64_t k = p.top_k, count = p.level == 1 ? k : k * k, total = num_candidates(k, p.levels);
  const int64_t first = p.level == 1 ? 0 : num_candidates(k, p.level - 1);
  const int64_t words = k * mask_words(p.levels * k);
  std::vector<simt::Region> regions = {
      simt::in("tokens", p.tokens, p.batch_size * count),
      simt::in("log_probs", p.log_probs, p.batch_size * count),
      simt::in("num_accepted", p.num_accepted, p.batch_size),
  };
  for (int64_t request = 0; request < p.batch_size; ++request) {
    const bool present = !p.num_accepted || p.num_accepted[request] >= 0;
    const simt::Access beam = !present      ? simt::Access::kIn
                              : p.level > 1 ? simt::Access::kInOut
                                            : simt::Access::kOut;
    regions.push_back(simt::bytes("beam_candidates", p.beam_candidates + request * k, k * 4, beam));
    regions.push_back(simt::bytes("beam_scores", p.beam_scores + request * k, k * 4, beam));
    regions.push_back(simt::bytes("beam_mask", p.beam_mask + request * words, words * 4, beam));
    if (!present) continue;
    const int64_t slice = request * total + first;
    regions.push_back(simt::out("candidate_tokens", p.candidate_tokens + slice, count));
    regions.push_back(simt::out("candidate_scores", p.candidate_scores + slice, count));
    regions.push_back(simt::out("candidate_parents", p.candidate_parents + slice, count));
    regions.push_back(simt::out("beam_tokens", p.beam_tokens + request * k, k));
    regions.push_back(simt::out("beam_rows", p.beam_rows + request * k, k));
  }
  simt::Memory memory("expand_tree", std::move(regions));
  cuda::expand_tree(p, nullptr);
  memory.finish();
}
