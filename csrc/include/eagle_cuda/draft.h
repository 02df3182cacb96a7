#pragma once
// draft: the draft head over committed tokens, and the whole draft phase in one call.
//
// Pairing: draft row i holds (embedding of token i+1, target feature i), stands at RoPE
// position i, and predicts token i+2's place, i.e. the row of the root predicts the root's children.
#include <cstdint>
#include <vector>

#include "eagle_cuda/attention.h"
#include "eagle_cuda/linear.h"
#include "eagle_cuda/tree.h"

namespace eagle {

enum class HeadKind : uint8_t { kEagle1, kEagle3 };  // EAGLE-1 and EAGLE-2 share one head

struct DraftLayer {
  const void* input_norm = nullptr;  // [H]  over the embedding in EAGLE-3's first layer; nullptr in EAGLE-1's
  const void* hidden_norm = nullptr;  // [H]  EAGLE-3's first layer only
  PackedWeight qkv;                   // [(Hq + 2 Hkv) D, 2H in EAGLE-3's first layer, else H]
  const void* qkv_bias = nullptr;     // [(Hq + 2 Hkv) D]
  const void* q_norm = nullptr;       // [D]
  const void* k_norm = nullptr;       // [D]
  PackedWeight o;                     // [H, Hq D]
  const void* post_norm = nullptr;    // [H]
  PackedWeight gate_up;               // [2I, H] paired
  PackedWeight down;                  // [H, I]
};

// A draft head. Norms, biases and the embedding have dtype `dtype`, as do the activations; every weight has
// that format or a quantised one, each its own.
struct DraftHead {
  HeadKind kind = HeadKind::kEagle3;
  DType dtype = DType::kBFloat16;
  int hidden_size = 0;        // H
  int feature_size = 0;       // F: H in EAGLE-1; num_aux * Ht in EAGLE-3
  int num_heads = 0;          // Hq
  int num_kv_heads = 0;       // Hkv
  int head_dim = 0;           // D
  int intermediate_size = 0;  // I
  int vocab_size = 0;         // V, rows of the embedding
  int draft_vocab_size = 0;   // Vd, rows of lm_head
  int num_aux = 1;            // slices of a feature row that fc_norm works on
  float norm_eps = 1e-5f;
  bool feedback_post_norm = false;    // EAGLE-3.1: the next level gets norm(g) instead of g
  bool norm_before_residual = false;  // EAGLE-3 variant: the residual is the normalised hidden state
  float softmax_scale =
      0.0f;  // 0: 1 / sqrt(D). Given where D was padded with zeros to a size attention supports
  int max_positions = 0;

  const void* embedding = nullptr;  // [V, H]
  PackedWeight fc;                  // [H, 2H] in EAGLE-1, [H, F] in EAGLE-3
  const void* fc_bias = nullptr;    // [H]
  const void* fc_norm = nullptr;    // [num_aux, F / num_aux] EAGLE-3.1, a norm per slice before fc
  const void* norm = nullptr;       // [H] before lm_head; nullptr in EAGLE-1
  PackedWeight lm_head;             // [Vd, H]
  const int32_t* draft_to_target =
      nullptr;                 // [Vd] absolute target ids, strictly increasing; nullptr: identity
  const float* cos = nullptr;  // [max_positions, D/2]; positions beyond are clamped to the last row
  const float* sin = nullptr;
  std::vector<DraftLayer> layers;
  DeviceType backend = DeviceType::kCPU;
  int device_id = 0;
};

// The head over committed rows, any number per request, filling its cache.
struct ExtendDraftParams {
  const DraftHead* head;
  int batch_size;        // B
  int64_t num_rows;      // T
  const void* features;  // [T, F]  row stride
  int64_t features_stride;
  const int32_t* tokens;       // [T]  the token that follows each feature; clamped to [0, V)
  const int32_t* row_offsets;  // [B + 1]  request b owns rows row_offsets[b] .. row_offsets[b+1]; ON THE HOST
  const int32_t* seq_lens;     // [B]  draft rows already in the cache; row i is written at seq_lens + i
  const KVCacheView* caches;   // [layers]
  void* hidden;                // [T, H] the head's output g for every row (pre-norm), or nullptr

