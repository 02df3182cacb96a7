#pragma once
// Which positions a row sees, and which of them the tensor cores reduce (docs/bit_exactness.md).
#include <cstdint>

#include "cuda/attention/attend.h"
#include "cuda/attention/cache_rows.cuh"

namespace eagle::cuda {

inline constexpr int kLog2Chunk = 8,
                     kChunk = 1 << kLog2Chunk;  // positions reduced from empty
inline constexpr int kLog2Group = 11, kGroup = 1 << kLog2Group,
                     kGroupChunks = 8;                     // folded among themselves first
inline constexpr int kMaxPrefix = 0x7fffffff - (1 << 24);  // so that positions ahead do not overflow

// One node: it stands at `position` and sees keys at begin .. position. Those below `limit` (a multiple of
// 16, at least 32 below the position's end) belong to the common pass, the others to its tail.
struct Span {
  int begin, limit, position;
};

__device__ __forceinline__ int request_prefix(const TreeAttentionParams& p, int request) {
  const int64_t most = min(cache_capacity(p.cache), int64_t{kMaxPrefix});
  const int length = max(load(p.seq_lens + request), 0);
  return static_cast<int>(min(int64_t{length}, most));
}
__device__ __forceinline__ int request_nodes(const TreeAttentionParams& p, int request) {
  return min(max(load(p.num_nodes + request), 0), p.max_nodes);
}

// Word `word` of the ancestors of a row's node and of the node itself.
__device__ __forceinline__ uint32_t mask_word(const AttendParams& p, int request, int row, int word) {
  const int node = p.first_node + row;
  if (word > node / 32) return 0;
  const int words = (p.all_nodes + 31) / 32;
  const uint32_t own = 1u << node % 32;
  uint32_t bits = ~0u;
  if (p.mask)
    bits = static_cast<uint32_t>(load(p.mask + (int64_t{request} * p.max_nodes + row) * words + word));
  return word == node / 32 ? (bits & (own - 1)) | own : bits;
}

__device__ __forceinline__ Span span_at(int position, int window) {
  const int begin = window > 0 ? max(position - window + 1, 0) : 0;
  return {begin, position < 31 ? 0 : (position - 31) & ~15, position};
}

__device__ __forceinline__ Span node_span(const AttendParams& p, int request, int row, int prefix) {
  int ancestors = 0;
  for (int word = 0; word <= (p.first_node + row) / 32; ++word)
    ancestors += __popc(mask_word(p, request, row, word));
  return span_at(prefix + ancestors - 1, p.window);
}

// How the common pass of a launch is cut into blocks, from sizes that the host knows. No choice here changes
// bits.
struct Plan {
  int group;           // query heads of a KV head
  int rows;            // packed rows of a KV head: node * group + head
  int rows_per_block;  // a multiple of 16
  int row_blocks;
  int splits;        // blocks along the positions
  int group_splits;  // a request of so many groups is cut into groups, a shorter one into chunks
  int slots;         // partials a row may have
  int ring;          // tiles of keys or values in shared memory
  bool vectors;      // keys, values and queries begin at multiples of 16 bytes
  bool pairs;        // output elements come in aligned pairs
};

// What a launch has for the common pass.
struct AttendRoom {
  int multiprocessors;
  size_t shared_bytes;  // of a block
  int rows;             // that a block takes at most
};
Plan attend_plan(const AttendParams& p, const AttendRoom& room);  // in tree_attention.cu
int64_t partials_bytes(const AttendParams& p, const Plan& plan);  // of workspace

// A request's partials: one for each chunk, one for each group of chunks, or one for all.
struct Units {
  int log2_size;  // of its positions
  int first;      // index of the first unit that a row may see

  __device__ __forceinline__ int size() const { return 1 << log2_size; }
  __device__ __forceinline__ int at(int position) const { return position >> log2_size; }
};

__device__ __forceinline__ Units request_units(const Plan& plan, int prefix, int nodes, int window) {
  const int begin = span_at(prefix, window).begin, end = span_at(prefix + nodes, window).limit;
  const int groups = (end + kGroup - 1) / kGroup - begin / kGroup;
  const int log2_size = groups >= plan.group_splits ? kLog2Group : kLog2Chunk;
  return {log2_size, begin >> log2_size};
}

}  // namespace eagle::cuda
