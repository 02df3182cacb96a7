// The draft head, composed from the other nouns' kernels (eagle_cuda/draft.h).
#include "cpu/draft/head.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/check.h"
#include "cpu/attention/attend.h"
#include "cpu/scratch.h"

namespace eagle::cpu {
namespace {

constexpr int64_t kTileRows = 256;

// One tile of rows on its way through the layers. Buffers are the head's dtype, contiguous but for the
// strides given.
class Tile {
 public:
  Tile(const DraftHead& head, const KVCacheView* caches, const HeadRow* rows, int64_t m)
      : head_(head),
        caches_(caches),
        rows_(rows),
        m_(m),
        H_(head.hidden_size),
        width_(element_size(head.dtype)) {}

  void run(const char* hidden, char* out) {
    const int64_t q_size = int64_t(head_.num_heads) * head_.head_dim;
    const int64_t qkv_size = q_size + 2 * int64_t(head_.num_kv_heads) * head_.head_dim;
    char* qkv = scratch<char, struct Qkv>(m_ * qkv_size * width_);
    char* attended = scratch<char, struct Attended>(m_ * q_size * width_);
    char* stream = scratch<char, struct Stream>(m_ * H_ * width_);  // the residual stream
    char* gated = scratch<char, struct Gated>(m_ * int64_t(head_.intermediate_size) * width_);

    Matrix residual = enter(hidden, stream);
    for (size_t i = 0; i < head_.layers.size(); ++i) {
      const DraftLayer& layer = head_.layers[i];
      const bool joined = i == 0 && head_.kind == HeadKind::kEagle3;
      const bool last = i + 1 == head_.layers.size();
      const Matrix input = joined ? Matrix{joined_, 2 * H_} : residual;
      linear(input, layer.qkv, joined ? nullptr : layer.input_norm, layer.qkv_bias, {}, qkv, qkv_size);
      append(layer, caches_[i], qkv, qkv_size, q_size, last && !out);
      if (last && !out) return;
      attend(caches_[i], qkv, qkv_size, attended, q_size);

      linear({attended, q_size}, layer.o, nullptr, nullptr, residual, stream, H_);
      residual = {stream, H_};
      linear(residual, layer.gate_up, layer.post_norm, nullptr, {}, gated, head_.intermediate_size,
             Activation::kSwiGLU);
      linear({gated, head_.intermediate_size}, layer.down, nullptr, nullptr, residual, last ? out : stream,
             H_);
    }
  }

 private:
  struct Matrix {
    const char* data = nullptr;
    int64_t stride = 0;
  };

  // Joins embeddings and hidden states; returns the residual that layer 0 adds to.
  Matrix enter(const char* hidden, char* stream) {
    joined_ = scratch<char, struct Joined>(m_ * 2 * H_ * width_);
    const int64_t row_bytes = H_ * width_;
    const bool normed = head_.kind == HeadKind::kEagle3;
    char* embeddings = normed ? scratch<char, struct Embeddings>(m_ * row_bytes) : joined_;
    const int64_t stride = normed ? row_bytes : 2 * row_bytes;
    for (int64_t i = 0; i < m_; ++i) {
      const int64_t token = std::clamp<int64_t>(rows_[i].token, 0, head_.vocab_size - 1);
      std::memcpy(embeddings + i * stride, static_cast<const char*>(head_.embedding) + token * row_bytes,
                  row_bytes);
      if (!normed) std::memcpy(joined_ + i * stride + row_bytes, hidden + i * row_bytes, row_bytes);
    }
    if (!normed) {
      linear({joined_, 2 * H_}, head_.fc, nullptr, head_.fc_bias, {}, stream, H_);
      return {stream, H_};
    }
    const DraftLayer& first = head_.layers[0];
    norm({embeddings, H_}, first.input_norm, joined_);
    norm({hidden, H_}, first.hidden_norm, joined_ + row_bytes);
    if (head_.norm_before_residual) return {joined_ + row_bytes, 2 * H_};
    return {hidden, H_};
  }

  void norm(Matrix x, const void* weight, char* out) const {
    rms_norm({.m = m_,
              .k = H_,
              .dtype = head_.dtype,
              .eps = head_.norm_eps,
              .x = x.data,
              .x_stride = x.stride,
              .weight = weight,
              .out = out,
              .out_stride = 2 * H_});
  }

  void linear(Matrix x, const PackedWeight& weight, const void* norm_weight, const void* bias,
              Matrix residual, char* out, int64_t out_stride,
              Activation activation = Activation::kNone) const {
    cpu::linear({.m = m_,
                 .weight = weight,
                 .activation = activation,
                 .x_dtype = head_.dtype,
                 .out_dtype = head_.dtype,
                 .norm_eps = head_.norm_eps,
                 .x = x.data,
                 .x_stride = x.stride,
                 .norm_weight = norm_weight,
                 .bias = bias,
                 .residual = residual.data,
                 .residual_stride = residual.stride,
                 .out = out,
                 .out_stride = out_stride});
  }

