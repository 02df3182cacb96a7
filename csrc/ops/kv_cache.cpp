#include "eagle_cuda/kv_cache.h"

#include "common/check.h"

namespace eagle {

void validate(const CompactKvParams& p) {
  check(p.batch_size >= 0, "path: expected a batch of 0 or more, got ", p.batch_size);
  check(p.num_caches >= 0, "k_caches: expected 0 or more caches, got ", p.num_caches);
  check(p.max_nodes >= 1 && p.max_nodes <= 256, "max_nodes: expected 1 to 256, got ", p.max_nodes);
  check(p.max_path >= 1, "path: expected at least 1 entry a request, got ", p.max_path);
  for (int i = 0; i < p.num_caches; ++i)
    check(p.caches[i].page_size >= 1, "k_caches[", i, "]: expected a page size of at least 1, got ",
          p.caches[i].page_size);
}

void compact_kv(const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
                TensorView page_table, TensorView path, TensorView num_accepted, TensorView seq_lens,
                int max_nodes, CUstream_st* stream) {
  check(k_caches.size() == v_caches.size(), "v_caches: expected ", k_caches.size(),
        " caches, as many as k_caches, got ", v_caches.size());
  Expect("path", path).dtype(DType::kInt32).rank(2).contiguous();
  const int64_t batch = path.shape[0];
  Expect("num_accepted", num_accepted).dtype(DType::kInt32).shape({batch}).contiguous().same_device(path);
  Expect("seq_lens", seq_lens).dtype(DType::kInt32).shape({batch}).contiguous().same_device(path);
  std::vector<KVCacheView> caches;
  caches.reserve(k_caches.size());
  for (size_t i = 0; i < k_caches.size(); ++i) {
    caches.push_back(kv_cache_view(k_caches[i], v_caches[i], page_table, batch));
    Expect("k_cache", k_caches[i]).same_device(path).writable();
    Expect("v_cache", v_caches[i]).writable();
  }
  CompactKvParams p{};
  p.batch_size = static_cast<int>(batch);
  p.num_caches = static_cast<int>(caches.size());
  p.max_nodes = max_nodes;
  p.max_path = static_cast<int>(path.shape[1]);
  p.caches = caches.data();
  p.path = path.as<const int32_t>();
  p.num_accepted = num_accepted.as<const int32_t>();
  p.seq_lens = seq_lens.as<const int32_t>();
  path.device == DeviceType::kCPU ? cpu::compact_kv(p) : cuda::compact_kv(p, stream);
}

}  // namespace eagle
