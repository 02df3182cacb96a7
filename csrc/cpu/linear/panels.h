#pragma once
// The CPU's packed layout, the same for every instruction set.
//
// A panel is 16 rows (outputs), k by k, so that one vector holds 16 outputs and sums need no horizontal adds;
// bf16 keeps pairs of k next to each other, as the BF16 dot product wants them. Two panels are interleaved
// step by step into a group: one stream of 128 (fp16: 64) bytes a step, and 32-row groups split evenly over
// few threads where 64-row ones would not.
//
//   unpaired:  panel p of group g = rows 32 g + 16 p ...
//   paired:    panel 0 of group g = gate rows 16 g ..., panel 1 = the up rows of the same outputs
//
// Ragged N and K are padded with zeros: a product that is exactly zero leaves a sum as it is.
#include <cstdint>

#include "common/check.h"
#include "common/numeric.h"
#include "cpu/linear/kernels.h"

namespace eagle::cpu {

struct PanelLayout {
  int64_t n, k;
  bool paired;
  int step_k;  // k per step: 2 for bf16, else 1
  int element_bytes;
  int64_t steps;  // steps per row
  int64_t groups;

  PanelLayout(int64_t n_, int64_t k_, WeightFormat format, bool paired_)
      : n(n_),
        k(k_),
        paired(paired_),
        step_k(format == WeightFormat::kBFloat16 ? 2 : 1),
        element_bytes(format == WeightFormat::kFloat32 ? 4 : 2),
        steps(ceil_div<int64_t>(k_, step_k)),
        groups(paired_ ? ceil_div<int64_t>(n_ / 2, kPanelRows) : ceil_div<int64_t>(n_, kGroupRows)) {}
  explicit PanelLayout(const PackedWeight& w) : PanelLayout(w.n, w.k, w.format, w.paired) {}

  int64_t step_bytes() const { return int64_t{kGroupRows} * step_k * element_bytes; }
  int64_t group_bytes() const { return steps * step_bytes(); }
  int64_t bytes() const { return groups * group_bytes(); }

  // Panels, numbered through all groups. `panel_row` is a panel's first source row, `panel_end` where its
  // rows stop.
  int64_t panel_row(int64_t panel) const {
    return paired ? panel / 2 * kPanelRows + panel % 2 * (n / 2) : panel * kPanelRows;
  }
  int64_t panel_end(int64_t panel) const { return paired && panel % 2 == 0 ? n / 2 : n; }
  int64_t panel_offset(int64_t panel) const {
    return panel / kGroupPanels * group_bytes() + panel % kGroupPanels * step_bytes() / kGroupPanels;
  }
};

inline void expect_packed_here(const PackedWeight& w) {
  check(w.backend == DeviceType::kCPU, "weight: expected a weight packed for cpu, got one packed for cuda");
}

}  // namespace eagle::cpu
