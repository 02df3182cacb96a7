// cpu::retrieve_indices through its CUDA kernel.
#include "eagle_cuda/tree.h"
#include "simt/emulator.h"

void eagle::cpu::retrieve_indices(const RetrieveIndicesParams& p) {
  validate(p);
  const int64_t batch = p.batch_size;
  simt::Memory memory("retrieve_indices", {
                                              simt::in("parents", p.parents, batch * p.max_nodes),
                                              simt::in("num_nodes", p.num_nodes, batch),
                                              simt::out("retrieve_indices", p.retrieve_indices,
                                                        batch * p.max_leaves * p.max_path),
                                              simt::out("num_leaves", p.num_leaves, batch),
                                          });
  cuda::retrieve_indices(p, nullptr);
  memory.finish();
}
