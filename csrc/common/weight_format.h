#pragma once
// Names and dtypes of weight formats, in one place. Host only.
#include "common/check.h"
#include "common/quantize.h"
#include "eagle_cuda/linear.h"

namespace eagle {

inline constexpr const char* kWeightFormatNames[] = {"fp32", "bf16", "fp16",        "fp8",
                                                     "int8", "int4", "int8_dynamic"};

inline const char* name(WeightFormat f) { return kWeightFormatNames[static_cast<int>(f)]; }

inline WeightFormat parse_weight_format(const std::string& text) {
  for (int i = 0; i < 7; ++i)
    if (text == kWeightFormatNames[i]) return static_cast<WeightFormat>(i);
  check(false, "format: expected bf16, fp16, fp32, fp8, int8, int4 or int8_dynamic, got ", text);
  return WeightFormat::kBFloat16;
}

inline bool is_quantized(WeightFormat f) { return f >= WeightFormat::kFloat8E4M3; }

// Of a float format: that of its elements and of the activations. float32 for the others, as they unpack.
inline DType format_dtype(WeightFormat f) {
  return f == WeightFormat::kBFloat16  ? DType::kBFloat16
         : f == WeightFormat::kFloat16 ? DType::kFloat16
                                       : DType::kFloat32;
}

inline bool is_float(DType t) {
  return t == DType::kFloat32 || t == DType::kBFloat16 || t == DType::kFloat16;
}

}  // namespace eagle
