#pragma once
// attention: rotate and append keys and values, then attend from every tree node to the committed prefix and
// to the node's own ancestors.
//
// Numbers of a cache of kFloat8E4M3 are code * scale. The score of a key is (q . codes) * softmax_scale *
// k_scale in fp32. Values are multiplied by v_scale as they are read: on tensor cores rounded to the dtype of
// q, in fp32 elsewhere. Which of the two is a matter of positions.
//
// Layout invariance: a result depends on the positions of the keys only, never on the slot of a node, the
// page layout, the batch or the other nodes (docs/bit_exactness.md). Plain decoding is the one-node tree,
// prefill a chain. A tree may fork at most 31 levels above a node; rows of CUDA's bf16 and fp16 kernels
// beyond that are NaN. Chains, and the trunk of a tree, may be longer.
#include <cstdint>

#include "eagle_cuda/tensor_view.h"

namespace eagle {

// One layer's cache. Paged: `page_table` [B, max_pages]; position t of a request is row t % page_size of page
// page_table[b, t / page_size]. Contiguous: page_table = nullptr, page b belongs to request b. Rows outside
// the table, or on a page id outside [0, num_pages), are neither read nor written: a missing key counts as
// masked.
struct KVCacheView {
  void* k;  // [num_pages, page_size, num_kv_heads, head_dim]  last dimension contiguous
  void* v;
  int64_t k_page_stride, k_row_stride, k_head_stride;  // elements
  int64_t v_page_stride, v_row_stride, v_head_stride;
  int64_t num_pages;
  int page_size;
  int num_kv_heads;
  int head_dim;
  DType dtype;
  const int32_t* page_table;  // [B, max_pages] or nullptr
  int max_pages;
  int64_t page_table_stride;  // elements between the rows of two requests

  // Factors of 1-byte elements; each may be nullptr. compact_kv moves those of rows with their rows.
  // append_kv and tree_attention take kFloat8E4M3 with both, and no other 1-byte elements; the draft takes
  // none.
  float* k_scale;  // [num_pages, page_size, num_kv_heads]  heads adjacent; or one for the whole tensor
  float* v_scale;
  int64_t k_scale_page_stride, k_scale_row_stride;  // elements
  int64_t v_scale_page_stride, v_scale_row_stride;
  bool tensor_scales;  // k_scale and v_scale point to one factor each, which no op writes
};

// Optional qk-norm, RoPE on q and k, then k and v are written at row seq_lens[b] + i of the cache: rounded
// once to its dtype, or as codes of kFloat8E4M3, round(x / scale) within +-448 (common/quantize.h). A row's
// scale is its own max |x| / 448 and is written beside it: 0 where that is 0, with codes 0; NaN, with codes
// 0, where the row holds NaN or an infinity. With a scale for the tensor, infinities become +-448, NaN stays
// NaN, and a scale that is not above 0 gives codes 0.
struct AppendKvParams {
  int batch_size;     // B
  int max_nodes;      // N
  int num_heads;      // Hq
  DType dtype;        // of q, k, v and, unless that has codes, the cache
  int rotary_dim;     // even, at most head_dim; 0: no rotation
  bool interleaved;   // pairs (2i, 2i+1) instead of (i, i + rotary_dim/2)
  int max_positions;  // rows of the table; a position at or beyond is clamped to the last row
  float norm_eps;

