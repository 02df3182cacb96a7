#pragma once
// linear: weights packed once, then skinny matrix products whose rows do not depend on each other.
//
// Row invariance: row i of every result is bitwise what a call with row i alone gives
// (docs/bit_exactness.md).
#include <cstdint>

#include "eagle_cuda/tensor_view.h"

namespace eagle {

// What a packed weight holds. A float format is the dtype of the activations too, and its codes are the
// values themselves. The others are one code an element and a scale, from quantize() of common/quantize.h:
//   kFloat8E4M3, kInt8   a float32 scale a row: max |w| / 448, max |w| / 127
//   kInt4                -7 .. 7, a float16 scale for each 64 columns of a row: max |w| / 7
//   kInt8Dynamic         kInt8, and the activations are quantised by row in the same way; integer sums, hence
//                        at most 131072 columns and the same bits on every backend
// A row (a group of kInt4, a row of kInt8Dynamic's activations) that holds NaN or infinity counts as NaN.
enum class WeightFormat : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat8E4M3, kInt8, kInt4, kInt8Dynamic };
enum class Activation : uint8_t { kNone, kSwiGLU };

// One [N, K] matrix (or several that share an input, rows concatenated) in the order in which a backend
// streams it.
struct PackedWeight {
  const void* data = nullptr;  // [packed_weight_bytes]  64-byte aligned on the CPU
  int64_t bytes = 0;
  DeviceType backend = DeviceType::kCPU;
  int device_id = 0;
  WeightFormat format = WeightFormat::kBFloat16;
  bool paired = false;  // gate and up rows are paired for SwiGLU; N counts both
  int64_t n = 0;        // N, rows = outputs
  int64_t k = 0;        // K, columns = inputs
};

int64_t packed_weight_bytes(int64_t n, int64_t k, WeightFormat format, DeviceType backend);

// Rows [row_begin, row_begin + rows) of the packed matrix come from `weight` [rows, K]; called once per
// source.
struct PackWeightParams {
  int64_t n, k;  // the packed matrix
  WeightFormat format;
  bool paired;        // the first half of the N source rows is gate, the second half up
  int64_t row_begin;  // place of the source's first row among the N concatenated rows
  int64_t rows;
  DType weight_dtype;  // of a float format, or float32, bfloat16 or float16 for the others to quantise
  const void* weight;  // [rows, K]
  int64_t weight_stride;
  void* packed;  // [packed_weight_bytes]
};

struct UnpackWeightParams {
  PackedWeight weight;
  DType out_dtype;  // of a float format; float32 (code * scale, one rounding) for the others
  void* out;        // [N, K]  contiguous, rows in source order (gate first, then up)
};

// out = residual + activation(norm(x) @ W^T + bias). Sums are fp32; one rounding to `out_dtype` at the end.
// norm(x) is rms_norm(x, norm_weight, norm_eps), rounded to x's dtype. SwiGLU: out = silu(gate) * up, N/2
// columns. A row's scale multiplies the finished sum over its codes, a group's (kInt4) the sum over the
// group.
struct LinearParams {
  int64_t m;  // rows, any number
  PackedWeight weight;
  Activation activation;
  DType x_dtype;    // the dtype of a float format; float32, bfloat16 or float16 with the others
  DType out_dtype;  // float32, bfloat16 or float16
  float norm_eps;

  const void* x;  // [M, K]  row stride x_stride
  int64_t x_stride;
  const void* norm_weight;  // [K]  dtype of x; nullptr: no norm
  const void* bias;         // [N]  dtype of x; nullptr: none
  const void* residual;     // [M, N or N/2]  dtype of out; nullptr: none; may be `out` itself
  int64_t residual_stride;
  void* out;  // [M, N or N/2]  may be x
  int64_t out_stride;

