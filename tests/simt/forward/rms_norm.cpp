#include "simt/forward/matrix_regions.h"

namespace eagle::cpu {

void rms_norm(const RmsNormParams& p) {
  validate(p);  // sizes below 0 would make nonsense of the regions
  std::vector<simt::Region> regions = {
      simt::bytes("weight", p.weight, p.k * element_size(p.dtype), simt::Access::kIn)};
  simulated::Spans spans;
  simulated::add_rows(spans, "x", p.x, simt::Access::kIn, p.m, p.x_stride, p.k, p.dtype);
  simulated::add_rows(spans, "out", p.out, simt::Access::kInOut, p.m, p.out_stride, p.k, p.dtype);
  spans.append_to(regions);
  simt::Memory memory("rms_norm", regions);
  cuda::rms_norm(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
