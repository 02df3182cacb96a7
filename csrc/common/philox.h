#pragma once
// Counter-based noise: a pure function of (seed, position, token) (docs/bit_exactness.md).
// Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#include <cstdint>

#include "common/numeric.h"

namespace eagle {

struct Philox4 {
  uint32_t lane[4];
};

EAGLE_INLINE Philox4 philox_4x32_10(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

inline constexpr uint32_t kTargetStream = 0;  // third counter word: the stream of the target's choice

// The largest value gumbel() can take, rounded up.
inline constexpr float kMaxGumbel = 22.9f;

// min(fp32(r) 2^-32 + 2^-33, 1 - 2^-24): the finest steps lie near 0, where the winner is.
EAGLE_INLINE float uniform_from_bits(uint32_t r) {
  const uint32_t v = float_bits(fma(float(r), 2.3283064365386963e-10f, 1.1641532182693481e-10f));
  return bits_float(
      v < 0x3f7fffffu ? v : 0x3f7fffffu);  // as integers: a float comparison keeps loops from vectorising
}

// Standard Gumbel variate of 32 random bits, in [-2.82, 22.88]. Error below 1.5e-6.
EAGLE_INLINE float gumbel_from_bits(uint32_t r) { return -log_f32(-log1p_f32(-uniform_from_bits(r))); }

EAGLE_INLINE float gumbel(uint64_t seed, int32_t position, int32_t token) {
  const Philox4 r = philox_4x32_10(seed, uint32_t(token) >> 2, uint32_t(position), kTargetStream, 0);
  return gumbel_from_bits(r.lane[token & 3]);
}

}  // namespace eagle