  // CUDA: at least linear_workspace_bytes(), begins at a multiple of 16, used by one call at a time. What it
  // holds before does not matter. CPU: none.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// out = x / sqrt(mean(x^2) + eps) * weight, in fp32 with one rounding; bit-equal to linear's fused norm.
struct RmsNormParams {
  int64_t m, k;
  DType dtype;  // of x, weight and out
  float eps;
  const void* x;  // [M, K]
  int64_t x_stride;
  const void* weight;  // [K]
  void* out;           // [M, K]  may be x
  int64_t out_stride;
};

// The k best tokens of every row of norm(x) @ W^T, by (score descending, draft id ascending).
//
// Uncoupled row (no temperature given, or temperature[m] < 1e-5): rank by the logit q;
//   log_probs = log_softmax(q).
// Coupled row: rank by z = q + T * g(seed, position, target id), T = temperature[m];
//   log_probs = log_softmax(z / tau)   (docs/coupled_drafting.md).
// log_probs are clamped to <= 0; NaN counts as -inf. A row with fewer than k usable logits is filled up with
// the lowest unused ids at -inf.
struct LmHeadTopkParams {
  int64_t m;
  PackedWeight weight;  // [Vd, K]
  int top_k;            // 1 .. 32, at most Vd
  DType x_dtype;
  float norm_eps;
  float tau;  // > 0

  const void* x;  // [M, K]
  int64_t x_stride;
  const void* norm_weight;         // [K] or nullptr
  const int32_t* draft_to_target;  // [Vd] absolute target ids, or nullptr for the identity
  const float* temperature;        // [M] or nullptr: no coupling
  const int64_t* seeds;            // [M] when temperature is given
  const int32_t* positions;        // [M] when temperature is given: index of the token to be produced

  int32_t* tokens;   // [M, top_k]  target ids, best first
  float* log_probs;  // [M, top_k]
  float* lse;        // [M]  natural log of the sum of exp(q) (or of exp(z / tau)); may be nullptr

  void* workspace = nullptr;  // as in LinearParams, of lm_head_topk_workspace_bytes()
  int64_t workspace_bytes = 0;
};

void validate(const PackWeightParams& p);
void validate(const UnpackWeightParams& p);
void validate(const LinearParams& p);
void validate(const RmsNormParams& p);
void validate(const LmHeadTopkParams& p);

namespace cpu {
int64_t packed_weight_bytes(int64_t n, int64_t k, WeightFormat format);
void pack_weight(const PackWeightParams& p);
void unpack_weight(const UnpackWeightParams& p);
void linear(const LinearParams& p);
void rms_norm(const RmsNormParams& p);
void lm_head_topk(const LmHeadTopkParams& p);

// The benchmarks' yardstick: reads `bytes` bytes once with all threads, each its own contiguous share, as an
// op would that did nothing but stream weights. Returns their sum as 64-bit words; what is left of the last
// 64 KiB is not read.
uint64_t read_probe(const void* data, int64_t bytes);
}  // namespace cpu

namespace cuda {
int64_t packed_weight_bytes(int64_t n, int64_t k, WeightFormat format);
void pack_weight(const PackWeightParams& p, CUstream_st* stream);
void unpack_weight(const UnpackWeightParams& p, CUstream_st* stream);
void linear(const LinearParams& p, CUstream_st* stream);
void rms_norm(const RmsNormParams& p, CUstream_st* stream);
void lm_head_topk(const LmHeadTopkParams& p, CUstream_st* stream);

// From the sizes and the current device alone; of the weight, `data` is not read. Never more for fewer rows.
int64_t linear_workspace_bytes(const PackedWeight& weight, int64_t m);
int64_t lm_head_topk_workspace_bytes(const PackedWeight& weight, int64_t m, int top_k);
}  // namespace cuda

// Tensor forms: every dtype, shape, stride and device is checked here, then the call goes to a backend.
void pack_weight(TensorView weight, int64_t row_begin, const PackedWeight& into, TensorView packed,
                 CUstream_st* stream);
void unpack_weight(const PackedWeight& weight, TensorView out, CUstream_st* stream);
void linear(TensorView x, const PackedWeight& weight, TensorView norm_weight, float norm_eps, TensorView bias,
            TensorView residual, Activation activation, TensorView out, TensorView workspace,
            CUstream_st* stream);
void rms_norm(TensorView x, TensorView weight, float eps, TensorView out, CUstream_st* stream);
void lm_head_topk(TensorView x, const PackedWeight& weight, TensorView norm_weight, float norm_eps,
                  TensorView draft_to_target, TensorView temperature, TensorView seeds, TensorView positions,
                  float tau, TensorView tokens, TensorView log_probs, TensorView lse, TensorView workspace,
                  CUstream_st* stream);
// Bytes that the ops want as `workspace`, uint8 [bytes], on the device of the weight; 0 on the CPU.
int64_t linear_workspace_bytes(const PackedWeight& weight, int64_t m);
int64_t lm_head_topk_workspace_bytes(const PackedWeight& weight, int64_t m, int top_k);

}  // namespace eagle
