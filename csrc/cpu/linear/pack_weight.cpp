// pack_weight and unpack_weight: between row order and panel order; quantised formats by common/quantize.h.
#include <algorithm>
#include <cstring>

#include "cpu/linear/panels.h"
#include "cpu/parallel.h"

namespace eagle::cpu {
namespace {

template <class Word, int kStepK>
void pack_row(const PanelLayout& layout, const void* from, char* to) {
  const auto* row = static_cast<const Word*>(from);
  for (int64_t step = 0; step < layout.steps; ++step) {
    Word values[kStepK] = {};
    for (int j = 0; j < kStepK; ++j)
      if (row && step * kStepK + j < layout.k) values[j] = row[step * kStepK + j];
    std::memcpy(to + step * layout.step_bytes, values, sizeof(values));
  }
}

template <class Word, int kStepK>
void unpack_row(const PanelLayout& layout, const char* from, void* to) {
  auto* row = static_cast<Word*>(to);
  for (int64_t step = 0; step < layout.steps; ++step) {
    Word values[kStepK];
    std::memcpy(values, from + step * layout.step_bytes, sizeof(values));
    for (int j = 0; j < kStepK && step * kStepK + j < layout.k; ++j) row[step * kStepK + j] = values[j];
  }
}

float element(DType dtype, const void* row, int64_t k) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(row)[k];
  return dtype == DType::kBFloat16 ? to_float(static_cast<const bf16_t*>(row)[k])
                                   : to_float(static_cast<const half_t*>(row)[k]);
}

// One quantised row in its group. Other rows' bits are left as they are: in int4 two rows share a byte.
struct QuantizedRow {
  const PanelLayout& layout;
  char* group;
  int64_t panel;
  int lane;

  char* code(int64_t k) const { return group + layout.code_offset(panel, lane, k); }
  char* scale(int64_t k) const { return group + layout.scale_offset(panel, lane, k); }

  // `from` [K] of dtype, or nullptr: zeros.
  void pack(DType dtype, const void* from) const {
    const int64_t padded = layout.padded_k();
    const int64_t span = layout.format == WeightFormat::kInt4 ? kInt4Group : padded;
    for (int64_t begin = 0; begin < padded; begin += span) {
      const int64_t end = from ? std::min(begin + span, layout.k) : begin;
      uint32_t largest = 0;
      for (int64_t k = begin; k < end; ++k)
        largest = std::max(largest, magnitude_bits(element(dtype, from, k)));
      const float step = put_scale(begin, largest);
      for (int64_t k = begin; k < begin + span; ++k) put(k, k < end ? element(dtype, from, k) : 0.0f, step);
    }
  }

  void unpack(float* to) const {
    for (int64_t k = 0; k < layout.k; ++k) {
      const char byte = *code(k);
      const auto bits = static_cast<uint8_t>(byte);
      if (layout.format == WeightFormat::kInt4) {
        half_t step;
        std::memcpy(&step, scale(k), sizeof(step));
        const auto nibble = static_cast<int8_t>(panel % 2 ? bits & 0xf0 : bits << 4);
        to[k] = static_cast<float>(nibble / 16) * to_float(step);
        continue;
      }
      float step;
      std::memcpy(&step, scale(k), sizeof(step));
      const int magnitude = bits & 0x7f;
      to[k] = step * (layout.format == WeightFormat::kFloat8E4M3 ? to_float(float8_t{bits})
                      : layout.format == WeightFormat::kInt8
                          ? static_cast<float>(bits & 0x80 ? -magnitude : magnitude)
                          : static_cast<float>(int(bits) - 128));
    }
  }

 private:
  // Stores the scale of a row or group; returns it as the codes want it.
  float put_scale(int64_t k, uint32_t largest) const {
    if (layout.format == WeightFormat::kInt4) {
      const half_t step = quantize_int4_scale(largest);
      std::memcpy(scale(k), &step, sizeof(step));
      return to_float(step);
    }
    const float step =
        quantize_scale(largest, layout.format == WeightFormat::kFloat8E4M3 ? kFloat8Max : kInt8Max);
    std::memcpy(scale(k), &step, sizeof(step));
    return step;
  }

