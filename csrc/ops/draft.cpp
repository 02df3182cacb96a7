#include "eagle_cuda/draft.h"

#include <string>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/weight_format.h"
#include "eagle_cuda/device.h"

namespace eagle {
namespace {

void check_weight(const std::string& what, const PackedWeight& w, const DraftHead& head, int64_t n, int64_t k,
                  bool paired) {
  check(w.data != nullptr, what, ": expected a packed weight, got None");
  check(w.n == n && w.k == k, what, ": expected a packed [", n, ", ", k, "], got [", w.n, ", ", w.k, "]");
  check(w.paired == paired, what, ": expected paired = ", paired, ", got ", w.paired);
  check(is_quantized(w.format) || format_dtype(w.format) == head.dtype, what, ": expected a weight of dtype ",
        name(head.dtype), ", the embedding's, or of a quantised format, got ", name(w.format));
  check(w.backend == head.backend && (w.backend == DeviceType::kCPU || w.device_id == head.device_id), what,
        ": expected a weight packed for ", device_name(head.backend, head.device_id), ", got one for ",
        device_name(w.backend, w.device_id));
  check(w.bytes >= packed_weight_bytes(n, k, w.format, w.backend), what, ": expected ",
        packed_weight_bytes(n, k, w.format, w.backend), " packed bytes, got ", w.bytes);
}

void check_layer(const DraftHead& head, size_t index) {
  const DraftLayer& layer = head.layers[index];
  const std::string at = "layers[" + std::to_string(index) + "].";
  const int64_t H = head.hidden_size, q = int64_t(head.num_heads) * head.head_dim;
  const bool first = index == 0, joined = first && head.kind == HeadKind::kEagle3;
  check_weight(at + "qkv", layer.qkv, head, q + 2 * int64_t(head.num_kv_heads) * head.head_dim,
               joined ? 2 * H : H, false);
  check_weight(at + "o", layer.o, head, H, q, false);
  check_weight(at + "gate_up", layer.gate_up, head, 2 * int64_t(head.intermediate_size), H, true);
  check_weight(at + "down", layer.down, head, H, head.intermediate_size, false);
  check(layer.post_norm != nullptr, at, "post_norm: expected a tensor, got None");
  const bool unnormed = first && head.kind == HeadKind::kEagle1;
  check((layer.input_norm == nullptr) == unnormed, at, "input_norm: expected ",
        unnormed ? "None (the first layer of EAGLE-1/2 has none)" : "a tensor, got None");
  check((layer.hidden_norm != nullptr) == joined, at, "hidden_norm: expected ",
        joined ? "a tensor, got None" : "None (only EAGLE-3's first layer has one)");
  check((layer.q_norm == nullptr) == (layer.k_norm == nullptr), at,
        "q_norm, k_norm: expected both or neither");
}

const void* optional_vector(const std::string& what, const TensorView& t, const DraftHead& head,
                            int64_t size) {
  if (!t.present()) return nullptr;
  Expect(what.c_str(), t).dtype(head.dtype).shape({size}).contiguous().on(head.backend, head.device_id);
  return t.data;
}

DraftLayer draft_layer(const DraftHead& head, const DraftLayerViews& v, size_t index) {
  const std::string at = "layers[" + std::to_string(index) + "].";
  const int64_t H = head.hidden_size, D = head.head_dim;
  DraftLayer layer;
  layer.input_norm = optional_vector(at + "input_norm", v.input_norm, head, H);
  layer.hidden_norm = optional_vector(at + "hidden_norm", v.hidden_norm, head, H);
  layer.qkv_bias = optional_vector(at + "qkv_bias", v.qkv_bias, head,
                                   (head.num_heads + 2 * int64_t(head.num_kv_heads)) * D);
  layer.q_norm = optional_vector(at + "q_norm", v.q_norm, head, D);
  layer.k_norm = optional_vector(at + "k_norm", v.k_norm, head, D);
  layer.post_norm = optional_vector(at + "post_norm", v.post_norm, head, H);
  layer.qkv = v.qkv;
  layer.o = v.o;
  layer.gate_up = v.gate_up;
  layer.down = v.down;
  return layer;
}

void check_draft_to_target(const TensorView& t, int64_t draft_vocab, const DraftHead& head) {
  Expect("draft_to_target", t)
      .dtype(DType::kInt32)
      .shape({draft_vocab})
      .contiguous()
      .on(head.backend, head.device_id);
  if (t.device != DeviceType::kCPU) return;  // values on a device are never read by the host
  for (int64_t i = 0; i < draft_vocab; ++i) {
    const int32_t id = t.as<int32_t>()[i];
    check(id >= 0 && id < head.vocab_size && (i == 0 || id > t.as<int32_t>()[i - 1]),
          "draft_to_target: expected strictly ", "increasing ids in [0, ", head.vocab_size, "), got ", id,
          " at ", i);
  }
}

// The caches of every layer, in memory that is kept for the next call.
const KVCacheView* cache_views(const DraftHead& head, const std::vector<TensorView>& k_caches,
                               const std::vector<TensorView>& v_caches, const TensorView& page_table,
                               int64_t batch_size) {
  check(k_caches.size() == head.layers.size() && v_caches.size() == head.layers.size(), "caches: expected ",
        head.layers.size(), " (one a layer of the head), got ", k_caches.size(), " for keys and ",
        v_caches.size(), " for values");
  thread_local std::vector<KVCacheView> views;
  views.clear();
  for (size_t i = 0; i < k_caches.size(); ++i) {
    views.push_back(kv_cache_view(k_caches[i], v_caches[i], page_table, batch_size));
    const KVCacheView& c = views.back();
    Expect("k_cache", k_caches[i]).dtype(head.dtype).on(head.backend, head.device_id).writable();
    Expect("v_cache", v_caches[i]).dtype(head.dtype).on(head.backend, head.device_id).writable();
    check(c.num_kv_heads == head.num_kv_heads && c.head_dim == head.head_dim, "caches: expected ",
          head.num_kv_heads, " heads of size ", head.head_dim, ", got ", c.num_kv_heads, " of ", c.head_dim);
  }
  return views.data();
}

void check_scales(const KVCacheView* caches, const DraftHead& head, int batch_size) {
  for (size_t i = 0; batch_size > 0 && i < head.layers.size(); ++i)
    check(!caches[i].k_scale && !caches[i].v_scale, "caches[", i,
          "]: expected no scales (the draft reads none)");
}

void expect_tree(const DraftTreeViews& tree, int64_t B, int64_t N, const DraftHead& head) {
  const auto expect = [&](const char* what, const TensorView& t, DType dtype) {
    Expect(what, t).dtype(dtype).shape({B, N}).contiguous().writable().on(head.backend, head.device_id);
  };
  expect("tree.parents", tree.parents, DType::kInt32);
  expect("tree.depths", tree.depths, DType::kInt32);
  expect("tree.scores", tree.scores, DType::kFloat32);
  expect("tree.first_child", tree.first_child, DType::kInt32);
  expect("tree.next_sibling", tree.next_sibling, DType::kInt32);
  Expect("tree.num_nodes", tree.num_nodes)
      .dtype(DType::kInt32)
      .shape({B})
      .contiguous()
      .writable()
      .on(head.backend, head.device_id);
  Expect("tree.mask", tree.mask)
      .dtype(DType::kInt32)
      .shape({B, N, mask_words(N)})
      .contiguous()
      .writable()
      .on(head.backend, head.device_id);
}

void* workspace_data(const TensorView& workspace, const DraftHead& head) {
  if (!workspace.present()) return nullptr;
  Expect("workspace", workspace)
      .dtype(DType::kUInt8)
      .rank(1)
      .contiguous()
      .on(head.backend, head.device_id)
      .writable();
  return workspace.data;
}

}  // namespace

void validate(const DraftHead& head) {
  check(head.hidden_size >= 1 && head.intermediate_size >= 1, "head: expected sizes >= 1, got hidden ",
        head.hidden_size, ", intermediate ", head.intermediate_size);
  dispatch(HeadDims{}, head.head_dim, "head_dim", [](auto) {});
  check(head.num_kv_heads >= 1 && head.num_heads >= 1 && head.num_heads % head.num_kv_heads == 0,
        "num_heads: expected a multiple of num_kv_heads = ", head.num_kv_heads, ", got ", head.num_heads);
  check(head.vocab_size >= 1 && head.embedding != nullptr,
        "embedding: expected a tensor with at least one row");
  check(head.draft_vocab_size >= 1 && head.draft_vocab_size <= head.vocab_size, "lm_head: expected 1 to ",
        head.vocab_size, " rows (the embedding's), got ", head.draft_vocab_size);
  check(head.draft_to_target || head.draft_vocab_size == head.vocab_size,
        "draft_to_target: expected a map, as lm_head has ", head.draft_vocab_size, " rows and the embedding ",
        head.vocab_size, ", got None");
  check(head.norm_eps >= 0.0f, "norm_eps: expected a number >= 0, got ", head.norm_eps);
  check(head.softmax_scale >= 0.0f, "softmax_scale: expected a number >= 0, got ", head.softmax_scale);
  check(head.max_positions >= 1 && head.cos && head.sin, "cos, sin: expected tables with at least one row");
  check(!head.layers.empty(), "layers: expected at least one, got 0");
  if (head.kind == HeadKind::kEagle1) {
    check(head.feature_size == head.hidden_size, "features: expected ", head.hidden_size, " columns, got ",
          head.feature_size);
    check_weight("fc", head.fc, head, head.hidden_size, 2 * int64_t(head.hidden_size), false);
    check(!head.norm && !head.fc_norm, "norm, fc_norm: expected None for an EAGLE-1/2 head");
    check(!head.feedback_post_norm && !head.norm_before_residual,
          "feedback_post_norm, norm_before_residual: expected false for an EAGLE-1/2 head");
  } else {
    check_weight("fc", head.fc, head, head.hidden_size, head.feature_size, false);
    check(head.norm != nullptr, "norm: expected a tensor for an EAGLE-3 head, got None");
    check(head.num_aux >= 1 && head.feature_size % head.num_aux == 0,
          "fc_norm: expected a number of slices that divides ", head.feature_size, ", got ", head.num_aux);
  }
  check_weight("lm_head", head.lm_head, head, head.draft_vocab_size, head.hidden_size, false);
  for (size_t i = 0; i < head.layers.size(); ++i) check_layer(head, i);
}

void validate(const ExtendDraftParams& p) {
  check(p.head != nullptr, "head: expected a DraftHead, got null");
  check(p.batch_size >= 0 && p.num_rows >= 0, "rows: expected counts >= 0, got ", p.batch_size, " requests, ",
        p.num_rows, " rows");
  check(p.batch_size > 0 || p.num_rows == 0, "row_offsets: expected 0 rows for 0 requests, got ", p.num_rows);
  check(p.row_offsets[0] == 0, "row_offsets: expected to start at 0, got ", p.row_offsets[0]);
  for (int b = 0; b < p.batch_size; ++b)
    check(p.row_offsets[b + 1] >= p.row_offsets[b], "row_offsets: expected a non-decreasing list, got ",
          p.row_offsets[b + 1], " after ", p.row_offsets[b]);
  check(p.row_offsets[p.batch_size] == p.num_rows, "row_offsets: expected to end at ", p.num_rows,
        " (the number of rows), got ", p.row_offsets[p.batch_size]);
  check_scales(p.caches, *p.head, p.batch_size);
}

void validate(const DraftParams& p) {
  check(p.head != nullptr, "head: expected a DraftHead, got null");
  check(p.batch_size >= 0, "batch_size: expected a number >= 0, got ", p.batch_size);
  check(p.max_feature_nodes >= 1, "features: expected at least 1 node, got ", p.max_feature_nodes);
  check(p.max_path >= 1, "path: expected at least 1 column, got ", p.max_path);
  check(p.max_nodes >= 1 && p.max_nodes <= kMaxTreeNodes, "max_nodes: expected 1 to ", kMaxTreeNodes,
        ", got ", p.max_nodes);
  const int widest = std::min(kMaxTopK, p.head->draft_vocab_size);
  check(p.top_k >= 1 && p.top_k <= widest, "top_k: expected 1 to ", widest, ", got ", p.top_k);
  check(p.levels >= 1, "levels: expected at least 1, got ", p.levels);
  check(p.top_k == 1 || p.levels <= kMaxBranchingLevels, "levels: expected at most ", kMaxBranchingLevels,
        " with top_k > 1, got ", p.levels);
  check(num_candidates(p.top_k, p.levels) <= kMaxCandidates,
        "levels: top_k + (levels - 1) top_k^2 = ", num_candidates(p.top_k, p.levels), " exceeds ",
        kMaxCandidates);
  check_shape(p.shape, p.top_k, p.levels);
  check(p.tau > 0.0f && p.tau < __builtin_inff(), "tau: expected a finite number > 0, got ", p.tau);
  check(!p.temperature || p.seeds, "seeds: expected a tensor when temperature is given, got None");
  check_scales(p.caches, *p.head, p.batch_size);
}

DraftHead draft_head(const DraftHeadViews& v) {
  DraftHead head;
  head.kind = v.kind;
  Expect("embedding", v.embedding)
      .dtype({DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      .rank(2)
      .contiguous();
  head.dtype = v.embedding.dtype;
  head.backend = v.embedding.device;
  head.device_id = v.embedding.device_id;
  check(v.embedding.shape[0] < INT32_MAX && v.embedding.shape[1] < INT32_MAX,
        "embedding: expected sizes below 2^31");
  head.vocab_size = static_cast<int>(v.embedding.shape[0]);
  head.hidden_size = static_cast<int>(v.embedding.shape[1]);
  head.embedding = v.embedding.data;
  head.num_heads = v.num_heads;
  head.num_kv_heads = v.num_kv_heads;
  head.head_dim = v.head_dim;
  head.norm_eps = v.norm_eps;
  head.softmax_scale = v.softmax_scale;
  head.feedback_post_norm = v.feedback_post_norm;
  head.norm_before_residual = v.norm_before_residual;
  head.fc = v.fc;
  head.feature_size = static_cast<int>(v.kind == HeadKind::kEagle1 ? head.hidden_size : v.fc.k);
  head.lm_head = v.lm_head;
  head.draft_vocab_size = static_cast<int>(v.lm_head.n);
  head.intermediate_size = v.layers.empty() ? 0 : static_cast<int>(v.layers[0].gate_up.n / 2);
  head.fc_bias = optional_vector("fc_bias", v.fc_bias, head, head.hidden_size);
  head.norm = optional_vector("norm", v.norm, head, head.hidden_size);
  if (v.fc_norm.present()) {
    Expect("fc_norm", v.fc_norm).dtype(head.dtype).rank(2).contiguous().on(head.backend, head.device_id);
    check(v.fc_norm.shape[0] * v.fc_norm.shape[1] == head.feature_size, "fc_norm: expected ",
          head.feature_size, " elements (the columns of fc), got ", v.fc_norm.shape[0], " x ",
          v.fc_norm.shape[1]);
    head.num_aux = static_cast<int>(v.fc_norm.shape[0]);
    head.fc_norm = v.fc_norm.data;
  }
  if (v.draft_to_target.present()) {
    check_draft_to_target(v.draft_to_target, head.draft_vocab_size, head);
    head.draft_to_target = v.draft_to_target.as<int32_t>();
  }
  Expect("cos", v.cos)
      .dtype(DType::kFloat32)
      .shape({-1, head.head_dim / 2})
      .contiguous()
      .on(head.backend, head.device_id);
  Expect("sin", v.sin)
      .dtype(DType::kFloat32)
      .shape({v.cos.shape[0], head.head_dim / 2})
      .contiguous()
      .on(head.backend, head.device_id);
  head.max_positions = static_cast<int>(std::min<int64_t>(v.cos.shape[0], INT32_MAX));
  head.cos = v.cos.as<float>();
  head.sin = v.sin.as<float>();
  for (size_t i = 0; i < v.layers.size(); ++i) head.layers.push_back(draft_layer(head, v.layers[i], i));
  validate(head);
  return head;
}

void extend_draft(const DraftHead& head, TensorView features, TensorView tokens,
                  const std::vector<int32_t>& row_offsets, TensorView seq_lens,
                  const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
                  TensorView page_table, TensorView hidden, TensorView workspace, CUstream_st* stream) {
  const auto on_device = [&](const char* what, const TensorView& t) {
    return Expect(what, t).on(head.backend, head.device_id);
  };
  on_device("features", features).dtype(head.dtype).shape({-1, head.feature_size}).last_dim_contiguous();
  const int64_t rows = features.shape[0];
  on_device("tokens", tokens).dtype(DType::kInt32).shape({rows}).contiguous();
  on_device("seq_lens", seq_lens).dtype(DType::kInt32).shape({-1}).contiguous();
  const int64_t B = seq_lens.shape[0];
  check(static_cast<int64_t>(row_offsets.size()) == B + 1, "row_offsets: expected ", B + 1,
        " entries (requests + 1), got ", row_offsets.size());
  if (hidden.present())
    on_device("hidden", hidden).dtype(head.dtype).shape({rows, head.hidden_size}).contiguous().writable();
  ExtendDraftParams p{};
  p.head = &head;
  p.batch_size = static_cast<int>(B);
  p.num_rows = rows;
  p.features = features.data;
  p.features_stride = rows > 1 ? features.strides[0] : head.feature_size;
  p.tokens = tokens.as<int32_t>();
  p.row_offsets = row_offsets.data();
  p.seq_lens = seq_lens.as<int32_t>();
  p.caches = cache_views(head, k_caches, v_caches, page_table, B);
  p.hidden = hidden.present() ? hidden.data : nullptr;
  p.workspace = workspace_data(workspace, head);
  p.workspace_bytes = workspace.present() ? workspace.shape[0] : 0;
  const DeviceGuard guard(features);
  features.device == DeviceType::kCPU ? cpu::extend_draft(p) : cuda::extend_draft(p, stream);
}

void draft(const DraftHead& head, TensorView features, TensorView target_tokens, TensorView path,
           TensorView num_accepted, TensorView seq_lens, TensorView node_limit, TensorView temperature,
           TensorView seeds, float tau, int top_k, int levels, TreeOrder order,
           const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
           TensorView page_table, const DraftTreeViews& tree, const TreeShape* shape, TensorView workspace,
           CUstream_st* stream) {
  const auto on_device = [&](const char* what, const TensorView& t) {
    return Expect(what, t).on(head.backend, head.device_id);
  };
  on_device("features", features).dtype(head.dtype).shape({-1, -1, head.feature_size}).last_dim_contiguous();
  const int64_t B = features.shape[0], nodes = features.shape[1];
  on_device("target_tokens", target_tokens).dtype(DType::kInt32).shape({B, nodes}).contiguous();
  on_device("path", path).dtype(DType::kInt32).shape({B, -1}).contiguous();
  on_device("num_accepted", num_accepted).dtype(DType::kInt32).shape({B}).contiguous();
  on_device("seq_lens", seq_lens).dtype(DType::kInt32).shape({B}).contiguous();
  if (node_limit.present()) on_device("node_limit", node_limit).dtype(DType::kInt32).shape({B}).contiguous();
  if (temperature.present())
    on_device("temperature", temperature).dtype(DType::kFloat32).shape({B}).contiguous();
  if (seeds.present()) on_device("seeds", seeds).dtype(DType::kInt64).shape({B}).contiguous();
  on_device("tree.tokens", tree.tokens).dtype(DType::kInt32).shape({B, -1}).contiguous().writable();
  const int64_t N = tree.tokens.shape[1];
  expect_tree(tree, B, N, head);
  DraftParams p{};
  p.head = &head;
  p.batch_size = static_cast<int>(B);
  p.max_feature_nodes = static_cast<int>(nodes);
  p.max_path = static_cast<int>(path.shape[1]);
  p.max_nodes = static_cast<int>(std::min<int64_t>(N, INT32_MAX));
  p.top_k = top_k;
  p.levels = levels;
  p.order = order;
  p.tau = tau;
  p.features = features.data;
  p.features_strides[0] = features.strides[0];
  p.features_strides[1] = features.strides[1];
  p.target_tokens = target_tokens.as<int32_t>();
  p.path = path.as<int32_t>();
  p.num_accepted = num_accepted.as<int32_t>();
  p.seq_lens = seq_lens.as<int32_t>();
  p.node_limit = node_limit.present() ? node_limit.as<int32_t>() : nullptr;
  p.temperature = temperature.present() ? temperature.as<float>() : nullptr;
  p.seeds = seeds.present() ? seeds.as<int64_t>() : nullptr;
  p.caches = cache_views(head, k_caches, v_caches, page_table, B);
  p.tree = {tree.tokens.as<int32_t>(),      tree.parents.as<int32_t>(),     tree.depths.as<int32_t>(),
            tree.mask.as<int32_t>(),        tree.scores.as<float>(),        tree.num_nodes.as<int32_t>(),
            tree.first_child.as<int32_t>(), tree.next_sibling.as<int32_t>()};
  p.shape = shape;
  p.workspace = workspace_data(workspace, head);
  p.workspace_bytes = workspace.present() ? workspace.shape[0] : 0;
  const DeviceGuard guard(features);
  features.device == DeviceType::kCPU ? cpu::draft(p) : cuda::draft(p, stream);
}

int64_t extend_draft_workspace_bytes(const DraftHead& head, const std::vector<int32_t>& row_offsets,
                                     const std::vector<TensorView>& k_caches,
                                     const std::vector<TensorView>& v_caches, TensorView page_table) {
  check(!row_offsets.empty(), "row_offsets: expected at least 1 entry (requests + 1), got 0");
  if (head.backend == DeviceType::kCPU) return 0;
  ExtendDraftParams p{};
  p.head = &head;
  p.batch_size = static_cast<int>(row_offsets.size()) - 1;
  p.num_rows = row_offsets.back();
  p.row_offsets = row_offsets.data();
  p.caches = cache_views(head, k_caches, v_caches, page_table, p.batch_size);
  const DeviceGuard guard(k_caches[0]);
  return cuda::extend_draft_workspace_bytes(p);
}

int64_t draft_workspace_bytes(const DraftHead& head, int64_t batch_size, int max_path, int top_k, int levels,
                              const std::vector<TensorView>& k_caches,
                              const std::vector<TensorView>& v_caches, TensorView page_table) {
  if (head.backend == DeviceType::kCPU) return 0;
  DraftParams p{};
  p.head = &head;
  p.batch_size = static_cast<int>(std::min<int64_t>(batch_size, INT32_MAX));
  p.max_feature_nodes = p.max_nodes = 1;
  p.max_path = max_path;
  p.top_k = top_k;
  p.levels = levels;
  p.tau = 1.0f;
  p.caches = cache_views(head, k_caches, v_caches, page_table, batch_size);
  const DeviceGuard guard(k_caches[0]);
  return cuda::draft_workspace_bytes(p);
}

}  // namespace eagle
