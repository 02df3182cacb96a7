#pragma once
// The vector loops of sampling over one row of logits, one table of them per instruction set. All tables give
// the same bits.
#include <cstdint>

#include "common/penalties.h"
#include "eagle_cuda/tensor_view.h"

namespace eagle::cpu {

// Rows in scratch memory are padded to whole blocks.
inline constexpr int64_t kRowBlock = 64;
inline constexpr int64_t padded_row(int64_t n) { return (n + kRowBlock - 1) / kRowBlock * kRowBlock; }

struct ScoredToken {
  float score;
  int32_t token;
};

struct RowKernels {
  // Largest logit and the lowest token that has it; NaN counts as -inf. No logit above -inf: {-inf, 0}.
  ScoredToken (*argmax)(DType dtype, const void* logits, int64_t n);

  // log of the sum over the row of exp(logit - max) as common/exp_sum.h defines it, NaN logits counting as
  // -inf. `max`, the largest logit, is finite.
  float (*log_sum_exp)(DType dtype, const void* logits, int64_t n, float max);

  // z = logits / temperature with NaN as -inf and -0 as 0; e = exp(z - z_max), z_max finite. Padding: z -inf,
  // e 0.
  void (*scale)(DType dtype, const void* logits, int64_t n, float temperature, float z_max, float* z,
                float* e);

  // Largest z of every block.
  void (*block_max)(const float* z, int64_t padded, float* out);

  // Sum of uint64(e 2^32).
  uint64_t (*mass)(const float* e, int64_t padded);

  // e = 0 unless z > z_limit or z == z_limit with a token up to `token_limit`, and e >= min_p.
  void (*keep)(const float* z, int64_t padded, float z_limit, int32_t token_limit, float min_p, float* e);

  // argmax of z + g(seed, position, token) over the tokens with e > 0, ties to the lower token. `z_max`: the
  // largest z; `max_token`: one of these tokens that has it.
  int32_t (*noise_argmax)(const float* z, const float* e, int64_t padded, uint64_t seed, int32_t position,
                          float z_max, int32_t max_token);

  // The logits as float32.
  void (*widen)(DType dtype, const void* logits, int64_t n, float* out);

  // penalised() of every element in place; counts may be nullptr.
  void (*penalise)(float* row, int64_t n, const Penalties& penalties, const int32_t* prompt_counts,
                   const int32_t* output_counts);

  // -inf where bit i % 32 of word i / 32 is not set.
  void (*mask)(float* row, int64_t n, const int32_t* words);

  // g(seed, position, token) for token in [0, n).
  void (*gumbel)(uint64_t seed, int32_t position, int64_t n, float* out);
};

extern const RowKernels kRowKernelsGeneric, kRowKernelsAvx2, kRowKernelsAvx512;

const RowKernels& row_kernels();

}  // namespace eagle::cpu