  void put(int64_t k, float value, float step) const {
    char& byte = *code(k);
    switch (layout.format) {
      case WeightFormat::kFloat8E4M3:
        byte = static_cast<char>(quantize_float8(value, step).bits);
        break;
      case WeightFormat::kInt8: {
        const int32_t whole = quantize(value, step, kInt8Max);
        byte = static_cast<char>(whole < 0 ? 0x80 | -whole : whole);
        break;
      }
      case WeightFormat::kInt8Dynamic:
        byte = static_cast<char>(quantize(value, step, kInt8Max) + 128);
        break;
      default: {
        const int nibble = quantize(value, step, kInt4Max) & 15;
        byte = static_cast<char>(panel % 2 ? (byte & 15) | nibble << 4 : (byte & 0xf0) | nibble);
      }
    }
  }
};

constexpr int64_t kGrain = 4;  // groups

// Calls f(panel, lane, source row) for all packed rows; source row -1: padding. A group is one thread's.
template <class F>
void for_rows(const PanelLayout& layout, F&& f) {
  parallel_for(layout.groups, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin * kGroupPanels; panel < end * kGroupPanels; ++panel)
      for (int lane = 0; lane < kPanelRows; ++lane) {
        const int64_t row = layout.panel_row(panel) + lane;
        f(panel, lane, row < layout.panel_end(panel) ? row : int64_t{-1});
      }
  });
}

}  // namespace

int64_t packed_weight_bytes(int64_t n, int64_t k, WeightFormat format) {
  return PanelLayout(n, k, format, false).bytes();
}

void pack_weight(const PackWeightParams& p) {
  validate(p);
  const PanelLayout layout(p.n, p.k, p.format, p.paired);
  for_rows(layout, [&](int64_t panel, int lane, int64_t row) {
    // The padding rows belong to the call that brings the last row of their panel.
    const int64_t owner = row < 0 ? layout.panel_end(panel) - 1 : row;
    if (owner < p.row_begin || owner >= p.row_begin + p.rows) return;
    const char* from = row < 0 ? nullptr
                               : static_cast<const char*>(p.weight) +
                                     (row - p.row_begin) * p.weight_stride * element_size(p.weight_dtype);
    char* packed = static_cast<char*>(p.packed);
    if (is_quantized(p.format)) {
      char* group = packed + panel / kGroupPanels * layout.group_bytes();
      return QuantizedRow{layout, group, panel, lane}.pack(p.weight_dtype, from);
    }
    char* to = packed + layout.panel_offset(panel) + lane * layout.step_k * layout.element_bytes;
    if (p.format == WeightFormat::kBFloat16)
      pack_row<uint16_t, 2>(layout, from, to);
    else if (p.format == WeightFormat::kFloat16)
      pack_row<uint16_t, 1>(layout, from, to);
    else
      pack_row<uint32_t, 1>(layout, from, to);
  });
}

void unpack_weight(const UnpackWeightParams& p) {
  validate(p);
  expect_packed_here(p.weight);
  const PanelLayout layout(p.weight);
  for_rows(layout, [&](int64_t panel, int lane, int64_t row) {
    if (row < 0) return;
    char* packed = static_cast<char*>(const_cast<void*>(p.weight.data));
    char* to = static_cast<char*>(p.out) + row * layout.k * element_size(p.out_dtype);
    if (is_quantized(layout.format)) {
      char* group = packed + panel / kGroupPanels * layout.group_bytes();
      return QuantizedRow{layout, group, panel, lane}.unpack(reinterpret_cast<float*>(to));
    }
    const char* from = packed + layout.panel_offset(panel) + lane * layout.step_k * layout.element_bytes;
    if (layout.format == WeightFormat::kBFloat16)
      unpack_row<uint16_t, 2>(layout, from, to);
    else if (layout.format == WeightFormat::kFloat16)
      unpack_row<uint16_t, 1>(layout, from, to);
    else
      unpack_row<uint32_t, 1>(layout, from, to);
  });
}

}  // namespace eagle::cpu
