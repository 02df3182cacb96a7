#include "eagle_cuda/kv_cache.h"

#include <algorithm>
#include <limits>

#include "common/check.h"
#include "eagle_cuda/device.h"

namespace eagle {
namespace {

void check_cache(const KVCacheView& c, const KVCacheView& first, int i) {
  check(c.page_size >= 1, "k_caches[", i, "]: expected a page size of at least 1, got ", c.page_size);
  const int64_t size = element_size(c.dtype);
  check(size <= 4, "k_caches[", i, "]: expected elements of 1, 2 or 4 bytes, got ", name(c.dtype));
  check(c.num_kv_heads >= 0 && c.head_dim >= 0, "k_caches[", i,
        "]: expected 0 or more heads and dimensions, got ", c.num_kv_heads, " and ", c.head_dim);
  check(int64_t{c.num_kv_heads} * c.head_dim <= std::numeric_limits<int>::max() / 4, "k_caches[", i,
        "]: expected rows of at most 2^29 elements, got ", c.num_kv_heads, " heads of ", c.head_dim);
  check(c.page_table == first.page_table &&
            (!c.page_table ||
             (c.max_pages == first.max_pages && c.page_table_stride == first.page_table_stride)),
        "k_caches[", i, "]: expected the page table of the first cache, got another one");
}

// A row that two caches share would be moved twice. Views of one tensor may interleave, so beginnings are
// compared, not extents.
void check_distinct(const std::vector<KVCacheView>& caches) {
  std::vector<const void*> begins;
  begins.reserve(4 * caches.size());
  for (const KVCacheView& c : caches) {
    const bool moves = !c.tensor_scales;  // the scales too
    for (const void* data : {static_cast<const void*>(c.k), static_cast<const void*>(c.v),
                             static_cast<const void*>(moves ? c.k_scale : nullptr),
                             static_cast<const void*>(moves ? c.v_scale : nullptr)})
      if (data && c.num_pages > 0 && c.num_kv_heads > 0 && c.head_dim > 0) begins.push_back(data);
  }
  std::sort(begins.begin(), begins.end());
  check(std::adjacent_find(begins.begin(), begins.end()) == begins.end(),
        "k_caches, v_caches: expected every cache once, got two that begin at the same address");
}

const TensorView& entry(const std::vector<TensorView>& list, size_t i) {
  static const TensorView absent;
  return list.empty() ? absent : list[i];
}

}  // namespace

void validate(const CompactKvParams& p) {
  check(p.batch_size >= 0, "path: expected a batch of 0 or more, got ", p.batch_size);
  check(p.num_caches >= 0, "k_caches: expected 0 or more caches, got ", p.num_caches);
  check(p.max_nodes >= 1 && p.max_nodes <= 256, "max_nodes: expected 1 to 256, got ", p.max_nodes);
  check(p.max_path >= 1, "path: expected at least 1 entry a request, got ", p.max_path);
  for (int i = 0; i < p.num_caches; ++i) check_cache(p.caches[i], p.caches[0], i);
}

void compact_kv(const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
                const std::vector<TensorView>& k_scales, const std::vector<TensorView>& v_scales,
                TensorView page_table, TensorView path, TensorView num_accepted, TensorView seq_lens,
                int max_nodes, CUstream_st* stream) {
  check(k_caches.size() == v_caches.size(), "v_caches: expected ", k_caches.size(),
        " caches, as many as k_caches, got ", v_caches.size());
  for (const auto* scales : {&k_scales, &v_scales})
    check(scales->empty() || scales->size() == k_caches.size(), scales == &k_scales ? "k" : "v",
          "_scales: expected ", k_caches.size(), " entries, as many as k_caches, got ", scales->size());
  Expect("path", path).dtype(DType::kInt32).rank(2).contiguous();
  const int64_t batch = path.shape[0];
  Expect("num_accepted", num_accepted).dtype(DType::kInt32).shape({batch}).contiguous().same_device(path);
  Expect("seq_lens", seq_lens).dtype(DType::kInt32).shape({batch}).contiguous().same_device(path);
  std::vector<KVCacheView> caches;
  caches.reserve(k_caches.size());
  for (size_t i = 0; i < k_caches.size(); ++i) {
    const TensorView &k_scale = entry(k_scales, i), &v_scale = entry(v_scales, i);
    caches.push_back(kv_cache_view(k_caches[i], v_caches[i], page_table, batch, k_scale, v_scale));
    Expect("k_cache", k_caches[i]).same_device(path).writable();
    Expect("v_cache", v_caches[i]).writable();
    if (k_scale.present() && !caches.back().tensor_scales) Expect("k_scale", k_scale).writable();
    if (v_scale.present() && !caches.back().tensor_scales) Expect("v_scale", v_scale).writable();
  }
  check_distinct(caches);
  CompactKvParams p{};
  p.batch_size = static_cast<int>(batch);
  p.num_caches = static_cast<int>(caches.size());
  p.max_nodes = max_nodes;
  p.max_path = static_cast<int>(path.shape[1]);
  p.caches = caches.data();
  p.path = path.as<const int32_t>();
  p.num_accepted = num_accepted.as<const int32_t>();
  p.seq_lens = seq_lens.as<const int32_t>();
  const DeviceGuard guard(path);
  path.device == DeviceType::kCPU ? cpu::compact_kv(p) : cuda::compact_kv(p, stream);
}

}  // namespace eagle
