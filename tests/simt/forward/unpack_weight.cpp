#include "common/check.h"
#include "eagle_cuda/linear.h"
#include "simt/emulator.h"

namespace eagle::cpu {

void unpack_weight(const UnpackWeightParams& p) {
  validate(p);
  const PackedWeight& w = p.weight;
  simt::Memory memory(
      "unpack_weight",
      {simt::bytes("packed", w.data, cuda::packed_weight_bytes(w.n, w.k, w.format), simt::Access::kIn),
       simt::bytes("out", p.out, w.n * w.k * element_size(p.out_dtype), simt::Access::kOut)});
  cuda::unpack_weight(p, nullptr);
  memory.finish();
}

}  // namespace eagle::cpu
