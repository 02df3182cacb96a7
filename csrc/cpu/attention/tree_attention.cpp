// tree_attention: mask bits become lists of cache rows for attend().
#include <algorithm>
#include <bit>

#include "common/numeric.h"
#include "cpu/attention/attend.h"
#include "cpu/attention/cache_rows.h"
#include "cpu/scratch.h"

namespace eagle::cpu {

void tree_attention(const TreeAttentionParams& p) {
  validate(p);
  struct RowSlot {};
  struct TailSlot {};
  const int words = ceil_div(p.max_nodes, 32);
  const int64_t capacity = cache_capacity(p.cache), size = element_size(p.dtype);
  const auto nodes_of = [&](int b) { return std::clamp(p.num_nodes[b], 0, p.max_nodes); };
  int64_t num_rows = 0, tails = 0;
  for (int b = 0; b < p.batch_size; ++b) {
    const int64_t nodes = nodes_of(b);
    num_rows += nodes;
    tails += nodes * (nodes + 1) / 2;
  }
  AttendRow* row = scratch<AttendRow, RowSlot>(num_rows);
  int32_t* tail = scratch<int32_t, TailSlot>(tails);
  const AttendRow* const rows = row;
  for (int b = 0; b < p.batch_size; ++b) {
    const int32_t prefix = static_cast<int32_t>(std::clamp<int64_t>(p.seq_lens[b], 0, capacity));
    for (int node = 0, nodes = nodes_of(b); node < nodes; ++node, ++row) {
      // Ascending slots are ascending depths, because parents precede their children. A node sees itself.
      const int32_t* mask = p.mask + (int64_t{b} * p.max_nodes + node) * words;
      const int32_t* const first = tail;
      for (int word = 0; word <= node / 32; ++word) {
        uint32_t bits = static_cast<uint32_t>(mask[word]);
        if (word == node / 32) bits = (bits & ((1u << node % 32) - 1)) | 1u << node % 32;
        for (; bits; bits &= bits - 1) *tail++ = prefix + word * 32 + std::countr_zero(bits);
      }
      *row = {.q = static_cast<const char*>(p.q) + (b * p.q_strides[0] + node * p.q_strides[1]) * size,
              .out = static_cast<char*>(p.out) + (b * p.out_strides[0] + node * p.out_strides[1]) * size,
              .lse = p.lse ? p.lse + (int64_t{b} * p.max_nodes + node) * p.num_heads : nullptr,
              .tail = first,
              .tail_length = static_cast<int32_t>(tail - first),
              .prefix = prefix,
              .request = b};
    }
  }
  attend({.rows = rows,
          .num_rows = static_cast<int>(num_rows),
          .num_heads = p.num_heads,
          .dtype = p.dtype,
          .softmax_scale = p.softmax_scale,
          .logit_softcap = p.logit_softcap,
          .window = p.window,
          .sinks = p.sinks,
          .q_head_stride = p.q_strides[2],
          .out_head_stride = p.out_strides[2],
          .cache = p.cache});
}

}  // namespace eagle::cpu
