// The kernels of attend_kernels.h over a vector type. Included once by each attend_<instruction set>.cpp,
// which defines `Simd` in the unnamed namespace first; everything here has internal linkage (cpu/isa.h).
//
// Simd: Vector, kLanes (4, 8 or 16), kRows (rows of a tile that is 4 vectors wide and stays in registers),
// zero, set, load (of every storage type), store, add, multiply, fma, max (the second where the first is
// NaN), transpose(Vector[kLanes]); with kTransposesPairs also transpose_pairs, which does transpose_keys for
// 16-bit bf16 pairs at a time.
#include "common/float8.h"
#include "common/numeric.h"
#include "cpu/attention/attend_kernels.h"

namespace eagle::cpu {
namespace {

constexpr int kDimBlock = 32;

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16_t> = true;

template <class T>
void widen(const void* x, int head_dim, float* out) {
  for (int d = 0; d < head_dim; d += Simd::kLanes)
    Simd::store(out + d, Simd::load(static_cast<const T*>(x) + d));
}

// ---- scores -----------------------------------------------------------------------------------------------

// 16 keys -> columns of out[d][kKeyBlock].
template <class T, class S = Simd>  // a parameter, so that only what S has is looked up
EAGLE_INLINE void transpose_keys(const void* const* keys, int head_dim, float* out) {
  if constexpr (S::kTransposesPairs && kIsBf16<T>) return S::transpose_pairs(keys, head_dim, out);
  for (int key = 0; key < kLaneKeys; key += Simd::kLanes)
    for (int d = 0; d < head_dim; d += Simd::kLanes) {
      typename Simd::Vector x[Simd::kLanes];
      for (int i = 0; i < Simd::kLanes; ++i) x[i] = Simd::load(static_cast<const T*>(keys[key + i]) + d);
      Simd::transpose(x);
      for (int i = 0; i < Simd::kLanes; ++i) Simd::store(out + (d + i) * kKeyBlock + key, x[i]);
    }
}

template <int kRows, int kVectors>
void score_tile(const float* q, int head_dim, const float* keys, float scale, float* s, int s_stride) {
  using V = typename Simd::Vector;
  for (int d0 = 0; d0 < head_dim; d0 += kDimBlock) {
    const int d1 = d0 + kDimBlock < head_dim ? d0 + kDimBlock : head_dim;
    V sum[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Simd::zero();
    for (int d = d0; d < d1; ++d) {
      V k[kVectors];
      for (int v = 0; v < kVectors; ++v) k[v] = Simd::load(keys + d * kKeyBlock + v * Simd::kLanes);
      for (int r = 0; r < kRows; ++r) {
        const V x = Simd::set(q[r * head_dim + d]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Simd::fma(x, k[v], sum[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) {
        float* out = s + r * s_stride + v * Simd::kLanes;
        V x = sum[r][v];
        if (d0 > 0) x = Simd::add(Simd::load(out), x);
        if (d1 == head_dim) x = Simd::multiply(x, Simd::set(scale));
        Simd::store(out, x);
      }
  }
}

// Runs f<rows, vectors> over a rows x columns grid in pieces as large as the registers allow; rows in even
// pieces.
template <template <int, int> class F, int kRows = Simd::kRows, class... Args>
EAGLE_INLINE void piece(int rows, int vectors, const Args&... args) {
  if constexpr (kRows > 1)
    if (rows < kRows) return piece<F, kRows - 1>(rows, vectors, args...);
  if (vectors >= 4)
    F<kRows, 4>::run(args...);
  else if (vectors >= 2)
    F<kRows, 2>::run(args...);
  else
    F<kRows, 1>::run(args...);
}

EAGLE_INLINE int piece_vectors(int left) { return left >= 4 ? 4 : left >= 2 ? 2 : 1; }

EAGLE_INLINE int piece_rows(int left) { return ceil_div(left, ceil_div(left, Simd::kRows)); }

template <int kRows, int kVectors>
struct ScoreTile {
  EAGLE_INLINE static void run(const float* q, int head_dim, const float* keys, float scale, float* s,
                               int s_stride) {
    score_tile<kRows, kVectors>(q, head_dim, keys, scale, s, s_stride);
  }
};

template <class T>
void scores(const float* q, int rows, int head_dim, const void* const* keys, int num_keys, float scale,
            float* s, int s_stride, float* scratch) {
  for (int block = 0; block < num_keys; block += kKeyBlock) {
    const int count = num_keys - block < kKeyBlock ? num_keys - block : kKeyBlock;
    for (int key = 0; key < count; key += kLaneKeys)
      transpose_keys<T>(keys + block + key, head_dim, scratch + key);
    for (int r = 0, step; r < rows; r += step) {
      step = piece_rows(rows - r);
      for (int key = 0, vectors; key < count; key += vectors * Simd::kLanes) {
        vectors = piece_vectors((count - key) / Simd::kLanes);
        piece<ScoreTile>(step, vectors, q + r * head_dim, head_dim, scratch + key, scale,
                         s + int64_t{r} * s_stride + block + key, s_stride);
      }
    }
  }
}

void adjust(float* s, int s_stride, int rows, int num_keys, const float* factor, float cap) {
  for (int r = 0; r < rows; ++r) {
    float* row = s + int64_t{r} * s_stride;
    if (factor)
      for (int j = 0; j < num_keys; ++j) row[j] *= factor[j];
    if (cap > 0.0f)
      for (int j = 0; j < num_keys; ++j) row[j] = soft_cap(row[j], cap);
  }
}

// ---- softmax ----------------------------------------------------------------------------------------------

void softmax(float* s, int begin, int end, float* max_out, float* sum_out) {
  const float minus_infinity = bits_float(0xff800000u);
  const int first = begin / kLaneKeys * kLaneKeys, last = ceil_div(end, kLaneKeys) * kLaneKeys;
  for (int j = first; j < begin; ++j) s[j] = minus_infinity;
  for (int j = end; j < last; ++j) s[j] = minus_infinity;
  using V = typename Simd::Vector;
  constexpr int kVectors = kLaneKeys / Simd::kLanes;
  V best[kVectors];
  for (int v = 0; v < kVectors; ++v) best[v] = Simd::set(minus_infinity);
  for (int j = first; j < last; j += kLaneKeys)
    for (int v = 0; v < kVectors; ++v) best[v] = Simd::max(Simd::load(s + j + v * Simd::kLanes), best[v]);
  float lane[kLaneKeys];
  for (int v = 0; v < kVectors; ++v) Simd::store(lane + v * Simd::kLanes, best[v]);
  float max = lane[0];
  for (int i = 1; i < kLaneKeys; ++i) max = lane[i] > max ? lane[i] : max;
  const float shift = max == minus_infinity ? 0.0f : max;
  for (int j = first; j < last; ++j) s[j] = exp_f32(s[j] - shift);
  V sum[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = Simd::zero();
  for (int j = first; j < last; j += kLaneKeys)
    for (int v = 0; v < kVectors; ++v) sum[v] = Simd::add(sum[v], Simd::load(s + j + v * Simd::kLanes));
  for (int v = 0; v < kVectors; ++v) Simd::store(lane + v * Simd::kLanes, sum[v]);
  for (int half = kLaneKeys / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  *max_out = max;
  *sum_out = lane[0];
}

// ---- values -----------------------------------------------------------------------------------------------

template <class T, int kRows, int kVectors>
void value_tile(const float* p, int p_stride, const void* const* values, int count, int d0, int head_dim,
                float* out) {
  using V = typename Simd::Vector;
  V sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Simd::load(out + r * head_dim + d0 + v * Simd::kLanes);
  for (int j = 0; j < count; ++j) {
    const T* row = static_cast<const T*>(values[j]) + d0;
    V x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = Simd::load(row + v * Simd::kLanes);
    for (int r = 0; r < kRows; ++r) {
      const V weight = Simd::set(p[int64_t{r} * p_stride + j]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Simd::fma(weight, x[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) Simd::store(out + r * head_dim + d0 + v * Simd::kLanes, sum[r][v]);
}

template <class T>
struct Values {
  template <int kRows, int kVectors>
  struct Tile {
    EAGLE_INLINE static void run(const float* p, int p_stride, const void* const* values, int count, int d0,
                                 int head_dim, float* out) {
      value_tile<T, kRows, kVectors>(p, p_stride, values, count, d0, head_dim, out);
    }
  };
};

template <class T>
void accumulate(const float* p, int p_stride, int rows, const void* const* values, int count, int head_dim,
                float* out) {
  for (int r = 0, step; r < rows; r += step) {
    step = piece_rows(rows - r);
    for (int d = 0, vectors; d < head_dim; d += vectors * Simd::kLanes) {
      vectors = piece_vectors((head_dim - d) / Simd::kLanes);
      piece<Values<T>::template Tile>(step, vectors, p + int64_t{r} * p_stride, p_stride, values, count, d,
                                      head_dim, out + r * head_dim);
    }
  }
}

// ---- folding ----------------------------------------------------------------------------------------------

void fold(int rows, int head_dim, float* a_max, float* a_sum, float* a_out, const float* b_max,
          const float* b_sum, const float* b_out) {
  for (int r = 0; r < rows; ++r) {
    const bool keep = a_max[r] >= b_max[r];
    const float larger = keep ? a_max[r] : b_max[r], smaller = keep ? b_max[r] : a_max[r];
    const float other = larger == smaller ? 1.0f : exp_f32(smaller - larger);  // equal infinities too
    const float a = keep ? 1.0f : other, b = keep ? other : 1.0f;
    a_max[r] = larger;
    a_sum[r] = eagle::fma(a_sum[r], a, b_sum[r] * b);
    float* x = a_out + r * head_dim;
    const float* y = b_out + r * head_dim;
    for (int d = 0; d < head_dim; ++d) x[d] = eagle::fma(x[d], a, y[d] * b);
  }
}

template <class T>
void finish(const float* x, float sum, int head_dim, void* out) {
  const float divisor = sum == 0.0f ? 1.0f : sum;
  for (int d = 0; d < head_dim; ++d) static_cast<T*>(out)[d] = from_float<T>(x[d] / divisor);
}

template <class T, class C>
constexpr AttendKernels kKernels = {&widen<T>,      &scores<C>, &adjust,   &softmax,
                                    &accumulate<C>, &fold,      &finish<T>};

template <class C>
EAGLE_INLINE const AttendKernels& kernels(DType dtype) {
  return dtype == DType::kFloat32    ? kKernels<float, C>
         : dtype == DType::kBFloat16 ? kKernels<bf16_t, C>
                                     : kKernels<half_t, C>;
}
EAGLE_INLINE const AttendKernels& kernels(DType dtype) {
  return dtype == DType::kFloat32    ? kKernels<float, float>
         : dtype == DType::kBFloat16 ? kKernels<bf16_t, bf16_t>
                                     : kKernels<half_t, half_t>;
}

}  // namespace
}  // namespace eagle::cpu
