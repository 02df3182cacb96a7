#include <algorithm>

#include "common/check.h"
#include "eagle_cuda/kv_cache.h"
#include "simt/emulator.h"

namespace eagle::cpu {
namespace {

struct Span {
  const char *begin, *end;
};

// From the first byte to the last of an array of [pages, page_size, pieces] pieces; strides in elements.
void add_span(std::vector<Span>& spans, const KVCacheView& c, const void* data, int64_t page_stride,
              int64_t row_stride, int64_t piece_stride, int64_t pieces, int64_t elements, int64_t size) {
  if (!data || c.num_pages == 0 || pieces == 0 || elements == 0) return;
  const int64_t last = (c.num_pages - 1) * page_stride + (c.page_size - 1) * row_stride +
                       (pieces - 1) * piece_stride + elements;
  const char* const begin = static_cast<const char*>(data);
  spans.push_back({begin, begin + last * size});
}

}  // namespace

void compact_kv(const CompactKvParams& p) {
  validate(p);  // sizes below 0 would make nonsense of the regions
  const int64_t b = p.batch_size;
  std::vector<simt::Region> regions = {simt::in("path", p.path, b * p.max_path),
                                       simt::in("num_accepted", p.num_accepted, b),
                                       simt::in("seq_lens", p.seq_lens, b)};
  if (p.num_caches > 0 && p.caches[0].page_table && b > 0 && p.caches[0].max_pages > 0)
    regions.push_back(simt::in("page_table", p.caches[0].page_table,
                               (b - 1) * p.caches[0].page_table_stride + p.caches[0].max_pages));
  std::vector<Span> spans;
  for (int i = 0; i < p.num_caches; ++i) {
    const KVCacheView& c = p.caches[i];
    const int64_t size = element_size(c.dtype), heads = c.num_kv_heads;
    add_span(spans, c, c.k, c.k_page_stride, c.k_row_stride, c.k_head_stride, heads, c.head_dim, size);
    add_span(spans, c, c.v, c.v_page_stride, c.v_row_stride, c.v_head_stride, heads, c.head_dim, size);
    add_span(spans, c, c.k_scale, c.k_scale_page_stride, c.k_scale_row_stride, 0, 1, heads, sizeof(float));
    add_span(spans, c, c.v_scale, c.v_scale_page_stride, c.v_scale_row_stride, 0, 1, heads, sizeof(float));
  }
  // Views of one tensor interleave: what overlaps becomes one region.
  std::sort(spans.begin(), spans.end(), [](const Span& x, const Span& y) { return x.begin < y.begin; });
  for (size_t i = 0; i < spans.size();) {
    Span whole = spans[i++];
    for (; i < spans.size() && spans[i].begin < whole.end; ++i) whole.end = std::max(whole.end, spans[i].end);
    regions.push_back(simt::bytes("caches", whole.begin, whole.end - whole.begin, simt::Access::kInOut));
  }
  simt::Memory memory("compact_kv", regions);
  cuda::compact_kv(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
