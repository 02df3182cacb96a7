// The draft head, composed from the other nouns' kernels (eagle_cuda/draft.h).
#include "cuda/draft/head.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"

namespace eagle::cuda {
namespace {

int64_t query_size(const DraftHead& head) { return int64_t{head.num_heads} * head.head_dim; }
int64_t kv_size(const DraftHead& head) { return int64_t{head.num_kv_heads} * head.head_dim; }

char* at(void* data, int64_t bytes) { return static_cast<char*>(data) + bytes; }
const char* at(const void* data, int64_t bytes) { return static_cast<const char*>(data) + bytes; }

// The cache as requests from `request` on see it.
KVCacheView from_request(KVCacheView cache, int request) {
  if (cache.page_table) {
    cache.page_table += request * cache.page_table_stride;
  } else {
    cache.k = at(cache.k, request * cache.k_page_stride * element_size(cache.dtype));
    cache.v = at(cache.v, request * cache.v_page_stride * element_size(cache.dtype));
    cache.num_pages = std::max<int64_t>(cache.num_pages - request, 0);
  }
  return cache;
}

struct Matrix {
  const void* data = nullptr;
  int64_t stride = 0;
};

class Layers {
 public:
  Layers(const DraftHead& head, int64_t m, const HeadMemory& memory, CUstream_st* stream)
      : head_(head), m_(m), memory_(memory), stream_(stream), width_(element_size(head.dtype)) {}

  void linear(Matrix x, const PackedWeight& weight, const void* norm_weight, const void* bias,
              Matrix residual, void* out, int64_t out_stride,
              Activation activation = Activation::kNone) const {
    LinearParams p{};
    p.m = m_;
    p.weight = weight;
    p.activation = activation;
    p.x_dtype = p.out_dtype = head_.dtype;
    p.norm_eps = head_.norm_eps;
    p.x = x.data;
    p.x_stride = x.stride;
    p.norm_weight = norm_weight;
    p.bias = bias;
    p.residual = residual.data;
    p.residual_stride = residual.stride;
    p.out = out;
    p.out_stride = out_stride;
    p.workspace = memory_.scratch;
    p.workspace_bytes = memory_.scratch_bytes;
    cuda::linear(p, stream_);
  }

  void append(const DraftLayer& layer, const KVCacheView& cache, const RowGroup& group) const {
    cuda::append_kv(append_params(head_, layer, cache, group, memory_), stream_);
  }

  void attend(const KVCacheView& cache, const RowGroup& group) const {
    cuda::attend(attend_params(head_, cache, group, memory_), stream_);
  }

 private:
  const DraftHead& head_;
  const int64_t m_;
  const HeadMemory& memory_;
  CUstream_st* const stream_;
  const int64_t width_;
};

int64_t linear_bytes(const DraftHead& head, int64_t m) {
  int64_t most = cuda::linear_workspace_bytes(head.fc, m);
  for (const DraftLayer& layer : head.layers)
    for (const PackedWeight* weight : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
      most = std::max(most, cuda::linear_workspace_bytes(*weight, m));
  return most;
}

}  // namespace

HeadMemory::HeadMemory(const DraftHead& head, int64_t rows, int64_t least_scratch, Arena& arena) {
  const int64_t width = element_size(head.dtype);
  const auto take = [&](int64_t columns) { return arena.take<char>(rows * columns * width); };
  joined = take(2 * int64_t{head.hidden_size});
  stream = take(head.hidden_size);
  qkv = take(query_size(head) + 2 * kv_size(head));
  attended = take(query_size(head));
  attended_bytes = rows * query_size(head) * width;
  gated = take(head.intermediate_size);
  scratch_bytes = std::max(least_scratch, linear_bytes(head, rows));
  scratch = arena.take<char>(scratch_bytes);
}

AppendKvParams append_params(const DraftHead& head, const DraftLayer& layer, const KVCacheView& cache,
                             const RowGroup& group, const HeadMemory& memory) {
  const int64_t D = head.head_dim, row = query_size(head) + 2 * kv_size(head),
                width = element_size(head.dtype);
  char* const q = at(memory.qkv, group.first_row * row * width);
  AppendKvParams p{};
  p.batch_size = group.batch;
  p.max_nodes = group.nodes;
  p.num_heads = head.num_heads;
  p.dtype = head.dtype;
  p.rotary_dim = head.head_dim;
  p.max_positions = head.max_positions;
  p.norm_eps = head.norm_eps;
  p.q = p.q_out = q;
  p.k = q + query_size(head) * width;
  p.v = q + (query_size(head) + kv_size(head)) * width;
  for (int64_t* strides : {p.q_strides, p.k_strides, p.v_strides, p.q_out_strides}) {
    strides[0] = group.nodes * row;
    strides[1] = row;
    strides[2] = D;
  }
  p.q_norm = layer.q_norm;
  p.k_norm = layer.k_norm;
  p.cos = head.cos;
  p.sin = head.sin;
  p.seq_lens = group.append_at;
  p.depths = group.depths;
  p.num_nodes = group.counts;
  p.cache = from_request(cache, group.request);
  return p;
}

AttendParams attend_params(const DraftHead& head, const KVCacheView& cache, const RowGroup& group,
                           const HeadMemory& memory) {
  const int64_t q_row = query_size(head) + 2 * kv_size(head), out_row = query_size(head),
                width = element_size(head.dtype);
  AttendParams p{};
  p.batch_size = group.batch;
  p.max_nodes = group.nodes;
  p.num_heads = head.num_heads;
  p.dtype = head.dtype;
  p.softmax_scale = head.softmax_scale > 0.0f
                        ? head.softmax_scale
                        : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head.head_dim)));
  p.q = at(memory.qkv, group.first_row * q_row * width);
  p.out = at(memory.attended, group.first_row * out_row * width);
  p.q_strides[0] = group.nodes * q_row;
  p.q_strides[1] = q_row;
  p.out_strides[0] = group.nodes * out_row;
  p.out_strides[1] = out_row;
  p.q_strides[2] = p.out_strides[2] = head.head_dim;
  p.cache = from_request(cache, group.request);
  p.seq_lens = group.lengths;
  p.num_nodes = group.counts;
  p.mask = group.mask;
  p.first_node = group.first_node;
  p.all_nodes = group.all_nodes;
  p.workspace = memory.scratch;
  p.workspace_bytes = memory.scratch_bytes;
  return p;
}

