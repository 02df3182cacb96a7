#pragma once
// What a request's state makes of a row of logits.
#include <cstdint>

#include "eagle_cuda/sampling.h"

namespace eagle::cpu {

// Whether the state of the row's request can change anything; costs nothing of the row.
bool has_state(const SampleTokensParams& p, int64_t request, int64_t node);

// The row with the state applied, in scratch memory of this thread: what is not allowed is -inf.
const float* apply_state(const SampleTokensParams& p, int64_t request, int64_t node, const void* logits);

// 0 if there is none.
int32_t lowest_allowed(const SampleTokensParams& p, int64_t request, int64_t node);

}  // namespace eagle::cpu
