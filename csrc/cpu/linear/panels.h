#pragma once
// The CPU's packed layout, the same for every instruction set.
//
// A panel is 16 rows (outputs), k by k, so that one vector holds 16 outputs and sums need no horizontal adds.
// Two panels are interleaved step by step into a group: one stream of 64 or 128 bytes a step, and 32-row
// groups split evenly over few threads where 64-row ones would not.
//
//   unpaired:  panel p of group g = rows 32 g + 16 p ...
//   paired:    panel 0 of group g = gate rows 16 g ..., panel 1 = the up rows of the same outputs
//
// A step of a group holds, for o the output within its panel:
//   fp32, fp16     one k; [panel][o]
//   bf16           two k, as the BF16 dot product wants them; [panel][o][k]
//   fp8, int8      two k, so that a table's low and high bytes interleave to pairs of bf16;
//                  [o / 4][panel][o % 4][k] bytes; int8 as sign and magnitude, as fp8 is: finding the
//                  magnitude of a two's complement cost a quarter of the speed at 8 rows
//   int4           four k, so that a word's four nibbles are looked up after shifts alone;
//                  [o][k % 2][k / 2] bytes, panel 0 in the low nibble
//   int8_dynamic   four k, as the VNNI dot product wants them; [panel][o][k] bytes, code + 128
// Behind a group's steps stand its float scales [panel][o]; in int4 float16 scales [panel][o] stand before
// every 16 steps (64 k).
//
// Ragged N and K are padded with zeros: a product that is exactly zero leaves a sum as it is.
#include <cstdint>

#include "common/weight_format.h"
#include "cpu/linear/kernels.h"

namespace eagle::cpu {

struct PanelLayout {
  int64_t n, k;
  WeightFormat format;
  bool paired;
  int step_k;         // k per step
  int step_bytes;     // of a group
  int element_bytes;  // of a float format; 1 otherwise
  int64_t steps;      // steps per row
  int64_t groups;

  PanelLayout(int64_t n_, int64_t k_, WeightFormat format_, bool paired_)
      : n(n_),
        k(k_),
        format(format_),
        paired(paired_),
        groups(paired_ ? ceil_div<int64_t>(n_ / 2, kPanelRows) : ceil_div<int64_t>(n_, kGroupRows)) {
    constexpr int kStepK[] = {1, 2, 1, 2, 2, 4, 4}, kStepBytes[] = {128, 128, 64, 64, 64, 64, 128};
    step_k = kStepK[static_cast<int>(format)];
    step_bytes = kStepBytes[static_cast<int>(format)];
    element_bytes = is_quantized(format) ? 1 : step_bytes / kGroupRows / step_k;
    steps = format == WeightFormat::kInt4 ? ceil_div<int64_t>(k, kInt4Group) * kInt4BlockSteps
                                          : ceil_div<int64_t>(k, step_k);
  }
  explicit PanelLayout(const PackedWeight& w) : PanelLayout(w.n, w.k, w.format, w.paired) {}

  int64_t padded_k() const { return steps * step_k; }
  int64_t group_bytes() const {
    return format == WeightFormat::kInt4 ? steps / kInt4BlockSteps * kInt4BlockBytes
                                         : steps * step_bytes + (is_quantized(format) ? kScaleBytes : 0);
  }
  int64_t bytes() const { return groups * group_bytes(); }

  // Panels, numbered through all groups. `panel_row` is a panel's first source row, `panel_end` where its
  // rows stop.
  int64_t panel_row(int64_t panel) const {
    return paired ? panel / 2 * kPanelRows + panel % 2 * (n / 2) : panel * kPanelRows;
  }
  int64_t panel_end(int64_t panel) const { return paired && panel % 2 == 0 ? n / 2 : n; }
  int64_t panel_offset(int64_t panel) const {
    return panel / kGroupPanels * group_bytes() + panel % kGroupPanels * step_bytes / kGroupPanels;
  }

  // Within a group: the byte of a code of a quantised format, and a row's scale (int4: of the 64 k around
  // `k_index`).
  int64_t code_offset(int64_t panel, int lane, int64_t k_index) const {
    const int64_t step = k_index / step_k, at = k_index % step_k, p = panel % kGroupPanels;
    if (format == WeightFormat::kInt4)
      return step / kInt4BlockSteps * kInt4BlockBytes + kInt4ScaleBytes +
             step % kInt4BlockSteps * step_bytes + lane * 4 + at % 2 * 2 + at / 2;
    if (format == WeightFormat::kInt8Dynamic) return step * step_bytes + p * 64 + lane * 4 + at;
    return step * step_bytes + lane / 4 * 16 + p * 8 + lane % 4 * 2 + at;
  }
  int64_t scale_offset(int64_t panel, int lane, int64_t k_index) const {
    const int64_t row = panel % kGroupPanels * kPanelRows + lane;
    return format == WeightFormat::kInt4 ? k_index / kInt4Group * kInt4BlockBytes + row * 2
                                         : steps * step_bytes + row * 4;
  }
};

inline void expect_packed_here(const PackedWeight& w) {
  check(w.backend == DeviceType::kCPU, "weight: expected a weight packed for cpu, got one packed for cuda");
}

}  // namespace eagle::cpu
