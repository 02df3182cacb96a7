#pragma once
// Which tokens survive top-k and top-p, for a row too long for shared memory.
//
// The first pass over the row counts tokens by the leading 12 bits of order_key(z) (bins). Of these only the
// keys from z_max down to z_max - 26 matter: no noise lifts a token from further below to the best, and its
// mass is 0. A second pass splits what matters of every bin into buckets, the more the more tokens the bin
// has, and sums tokens and mass per bucket. The bucket with the boundary then either has few enough tokens to
// be gathered, or few enough keys for one counter each. Masses are sums of integers: their order does not
// matter.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/numeric.h"
#include "cuda/device/ptx.cuh"
#include "cuda/sampling/block_search.cuh"
#include "cuda/sampling/noise.cuh"
#include "cuda/sampling/row.cuh"

namespace eagle::cuda {

inline constexpr int kBins = 4096, kKeyBits = 20;  // keys per bin: 2^20
inline constexpr int kSplit = 4096;                // buckets that the tokens of a row share out
inline constexpr int kBuckets = kSplit + 2304;     // and one for any of the bins that matter, at most 2091
inline constexpr uint32_t kCapacity = 8192;        // tokens, or keys, that shared memory holds at once

// A bucket with more than kCapacity tokens has at most kCapacity keys in rows of up to this many tokens;
// longer rows split such a bucket again. 2^20 keys / (kSplit kCapacity / V) <= kCapacity
inline constexpr int64_t kOneSplitVocab = 262144;
static_assert((int64_t{1} << kKeyBits) / (int64_t{kSplit} * kCapacity / kOneSplitVocab) <= kCapacity);

struct BucketTable {
  uint32_t bins[kBins];  // tokens; then first bucket << 5 | bits of a key within a bucket
  uint32_t tokens[kBuckets];
  uint32_t mass_low[kBuckets], mass_high[kBuckets];
};
inline constexpr uint32_t kNoBuckets = 31;  // an entry of `bins`

// uint64(e 2^32) for e <= 1.
__device__ __forceinline__ uint64_t fixed_mass(float e) {
  return e >= 1.0f ? uint64_t{1} << 32 : static_cast<uint64_t>(static_cast<uint32_t>(e * 4294967296.0f));
}
__device__ __forceinline__ uint64_t key_mass(uint32_t key, float z_max) {
  return fixed_mass(exp_f32(from_order_key(key) - z_max));
}

__device__ __forceinline__ uint64_t top_p_target(float top_p, uint64_t total) {
  const double target = (top_p > 0.0f ? static_cast<double>(top_p) : 0.0) * static_cast<double>(total);
  return max(uint64_t{1}, static_cast<uint64_t>(target));
}

// Equal neighbours of a thread are counted in registers: a flat row would queue at one word.
struct BinCounter {
  uint32_t* bins;
  uint32_t bin, count;

  __device__ __forceinline__ void add(uint32_t b) {
    if (b != bin) {
      flush();
      bin = b, count = 0;
    }
    ++count;
  }
  __device__ __forceinline__ void flush() {
    if (count > 0) atomicAdd(bins + bin, count);
  }
};

struct BucketCounter {
  BucketTable& table;
  uint32_t bucket, tokens;
  uint64_t mass;

