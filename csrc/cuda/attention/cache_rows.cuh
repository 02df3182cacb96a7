#pragma once
// Where the rows of a request lie in a paged or contiguous cache, on the device.
#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "eagle_cuda/attention.h"

namespace eagle::cuda {

// Rows that a request can have; positions at or beyond it are missing.
__host__ __device__ __forceinline__ int64_t cache_capacity(const KVCacheView& cache) {
  return cache.page_table ? int64_t{cache.max_pages} * cache.page_size : int64_t{cache.page_size};
}

struct CacheSlot {
  int32_t page;  // -1: missing
  int32_t row;   // in the page
};

__device__ __forceinline__ CacheSlot cache_slot(const KVCacheView& cache, int request, int64_t row) {
  if (row < 0 || row >= cache_capacity(cache)) return {-1, 0};
  int64_t page = request;
  if (cache.page_table) {
    // Rows beyond 2^32 exist only where the capacity does, which the host bounds by the table; 32 bits divide
    // faster.
    const int64_t index = row <= INT64_C(0xffffffff)
                              ? static_cast<uint32_t>(row) / static_cast<uint32_t>(cache.page_size)
                              : row / cache.page_size;
    page = load_read_only(cache.page_table + request * cache.page_table_stride + index);
    row -= index * cache.page_size;
  }
  if (page < 0 || page >= cache.num_pages) return {-1, 0};
  return {static_cast<int32_t>(page), static_cast<int32_t>(row)};
}

// Elements from the beginning of the cache.
__device__ __forceinline__ int64_t k_offset(const KVCacheView& cache, CacheSlot slot, int head) {
  return slot.page * cache.k_page_stride + slot.row * cache.k_row_stride + head * cache.k_head_stride;
}
__device__ __forceinline__ int64_t v_offset(const KVCacheView& cache, CacheSlot slot, int head) {
  return slot.page * cache.v_page_stride + slot.row * cache.v_row_stride + head * cache.v_head_stride;
}

// The scale of a row's head, or the tensor's.
__device__ __forceinline__ float* k_scale_at(const KVCacheView& cache, CacheSlot slot, int head) {
  if (cache.tensor_scales) return cache.k_scale;
  return cache.k_scale + slot.page * cache.k_scale_page_stride + slot.row * cache.k_scale_row_stride + head;
}
__device__ __forceinline__ float* v_scale_at(const KVCacheView& cache, CacheSlot slot, int head) {
  if (cache.tensor_scales) return cache.v_scale;
  return cache.v_scale + slot.page * cache.v_scale_page_stride + slot.row * cache.v_scale_row_stride + head;
}

}  // namespace eagle::cuda
