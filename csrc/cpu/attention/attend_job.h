#pragma once
// How attend() cuts its work: shared by attend.cpp (plan, threads, folding) and attend_chunk.cpp (one chunk
// of keys).
#include <cstdint>
#include <limits>

#include "cpu/attention/attend.h"
#include "cpu/attention/attend_kernels.h"

namespace eagle::cpu {

inline constexpr int kMaxHeadDim = 256;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One AttendRow with its positions resolved: keys are the cache rows [begin, prefix) and tail entries at
// [prefix, end).
struct AttendNode {
  const AttendRow* row;
  const int32_t* tail;
  int64_t begin, prefix, end;
  int first_chunk, end_chunk;
};

struct AttendTile {
  int first_node, num_nodes;
  int first_chunk, end_chunk;
};

// Running softmax of the rows of a tile.
struct AttendPartial {
  float *max, *sum, *out;  // [rows], [rows], [rows, D]
};

struct AttendJob {
  const AttendParams& p;
  const AttendKernels& kernels;
  int group;  // query heads of a key head
  int head_dim;
  int max_rows;  // of a tile
  const AttendNode* nodes;
  const AttendTile* tiles;
  int splits;        // pieces of a tile and key head: 1, or a chunk each
  int* chunks_left;  // [tiles, Hkv]
  float* partials;   // [tiles, Hkv, splits] of partial_size()
  bool codes() const { return p.cache.dtype == DType::kFloat8E4M3; }
  bool adjusts() const { return codes() || p.logit_softcap > 0.0f; }
  int64_t partial_size() const { return int64_t{max_rows} * (head_dim + 2); }
  AttendPartial partial(float* data) const { return {data, data + max_rows, data + 2 * max_rows}; }
};

// The partial of chunk `chunk` for all rows of the tile that see a key in it; the others are left undefined.
// q: [rows, D].
void reduce_chunk(const AttendJob& job, const AttendTile& tile, int kv_head, int chunk, const float* q,
                  const AttendPartial& out);

}  // namespace eagle::cpu
