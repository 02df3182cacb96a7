#pragma once
// Regions of a draft head and of its caches.
#include <vector>

#include "eagle_cuda/draft.h"
#include "simt/emulator.h"
#include "simt/forward/cache_regions.h"
#include "simt/forward/matrix_regions.h"

namespace eagle::simulated {

inline std::vector<simt::Region> head_regions(const DraftHead& head) {
  const int64_t size = element_size(head.dtype), H = head.hidden_size, D = head.head_dim;
  std::vector<simt::Region> regions;
  const auto vector = [&](const char* name, const void* data, int64_t elements) {
    regions.push_back(simt::bytes(name, data, elements * size, simt::Access::kIn));
  };
  vector("embedding", head.embedding, head.vocab_size * H);
  vector("fc_bias", head.fc_bias, H);
  vector("fc_norm", head.fc_norm, head.feature_size);
  vector("norm", head.norm, H);
  regions.push_back(packed_region(head.fc));
  regions.push_back(packed_region(head.lm_head));
  regions.push_back(simt::in("draft_to_target", head.draft_to_target, head.draft_vocab_size));
  regions.push_back(simt::in("cos", head.cos, int64_t{head.max_positions} * (D / 2)));
  regions.push_back(simt::in("sin", head.sin, int64_t{head.max_positions} * (D / 2)));
  for (const DraftLayer& layer : head.layers) {
    vector("input_norm", layer.input_norm, H);
    vector("hidden_norm", layer.hidden_norm, H);
    vector("qkv_bias", layer.qkv_bias, layer.qkv.n);
    vector("q_norm", layer.q_norm, D);
    vector("k_norm", layer.k_norm, D);
    vector("post_norm", layer.post_norm, H);
    for (const PackedWeight* weight : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
      regions.push_back(packed_region(*weight));
  }
  return regions;
}

inline void add_caches(std::vector<simt::Region>& regions, const DraftHead& head, const KVCacheView* caches,
                       int64_t batch) {
  if (batch == 0) return;
  add_page_table(regions, caches[0], batch);
  Spans spans;
  for (size_t i = 0; i < head.layers.size(); ++i) spans.add_cache(caches[i], simt::Access::kInOut);
  spans.append_to(regions);
}

}  // namespace eagle::simulated
