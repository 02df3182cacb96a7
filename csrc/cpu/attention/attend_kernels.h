#pragma once
// What attend.cpp needs from an instruction set. Every entry gives the same bits on every instruction set:
// keys are lanes, so the order of each sum is written here and not made by the width of a vector.
#include "eagle_cuda/tensor_view.h"

namespace eagle::cpu {

inline constexpr int kChunk = 256;    // keys reduced from empty (eagle_cuda/attention.h)
inline constexpr int kLaneKeys = 16;  // key j of a chunk is added to the row sum's lane j % 16
inline constexpr int kKeyBlock = 64;  // keys whose scores are computed at a time

struct AttendKernels {
  // head_dim elements to float.
  void (*widen)(const void* x, int head_dim, float* out);

  // s[r][j] = scale * dot(q[r], keys[j]), r < rows, j < num_keys: a multiple of kLaneKeys, no key nullptr.
  // The dot product is summed in order of the dimension inside blocks of 32, then over the blocks. `scratch`:
  // head_dim * 64 floats.
  void (*scores)(const float* q, int rows, int head_dim, const void* const* keys, int num_keys, float scale,
                 float* s, int s_stride, float* scratch);

  // s[r][j] -> s[r][j] * factor[j], then soft_cap() of that; nullptr and 0 leave either out.
  void (*adjust)(float* s, int s_stride, int rows, int num_keys, const float* factor, float cap);

  // s[begin .. end) -> exp(s - max) in place, with zeros up to the next multiples of 16; `s` is the chunk's
  // first key. max = -inf and sum = 0 where every score is -inf.
  void (*softmax)(float* s, int begin, int end, float* max, float* sum);

  // out[r][d] = fma(p[r][j], values[j][d], out[r][d]) for j = 0, 1, ... count - 1.
  void (*accumulate)(const float* p, int p_stride, int rows, const void* const* values, int count,
                     int head_dim, float* out);

  // Folds (max, sum, out) of `rows` rows from `b` into `a`, `a` being the earlier one.
  void (*fold)(int rows, int head_dim, float* a_max, float* a_sum, float* a_out, const float* b_max,
               const float* b_sum, const float* b_out);

  // out / sum in the storage type of queries; zero where the sum is zero.
  void (*finish)(const float* x, float sum, int head_dim, void* out);
};

// For queries of `dtype` and keys and values of the same, or of codes.
const AttendKernels& attend_kernels_generic(DType dtype, bool codes);
const AttendKernels& attend_kernels_avx2(DType dtype, bool codes);
const AttendKernels& attend_kernels_avx512(DType dtype, bool codes);

}  // namespace eagle::cpu
