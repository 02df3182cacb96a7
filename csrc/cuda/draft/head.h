#pragma once
// The draft head's layers as a sequence of launches over rows in groups: what extend_draft and draft share.
#include <cstdint>
#include <span>

#include "cuda/attention/attend.h"
#include "eagle_cuda/draft.h"

namespace eagle::cuda {

// Memory taken from a workspace piece by piece; of no workspace only the size is counted.
class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const auto at = static_cast<uintptr_t>(bytes_);
    bytes_ += (count * int64_t{sizeof(T)} + 127) / 128 * 128;
    return reinterpret_cast<T*>(base_ + at);
  }
  int64_t bytes() const { return bytes_; }

 private:
  uintptr_t base_;
  int64_t bytes_ = 0;
};

// Rows [batch, nodes] that stand in the cache alike: node i of a request at row lengths + first_node + i,
// seeing the rows before `lengths` and its own ancestors. All pointers are to device memory.
struct RowGroup {
  int64_t first_row = 0;  // among the rows of the call
  int request = 0;        // of the group's first
  int batch = 0, nodes = 0;
  int first_node = 0, all_nodes = 0;  // as in AttendParams; so is `mask`
  const int32_t* mask = nullptr;
  const int32_t* lengths = nullptr;    // [batch]  rows before the first node of all
  const int32_t* append_at = nullptr;  // [batch]  lengths + first_node
  const int32_t* depths = nullptr;     // [batch, nodes]  RoPE position - append_at
  const int32_t* counts = nullptr;  // [batch]  nodes that exist; the others are computed without meaning, and
                                    //   nothing of them is kept
};

// What the layers keep between launches, for up to `rows` rows.
struct HeadMemory {
  void *joined, *stream, *qkv, *attended, *gated;  // [rows, 2H], [rows, H], ...
  void* scratch;                                   // the workspace of one launch
  int64_t attended_bytes, scratch_bytes;

  HeadMemory() = default;
  HeadMemory(const DraftHead& head, int64_t rows, int64_t least_scratch, Arena& arena);
};

// Features [m, F] to what the head takes as hidden state [m, H]: fc, over fc_norm's slices. EAGLE-3 only.
// `normed`: [m, F], may be the features; used where there is a fc_norm.
void fuse_features(const DraftHead& head, const void* features, int64_t stride, int64_t m, void* normed,
                   void* out, const HeadMemory& memory, CUstream_st* stream);

// tokens [m], hidden [m, H] -> out [m, H], the output g of the last layer; nullptr: only keys and values are
// written. Rows of a group see the keys of the groups before it.
void run_head(const DraftHead& head, const KVCacheView* caches, std::span<const RowGroup> groups, int64_t m,
              const int32_t* tokens, const void* hidden, int64_t hidden_stride, void* out,
              const HeadMemory& memory, CUstream_st* stream);

// What append_kv and tree_attention are asked for a group, in a layer.
AppendKvParams append_params(const DraftHead& head, const DraftLayer& layer, const KVCacheView& cache,
                             const RowGroup& group, const HeadMemory& memory);
AttendParams attend_params(const DraftHead& head, const KVCacheView& cache, const RowGroup& group,
                           const HeadMemory& memory);

// Bytes of scratch that the attention of a group takes.
int64_t attention_bytes(const DraftHead& head, const KVCacheView* caches, const RowGroup& group);

// Rows that a request's pages can hold, at most 2^30: lengths are clamped to it, so that nothing overflows.
int row_capacity(const KVCacheView& cache);

// What enters layer 0: (embedding of the token, hidden state), each behind its norm where it has one.
struct JoinRowsParams {
  DType dtype;
  int64_t m, size;        // H
  const int32_t* tokens;  // [m]  clamped to [0, vocab_size)
  int vocab_size;
  const void* embedding;  // [vocab_size, H]
  const void* hidden;     // [m, H]
  int64_t hidden_stride;
  const void *input_norm, *hidden_norm;  // [H] or nullptr
  float norm_eps;
  void* joined;  // [m, 2H]
};
void join_rows(const JoinRowsParams& p, CUstream_st* stream);  // in extend_draft.cu

void check_draft_workspace(const void* workspace, int64_t bytes, int64_t needed);

}  // namespace eagle::cuda
