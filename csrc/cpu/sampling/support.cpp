#include "cpu/sampling/support.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "common/numeric.h"
#include "cpu/sampling/row_kernels.h"
#include "cpu/scratch.h"

namespace eagle::cpu {
namespace {

struct Candidate {
  float z;
  int32_t token;
  uint64_t mass;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr Support kEverything{-kInfinity, std::numeric_limits<int32_t>::max()};

// Order-preserving: larger floats have larger keys. NaN and -0 do not occur.
uint32_t key(float z) {
  const uint32_t bits = float_bits(z);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The Support of those tokens before which less than `target` of `weight` stands; at least the first. Radix
// selection, most significant byte first: linear in `n`. `c` is in ascending token order and is permuted.
template <class Weight>
Support select(Candidate* c, int64_t n, uint64_t target, Weight weight) {
  uint64_t before = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint64_t bucket[256] = {};
    for (int64_t i = 0; i < n; ++i) bucket[(key(c[i].z) >> shift) & 255u] += weight(c[i]);
    uint32_t b = 255;
    while (b > 0 && before + bucket[b] < target) before += bucket[b--];
    n = std::stable_partition(c, c + n,
                              [&](const Candidate& x) { return ((key(x.z) >> shift) & 255u) == b; }) -
        c;
  }
  int64_t last = 0;
  for (int64_t i = 0; i < n && before < target; ++i) {
    before += weight(c[i]);
    last = i;
  }
  return {c[last].z, c[last].token};
}

bool inside(const Support& s, const Candidate& c) { return c.z > s.z || (c.z == s.z && c.token <= s.token); }

// The shorter of two prefixes of the same order.
Support shorter(const Support& a, const Support& b) {
  if (a.z != b.z) return a.z > b.z ? a : b;
  return a.token < b.token ? a : b;
}

// Tokens with z >= limit in ascending order; only blocks that hold one are read.
int64_t collect(const float* z, const float* e, const float* block_max, int64_t padded, float limit,
                Candidate* out) {
  int64_t n = 0;
  for (int64_t block = 0; block < padded; block += kRowBlock) {
    if (block_max[block / kRowBlock] < limit) continue;
    for (int64_t i = block; i < block + kRowBlock; ++i) {
      out[n] = {z[i], int32_t(i), uint64_t(int64_t(e[i] * 4294967296.0f))};
      n += z[i] >= limit;
    }
  }
  return n;
}

uint64_t total_mass(const Candidate* c, int64_t n) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += c[i].mass;
  return total;
}

}  // namespace

Support find_support(const float* z, const float* e, int64_t padded, float z_max, int64_t top_k, float top_p,
                     TopKTopP rule) {
  const int64_t blocks = padded / kRowBlock;
  struct BlockMaxima;
  struct Candidates;
  float* const block_max = scratch<float, BlockMaxima>(2 * blocks);
  Candidate* const candidates = scratch<Candidate, Candidates>(padded + 1);
  row_kernels().block_max(z, padded, block_max);

  const auto target = [&](uint64_t total) {
    return std::max<uint64_t>(1, uint64_t(std::max(0.0, double(top_p)) * double(total)));
  };
  const auto unit = [](const Candidate&) { return uint64_t{1}; };
  const auto mass = [](const Candidate& c) { return c.mass; };

  Support support = kEverything;
  if (top_k > 0) {
    // The k-th largest block maximum is a floor under the k-th largest value.
    float limit = -kInfinity;
    if (top_k <= blocks) {
      float* const sorted = block_max + blocks;
      std::copy(block_max, block_max + blocks, sorted);
      std::nth_element(sorted, sorted + top_k - 1, sorted + blocks, std::greater<float>());
      limit = sorted[top_k - 1];
    }
    int64_t n = collect(z, e, block_max, padded, limit, candidates);
    support = select(candidates, n, uint64_t(top_k), unit);
    if (top_p < 1.0f && rule == TopKTopP::kSequential) {
      n = std::partition(candidates, candidates + n, [&](const Candidate& c) { return inside(support, c); }) -
          candidates;
      std::sort(candidates, candidates + n,
                [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
      return shorter(support, select(candidates, n, target(total_mass(candidates, n)), mass));
    }
  }
  if (top_p < 1.0f) {
    // Below z_max - 22.2 the mass is zero, so the boundary cannot lie there; mostly it lies far above.
    const uint64_t wanted = target(row_kernels().mass(e, padded));
    int64_t n = 0;
    for (float depth : {6.0f, 12.0f, 22.2f}) {
      n = collect(z, e, block_max, padded, z_max - depth, candidates);
      if (total_mass(candidates, n) >= wanted) break;
    }
    support = shorter(support, select(candidates, n, wanted, mass));
  }
  return support;
}

}  // namespace eagle::cpu