void fuse_features(const DraftHead& head, const void* features, int64_t stride, int64_t m, void* normed,
                   void* out, const HeadMemory& memory, CUstream_st* stream) {
  const int64_t width = element_size(head.dtype), F = head.feature_size, slice = F / head.num_aux;
  Matrix x{features, stride};
  if (head.fc_norm) {
    for (int64_t i = 0; i < head.num_aux; ++i) {
      const int64_t offset = i * slice * width;
      rms_norm({.m = m,
                .k = slice,
                .dtype = head.dtype,
                .eps = head.norm_eps,
                .x = at(features, offset),
                .x_stride = stride,
                .weight = at(head.fc_norm, offset),
                .out = at(normed, offset),
                .out_stride = F},
               stream);
    }
    x = {normed, F};
  }
  Layers(head, m, memory, stream).linear(x, head.fc, nullptr, head.fc_bias, {}, out, head.hidden_size);
}

void run_head(const DraftHead& head, const KVCacheView* caches, std::span<const RowGroup> groups, int64_t m,
              const int32_t* tokens, const void* hidden, int64_t hidden_stride, void* out,
              const HeadMemory& memory, CUstream_st* stream) {
  const Layers layers(head, m, memory, stream);
  const int64_t H = head.hidden_size, q_size = query_size(head), qkv_size = q_size + 2 * kv_size(head);
  const bool eagle3 = head.kind == HeadKind::kEagle3;
  join_rows({.dtype = head.dtype,
             .m = m,
             .size = H,
             .tokens = tokens,
             .vocab_size = head.vocab_size,
             .embedding = head.embedding,
             .hidden = hidden,
             .hidden_stride = hidden_stride,
             .input_norm = eagle3 ? head.layers[0].input_norm : nullptr,
             .hidden_norm = eagle3 ? head.layers[0].hidden_norm : nullptr,
             .norm_eps = head.norm_eps,
             .joined = memory.joined},
            stream);
  const Matrix joined{memory.joined, 2 * H};
  Matrix residual{hidden, hidden_stride};
  if (!eagle3) {
    layers.linear(joined, head.fc, nullptr, head.fc_bias, {}, memory.stream, H);
    residual = {memory.stream, H};
  } else if (head.norm_before_residual) {
    residual = {at(memory.joined, H * element_size(head.dtype)), 2 * H};
  }
  for (size_t i = 0; i < head.layers.size(); ++i) {
    const DraftLayer& layer = head.layers[i];
    const bool first = i == 0 && eagle3, last = i + 1 == head.layers.size();
    layers.linear(first ? joined : residual, layer.qkv, first ? nullptr : layer.input_norm, layer.qkv_bias,
                  {}, memory.qkv, qkv_size);
    for (const RowGroup& group : groups) layers.append(layer, caches[i], group);
    if (last && !out) return;
    for (const RowGroup& group : groups) layers.attend(caches[i], group);
    layers.linear({memory.attended, q_size}, layer.o, nullptr, nullptr, residual, memory.stream, H);
    residual = {memory.stream, H};
    layers.linear(residual, layer.gate_up, layer.post_norm, nullptr, {}, memory.gated, head.intermediate_size,
                  Activation::kSwiGLU);
    layers.linear({memory.gated, head.intermediate_size}, layer.down, nullptr, nullptr, residual,
                  last ? out : memory.stream, H);
  }
}

int64_t attention_bytes(const DraftHead& head, const KVCacheView* caches, const RowGroup& group) {
  int64_t most = 0;
  Arena none(nullptr);
  const HeadMemory shapes(head, 0, 0, none);
  for (size_t i = 0; i < head.layers.size(); ++i)
    most = std::max(most, attend_workspace_bytes(attend_params(head, caches[i], group, shapes)));
  return most;
}

int row_capacity(const KVCacheView& cache) {
  const int64_t rows = int64_t{cache.page_size} * (cache.page_table ? cache.max_pages : 1);
  return static_cast<int>(std::min(rows, int64_t{1} << 30));
}

void check_draft_workspace(const void* workspace, int64_t bytes, int64_t needed) {
  check(bytes >= needed, "workspace: expected at least ", needed, " bytes, got ", bytes);
  check(reinterpret_cast<uintptr_t>(workspace) % 16 == 0,
        "workspace: expected an address that is a multiple of 16");
}

}  // namespace eagle::cuda
