#include "eagle_cuda/linear.h"

#include "common/check.h"

namespace eagle {
namespace {

DType dtype_of(WeightFormat f) {
  return f == WeightFormat::kFloat32    ? DType::kFloat32
         : f == WeightFormat::kBFloat16 ? DType::kBFloat16
                                        : DType::kFloat16;
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

}  // namespace

void pack_weight(TensorView weight, int64_t row_begin, const PackedWeight& into, TensorView packed,
                 CUstream_st* stream) {
  Expect("weight", weight).dtype(dtype_of(into.format)).shape({-1, into.k}).last_dim_contiguous();
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
  p.weight = weight.data;
  p.weight_stride = row_stride(weight);
  p.packed = packed.data;
  if (weight.device == DeviceType::kCPU)
    cpu::pack_weight(p);
  else
    cuda::pack_weight(p, stream);
}

void unpack_weight(const PackedWeight& weight, TensorView out, CUstream_st* stream) {
  Expect("out", out).dtype(dtype_of(weight.format)).shape({weight.n, weight.k}).contiguous().writable();
  expect_weight(weight, out);
  const UnpackWeightParams p{weight, out.data};
  if (out.device == DeviceType::kCPU)
    cpu::unpack_weight(p);
  else
    cuda::unpack_weight(p, stream);
}

void linear(TensorView x, const PackedWeight& weight, TensorView norm_weight, float norm_eps, TensorView bias,
            TensorView residual, Activation activation, TensorView out, CUstream_st* stream) {
  const DType dtype = dtype_of(weight.format);
  Expect("x", x).dtype(dtype).shape({-1, weight.k}).last_dim_contiguous();
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
  if (x.device == DeviceType::kCPU)
    cpu::linear(p);
  else
    cuda::linear(p, stream);
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
  if (x.device == DeviceType::kCPU)
    cpu::rms_norm(p);
  else
    cuda::rms_norm(p, stream);
}

void lm_head_topk(TensorView x, const PackedWeight& weight, TensorView norm_weight, float norm_eps,
                  TensorView draft_to_target, TensorView temperature, TensorView seeds, TensorView positions,
                  float tau, TensorView tokens, TensorView log_probs, TensorView lse, CUstream_st* stream) {
  const DType dtype = dtype_of(weight.format);
  Expect("x", x).dtype(dtype).shape({-1, weight.k}).last_dim_contiguous();
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
  if (x.device == DeviceType::kCPU)
    cpu::lm_head_topk(p);
  else
    cuda::lm_head_topk(p, stream);
}

}  // namespace eagle
