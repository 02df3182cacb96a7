// attend on any processor. Slow where fma() is a library call; the bits are the same.
#include "common/float8.h"
#include "common/numeric.h"
#include "cpu/attention/attend_kernels.h"

namespace eagle::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 4, kRows = 3;
  static constexpr bool kTransposesPairs = false;
  struct Vector {
    float lane[kLanes];
  };
  EAGLE_INLINE static Vector zero() { return {}; }
  EAGLE_INLINE static Vector set(float x) { return {{x, x, x, x}}; }
  template <class T>
  EAGLE_INLINE static Vector load(const T* x) {
    return {{to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])}};
  }
  EAGLE_INLINE static void store(float* out, const Vector& x) {
    for (int i = 0; i < kLanes; ++i) out[i] = x.lane[i];
  }
  EAGLE_INLINE static Vector add(Vector a, const Vector& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  EAGLE_INLINE static Vector multiply(Vector a, const Vector& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] *= b.lane[i];
    return a;
  }
  EAGLE_INLINE static Vector max(const Vector& a, Vector b) {
    for (int i = 0; i < kLanes; ++i) b.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return b;
  }
  EAGLE_INLINE static Vector fma(const Vector& a, const Vector& b, Vector c) {
    for (int i = 0; i < kLanes; ++i) c.lane[i] = eagle::fma(a.lane[i], b.lane[i], c.lane[i]);
    return c;
  }
  EAGLE_INLINE static void transpose(Vector* x) {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < i; ++j) {
        const float t = x[i].lane[j];
        x[i].lane[j] = x[j].lane[i];
        x[j].lane[i] = t;
      }
  }
};

}  // namespace
}  // namespace eagle::cpu

#include "cpu/attention/attend_kernel.h"

namespace eagle::cpu {

const AttendKernels& attend_kernels_generic(DType dtype, bool codes) {
  return codes ? kernels<float8_t>(dtype) : kernels(dtype);
}

}  // namespace eagle::cpu
