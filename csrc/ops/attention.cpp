#include "eagle_cuda/attention.h"

#include <cmath>
#include <limits>

#include "common/check.h"
#include "common/dispatch.h"
#include "eagle_cuda/device.h"

namespace eagle {
namespace {

constexpr int kMaxNodes = 256;

// A cache that attention can compute with, beside queries of `dtype`.
void check_cache(const KVCacheView& c, DType dtype) {
  check(c.dtype == DType::kFloat32 || c.dtype == DType::kBFloat16 || c.dtype == DType::kFloat16 ||
            c.dtype == DType::kFloat8E4M3,
        "k_cache: expected a dtype of float32, bfloat16, float16, float8_e4m3fn, got ", name(c.dtype));
  if (c.dtype == DType::kFloat8E4M3)
    dispatch(FloatTypes{}, dtype, "q", [](auto) {});
  else
    check(dtype == c.dtype, "q: expected dtype ", name(c.dtype), ", got ", name(dtype));
  check(c.num_kv_heads >= 1, "k_cache: expected at least 1 key head, got ", c.num_kv_heads);
  check(c.page_size >= 1, "k_cache: expected a page size of at least 1, got ", c.page_size);
  check(c.num_pages >= 0, "k_cache: expected 0 or more pages, got ", c.num_pages);
  check(c.max_pages >= 0, "page_table: expected 0 or more pages a request, got ", c.max_pages);
}

void check_scales(const KVCacheView& c) {
  const bool wanted = c.dtype == DType::kFloat8E4M3;
  for (const bool keys : {true, false}) {
    const bool given = keys ? c.k_scale : c.v_scale;
    check(given == wanted, keys ? "k" : "v", "_scale: expected ", wanted ? "one" : "none", " for a cache of ",
          name(c.dtype), ", got ", given ? "one" : "none");
  }
}

void check_heads(int num_heads, int num_kv_heads) {
  check(num_heads >= 1 && num_heads % num_kv_heads == 0,
        "q: expected a number of heads that is a multiple of ", num_kv_heads, ", got ", num_heads);
}

void check_sizes(int batch_size, int max_nodes) {
  check(batch_size >= 0, "q: expected a batch of 0 or more, got ", batch_size);
  check(max_nodes >= 0 && max_nodes <= kMaxNodes, "q: expected at most ", kMaxNodes, " nodes a request, got ",
        max_nodes);
}

int as_int(int64_t size, const char* what) {
  check(size <= std::numeric_limits<int>::max(), what, ": expected a size below 2^31, got ", size);
  return static_cast<int>(size);
}

void copy_strides(const TensorView& t, int64_t (&strides)[3]) {
  for (int d = 0; d < 3; ++d) strides[d] = t.strides[d];
}

bool of_tensor(const TensorView& scale) { return scale.ndim == 1 && scale.shape[0] == 1; }

void expect_scale(const char* what, const TensorView& scale, const TensorView& cache) {
  Expect(what, scale).dtype(DType::kFloat32).same_device(cache);
  if (of_tensor(scale)) return;
  Expect(what, scale).shape({cache.shape[0], cache.shape[1], cache.shape[2]}).last_dim_contiguous();
}

}  // namespace

void validate(const AppendKvParams& p) {
  check_sizes(p.batch_size, p.max_nodes);
  check_cache(p.cache, p.dtype);
  check_scales(p.cache);
  check_heads(p.num_heads, p.cache.num_kv_heads);
  check(p.cache.head_dim >= 1 && p.cache.head_dim <= 256, "q: expected a head_dim of 1 to 256, got ",
        p.cache.head_dim);
  check(p.rotary_dim >= 0 && p.rotary_dim <= p.cache.head_dim && p.rotary_dim % 2 == 0,
        "cos: expected an even number of rotated dimensions, at most head_dim = ", p.cache.head_dim, ", got ",
        p.rotary_dim);
  check(p.rotary_dim == 0 || p.max_positions >= 1, "cos: expected at least 1 position, got ",
        p.max_positions);
  check(!(p.q_norm || p.k_norm) || p.norm_eps >= 0.0f, "eps: expected 0 or more, got ", p.norm_eps);
}

void validate(const TreeAttentionParams& p) {
  check_sizes(p.batch_size, p.max_nodes);
  check_cache(p.cache, p.dtype);
  check_scales(p.cache);
  check_heads(p.num_heads, p.cache.num_kv_heads);
  dispatch(HeadDims{}, p.cache.head_dim, "head_dim", [](auto) {});
  check(p.window >= 0, "window: expected 0 (no limit) or more, got ", p.window);
  check(std::isfinite(p.softmax_scale), "softmax_scale: expected a finite number, got ", p.softmax_scale);
  check(std::isfinite(p.logit_softcap) && p.logit_softcap >= 0.0f,
        "logit_softcap: expected 0 (none) or a finite number above, got ", p.logit_softcap);
}

KVCacheView kv_cache_view(TensorView k_cache, TensorView v_cache, TensorView page_table, int64_t batch_size,
                          TensorView k_scale, TensorView v_scale) {
  Expect("k_cache", k_cache)
      .dtype({DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kInt32,
              DType::kUInt8, DType::kInt8})
      .rank(4)
      .last_dim_contiguous();
  Expect("v_cache", v_cache)
      .dtype(k_cache.dtype)
      .shape({k_cache.shape[0], k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]})
      .last_dim_contiguous()
      .same_device(k_cache);
  KVCacheView view{};
  view.k = k_cache.data;
  view.v = v_cache.data;
  view.k_page_stride = k_cache.strides[0];
  view.k_row_stride = k_cache.strides[1];
  view.k_head_stride = k_cache.strides[2];
  view.v_page_stride = v_cache.strides[0];
  view.v_row_stride = v_cache.strides[1];
  view.v_head_stride = v_cache.strides[2];
  view.num_pages = k_cache.shape[0];
  view.page_size = as_int(k_cache.shape[1], "k_cache");
  view.num_kv_heads = as_int(k_cache.shape[2], "k_cache");
  view.head_dim = as_int(k_cache.shape[3], "k_cache");
  view.dtype = k_cache.dtype;
  if (page_table.present()) {
    Expect("page_table", page_table)
        .dtype(DType::kInt32)
        .shape({batch_size, -1})
        .last_dim_contiguous()
        .same_device(k_cache);
    // Without a page id the table has no address, yet a table it is: no request has a row.
    static constexpr int32_t kNoPages[1] = {-1};
    view.page_table = page_table.data ? page_table.as<const int32_t>() : kNoPages;
    view.max_pages = as_int(page_table.shape[1], "page_table");
    view.page_table_stride = page_table.strides[0];
  } else {
    check(k_cache.shape[0] >= batch_size, "k_cache: expected a page for each of ", batch_size,
          " requests, since there is no page_table; got ", k_cache.shape[0]);
  }
  // Scales without pages have no address, yet they are scales.
  static constexpr float kNoRows[1] = {};
  const auto scales = [](const TensorView& t) {
    return t.data ? t.as<float>() : const_cast<float*>(kNoRows);
  };
  if (k_scale.present()) {
    expect_scale("k_scale", k_scale, k_cache);
    view.k_scale = scales(k_scale);
    view.k_scale_page_stride = k_scale.strides[0];
    view.k_scale_row_stride = k_scale.strides[1];
  }
  if (v_scale.present()) {
    expect_scale("v_scale", v_scale, v_cache);
    view.v_scale = scales(v_scale);
    view.v_scale_page_stride = v_scale.strides[0];
    view.v_scale_row_stride = v_scale.strides[1];
  }
  if (k_scale.present() && v_scale.present())
    check(of_tensor(k_scale) == of_tensor(v_scale), "v_scale: expected ", of_tensor(k_scale) ? "one" : "no",
          " factor for the whole tensor, as k_scale has, got shape ", of_tensor(v_scale) ? "[1]" : "of rows");
  view.tensor_scales = of_tensor(k_scale) || of_tensor(v_scale);
  return view;
}

