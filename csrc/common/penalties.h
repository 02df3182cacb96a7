#pragma once
// What repetition, frequency and presence penalties do to one logit (sampling.h, SamplingState): the same
// arithmetic for every backend.
#include <cstdint>

#include "common/numeric.h"

namespace eagle {

struct Penalties {
  float repetition, frequency, presence;  // 1, 0, 0: off
};

// Values that make no sense mean "off"; written so that NaN takes that branch.
EAGLE_INLINE Penalties usable_penalties(float repetition, float frequency, float presence) {
  return {repetition > 0.0f ? repetition : 1.0f, frequency == frequency ? frequency : 0.0f,
          presence == presence ? presence : 0.0f};
}

EAGLE_INLINE bool off(const Penalties& p) {
  return p.repetition == 1.0f && p.frequency == 0.0f && p.presence == 0.0f;
}

// `in_prompt`, `in_output`: how often the prompt and the output hold the token.
EAGLE_INLINE float penalised(float logit, const Penalties& p, uint32_t in_prompt, uint32_t in_output) {
  const float repeated = logit > 0.0f ? logit / p.repetition : logit * p.repetition;
  const float l = (in_prompt | in_output) > 0 ? repeated : logit;
  const float less = l - p.frequency * static_cast<float>(in_output) - p.presence;
  return in_output > 0 ? less : l;
}

EAGLE_INLINE uint32_t usable_count(int32_t count) { return static_cast<uint32_t>(count > 0 ? count : 0); }

}  // namespace eagle
