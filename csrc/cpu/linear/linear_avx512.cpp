// linear's kernels for AVX-512 without BF16 products.
#include "cpu/linear/avx512_impl.h"

namespace eagle::cpu {
namespace {

// Codes as 16-bit integers, since products of bytes would saturate: the even and the odd k of every word.
struct Integers : IntegerSums {
  struct Weights {
    __m512i even, odd;
  };
  struct Input {
    __m512i even, odd;
  };
  static Weights load(const char* p) {
    const __m512i w = _mm512_loadu_si512(p);
    return {_mm512_and_si512(w, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(w, 8)};
  }
  static Input broadcast(const int8_t* x) {
    const __m512i all = broadcast_four(x);
    return {_mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), _mm512_srai_epi16(all, 8)};
  }
  static void accumulate(Sum& sum, const Weights& w, const Input& x) {
    const __m512i even = _mm512_madd_epi16(w.even, x.even), odd = _mm512_madd_epi16(w.odd, x.odd);
    sum = _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
  }
};

struct Formats {
  using BFloat16 = BFloat16Pairs;
  using Float16 = Single<LoadFloat16>;
  using Float32 = Single<LoadFloat32>;
  using Float8 = Bytes<DecodeFloat8>;
  using Int8 = Bytes<DecodeInt8>;
  using Int4 = Nibbles;
  using Float8OfBFloat16 = Float8;
  using Int8OfBFloat16 = Int8;
  using Int4OfBFloat16 = Int4;
  using Int8Dynamic = Integers;
};

}  // namespace

const LinearKernels kLinearAvx512 = {false, prepare, multiply<Formats>, noise, best};

}  // namespace eagle::cpu
