// The noise of the Gumbel-max choice by itself.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/sampling/row_kernels.h"
#include "eagle_cuda/sampling.h"

namespace eagle {

void cpu::gumbel_noise(const GumbelNoiseParams& p) {
  validate(p);
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(p.vocab_size, 1));
  parallel_for(p.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      row_kernels().gumbel(static_cast<uint64_t>(p.seeds[row]), p.positions[row], p.vocab_size,
                           p.out + row * p.vocab_size);
  });
}

}  // namespace eagle
