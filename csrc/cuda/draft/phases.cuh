#pragma once
// What the persistent draft kernel is told, and the order of its phases.
//
// The head runs over the rows of the accepted paths once (level 0) and then over the beam of every level but
// the last. Each run is a row of phases, with a barrier of the grid between two of them. Paths that have more
// rows in all than the products take go through the layers tile by tile, each of whole requests (PathTiles);
// the LM head comes once, when the last tile is through:
//
//   [fc]        EAGLE-1/2: embedding and hidden state become one row
//   qkv         the last block of a KV head's tiles rotates and appends its rows
//   attention   partial results of the prefix, then every row as its prefix is there; meanwhile o's first
//               weights come, into places of the ring that attention does not want
//   o           onto the residual
//   gate, up
//   down        onto the residual
//               ... the same from qkv on for further layers
//   lm head     the last block has every row's best tokens, grows the trees, knows when they are done
//
// 6 barriers a level for one layer of EAGLE-3, 7 for EAGLE-1/2; every further tile of the paths costs 6, and
// reads all weights but the LM head's once more.
#include <cstdint>

#include "cuda/attention/common_layout.cuh"
#include "cuda/device/grid_barrier.cuh"
#include "cuda/draft/memory.h"
#include "cuda/linear/sources.cuh"

namespace eagle::cuda {

inline constexpr int kPersistentThreads = 256;         // of 255 registers: more threads of fewer would spill
inline constexpr int kPersistentRows = kMaxTableRows;  // of a tile of paths, of a batch's beams
inline constexpr int kPersistentLayers = 3;
inline constexpr int kPersistentKvHeads = 128;
inline constexpr int kPersistentItems = 32;  // candidates of a thread when trees are built
inline constexpr int kPersistentAttendRows = kPersistentThreads / kWarpSize * kWarpRows;
inline constexpr int kPersistentRowBytes = 128;  // of a row of x in a step: 64 columns of 16 bits

enum class Work : int { kRows, kFc, kQkv, kAttention, kO, kGateUp, kDown, kLmHead, kTree };

struct Phase {
  Work work;
  int level, layer, tile;  // of the paths: level 0

  // Whether it is the first of a level, which the level before may have made idle.
  __device__ __forceinline__ bool begins_level(bool eagle3) const {
    return level > 0 && layer == 0 && work == (eagle3 ? Work::kQkv : Work::kFc);
  }
  __device__ __forceinline__ bool is_product() const {
    return work != Work::kRows && work != Work::kAttention && work != Work::kTree;
  }
  __device__ __forceinline__ Phase next(bool eagle3, int layers, int levels, int tiles) const {
    switch (work) {
      case Work::kRows:
        return {Work::kFc, 0, 0, 0};
      case Work::kFc:
        return {Work::kQkv, level, 0, tile};
      case Work::kDown:
        if (layer + 1 < layers) return {Work::kQkv, level, layer + 1, tile};
        if (level == 0 && tile + 1 < tiles) return {Work::kFc, 0, 0, tile + 1};
        return {Work::kLmHead, level, layer, 0};
      case Work::kLmHead:
        if (level + 1 == levels) return {Work::kTree, levels, 0, 0};
        return {eagle3 ? Work::kQkv : Work::kFc, level + 1, 0, 0};
      default:
        return {static_cast<Work>(static_cast<int>(work) + 1), level, layer, tile};
    }
  }
};

// A weight, and how blocks go through it: first for a full tile of paths, then for the rows of a level. The
// LM head of the paths has their last rows alone.
struct PersistentWeight {
  const unsigned char* data;
  const float* scales;
  int n, k, tiles, steps;
  uint16_t tile_bytes;
  uint8_t slices, unit, paired;
  WeightFormat format;
  uint8_t pass_tiles[2], stage_steps[2], ring[2], row_ring[2];
  uint8_t first[2];  // the place of the first stage: those from it on are asked for before attention; 0: none
};

struct PersistentLayer {
  const void *input_norm, *hidden_norm, *qkv_bias, *q_norm, *k_norm, *post_norm;
  PersistentWeight qkv, o, gate_up, down;
  KVCacheView cache;
};

// Words that are zero when the launch begins.
struct PersistentWords {
  GridBarrierWord* barrier;
  uint32_t* tiles;     // slices that have left a row tile; set back by the last
  uint32_t* kv_heads;  // items of qkv that are done, of all phases so far
  uint32_t* prefixes;  // [B, Hkv]  blocks' parts of the prefix that are done, of all phases so far
  uint32_t* lm_head;   // blocks that are done, of all phases so far
  int32_t* over;       // whether no tree can change any more
};

struct PersistentParams {
  // Of the call; arrays as in DraftParams.
  int batch_size, max_feature_nodes, max_path, max_nodes, top_k, levels;
  TreeOrder order;
  float tau;
  const void* features;
  int64_t features_strides[2];
  const int32_t *target_tokens, *path, *num_accepted, *seq_lens, *node_limit;
  const float* temperature;
  const int64_t* seeds;
  DraftTree tree;
  TreeShape shape;  // without nodes: a dynamic tree
  DraftMemory memory;

  // Of the head.
  bool eagle3, feedback_post_norm, norm_before_residual;
  int num_layers, hidden_size, feature_size, num_aux, intermediate_size, vocab_size;
  int row_capacity;  // of a request's pages
  float norm_eps;
  const void *embedding, *fc_bias, *fc_norm, *norm;
  const int32_t* draft_to_target;
  PersistentWeight fc, lm_head;
  PersistentLayer layer[kPersistentLayers];

  // Of the paths' rows and of a level's; what layers and levels change is filled in on the device.
  AttendParams attend[2];
  Plan attend_plan[2];
  AppendKvParams append[2];

  PersistentWords words;
  uint64_t* lists;  // of TopkParams
  float2* sums;
  bool bulk, feature_vectors;
  int topk_offset[2];  // in shared memory
};
static_assert(sizeof(PersistentParams) <= 4096);  // what every toolkit passes to a kernel

}  // namespace eagle::cuda
