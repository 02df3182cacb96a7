#include "eagle_cuda/linear.h"

#include "common/weight_format.h"
#include "eagle_cuda/device.h"

namespace eagle {
namespace {

// What the activations of a weight, or the sources that it is packed from, may be.
void expect_dtype(const Expect& tensor, WeightFormat format) {
  if (is_quantized(format))
    tensor.dtype({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  else
    tensor.dtype(format_dtype(format));
}

void check_dtype(const char* what, DType got, WeightFormat format) {
  if (is_quantized(format))
    check(is_float(got), what, ": expected a dtype of float32, bfloat16, float16, got ", name(got));
  else
    check(got == format_dtype(format), what, ": expected dtype ", name(format_dtype(format)),
          " (the weight's format), got ", name(got));
}

// A weight packed for one backend is refused by another.
void expect_weight(const PackedWeight& w, const TensorView& x) {
  check(w.backend == x.device && (w.backend == DeviceType::kCPU || w.device_id == x.device_id),
        "weight: expected a weight packed for ", device_name(x.device, x.device_id), ", got one packed for ",
        device_name(w.backend, w.device_id));
  check(w.bytes >= packed_weight_bytes(w.n, w.k, w.format, w.backend), "weight: expected ",
        packed_weight_bytes(w.n, w.k, w.format, w.backend), " packed bytes, got ", w.bytes);
}

// [M, K] with any row stride; a stride of 0 or below K would let rows overlap, which only an input may do.
int64_t row_stride(const TensorView& t) { return t.shape[0] > 1 ? t.strides[0] : t.shape[1]; }

void expect_rows_apart(const char* what, const TensorView& t) {
  check(row_stride(t) >= t.shape[1], what, ": output rows overlap (row stride ", row_stride(t), ", columns ",
        t.shape[1], ")");
}

void expect_aligned(const char* what, const void* data) {
  check(reinterpret_cast<uintptr_t>(data) % 64 == 0, what, ": expected data aligned to 64 bytes");
}

const void* norm_data(const TensorView& norm_weight, const TensorView& x, DType dtype, int64_t k) {
  if (!norm_weight.present()) return nullptr;
  Expect("rms_norm", norm_weight).dtype(dtype).shape({k}).contiguous().same_device(x);
  return norm_weight.data;
}

void* workspace_data(const TensorView& workspace, const TensorView& x) {
  if (!workspace.present()) return nullptr;
  Expect("workspace", workspace).dtype(DType::kUInt8).rank(1).contiguous().same_device(x).writable();
  return workspace.data;
}

}  // namespace

int64_t packed_weight_bytes(int64_t n, int64_t k, WeightFormat format, DeviceType backend) {
  return backend == DeviceType::kCUDA ? cuda::packed_weight_bytes(n, k, format)
                                      : cpu::packed_weight_bytes(n, k, format);
}

void validate(const PackWeightParams& p) {
  check(p.n >= 0 && p.k >= 1, "weights: expected N >= 0 and K >= 1, got N = ", p.n, ", K = ", p.k);
  check(p.format != WeightFormat::kInt8Dynamic || p.k <= kMaxInt8Columns, "weights: expected at most ",
        kMaxInt8Columns, " columns in int8_dynamic, got ", p.k);
  check_dtype("weights", p.weight_dtype, p.format);
  check(!p.paired || p.n % 2 == 0, "weights: expected as many gate as up rows, got ", p.n, " rows together");
  check(p.row_begin >= 0 && p.rows >= 0 && p.row_begin + p.rows <= p.n, "weight: rows [", p.row_begin, ", ",
        p.row_begin + p.rows, ") lie outside the packed matrix of ", p.n, " rows");
}

void validate(const LinearParams& p) {
  const PackedWeight& w = p.weight;
  check(w.data != nullptr || w.n == 0, "weight: expected packed data, got a null pointer");
  check(p.m >= 0, "x: expected a number of rows >= 0, got ", p.m);
  check_dtype("x", p.x_dtype, w.format);
  check(is_float(p.out_dtype), "out: expected a dtype of float32, bfloat16, float16, got ",
        name(p.out_dtype));
  check(p.activation == Activation::kNone || w.paired,
        "activation: swiglu expects a weight packed with paired=True");
  check(p.norm_eps >= 0.0f, "eps: expected a number >= 0, got ", p.norm_eps);
}

void validate(const RmsNormParams& p) {
  check(p.m >= 0 && p.k >= 1, "x: expected at least one column, got M = ", p.m, ", K = ", p.k);
  check(is_float(p.dtype), "x: expected a dtype of float32, bfloat16, float16, got ", name(p.dtype));
  check(p.eps >= 0.0f, "eps: expected a number >= 0, got ", p.eps);
}

void validate(const LmHeadTopkParams& p) {
  const PackedWeight& w = p.weight;
  check(!w.paired, "weight: expected a weight packed with paired=False");
  check(w.data != nullptr, "weight: expected packed data, got a null pointer");
  check(p.m >= 0, "x: expected a number of rows >= 0, got ", p.m);
  check(p.top_k >= 1 && p.top_k <= 32 && p.top_k <= w.n, "k: expected 1 to ", std::min<int64_t>(32, w.n),
        ", got ", p.top_k);
  check_dtype("x", p.x_dtype, w.format);
  check(p.norm_eps >= 0.0f, "eps: expected a number >= 0, got ", p.norm_eps);
  check(p.tau > 0.0f && p.tau < __builtin_inff(), "tau: expected a finite number > 0, got ", p.tau);
  check(!p.temperature || (p.seeds && p.positions),
        "seeds, positions: expected tensors when temperature is given, got None");
}

void validate(const UnpackWeightParams& p) {
  check(p.weight.data != nullptr || p.weight.n == 0, "weight: expected packed data, got a null pointer");
  check(p.out_dtype == format_dtype(p.weight.format), "out: expected dtype ",
        name(format_dtype(p.weight.format)), ", got ", name(p.out_dtype));
}

void pack_weight(TensorView weight, int64_t row_begin, const PackedWeight& into, TensorView packed,
                 CUstream_st* stream) {
  const Expect source("weight", weight);
  expect_dtype(source, into.format);
  source.shape({-1, into.k}).last_dim_contiguous();
  Expect("packed", packed).dtype(DType::kUInt8).rank(1).contiguous().writable().same_device(weight);
  check(into.backend == weight.device, "weight: expected a tensor on ",
        device_name(into.backend, into.device_id), ", got ", device_name(weight.device, weight.device_id));
  check(into.n >= 0 && into.k >= 1, "weights: expected N >= 0 and K >= 1, got N = ", into.n,
        ", K = ", into.k);
  const int64_t bytes = packed_weight_bytes(into.n, into.k, into.format, into.backend);
  check(packed.shape[0] >= bytes, "packed: expected at least ", bytes, " bytes, got ", packed.shape[0]);
  expect_aligned("packed", packed.data);
  PackWeightParams p{};
  p.n = into.n;
  p.k = into.k;
  p.format = into.format;
  p.paired = into.paired;
  p.row_begin = row_begin;
  p.rows = weight.shape[0];
  p.weight_dtype = weight.dtype;
  p.weight = weight.data;
  p.weight_stride = row_stride(weight);
  p.packed = packed.data;
  const DeviceGuard guard(weight);
  weight.device == DeviceType::kCPU ? cpu::pack_weight(p) : cuda::pack_weight(p, stream);
}

void unpack_weight(const PackedWeight& weight, TensorView out, CUstream_st* stream) {
  Expect("out", out).dtype(format_dtype(weight.format)).shape({weight.n, weight.k}).contiguous().writable();
  expect_weight(weight, out);
  const UnpackWeightParams p{weight, out.dtype, out.data};
  const DeviceGuard guard(out);
  out.device == DeviceType::kCPU ? cpu::unpack_weight(p) : cuda::unpack_weight(p, stream);
}

void linear(TensorView x, const PackedWeight& weight, TensorView norm_weight, float norm_eps, TensorView bias,
            TensorView residual, Activation activation, TensorView out, TensorView workspace,
            CUstream_st* stream) {
  const DType dtype = x.dtype;
  expect_dtype(Expect("x", x), weight.format);
  Expect("x", x).shape({-1, weight.k}).last_dim_contiguous();
  expect_weight(weight, x);
  check(activation == Activation::kNone || weight.paired,
        "activation: expected a weight packed with paired=True for swiglu, got paired=False");
  const int64_t m = x.shape[0], columns = activation == Activation::kSwiGLU ? weight.n / 2 : weight.n;
  Expect("out", out)
      .dtype({DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      .shape({m, columns})
      .last_dim_contiguous()
      .writable()
      .same_device(x);
  expect_rows_apart("out", out);
  LinearParams p{};
  p.m = m;
  p.weight = weight;
  p.activation = activation;
  p.x_dtype = dtype;
  p.out_dtype = out.dtype;
  p.norm_eps = norm_eps;
  p.x = x.data;
  p.x_stride = row_stride(x);
  p.norm_weight = norm_data(norm_weight, x, dtype, weight.k);
  if (bias.present()) {
    Expect("bias", bias).dtype(dtype).shape({weight.n}).contiguous().same_device(x);
    p.bias = bias.data;
  }
  if (residual.present()) {
    Expect("residual", residual).dtype(out.dtype).shape({m, columns}).last_dim_contiguous().same_device(x);
    p.residual = residual.data;
    p.residual_stride = row_stride(residual);
  }
  p.out = out.data;
  p.out_stride = row_stride(out);
  p.workspace = workspace_data(workspace, x);
  p.workspace_bytes = workspace.present() ? workspace.shape[0] : 0;
  const DeviceGuard guard(x);
  x.device == DeviceType::kCPU ? cpu::linear(p) : cuda::linear(p, stream);
}

void rms_norm(TensorView x, TensorView weight, float eps, TensorView out, CUstream_st* stream) {
  Expect("x", x).dtype({DType::kFloat32, DType::kBFloat16, DType::kFloat16}).rank(2).last_dim_contiguous();
  const int64_t m = x.shape[0], k = x.shape[1];
  Expect("weight", weight).dtype(x.dtype).shape({k}).contiguous().same_device(x);
  Expect("out", out).dtype(x.dtype).shape({m, k}).last_dim_contiguous().writable().same_device(x);
  expect_rows_apart("out", out);
  RmsNormParams p{};
  p.m = m;
  p.k = k;
  p.dtype = x.dtype;
  p.eps = eps;
  p.x = x.data;
  p.x_stride = row_stride(x);
  p.weight = weight.data;
  p.out = out.data;
  p.out_stride = row_stride(out);
  const DeviceGuard guard(x);
  x.device == DeviceType::kCPU ? cpu::rms_norm(p) : cuda::rms_norm(p, stream);
}

void lm_head_topk(TensorView x, const PackedWeight& weight, TensorView norm_weight, float norm_eps,
                  TensorView draft_to_target, TensorView temperature, TensorView seeds, TensorView positions,
                  float tau, TensorView tokens, TensorView log_probs, TensorView lse, TensorView workspace,
                  CUstream_st* stream) {
  const DType dtype = x.dtype;
  expect_dtype(Expect("x", x), weight.format);
  Expect("x", x).shape({-1, weight.k}).last_dim_contiguous();
  expect_weight(weight, x);
  const int64_t m = x.shape[0];
  Expect("tokens", tokens).dtype(DType::kInt32).shape({m, -1}).contiguous().writable().same_device(x);
  const int64_t k = tokens.shape[1];
  check(k >= 1 && k <= 32 && k <= weight.n, "k: expected 1 to ", std::min<int64_t>(32, weight.n), ", got ",
        k);
  Expect("log_probs", log_probs).dtype(DType::kFloat32).shape({m, k}).contiguous().writable().same_device(x);
  LmHeadTopkParams p{};
  p.m = m;
  p.weight = weight;
  p.top_k = static_cast<int>(k);
  p.x_dtype = dtype;
  p.norm_eps = norm_eps;
  p.tau = tau;
  p.x = x.data;
  p.x_stride = row_stride(x);
  p.norm_weight = norm_data(norm_weight, x, dtype, weight.k);
  if (draft_to_target.present()) {
    Expect("draft_to_target", draft_to_target)
        .dtype(DType::kInt32)
        .shape({weight.n})
        .contiguous()
        .same_device(x);
    p.draft_to_target = draft_to_target.as<const int32_t>();
  }
  if (temperature.present()) {
    Expect("temperature", temperature).dtype(DType::kFloat32).shape({m}).contiguous().same_device(x);
    Expect("seeds", seeds).dtype(DType::kInt64).shape({m}).contiguous().same_device(x);
    Expect("positions", positions).dtype(DType::kInt32).shape({m}).contiguous().same_device(x);
    p.temperature = temperature.as<const float>();
    p.seeds = seeds.as<const int64_t>();
    p.positions = positions.as<const int32_t>();
  }
  p.tokens = tokens.as<int32_t>();
  p.log_probs = log_probs.as<float>();
  if (lse.present()) {
    Expect("lse", lse).dtype(DType::kFloat32).shape({m}).contiguous().writable().same_device(x);
    p.lse = lse.as<float>();
  }
  p.workspace = workspace_data(workspace, x);
  p.workspace_bytes = workspace.present() ? workspace.shape[0] : 0;
  const DeviceGuard guard(x);
  x.device == DeviceType::kCPU ? cpu::lm_head_topk(p) : cuda::lm_head_topk(p, stream);
}

int64_t linear_workspace_bytes(const PackedWeight& weight, int64_t m) {
  return weight.backend == DeviceType::kCPU ? 0 : cuda::linear_workspace_bytes(weight, m);
}

int64_t lm_head_topk_workspace_bytes(const PackedWeight& weight, int64_t m, int top_k) {
  return weight.backend == DeviceType::kCPU ? 0 : cuda::lm_head_topk_workspace_bytes(weight, m, top_k);
}

}  // namespace eagle
