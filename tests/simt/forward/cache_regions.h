#pragma once
// Regions of strided arrays and caches: one for each stretch of memory, since
// views of one tensor interleave.
#include <algorithm>
#include <vector>

#include "common/check.h"
#include "eagle_cuda/attention.h"
#include "simt/emulator.h"

namespace eagle::simulated {

class Spans {
 public:
  // [rows0, rows1, rows2] pieces of `elements`; strides in elements.
  void add(const char* name, const void* data, simt::Access access, const int64_t (&rows)[3],
           const int64_t (&strides)[3], int64_t elements, int64_t size) {
    if (!data || elements == 0 || rows[0] == 0 || rows[1] == 0 || rows[2] == 0) return;
    int64_t last = elements;
    for (int d = 0; d < 3; ++d) last += (rows[d] - 1) * strides[d];
    const char* const begin = static_cast<const char*>(data);
    spans_.push_back({name, begin, begin + last * size, access});
  }

  void add_cache(const KVCacheView& c, simt::Access access) {
    const int64_t size = element_size(c.dtype);
    const int64_t rows[3] = {c.num_pages, c.page_size, c.num_kv_heads};
    add("k_cache", c.k, access, rows, {c.k_page_stride, c.k_row_stride, c.k_head_stride}, c.head_dim, size);
    add("v_cache", c.v, access, rows, {c.v_page_stride, c.v_row_stride, c.v_head_stride}, c.head_dim, size);
    const int64_t one[3] = {1, 1, 1}, scales[3] = {c.num_pages, c.page_size, 1};
    const auto& scale_rows = c.tensor_scales ? one : scales;
    const simt::Access scale_access = c.tensor_scales ? simt::Access::kIn : access;
    const int64_t heads = c.tensor_scales ? 1 : c.num_kv_heads;
    add("k_scale", c.k_scale, scale_access, scale_rows, {c.k_scale_page_stride, c.k_scale_row_stride, 0},
        heads, sizeof(float));
    add("v_scale", c.v_scale, scale_access, scale_rows, {c.v_scale_page_stride, c.v_scale_row_stride, 0},
        heads, sizeof(float));
  }

  // What overlaps becomes one region, writable if a part of it is.
  void append_to(std::vector<simt::Region>& regions) {
    std::sort(spans_.begin(), spans_.end(), [](const Span& x, const Span& y) { return x.begin < y.begin; });
    for (size_t i = 0; i < spans_.size();) {
      Span whole = spans_[i++];
      for (; i < spans_.size() && spans_[i].begin < whole.end; ++i) {
        whole.end = std::max(whole.end, spans_[i].end);
        if (spans_[i].access != whole.access) whole.access = simt::Access::kInOut;
      }
      regions.push_back(simt::bytes(whole.name, whole.begin, whole.end - whole.begin, whole.access));
    }
  }

 private:
  struct Span {
    const char* name;
    const char *begin, *end;
    simt::Access access;
  };
  std::vector<Span> spans_;
};

inline void add_page_table(std::vector<simt::Region>& regions, const KVCacheView& c, int64_t batch) {
  if (c.page_table && batch > 0 && c.max_pages > 0)
    regions.push_back(simt::in("page_table", c.page_table, (batch - 1) * c.page_table_stride + c.max_pages));
}

}  // namespace eagle::simulated
