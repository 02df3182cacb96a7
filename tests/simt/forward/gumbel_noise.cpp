// cpu::gumbel_noise through its CUDA kernel.
#include "eagle_cuda/sampling.h"
#include "simt/emulator.h"

void eagle::cpu::gumbel_noise(const GumbelNoiseParams& p) {
  validate(p);
  simt::Memory memory("gumbel_noise", {
                                          simt::in("seeds", p.seeds, p.rows),
                                          simt::in("positions", p.positions, p.rows),
                                          simt::out("out", p.out, p.rows * p.vocab_size),
                                      });
  cuda::gumbel_noise(p, nullptr);
  memory.finish();
}
