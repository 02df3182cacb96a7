#pragma once
// Scores as integers that sort alike.
#include <limits>

#include "common/numeric.h"

namespace eagle::cuda {

inline constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Larger scores have larger keys, 0 and -0 the same one; not for NaN. Never 0.
__device__ __forceinline__ uint32_t score_key(float score) {
  const uint32_t bits = float_bits(score + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace eagle::cuda
