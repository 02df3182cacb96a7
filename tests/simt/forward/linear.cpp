#include "simt/forward/matrix_regions.h"

namespace eagle::cpu {

void linear(const LinearParams& given) {
  LinearParams p = given;
  validate(p);  // sizes below 0 would make nonsense of the regions
  const PackedWeight& w = p.weight;
  const int64_t size = element_size(p.x_dtype), columns = p.activation == Activation::kSwiGLU ? w.n / 2 : w.n;
  simulated::Workspace workspace(p.workspace, p.workspace_bytes, cuda::linear_workspace_bytes(w, p.m));
  p.workspace = workspace.data();
  p.workspace_bytes = workspace.bytes();
  std::vector<simt::Region> regions = {
      simulated::packed_region(w),
      simt::bytes("norm_weight", p.norm_weight, w.k * size, simt::Access::kIn),
      simt::bytes("bias", p.bias, w.n * size, simt::Access::kIn),
      workspace.region(),
  };
  simulated::Spans spans;
  simulated::add_rows(spans, "x", p.x, simt::Access::kIn, p.m, p.x_stride, w.k, p.x_dtype);
  simulated::add_rows(spans, "residual", p.residual, simt::Access::kIn, p.m, p.residual_stride, columns,
                      p.out_dtype);
  simulated::add_rows(spans, "out", p.out, simt::Access::kInOut, p.m, p.out_stride, columns, p.out_dtype);
  spans.append_to(regions);
  simt::Memory memory("linear", regions);
  cuda::linear(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
