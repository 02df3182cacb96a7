// cpu::build_tree through its CUDA kernel.
#include "eagle_cuda/tree.h"
#include "simt/emulator.h"

void eagle::cpu::build_tree(const BuildTreeParams& p) {
  validate(p);
  const int64_t candidates = int64_t{p.batch_size} * p.num_candidates;
  const int64_t nodes = int64_t{p.batch_size} * p.max_nodes;
  simt::Memory memory("build_tree", {
                                        simt::in("root_tokens", p.root_tokens, p.batch_size),
                                        simt::in("candidate_tokens", p.candidate_tokens, candidates),
                                        simt::in("candidate_scores", p.candidate_scores, candidates),
                                        simt::in("candidate_parents", p.candidate_parents, candidates),
                                        simt::in("node_limit", p.node_limit, p.batch_size),
                                        simt::out("tree.tokens", p.tree.tokens, nodes),
                                        simt::out("tree.parents", p.tree.parents, nodes),
                                        simt::out("tree.depths", p.tree.depths, nodes),
                                        simt::out("tree.mask", p.tree.mask, nodes * mask_words(p.max_nodes)),
                                        simt::out("tree.scores", p.tree.scores, nodes),
                                        simt::out("tree.num_nodes", p.tree.num_nodes, p.batch_size),
                                        simt::out("tree.first_child", p.tree.first_child, nodes),
                                        simt::out("tree.next_sibling", p.tree.next_sibling, nodes),
                                        simt::out("selected", p.selected, nodes),
                                    });
  cuda::build_tree(p, nullptr);
  memory.finish();
}