  const void* q;  // [B, N, Hq, D]  strides batch, node, head
  const void* k;  // [B, N, Hkv, D]
  const void* v;  // [B, N, Hkv, D]
  int64_t q_strides[3], k_strides[3], v_strides[3];
  const void* q_norm;  // [D] dtype of q, or nullptr
  const void* k_norm;  // [D]
  const float* cos;  // [max_positions, rotary_dim/2]  made in fp64, rounded to fp32; scaling (linear, llama3,
                     // yarn) included
  const float* sin;
  const int32_t* seq_lens;   // [B]  rows in the cache; the root's position
  const int32_t* depths;     // [B, N]  node position = seq_lens[b] + depths[b, i]
  const int32_t* num_nodes;  // [B]
  KVCacheView cache;
  void* q_out;  // [B, N, Hq, D]  may be q
  int64_t q_out_strides[3];
};

struct TreeAttentionParams {
  int batch_size;  // B
  int max_nodes;   // N
  int num_heads;   // Hq, a multiple of num_kv_heads
  DType dtype;     // of q, out and, unless that has codes, the cache
  float softmax_scale;
  float logit_softcap;  // scaled scores s become cap * tanh(s / cap), before any mask; 0: they stay
  int window;           // keys at positions > position - window; 0: no limit

  const void* q;  // [B, N, Hq, D]
  int64_t q_strides[3];
  KVCacheView cache;
  const int32_t* seq_lens;   // [B]
  const int32_t* num_nodes;  // [B]
  const int32_t* mask;       // [B, N, ceil(N/32)]  ancestor-or-self bits; bits above the own slot are ignored
  // [Hq] or nullptr: a logit of each head that joins the denominator of its softmax and has no value. It is
  // folded onto the finished row, last, whatever the window; the soft cap leaves it alone. -inf: none.
  const float* sinks;
  void* out;  // [B, N, Hq, D]  rows at and beyond num_nodes are left alone
  int64_t out_strides[3];
  float* lse;  // [B, N, Hq] natural log of the denominator, the sink's part included; or nullptr

  // CUDA: at least tree_attention_workspace_bytes(), begins at a multiple of 16, used by one call at a time.
  // What it holds before does not matter. CPU: none.
  void* workspace;
  int64_t workspace_bytes;
};

void validate(const AppendKvParams& p);
void validate(const TreeAttentionParams& p);

namespace cpu {
void append_kv(const AppendKvParams& p);
void tree_attention(const TreeAttentionParams& p);
}  // namespace cpu

namespace cuda {
void append_kv(const AppendKvParams& p, CUstream_st* stream);
void tree_attention(const TreeAttentionParams& p, CUstream_st* stream);

// From the sizes and the current device alone, not from what tensors hold.
int64_t tree_attention_workspace_bytes(const TreeAttentionParams& p);
}  // namespace cuda

// Tensor forms.
void append_kv(TensorView q, TensorView k, TensorView v, TensorView k_cache, TensorView v_cache,
               TensorView page_table, TensorView seq_lens, TensorView depths, TensorView num_nodes,
               TensorView cos, TensorView sin, bool interleaved, TensorView q_norm, TensorView k_norm,
               float norm_eps, TensorView q_out, TensorView k_scale, TensorView v_scale, CUstream_st* stream);
void tree_attention(TensorView q, TensorView k_cache, TensorView v_cache, TensorView page_table,
                    TensorView seq_lens, TensorView num_nodes, TensorView mask, float softmax_scale,
                    int window, TensorView out, TensorView lse, float logit_softcap, TensorView sinks,
                    TensorView k_scale, TensorView v_scale, TensorView workspace, CUstream_st* stream);
// Bytes that tree_attention wants as `workspace`, uint8 [bytes], on the device of q; 0 on the CPU.
int64_t tree_attention_workspace_bytes(TensorView q, TensorView k_cache, TensorView v_cache,
                                       TensorView page_table);

// Checks a pair of caches of 1-, 2- or 4-byte elements, an optional page table of B requests and optional
// scales (of shape [1] for the tensor, else one for each row and head), and describes them. For the tensor
// forms of every op that takes a cache; which dtypes an op computes with, and whether it reads scales, is its
// own affair.
KVCacheView kv_cache_view(TensorView k_cache, TensorView v_cache, TensorView page_table, int64_t batch_size,
                          TensorView k_scale = {}, TensorView v_scale = {});

}  // namespace eagle
