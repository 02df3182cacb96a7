// compact_kv: accepted rows move down in place, every cache by itself.
#include "eagle_cuda/kv_cache.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "cpu/attention/cache_rows.h"
#include "cpu/parallel.h"

namespace eagle::cpu {
namespace {

void move_row(char* to, const char* from, int64_t head_stride, int heads, int64_t bytes) {
  if (head_stride == bytes) {
    std::memmove(to, from, static_cast<size_t>(heads * bytes));
    return;
  }
  for (int head = 0; head < heads; ++head)
    std::memmove(to + head * head_stride, from + head * head_stride, static_cast<size_t>(bytes));
}

void move_scales(const KVCacheView& cache, float* scale, int64_t page_stride, int64_t row_stride, CacheRow to,
                 CacheRow from) {
  if (!scale || cache.tensor_scales) return;
  std::memmove(scale + to.page * page_stride + to.slot * row_stride,
               scale + from.page * page_stride + from.slot * row_stride,
               static_cast<size_t>(cache.num_kv_heads) * sizeof(float));
}

void compact_request(const CompactKvParams& p, const KVCacheView& cache, int b) {
  const int64_t size = element_size(cache.dtype);
  const int32_t* path = p.path + int64_t{b} * p.max_path;
  const int64_t first = std::max(p.seq_lens[b], 0);
  const int last = std::min(p.num_accepted[b], p.max_path - 1);
  for (int i = 1; i <= last; ++i) {
    // Ascending order is safe because no entry lies below its index: a row is read before it is overwritten.
    if (path[i] < i || path[i] >= p.max_nodes) return;
    if (path[i] == i) continue;
    const CacheRow from = cache_row(cache, b, first + path[i]), to = cache_row(cache, b, first + i);
    if (!from.k || !to.k) continue;
    move_row(to.k, from.k, cache.k_head_stride * size, cache.num_kv_heads, cache.head_dim * size);
    move_row(to.v, from.v, cache.v_head_stride * size, cache.num_kv_heads, cache.head_dim * size);
    move_scales(cache, cache.k_scale, cache.k_scale_page_stride, cache.k_scale_row_stride, to, from);
    move_scales(cache, cache.v_scale, cache.v_scale_page_stride, cache.v_scale_row_stride, to, from);
  }
}

}  // namespace

void compact_kv(const CompactKvParams& p) {
  validate(p);
  // A cache takes about a microsecond: too little to share among threads unless there are many.
  parallel_for(int64_t{p.num_caches} * p.batch_size, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      compact_request(p, p.caches[i / p.batch_size], static_cast<int>(i % p.batch_size));
  });
}

}  // namespace eagle::cpu
