// linear's kernels for AVX-512 with BF16 products: one instruction for two k of 16 outputs.
#include "cpu/linear/avx512_impl.h"

namespace eagle::cpu {
namespace {

struct BFloat16Products {
  using Element = uint16_t;
  using Sum = __m512;
  using Weights = __m512i;
  using Input = __m512i;
  static constexpr int kStepK = 2, kPanelStepBytes = 64, kMaxRows = 8, kPrefetchRows = 7;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Weights load(const char* p) { return _mm512_loadu_si512(p); }
  static Input broadcast(const uint16_t* x) {
    int pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_set1_epi32(pair);
  }
  static void accumulate(Sum& sum, Weights w, Input x) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
  }
  static void store(Sum sum, float* out) { _mm512_storeu_ps(out, sum); }
};

struct Formats {
  using BFloat16 = BFloat16Products;
  using Float16 = Single<LoadFloat16>;
  using Float32 = Single<LoadFloat32>;
};

}  // namespace

const LinearKernels kLinearAvx512Bf16 = {true, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