void append_kv(TensorView q, TensorView k, TensorView v, TensorView k_cache, TensorView v_cache,
               TensorView page_table, TensorView seq_lens, TensorView depths, TensorView num_nodes,
               TensorView cos, TensorView sin, bool interleaved, TensorView q_norm, TensorView k_norm,
               float norm_eps, TensorView q_out, TensorView k_scale, TensorView v_scale,
               CUstream_st* stream) {
  Expect("q", q).rank(4).last_dim_contiguous();
  const int64_t batch = q.shape[0], nodes = q.shape[1], dim = q.shape[3];
  AppendKvParams p{};
  p.cache = kv_cache_view(k_cache, v_cache, page_table, batch, k_scale, v_scale);
  check_cache(p.cache, q.dtype);
  check_scales(p.cache);
  if (p.cache.k_scale && !p.cache.tensor_scales) {
    Expect("k_scale", k_scale).writable();
    Expect("v_scale", v_scale).writable();
  }
  Expect("k_cache", k_cache).shape({-1, -1, -1, dim}).same_device(q).writable();
  Expect("v_cache", v_cache).writable();
  const int64_t kv_heads = k_cache.shape[2];
  Expect("k", k).dtype(q.dtype).shape({batch, nodes, kv_heads, dim}).last_dim_contiguous().same_device(q);
  Expect("v", v).dtype(q.dtype).shape({batch, nodes, kv_heads, dim}).last_dim_contiguous().same_device(q);
  Expect("q_out", q_out)
      .dtype(q.dtype)
      .shape({batch, nodes, q.shape[2], dim})
      .last_dim_contiguous()
      .same_device(q)
      .writable();
  Expect("seq_lens", seq_lens).dtype(DType::kInt32).shape({batch}).contiguous().same_device(q);
  Expect("depths", depths).dtype(DType::kInt32).shape({batch, nodes}).contiguous().same_device(q);
  Expect("num_nodes", num_nodes).dtype(DType::kInt32).shape({batch}).contiguous().same_device(q);
  if (cos.present() || sin.present()) {
    Expect("cos", cos).dtype(DType::kFloat32).rank(2).contiguous().same_device(q);
    Expect("sin", sin).dtype(DType::kFloat32).shape({cos.shape[0], cos.shape[1]}).contiguous().same_device(q);
    p.rotary_dim = as_int(2 * cos.shape[1], "cos");
    p.max_positions = as_int(cos.shape[0], "cos");
    p.cos = cos.as<const float>();
    p.sin = sin.as<const float>();
  }
  if (q_norm.present()) {
    Expect("q_norm", q_norm).dtype(q.dtype).shape({dim}).contiguous().same_device(q);
    p.q_norm = q_norm.data;
  }
  if (k_norm.present()) {
    Expect("k_norm", k_norm).dtype(q.dtype).shape({dim}).contiguous().same_device(q);
    p.k_norm = k_norm.data;
  }
  p.batch_size = as_int(batch, "q");
  p.max_nodes = as_int(nodes, "q");
  p.num_heads = as_int(q.shape[2], "q");
  p.dtype = q.dtype;
  p.interleaved = interleaved;
  p.norm_eps = norm_eps;
  p.q = q.data;
  p.k = k.data;
  p.v = v.data;
  p.q_out = q_out.data;
  copy_strides(q, p.q_strides);
  copy_strides(k, p.k_strides);
  copy_strides(v, p.v_strides);
  copy_strides(q_out, p.q_out_strides);
  p.seq_lens = seq_lens.as<const int32_t>();
  p.depths = depths.as<const int32_t>();
  p.num_nodes = num_nodes.as<const int32_t>();
  const DeviceGuard guard(q);
  q.device == DeviceType::kCPU ? cpu::append_kv(p) : cuda::append_kv(p, stream);
}

