#pragma once
// What linear's ops need from an instruction set. One table per set; kernels() picks this process's once.
#include <cstdint>

#include "eagle_cuda/linear.h"

namespace eagle::cpu {

// Packed rows: 16 to a panel, two panels to a group (panels.h).
inline constexpr int kPanelRows = 16, kGroupPanels = 2, kGroupRows = kPanelRows * kGroupPanels;

// int4: 16 steps, and in front of them the scales of their 64 k.
inline constexpr int kInt4BlockSteps = 16, kInt4ScaleBytes = 64,
                     kInt4BlockBytes = kInt4ScaleBytes + kInt4BlockSteps * 64;
inline constexpr int kScaleBytes = kGroupRows * 4;  // of a group in the other quantised formats

// Rows of x as the dot products read them: normalised, rounded to x's dtype, then in one of three forms.
enum class RowForm { kKeep, kWiden, kInt8 };  // x's dtype; fp32; codes of int8_dynamic with an Int8RowEnd

// Behind the codes of a row.
struct Int8RowEnd {
  float scale;
  int32_t start;  // -128 times the sum of the codes: weights are stored as code + 128
};

struct InputRows {
  DType dtype;  // of x and norm_weight
  RowForm form;
  int64_t k;
  int64_t padded_k;  // zeros behind K
  float eps;
  const void* x;
  int64_t x_stride;
  const void* norm_weight;  // nullptr: no norm
  void* out;                // [rows, out_stride bytes]
  int64_t out_stride;
};

// Products of all rows with some groups, and what follows them up to the rounding.
struct GroupProducts {
  WeightFormat format;
  DType x_dtype, out_dtype;
  bool paired, swiglu;
  int64_t m, n;
  int64_t steps, group_bytes;
  const char* weight;
  const char* rows;    // prepared by InputRows
  int64_t row_stride;  // bytes
  const void* bias;
  const void* residual;
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
};

inline constexpr int kMaxTopK = 32;

// Scores of one row within one chunk of ids: the partial sum of exponentials and the best few.
struct ChunkBest {
  float max, sum;  // sum of exp(y - max); y = q, or z / tau
  int count;
  float score[kMaxTopK];
  int32_t id[kMaxTopK];
};

struct ChunkScores {
  float* q;  // [count]  logits in; scores (NaN -> -inf, noise added) out
  int64_t first_id, count;
  int top_k;
  bool coupled;
  float temperature, tau;
  const float* noise;  // [count] when coupled
  float* scratch;      // [count rounded up to 16]
};

struct ChunkNoise {
  uint64_t seed;
  int32_t position;
  int64_t first_id, count;
  const int32_t* draft_to_target;  // nullptr: identity
  float* out;                      // [count rounded up to 16]
};

struct LinearKernels {
  bool bf16_products;  // takes bf16 rows as they are; otherwise all but int8_dynamic takes fp32 rows
  void (*prepare)(const InputRows& a, int64_t begin, int64_t end);
  void (*multiply)(const GroupProducts& a, int64_t begin, int64_t end);  // groups [begin, end)
  void (*noise)(const ChunkNoise& a);
  void (*best)(const ChunkScores& a, ChunkBest* out);
};

extern const LinearKernels kLinearGeneric, kLinearAvx2, kLinearAvx512, kLinearAvx512Bf16;

const LinearKernels& linear_kernels();

}  // namespace eagle::cpu
