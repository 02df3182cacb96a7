#pragma once
// Ancestor sets of up to 256 nodes in shared memory, and bit sets of nodes.
#include "eagle_cuda/tree.h"

namespace eagle::cuda {

inline constexpr int kMaxNodeWords = kMaxTreeNodes / 32;

// Two copies each: a step reads one and writes the other.
struct AncestorWords {
  int32_t up[2][kMaxTreeNodes];                      // a node whose words are still to be joined, -1 none
  uint32_t words[2][kMaxTreeNodes * kMaxNodeWords];  // [nodes, words per node]
};

// Joins (or) the words of every node with those of all its ancestors, where up[0] holds the parents and
// words[0] the nodes' own words. Distances double from step to step. Whole block; the shared writes before it
// and the reads after it need no barrier of their own. Returns the copy that holds the result. Ends for any
// `up` in [-1, nodes).
__device__ __forceinline__ int join_ancestors(AncestorWords& a, int nodes, int words_per_node) {
  int from = 0;
  __syncthreads();
  for (int distance = 1; distance < kMaxTreeNodes; distance *= 2) {
    bool unfinished = false;
    for (int i = static_cast<int>(threadIdx.x); i < nodes * words_per_node;
         i += static_cast<int>(blockDim.x)) {
      const int node = i / words_per_node, word = i % words_per_node, up = a.up[from][node];
      const int next = up < 0 ? -1 : a.up[from][up];
      a.words[1 - from][i] = a.words[from][i] | (up < 0 ? 0 : a.words[from][up * words_per_node + word]);
      if (word == 0) a.up[1 - from][node] = next;
      unfinished |= next >= 0;
    }
    from = 1 - from;
    if (!__syncthreads_or(unfinished)) break;
  }
  return from;
}

// ---- sets of nodes --------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t bits_below(int bit) { return (uint32_t{1} << bit) - 1; }  // bit < 32

// Place of the n-th set bit from below, n = 0 .. popcount - 1.
__device__ __forceinline__ int nth_set_bit(uint32_t word, int n) {
  int place = 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const int low = __popc((word >> place) & bits_below(width));
    if (n >= low) {
      n -= low;
      place += width;
    }
  }
  return place;
}

// The n-th member from below, -1 if there are fewer.
__device__ __forceinline__ int nth_member(const uint32_t* words, int num_words, int n) {
  for (int w = 0; w < num_words; ++w) {
    const int members = __popc(words[w]);
    if (n < members) return w * 32 + nth_set_bit(words[w], n);
    n -= members;
  }
  return -1;
}

// The first member at or above `from`, -1 none.
__device__ __forceinline__ int next_member(const uint32_t* words, int num_words, int from) {
  for (int w = from / 32; w < num_words; ++w) {
    const uint32_t bits = w == from / 32 ? words[w] & ~bits_below(from % 32) : words[w];
    if (bits != 0) return w * 32 + __ffs(static_cast<int>(bits)) - 1;
  }
  return -1;
}

__device__ __forceinline__ int members_below(const uint32_t* words, int end) {
  int members = 0;
  for (int w = 0; w < end / 32; ++w) members += __popc(words[w]);
  return members + (end % 32 == 0 ? 0 : __popc(words[end / 32] & bits_below(end % 32)));
}

}  // namespace eagle::cuda