namespace {

TreeAttentionParams queries_and_cache(TensorView q, TensorView k_cache, TensorView v_cache,
                                      TensorView page_table, TensorView k_scale = {},
                                      TensorView v_scale = {}) {
  Expect("q", q).rank(4).last_dim_contiguous();
  TreeAttentionParams p{};
  p.cache = kv_cache_view(k_cache, v_cache, page_table, q.shape[0], k_scale, v_scale);
  check_cache(p.cache, q.dtype);
  Expect("k_cache", k_cache).shape({-1, -1, -1, q.shape[3]}).same_device(q);
  p.batch_size = as_int(q.shape[0], "q");
  p.max_nodes = as_int(q.shape[1], "q");
  p.num_heads = as_int(q.shape[2], "q");
  p.dtype = q.dtype;
  p.q = q.data;
  copy_strides(q, p.q_strides);
  return p;
}

}  // namespace

int64_t tree_attention_workspace_bytes(TensorView q, TensorView k_cache, TensorView v_cache,
                                       TensorView page_table) {
  TreeAttentionParams p = queries_and_cache(q, k_cache, v_cache, page_table);
  float unread = 1.0f;  // sizes alone matter: any factor will do
  if (p.cache.dtype == DType::kFloat8E4M3) p.cache.k_scale = p.cache.v_scale = &unread;
  validate(p);
  const DeviceGuard guard(q);
  return q.device == DeviceType::kCPU ? 0 : cuda::tree_attention_workspace_bytes(p);
}

