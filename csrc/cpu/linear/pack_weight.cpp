// pack_weight and unpack_weight: a copy between row order and panel order.
#include <cstring>

#include "common/weight_format.h"
#include "cpu/linear/panels.h"
#include "cpu/parallel.h"

namespace eagle::cpu {
namespace {

// Calls f(packed address of the row's first step, source row) for the lanes of panels; source row -1:
// padding.
template <class F>
void for_rows(const PanelLayout& layout, int64_t panel_begin, int64_t panel_end, F&& f) {
  for (int64_t panel = panel_begin; panel < panel_end; ++panel)
    for (int lane = 0; lane < kPanelRows; ++lane) {
      const int64_t row = layout.panel_row(panel) + lane;
      f(layout.panel_offset(panel) + lane * layout.step_k * layout.element_bytes,
        row < layout.panel_end(panel) ? row : int64_t{-1});
    }
}

template <class Word, int kStepK>
void pack_row(const PanelLayout& layout, const Word* row, char* to) {
  for (int64_t step = 0; step < layout.steps; ++step) {
    Word values[kStepK] = {};
    for (int j = 0; j < kStepK; ++j)
      if (row && step * kStepK + j < layout.k) values[j] = row[step * kStepK + j];
    std::memcpy(to + step * layout.step_bytes(), values, sizeof(values));
  }
}

template <class Word, int kStepK>
void unpack_row(const PanelLayout& layout, const char* from, Word* row) {
  for (int64_t step = 0; step < layout.steps; ++step) {
    Word values[kStepK];
    std::memcpy(values, from + step * layout.step_bytes(), sizeof(values));
    for (int j = 0; j < kStepK && step * kStepK + j < layout.k; ++j) row[step * kStepK + j] = values[j];
  }
}

constexpr int64_t kGrain = 8;  // panels

}  // namespace

int64_t packed_weight_bytes(int64_t n, int64_t k, WeightFormat format) {
  check(!is_quantized(format), "format: expected fp32, bf16 or fp16 on the CPU, got ", name(format));
  return PanelLayout(n, k, format, false).bytes();
}

void pack_weight(const PackWeightParams& p) {
  validate(p);
  const PanelLayout layout(p.n, p.k, p.format, p.paired);
  // The padding rows belong to the call that brings the last row of their panel.
  const auto is_ours = [&](int64_t row, int64_t panel) {
    if (row < 0) row = layout.panel_end(panel) - 1;
    return row >= p.row_begin && row < p.row_begin + p.rows;
  };
  parallel_for(layout.groups * kGroupPanels, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for_rows(layout, panel, panel + 1, [&](int64_t offset, int64_t row) {
        if (!is_ours(row, panel)) return;
        char* to = static_cast<char*>(p.packed) + offset;
        const char* from = row < 0 ? nullptr
                                   : static_cast<const char*>(p.weight) +
                                         (row - p.row_begin) * p.weight_stride * layout.element_bytes;
        switch (p.format) {
          case WeightFormat::kBFloat16:
            return pack_row<uint16_t, 2>(layout, reinterpret_cast<const uint16_t*>(from), to);
          case WeightFormat::kFloat16:
            return pack_row<uint16_t, 1>(layout, reinterpret_cast<const uint16_t*>(from), to);
          case WeightFormat::kFloat32:
            return pack_row<uint32_t, 1>(layout, reinterpret_cast<const uint32_t*>(from), to);
          default:
            break;
        }
      });
  });
}

void unpack_weight(const UnpackWeightParams& p) {
  validate(p);
  expect_packed_here(p.weight);
  const PanelLayout layout(p.weight);
  parallel_for(layout.groups * kGroupPanels, kGrain, [&](int64_t begin, int64_t end) {
    for_rows(layout, begin, end, [&](int64_t offset, int64_t row) {
      if (row < 0) return;
      const char* from = static_cast<const char*>(p.weight.data) + offset;
      char* to = static_cast<char*>(p.out) + row * layout.k * layout.element_bytes;
      switch (p.weight.format) {
        case WeightFormat::kBFloat16:
          return unpack_row<uint16_t, 2>(layout, from, reinterpret_cast<uint16_t*>(to));
        case WeightFormat::kFloat16:
          return unpack_row<uint16_t, 1>(layout, from, reinterpret_cast<uint16_t*>(to));
        case WeightFormat::kFloat32:
          return unpack_row<uint32_t, 1>(layout, from, reinterpret_cast<uint32_t*>(to));
        default:
          break;
      }
    });
  });
}

}  // namespace eagle::cpu