  // CUDA: at least extend_draft_workspace_bytes(), begins at a multiple of 16, used by one call at a time.
  // What it holds before does not matter. CPU: none.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// gather along the accepted path -> extend -> `levels` levels of top-k expansion, or of a static tree's ->
// rerank.
// Request b's extend rows pair features[b, path[i]] with target_tokens[b, path[i]], i = 0 .. num_accepted, at
// draft rows seq_lens + i (seq_lens before acceptance). The root of the new tree is target_tokens[b,
// path[num_accepted]]. Beam rows of level j stand behind the committed rows, at new_seq_lens + (j-1) K + r,
// at RoPE position new_seq_lens + j - 1; the cache must have room for num_accepted + 1 + (levels - 1) K rows:
// rows without room are not written and count as masked. num_accepted < 0: the request is absent, num_nodes
// 0. num_accepted is clamped to P - 1, path entries to [0, Nf).
struct DraftParams {
  const DraftHead* head;
  int batch_size;         // B
  int max_feature_nodes;  // Nf: nodes of the tree that was verified
  int max_path;           // P
  int max_nodes;          // N of the new tree
  int top_k;              // K, 1 .. 32, at most Vd
  int levels;             // 1 .. 31 (any number for a chain); K + (levels - 1) K^2 <= 8192
  TreeOrder order;
  float tau;

  const void* features;  // [B, Nf, F]  strides batch, node
  int64_t features_strides[2];
  const int32_t* target_tokens;  // [B, Nf]
  const int32_t* path;           // [B, P]
  const int32_t* num_accepted;   // [B]
  const int32_t* seq_lens;       // [B]
  const int32_t* node_limit;     // [B] or nullptr: N
  const float* temperature;      // [B] or nullptr: uncoupled
  const int64_t* seeds;          // [B] when temperature is given
  const KVCacheView* caches;     // [layers]
  DraftTree tree;
  const TreeShape* shape = nullptr;  // a static tree, of this top_k and at least `levels` levels; on the host

  void* workspace = nullptr;  // as in ExtendDraftParams, of draft_workspace_bytes()
  int64_t workspace_bytes = 0;
};

void validate(const DraftHead& head);
void validate(const ExtendDraftParams& p);
void validate(const DraftParams& p);

namespace cpu {
void extend_draft(const ExtendDraftParams& p);
void draft(const DraftParams& p);
}  // namespace cpu

namespace cuda {
void extend_draft(const ExtendDraftParams& p, CUstream_st* stream);
void draft(const DraftParams& p, CUstream_st* stream);

// From the sizes (head, caches, row_offsets) and the current device alone, not from what tensors hold.
int64_t extend_draft_workspace_bytes(const ExtendDraftParams& p);
int64_t draft_workspace_bytes(const DraftParams& p);
}  // namespace cuda

// Tensor forms. A head is described once; its tensors must outlive it.
struct DraftLayerViews {
  TensorView input_norm, hidden_norm, qkv_bias, q_norm, k_norm, post_norm;
  PackedWeight qkv, o, gate_up, down;
};
struct DraftHeadViews {
  HeadKind kind;
  int num_heads, num_kv_heads, head_dim;
  float norm_eps, softmax_scale;
  bool feedback_post_norm, norm_before_residual;
  TensorView embedding, fc_bias, fc_norm, norm, draft_to_target, cos, sin;
  PackedWeight fc, lm_head;
  std::vector<DraftLayerViews> layers;
};
DraftHead draft_head(const DraftHeadViews& views);
void extend_draft(const DraftHead& head, TensorView features, TensorView tokens,
                  const std::vector<int32_t>& row_offsets, TensorView seq_lens,
                  const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
                  TensorView page_table, TensorView hidden, TensorView workspace, CUstream_st* stream);
void draft(const DraftHead& head, TensorView features, TensorView target_tokens, TensorView path,
           TensorView num_accepted, TensorView seq_lens, TensorView node_limit, TensorView temperature,
           TensorView seeds, float tau, int top_k, int levels, TreeOrder order,
           const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
           TensorView page_table, const DraftTreeViews& tree, const TreeShape* shape, TensorView workspace,
           CUstream_st* stream);
// Bytes that the ops want as `workspace`, uint8 [bytes], on the device of the head; 0 on the CPU.
int64_t extend_draft_workspace_bytes(const DraftHead& head, const std::vector<int32_t>& row_offsets,
                                     const std::vector<TensorView>& k_caches,
                                     const std::vector<TensorView>& v_caches, TensorView page_table);
int64_t draft_workspace_bytes(const DraftHead& head, int64_t batch_size, int max_path, int top_k, int levels,
                              const std::vector<TensorView>& k_caches,
                              const std::vector<TensorView>& v_caches, TensorView page_table);

}  // namespace eagle
