#pragma once
// Which tokens of a row survive top-k and top-p.
#include <cstdint>

#include "eagle_cuda/sampling.h"

namespace eagle::cpu {

// The first tokens in the order (z descending, token ascending): those above `z`, and those equal to it up to
// `token`.
struct Support {
  float z;
  int32_t token;
};

// `z`, `e`: a row as RowKernels::scale leaves it. top_k in [1, vocab) or 0 for off; top_p below 1, or 1 for
// off.
Support find_support(const float* z, const float* e, int64_t padded, float z_max, int64_t top_k, float top_p,
                     TopKTopP rule);

}  // namespace eagle::cpu
