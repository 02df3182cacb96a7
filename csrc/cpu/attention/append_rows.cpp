// Norm, rotation and cache write of explicit rows; a row is a piece of work.
#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "cpu/attention/append_kernels.h"
#include "cpu/attention/attend.h"
#include "cpu/attention/cache_rows.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace eagle::cpu {
namespace {

AppendKernels choose_kernels(DType dtype) {
  switch (isa()) {
    case Isa::kGeneric:
      return append_kernels_generic(dtype);
    case Isa::kAvx2:
      return append_kernels_avx2(dtype);
    default:
      return append_kernels_avx512(dtype);
  }
}

void copy_heads(const char* from, int64_t from_stride, char* to, int64_t to_stride, int heads,
                int64_t bytes) {
  if (from_stride == bytes && to_stride == bytes) {
    std::memcpy(to, from, static_cast<size_t>(heads * bytes));
    return;
  }
  for (int head = 0; head < heads; ++head)
    std::memcpy(to + head * to_stride, from + head * from_stride, static_cast<size_t>(bytes));
}

}  // namespace

void append_rows(const AppendRowsParams& p) {
  const KVCacheView& cache = p.cache;
  const AppendKernels kernels = choose_kernels(p.dtype);
  const bool encodes = cache.dtype == DType::kFloat8E4M3;
  const int64_t size = element_size(p.dtype);
  const int half = p.rotary_dim / 2;
  const auto append = [&](const AppendRow& row) {
    const int64_t position = p.rotary_dim ? std::clamp(row.position, 0, p.max_positions - 1) : 0;
    RotateParams r{.head_dim = cache.head_dim,
                   .rotary_dim = p.rotary_dim,
                   .interleaved = p.interleaved,
                   .norm_eps = p.norm_eps,
                   .norm = p.q_norm,
                   .cos = p.cos + position * half,
                   .sin = p.sin + position * half};
    if (row.q) kernels.rotate(r, p.num_heads, row.q, p.q_head_stride, row.q_out, p.q_out_head_stride);
    const CacheRow to = cache_row(cache, row.request, row.cache_row);
    if (!to.k) return;
    r.norm = p.k_norm;
    if (encodes) {
      kernels.encode(r, cache.num_kv_heads, row.k, p.k_head_stride,
                     {to.k, cache.k_head_stride, k_scales(cache, to), cache.tensor_scales});
      RotateParams as_it_is{};
      as_it_is.head_dim = cache.head_dim;
      return kernels.encode(as_it_is, cache.num_kv_heads, row.v, p.v_head_stride,
                            {to.v, cache.v_head_stride, v_scales(cache, to), cache.tensor_scales});
    }
    kernels.rotate(r, cache.num_kv_heads, row.k, p.k_head_stride, to.k, cache.k_head_stride);
    copy_heads(static_cast<const char*>(row.v), p.v_head_stride * size, to.v, cache.v_head_stride * size,
               cache.num_kv_heads, cache.head_dim * size);
  };
  // About 16 k elements a piece: below that, a thread takes longer to wake than the row takes.
  const int64_t elements = int64_t{p.num_heads + 2 * cache.num_kv_heads} * cache.head_dim;
  parallel_for(p.num_rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(elements, 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) append(p.rows[i]);
               });
}

}  // namespace eagle::cpu
