// linear's kernels for any x86-64 processor: plain loops, the same sums in the same order as AVX2 and
// AVX-512.
#include "cpu/linear/multiply_impl.h"
#include "cpu/linear/topk_impl.h"

namespace eagle::cpu {
namespace {

struct Lanes {
  float v[kBlock];
};

template <class T, int kStepK_>
struct Scalar {
  using Element = float;
  using Sum = Lanes;
  using Weights = const T*;
  using Input = const float*;
  static constexpr int kStepK = kStepK_, kPanelStepBytes = kPanelRows * kStepK * int(sizeof(T)), kMaxRows = 4,
                       kPrefetchRows = 9;
  static Sum zero() { return {}; }
  static Weights load(const char* p) { return reinterpret_cast<const T*>(p); }
  static Input broadcast(const float* x) { return x; }
  static void accumulate(Sum& sum, Weights w, Input x) {
    for (int k = 0; k < kStepK; ++k)
      for (int i = 0; i < kBlock; ++i) sum.v[i] = fma(to_float(w[i * kStepK + k]), x[k], sum.v[i]);
  }
  static void store(const Sum& sum, float* out) {
    for (int i = 0; i < kBlock; ++i) out[i] = sum.v[i];
  }
};

struct Formats {
  using BFloat16 = Scalar<bf16_t, 2>;
  using Float16 = Scalar<half_t, 1>;
  using Float32 = Scalar<float, 1>;
};

}  // namespace

const LinearKernels kLinearGeneric = {false, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
