// The noise of the Gumbel-max choice by itself.
//
// grid: [ceil(rows * ceil(V / 4) / kThreads)]     a thread makes the four values that one Philox block holds
#include "cuda/launch.h"

#include "common/check.h"
#include "common/philox.h"
#include "cuda/device/ptx.cuh"
#include "eagle_cuda/sampling.h"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 256;

// registers: <= 32
__global__ void __launch_bounds__(kThreads) gumbel_noise_kernel(const GumbelNoiseParams p) {
  const int64_t groups = (p.vocab_size + 3) / 4;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = at / groups, group = at % groups;
  if (row >= p.rows) return;
  const auto seed = static_cast<uint64_t>(load_read_only(p.seeds + row));
  const auto position = static_cast<uint32_t>(load_read_only(p.positions + row));
  const Philox4 x = philox_4x32_10(seed, static_cast<uint32_t>(group), position, kTargetStream, 0);
  float* const out = p.out + row * p.vocab_size;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (group * 4 + i < p.vocab_size) store(out + group * 4 + i, gumbel_from_bits(x.lane[i]));
}

}  // namespace

void gumbel_noise(const GumbelNoiseParams& p, CUstream_st* stream) {
  validate(p);
  const int64_t blocks = ceil_div(p.rows * ((p.vocab_size + 3) / 4), int64_t{kThreads});
  check(blocks <= 0x7fffffff, "out: expected fewer than 2^41 values, got ", p.rows, " rows of ",
        p.vocab_size);
  launch(gumbel_noise_kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream, 0}, p);
}

}  // namespace eagle::cuda