  __device__ __forceinline__ void add(uint32_t b, uint64_t w) {
    if (b != bucket) {
      flush();
      bucket = b, tokens = 0, mass = 0;
    }
    ++tokens;
    mass += w;
  }
  // A 64-bit sum in two words: shared memory adds 32 bits natively.
  __device__ __forceinline__ void flush() {
    if (tokens == 0) return;
    atomicAdd(table.tokens + bucket, tokens);
    const uint32_t low = static_cast<uint32_t>(mass);
    const uint32_t carry = low > 0 && atomicAdd(table.mass_low + bucket, low) + low < low ? 1 : 0;
    const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
    if (high > 0) atomicAdd(table.mass_high + bucket, high);
  }
};

// The last key of a token that can win or has mass, where the first is that of z_max.
__device__ __forceinline__ uint32_t last_key_that_matters(float z_max) {
  uint32_t low = order_key(z_max), high = order_key(kLowestFloat);
  while (low < high) {
    const uint32_t middle = high - (high - low) / 2;
    if (from_order_key(middle) + kMaxGumbel >= z_max + kMinGumbel)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// A range of keys, both ends included, and what stands before it in the order of all tokens.
struct KeyRange {
  uint32_t first, last;
  uint32_t tokens;
  uint64_t mass;  // of a bucket; else 0
  uint64_t tokens_before, mass_before;

  // Few tokens to list, or many of few keys to count.
  __device__ __forceinline__ bool fits() const { return few() || keys() <= kCapacity; }
  __device__ __forceinline__ bool few() const { return tokens <= kCapacity; }
  __device__ __forceinline__ bool countable() const { return !few() && keys() <= kCapacity; }

  __device__ __forceinline__ uint32_t keys() const { return last - first + 1; }
  __device__ __forceinline__ bool contains(uint32_t key) const { return key - first <= last - first; }
};

template <int kThreads>
struct Buckets {
  BucketTable& table;
  BlockScratch<kThreads>& scratch;
  uint32_t first_key, last_key;  // that matter
  uint32_t count;                // of buckets

  __device__ __forceinline__ uint32_t first_bin() const { return first_key >> kKeyBits; }
  __device__ __forceinline__ uint32_t last_bin() const { return last_key >> kKeyBits; }

  // Turns the counts of the bins into their shares of the buckets. `tokens`: the sum of these counts.
  __device__ __forceinline__ void share_out(uint32_t tokens) {
    const uint32_t bins = last_bin() - first_bin() + 1, share = (bins + kThreads - 1) / kThreads;
    const uint32_t begin = first_bin() + min(bins, threadIdx.x * share);
    const uint32_t end = min(last_bin() + 1, begin + share);
    uint32_t mine = 0;
    for (uint32_t i = begin; i < end; ++i) mine += split(i, tokens).count;
    uint32_t next = static_cast<uint32_t>(block_sum_below<kThreads>(mine, scratch));
    for (uint32_t i = begin; i < end; ++i) {
      const Split s = split(i, tokens);
      table.bins[i] = s.count > 0 ? (next - s.skipped) << 5 | s.bits : kNoBuckets;
      next += s.count;
    }
    count = static_cast<uint32_t>(block_sum<kThreads>(mine, scratch));
    count = min(count, static_cast<uint32_t>(kBuckets));
    clear();
  }

  // The keys of `range`, a former bucket, by themselves.
  __device__ __forceinline__ void zoom(const KeyRange& range) {
    __syncthreads();
    for (uint32_t i = first_bin() + threadIdx.x; i <= last_bin(); i += kThreads) table.bins[i] = kNoBuckets;
    __syncthreads();
    int bits = 0;
    while ((range.last >> bits) - (range.first >> bits) >= kSplit) ++bits;
    if (threadIdx.x == 0) {
      const uint32_t below = (range.first & ((1u << kKeyBits) - 1)) >> bits;
      table.bins[range.first >> kKeyBits] = (0u - below) << 5 | bits;
    }
    count = (range.last >> bits) - (range.first >> bits) + 1;
    clear();
  }

  __device__ __forceinline__ void clear() {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads)
      table.tokens[i] = 0, table.mass_low[i] = 0, table.mass_high[i] = 0;
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t bucket_of(uint32_t key) const {
    const uint32_t entry = table.bins[key >> kKeyBits];
    const uint32_t within = (key & ((1u << kKeyBits) - 1)) >> (entry & 31);
    return min(static_cast<uint32_t>(static_cast<int32_t>(entry) >> 5) + within, count - 1);
  }
  __device__ __forceinline__ uint64_t mass(uint32_t i) const {
    return static_cast<uint64_t>(table.mass_high[i]) << 32 | table.mass_low[i];
  }
  __device__ __forceinline__ uint64_t total_mass() const {
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) sum += mass(i);
    return block_sum<kThreads>(sum, scratch);
  }

  __device__ __forceinline__ uint32_t total_tokens() const {
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) sum += table.tokens[i];
    return static_cast<uint32_t>(block_sum<kThreads>(sum, scratch));
  }

  // The buckets in which the k-th token stands, and in which the mass reaches `target`.
  __device__ __forceinline__ KeyRange find_token(uint64_t k, const KeyRange& all) const {
    const Crossing c = find_crossing<kThreads>(
        count, all.tokens_before, k, [&](uint32_t i) { return uint64_t{table.tokens[i]}; }, scratch);
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < c.index; i += kThreads) sum += mass(i);
    sum = block_sum<kThreads>(sum, scratch);
    return range_of(c.index, c.before, all.mass_before + sum);
  }
  __device__ __forceinline__ KeyRange find_mass(uint64_t target, const KeyRange& all) const {
    const Crossing c =
        find_crossing<kThreads>(count, all.mass_before, target, [&](uint32_t i) { return mass(i); }, scratch);
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < c.index; i += kThreads) sum += table.tokens[i];
    sum = block_sum<kThreads>(sum, scratch);
    return range_of(c.index, all.tokens_before + sum, c.before);
  }

 private:
  // Buckets of 2^bits keys, aligned, as many of them as hold the keys of a bin that matter; `skipped` lie
  // before these keys.
  struct Split {
    uint32_t bits, skipped, count;
  };
  // As many buckets as its share of the row's `tokens` allows, but at least one if it has any.
  __device__ __forceinline__ Split split(uint32_t bin, uint32_t tokens) const {
    const uint32_t n = table.bins[bin], mask = (1u << kKeyBits) - 1;
    if (n == 0) return {0, 0, 0};
    const uint32_t first = bin == first_bin() ? first_key & mask : 0;
    const uint32_t last = bin == last_bin() ? last_key & mask : mask;
    const uint32_t share = max(1u, static_cast<uint32_t>(uint64_t{n} * kSplit / tokens));
    uint32_t bits = kKeyBits;
    while (bits > 0 && (last >> (bits - 1)) - (first >> (bits - 1)) < share) --bits;
    return {bits, first >> bits, (last >> bits) - (first >> bits) + 1};
  }

  __device__ __forceinline__ KeyRange range_of(uint32_t bucket, uint64_t tokens_before,
                                               uint64_t mass_before) const {
    for (uint32_t i = first_bin() + threadIdx.x; i <= last_bin(); i += kThreads) {
      const uint32_t entry = table.bins[i], bits = entry & 31;
      if (bits == kNoBuckets) continue;
      const uint32_t within = bucket - static_cast<uint32_t>(static_cast<int32_t>(entry) >> 5);
      if (within < 1u << (kKeyBits - bits)) scratch.index = i << kKeyBits | within << bits;
    }
    __syncthreads();
    const uint32_t first = scratch.index;
    const uint32_t bits = table.bins[first >> kKeyBits] & 31;
    __syncthreads();
    return {max(first, first_key), min(first + (1u << bits) - 1, last_key),
            table.tokens[bucket],  mass(bucket),
            tokens_before,         mass_before};
  }
};

}  // namespace eagle::cuda
