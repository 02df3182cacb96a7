#pragma once
// Where the rows of a request lie in a paged or contiguous cache.
#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "eagle_cuda/attention.h"

namespace eagle::cpu {

// Rows that a request can have. Positions at or beyond it are missing.
inline int64_t cache_capacity(const KVCacheView& cache) {
  return cache.page_table ? int64_t{cache.max_pages} * cache.page_size : int64_t{cache.page_size};
}

// The page that holds row `page_index * page_size` of a request, or -1.
inline int64_t cache_page(const KVCacheView& cache, int64_t request, int64_t page_index) {
  const int64_t page =
      cache.page_table ? cache.page_table[request * cache.page_table_stride + page_index] : request;
  return page >= 0 && page < cache.num_pages ? page : -1;
}

struct CacheRow {
  char* k;  // nullptr: missing
  char* v;
  int64_t page, slot;
};

inline CacheRow cache_row(const KVCacheView& cache, int64_t request, int64_t row) {
  if (row < 0 || row >= cache_capacity(cache)) return {};
  const int64_t page = cache_page(cache, request, row / cache.page_size), slot = row % cache.page_size;
  if (page < 0) return {};
  const int64_t size = element_size(cache.dtype);
  return {static_cast<char*>(cache.k) + (page * cache.k_page_stride + slot * cache.k_row_stride) * size,
          static_cast<char*>(cache.v) + (page * cache.v_page_stride + slot * cache.v_row_stride) * size, page,
          slot};
}

// The scales of a row's heads, or the one of the tensor.
inline float* k_scales(const KVCacheView& cache, const CacheRow& row) {
  return cache.k_scale + (cache.tensor_scales
                              ? 0
                              : row.page * cache.k_scale_page_stride + row.slot * cache.k_scale_row_stride);
}
inline float* v_scales(const KVCacheView& cache, const CacheRow& row) {
  return cache.v_scale + (cache.tensor_scales
                              ? 0
                              : row.page * cache.v_scale_page_stride + row.slot * cache.v_scale_row_stride);
}

// Calls f(index, count, first) for runs of rows that lie at a fixed stride; `index` counts from `begin`,
// `first` is the first row of the run, missing where the page is. Needs 0 <= begin, end <= capacity.
template <class F>
inline void for_each_run(const KVCacheView& cache, int64_t request, int64_t begin, int64_t end, F&& f) {
  for (int64_t row = begin; row < end;) {
    const int64_t left = cache.page_size - row % cache.page_size;
    const int64_t count = std::min(left, end - row);
    f(static_cast<int>(row - begin), static_cast<int>(count), cache_row(cache, request, row));
    row += count;
  }
}

}  // namespace eagle::cpu