void tree_attention(TensorView q, TensorView k_cache, TensorView v_cache, TensorView page_table,
                    TensorView seq_lens, TensorView num_nodes, TensorView mask, float softmax_scale,
                    int window, TensorView out, TensorView lse, float logit_softcap, TensorView sinks,
                    TensorView k_scale, TensorView v_scale, TensorView workspace, CUstream_st* stream) {
  TreeAttentionParams p = queries_and_cache(q, k_cache, v_cache, page_table, k_scale, v_scale);
  const int64_t batch = q.shape[0], nodes = q.shape[1], heads = q.shape[2], dim = q.shape[3];
  Expect("seq_lens", seq_lens).dtype(DType::kInt32).shape({batch}).contiguous().same_device(q);
  Expect("num_nodes", num_nodes).dtype(DType::kInt32).shape({batch}).contiguous().same_device(q);
  Expect("mask", mask)
      .dtype(DType::kInt32)
      .shape({batch, nodes, ceil_div<int64_t>(nodes, 32)})
      .contiguous()
      .same_device(q);
  Expect("out", out)
      .dtype(q.dtype)
      .shape({batch, nodes, heads, dim})
      .last_dim_contiguous()
      .same_device(q)
      .writable();
  if (lse.present()) {
    Expect("lse", lse)
        .dtype(DType::kFloat32)
        .shape({batch, nodes, heads})
        .contiguous()
        .same_device(q)
        .writable();
    p.lse = lse.as<float>();
  }
  if (workspace.present()) {
    Expect("workspace", workspace).dtype(DType::kUInt8).rank(1).contiguous().same_device(q).writable();
    p.workspace = workspace.data;
    p.workspace_bytes = workspace.shape[0];
  }
  if (sinks.present()) {
    Expect("sinks", sinks).dtype(DType::kFloat32).shape({heads}).contiguous().same_device(q);
    p.sinks = sinks.as<const float>();
  }
  p.softmax_scale = softmax_scale;
  p.logit_softcap = logit_softcap;
  p.window = window;
  p.out = out.data;
  copy_strides(out, p.out_strides);
  p.seq_lens = seq_lens.as<const int32_t>();
  p.num_nodes = num_nodes.as<const int32_t>();
  p.mask = mask.as<const int32_t>();
  const DeviceGuard guard(q);
  q.device == DeviceType::kCPU ? cpu::tree_attention(p) : cuda::tree_attention(p, stream);
}

}  // namespace eagle