  void append(const DraftLayer& layer, const KVCacheView& cache, char* qkv, int64_t stride, int64_t q_size,
              bool keys_only) const {
    const int64_t kv_bytes = int64_t(head_.num_kv_heads) * head_.head_dim * width_;
    AppendRow* rows = scratch<AppendRow, struct AppendRows>(m_);
    for (int64_t i = 0; i < m_; ++i) {
      char* q = qkv + i * stride * width_;
      char* k = q + q_size * width_;
      rows[i] = {.q = keys_only ? nullptr : q,
                 .k = k,
                 .v = k + kv_bytes,
                 .q_out = keys_only ? nullptr : q,
                 .request = rows_[i].request,
                 .cache_row = rows_[i].cache_row,
                 .position = rows_[i].position};
    }
    const int64_t D = head_.head_dim;
    append_rows({.rows = rows,
                 .num_rows = static_cast<int>(m_),
                 .num_heads = head_.num_heads,
                 .dtype = head_.dtype,
                 .rotary_dim = head_.head_dim,
                 .interleaved = false,
                 .max_positions = head_.max_positions,
                 .norm_eps = head_.norm_eps,
                 .q_head_stride = D,
                 .k_head_stride = D,
                 .v_head_stride = D,
                 .q_out_head_stride = D,
                 .q_norm = layer.q_norm,
                 .k_norm = layer.k_norm,
                 .cos = head_.cos,
                 .sin = head_.sin,
                 .cache = cache});
  }

  void attend(const KVCacheView& cache, const char* q, int64_t q_stride, char* out,
              int64_t out_stride) const {
    AttendRow* rows = scratch<AttendRow, struct AttendRows>(m_);
    for (int64_t i = 0; i < m_; ++i)
      rows[i] = {.q = q + i * q_stride * width_,
                 .out = out + i * out_stride * width_,
                 .lse = nullptr,
                 .tail = rows_[i].tail,
                 .tail_length = rows_[i].tail_length,
                 .prefix = rows_[i].prefix,
                 .request = rows_[i].request};
    const float scale = head_.softmax_scale > 0.0f
                            ? head_.softmax_scale
                            : static_cast<float>(1.0 / std::sqrt(double(head_.head_dim)));
    cpu::attend({.rows = rows,
                 .num_rows = static_cast<int>(m_),
                 .num_heads = head_.num_heads,
                 .dtype = head_.dtype,
                 .softmax_scale = scale,
                 .logit_softcap = 0.0f,
                 .window = 0,
                 .sinks = nullptr,
                 .q_head_stride = head_.head_dim,
                 .out_head_stride = head_.head_dim,
                 .cache = cache});
  }

  const DraftHead& head_;
  const KVCacheView* caches_;
  const HeadRow* rows_;
  const int64_t m_, H_, width_;
  char* joined_ = nullptr;
};

}  // namespace

void fuse_features(const DraftHead& head, const void* features, int64_t stride, int64_t m, void* out) {
  const int64_t width = element_size(head.dtype);
  const int64_t F = head.feature_size;
  const char* x = static_cast<const char*>(features);
  if (head.kind == HeadKind::kEagle1) {
    for (int64_t i = 0; i < m; ++i)
      std::memcpy(static_cast<char*>(out) + i * F * width, x + i * stride * width, F * width);
    return;
  }
  if (head.fc_norm) {
    const int64_t slice = F / head.num_aux;
    char* normed = scratch<char, struct NormedFeatures>(m * F * width);
    for (int64_t a = 0; a < head.num_aux; ++a) {
      const int64_t offset = a * slice * width;
      rms_norm({.m = m,
                .k = slice,
                .dtype = head.dtype,
                .eps = head.norm_eps,
                .x = x + offset,
                .x_stride = stride,
                .weight = static_cast<const char*>(head.fc_norm) + offset,
                .out = normed + offset,
                .out_stride = F});
    }
    x = normed;
    stride = F;
  }
  linear({.m = m,
          .weight = head.fc,
          .activation = Activation::kNone,
          .x_dtype = head.dtype,
          .out_dtype = head.dtype,
          .norm_eps = head.norm_eps,
          .x = x,
          .x_stride = stride,
          .norm_weight = nullptr,
          .bias = head.fc_bias,
          .residual = nullptr,
          .residual_stride = 0,
          .out = out,
          .out_stride = head.hidden_size});
}

void run_head(const DraftHead& head, const KVCacheView* caches, const HeadRow* rows, int64_t m,
              const void* hidden, void* out) {
  const int64_t row_bytes = head.hidden_size * element_size(head.dtype);
  for (int64_t begin = 0; begin < m; begin += kTileRows) {
    Tile tile(head, caches, rows + begin, std::min(kTileRows, m - begin));
    tile.run(static_cast<const char*>(hidden) + begin * row_bytes,
             out ? static_cast<char*>(out) + begin * row_bytes : nullptr);
  }
}

int64_t cache_capacity(const KVCacheView& cache) {
  return std::min(int64_t(cache.page_size) * (cache.page_table ? cache.max_pages : 1), int64_t{1} << 30);
}

}  // namespace eagle::cpu
