// append_kv: the nodes of every request become rows for append_rows().
#include <algorithm>
#include <limits>

#include "common/check.h"
#include "cpu/attention/attend.h"
#include "cpu/scratch.h"

namespace eagle::cpu {

void append_kv(const AppendKvParams& p) {
  validate(p);
  struct RowSlot {};
  AppendRow* const rows = scratch<AppendRow, RowSlot>(int64_t{p.batch_size} * p.max_nodes);
  const int64_t size = element_size(p.dtype);
  const auto at = [size](const void* base, const int64_t* strides, int b, int node) {
    return static_cast<const char*>(base) + (b * strides[0] + node * strides[1]) * size;
  };
  const auto saturate = [](int64_t x) {
    return static_cast<int32_t>(std::min<int64_t>(x, std::numeric_limits<int32_t>::max()));
  };
  int num_rows = 0;
  for (int b = 0; b < p.batch_size; ++b)
    for (int node = 0, nodes = std::clamp(p.num_nodes[b], 0, p.max_nodes); node < nodes; ++node) {
      const int64_t length = std::max(p.seq_lens[b], 0);
      rows[num_rows++] = {.q = at(p.q, p.q_strides, b, node),
                          .k = at(p.k, p.k_strides, b, node),
                          .v = at(p.v, p.v_strides, b, node),
                          .q_out = const_cast<char*>(at(p.q_out, p.q_out_strides, b, node)),
                          .request = b,
                          .cache_row = saturate(length + node),
                          .position = saturate(length + p.depths[int64_t{b} * p.max_nodes + node])};
    }
  append_rows({.rows = rows,
               .num_rows = num_rows,
               .num_heads = p.num_heads,
               .dtype = p.dtype,
               .rotary_dim = p.rotary_dim,
               .interleaved = p.interleaved,
               .max_positions = p.max_positions,
               .norm_eps = p.norm_eps,
               .q_head_stride = p.q_strides[2],
               .k_head_stride = p.k_strides[2],
               .v_head_stride = p.v_strides[2],
               .q_out_head_stride = p.q_out_strides[2],
               .q_norm = p.q_norm,
               .k_norm = p.k_norm,
               .cos = p.cos,
               .sin = p.sin,
               .cache = p.cache});
}

}  // namespace eagle::cpu
