#pragma once
// Probabilities of a row as 64-bit integers, and uniforms that are tested against sums of them: exact, in any
// order, hence the same from every backend.
//
// A mass is the float's mantissa, shifted so that the largest of the row is below 2^(62 - bits of V): all
// masses of a row sum to less than 2^62, and a float loses nothing unless it is 2^(38 - bits of V) times
// smaller than the largest. What is no finite number of at least 0 has no mass.
#include <cstdint>

#include "common/numeric.h"
#include "common/philox.h"

namespace eagle {

__extension__ using uint128_t = unsigned __int128;

EAGLE_INLINE uint64_t multiply_high(uint64_t a, uint64_t b) { return uint64_t((uint128_t(a) * b) >> 64); }

EAGLE_INLINE bool is_probability(float p) {
  const uint32_t bits = float_bits(p);
  return bits < 0x7f800000u || bits == 0x80000000u;  // -0 is 0
}
// Ordered as the probabilities are.
EAGLE_INLINE uint32_t probability_bits(float p) {
  const uint32_t bits = float_bits(p);
  return bits < 0x7f800000u ? bits : 0;
}

struct MassScale {
  int32_t exponent;  // that of the largest probability
  int32_t shift;     // to the left, of the largest one's mantissa
};

EAGLE_INLINE int32_t exponent_of(uint32_t bits) {
  const int32_t field = int32_t(bits >> 23);
  return field > 0 ? field : 1;
}
EAGLE_INLINE MassScale mass_scale(uint32_t largest_bits, int64_t vocab_size) {
  int32_t width = 0;
  while (vocab_size >> width) ++width;
  return {exponent_of(largest_bits), 62 - width - 24};
}
EAGLE_INLINE uint64_t fixed_mass(float p, MassScale s) {
  const uint32_t bits = probability_bits(p);
  const uint64_t mantissa = (bits & 0x7fffffu) | (bits >> 23 ? 0x800000u : 0u);
  const int32_t left = s.shift - (s.exponent - exponent_of(bits));
  if (left >= 0) return mantissa << left;
  return left > -24 ? mantissa >> -left : 0;
}

// A part of a sum as a part of 2^62: of(x) = x * 2^62 / sum, rounded down, for x <= sum. By multiplication
// with floor((2^(64 + h) - 1) / sum), 2^h the highest bit of the sum. The sum: 1 to 2^63 - 1.
struct PartOf {
  uint64_t reciprocal;
  int32_t shift;

  EAGLE_INLINE uint64_t of(uint64_t x) const { return multiply_high(x << shift, reciprocal); }
};

EAGLE_INLINE PartOf part_of(uint64_t sum) {
  int32_t high = 0;
  for (uint64_t rest = sum >> 1; rest > 0; rest >>= 1) ++high;
  uint64_t remainder = (uint64_t{1} << high) - 1, quotient = 0;
  for (int bit = 0; bit < 64; ++bit) {  // long division: 128 by 64 bits is no instruction everywhere
    remainder = 2 * remainder + 1;
    const bool fits = remainder >= sum;
    remainder -= fits ? sum : 0;
    quotient = 2 * quotient + fits;
  }
  return {quotient, 62 - high};
}

// ---- uniforms, as multiples of 2^-64 -------------------------------------------------------------------

// u < mass / sum, exactly. Never for a mass of 0.
EAGLE_INLINE bool below(uint64_t u, uint64_t mass, uint64_t sum) { return multiply_high(u, sum) < mass; }

// Of a float in [0, 1), exact from 2^-40 up. Below 0 and NaN: 0; from 1 on: the largest float below 1.
EAGLE_INLINE uint64_t uniform_of(float coin) {
  const float u = coin > 0.0f ? (coin < 0.99999994f ? coin : 0.99999994f) : 0.0f;
  return uint64_t(u * 18446744073709551616.0f);
}
// Of a threshold from 0 to below 1.
EAGLE_INLINE uint64_t fixed_threshold(double threshold) {
  return uint64_t(threshold * 18446744073709551616.0);
}
// mass / sum >= threshold, exactly.
EAGLE_INLINE bool reaches(uint64_t mass, uint64_t sum, uint64_t threshold) {
  const uint128_t product = uint128_t(sum) * threshold;
  return mass >= uint64_t(product >> 64) + (uint64_t(product) != 0);
}
// Of our own noise: the streams of verify_rejection. They are not the stream of the target's choice, with
// which a coupled draft was made: proposal and test must be independent.
inline constexpr uint32_t kAcceptStream = 1, kResidualStream = 2;
EAGLE_INLINE uint64_t uniform_from_noise(uint64_t seed, uint32_t index, uint32_t position, uint32_t stream) {
  const Philox4 r = philox_4x32_10(seed, index, position, stream, 0);
  return uint64_t(r.lane[0]) << 32 | r.lane[1];
}

}  // namespace eagle
