#include "common/check.h"
#include "eagle_cuda/linear.h"
#include "simt/emulator.h"

namespace eagle::cpu {

int64_t packed_weight_bytes(int64_t n, int64_t k, WeightFormat format) {
  return cuda::packed_weight_bytes(n, k, format);
}

void pack_weight(const PackWeightParams& p) {
  validate(p);  // sizes below 0 would make nonsense of the regions
  const int64_t elements = p.rows ? (p.rows - 1) * p.weight_stride + p.k : 0;
  simt::Memory memory(
      "pack_weight",
      {simt::bytes("weight", p.weight, elements * element_size(p.weight_dtype), simt::Access::kIn),
       simt::bytes("packed", p.packed, cuda::packed_weight_bytes(p.n, p.k, p.format), simt::Access::kInOut)});
  cuda::pack_weight(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
