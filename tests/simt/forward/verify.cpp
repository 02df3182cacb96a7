#include "eagle_cuda/verify.h"

#include "simt/emulator.h"

namespace eagle::cpu {

void verify(const VerifyParams& p) {
  const int64_t b = p.batch_size, nodes = b * p.max_nodes;
  const bool in_place = p.new_seq_lens == p.seq_lens;
  std::vector<simt::Region> regions = {
      simt::in("tokens", p.tokens, nodes),
      simt::in("first_child", p.first_child, nodes),
      simt::in("next_sibling", p.next_sibling, nodes),
      simt::in("num_nodes", p.num_nodes, b),
      simt::in("target_tokens", p.target_tokens, nodes),
      simt::in("stop_tokens", p.stop_tokens, b * p.num_stop_tokens),
      simt::in("budget", p.budget, b),
      simt::out("path", p.path, b * p.max_path),
      simt::out("num_accepted", p.num_accepted, b),
      simt::out("next_tokens", p.next_tokens, b),
      simt::out("finished", p.finished, b),
  };
  if (in_place) {
    regions.push_back(simt::inout("seq_lens", p.new_seq_lens, b));
  } else {
    regions.push_back(simt::in("seq_lens", p.seq_lens, b));
    regions.push_back(simt::out("new_seq_lens", p.new_seq_lens, b));
  }
  simt::Memory memory("verify", regions);
  cuda::verify(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
