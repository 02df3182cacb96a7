#pragma once
// The two cores that the public attention ops and the draft op share: rows with explicit cache rows and
// positions.
//
// One row is one node of one request: all its heads. Rows may come in any order and mix requests; neither the
// order, nor the other rows, nor the threads change the bits of a row's result.
#include <cstdint>

#include "eagle_cuda/attention.h"

namespace eagle::cpu {

// ---- RoPE and cache write ---------------------------------------------------------------------------------

struct AppendRow {
  const void* q;      // [Hq, D] or nullptr: no query
  const void* k;      // [Hkv, D]
  const void* v;      // [Hkv, D]
  void* q_out;        // [Hq, D]; may be q
  int32_t request;    // row of the page table; contiguous caches: the page
  int32_t cache_row;  // a row outside the request's pages is not written
  int32_t position;   // RoPE position, clamped to [0, max_positions)
};

struct AppendRowsParams {
  const AppendRow* rows;
  int num_rows;
  int num_heads;  // Hq
  DType dtype;    // of q, k, v, q_out and, unless that has codes, the cache
  int rotary_dim;
  bool interleaved;
  int max_positions;
  float norm_eps;
  int64_t q_head_stride, k_head_stride, v_head_stride, q_out_head_stride;  // elements
  const void* q_norm;                                                      // [D] dtype of q, or nullptr
  const void* k_norm;
  const float* cos;  // [max_positions, rotary_dim / 2]
  const float* sin;
  KVCacheView cache;
};

void append_rows(const AppendRowsParams& p);

// ---- attention --------------------------------------------------------------------------------------------

// A query at position prefix + tail_length - 1 whose visible keys are cache rows 0 .. prefix - 1 at their own
// positions and tail[0], tail[1], ... at positions prefix, prefix + 1, ...; the last one is normally the
// row's own key. The split into prefix and tail does not change the bits: a chain may give everything as
// prefix. Key rows that lie outside the request's pages count as masked. With no key left the output is zero
// and lse is -inf.
struct AttendRow {
  const void* q;        // [Hq, D]
  void* out;            // [Hq, D]
  float* lse;           // [Hq] natural log, or nullptr
  const int32_t* tail;  // [tail_length] cache rows
  int32_t tail_length;
  int32_t prefix;
  int32_t request;
};

struct AttendParams {
  const AttendRow* rows;
  int num_rows;
  int num_heads;  // Hq, a multiple of cache.num_kv_heads
  DType dtype;    // of q, out and, unless that has codes, the cache
  float softmax_scale;
  float logit_softcap;                     // of scaled scores; 0: none
  int window;                              // keys at positions > position - window; 0: no limit
  const float* sinks;                      // [Hq] or nullptr
  int64_t q_head_stride, out_head_stride;  // elements
  KVCacheView cache;                       // head_dim as validate() of tree_attention
};

// Neighbouring rows of one request share loaded keys and values, so keep a request's rows together.
void attend(const AttendParams& p);

}  // namespace eagle::cpu
