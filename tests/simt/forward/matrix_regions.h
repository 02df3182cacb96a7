#pragma once
// Regions of the matrices that linear's ops read and write.
#include <vector>

#include "eagle_cuda/linear.h"
#include "simt/emulator.h"
#include "simt/forward/cache_regions.h"
#include "simt/forward/workspace.h"

namespace eagle::simulated {

inline void add_rows(Spans& spans, const char* name, const void* data, simt::Access access, int64_t rows,
                     int64_t stride, int64_t columns, DType dtype) {
  spans.add(name, data, access, {rows, 1, 1}, {stride, 0, 0}, columns, element_size(dtype));
}

inline simt::Region packed_region(const PackedWeight& w) {
  return simt::bytes("weight", w.data, cuda::packed_weight_bytes(w.n, w.k, w.format), simt::Access::kIn);
}

}  // namespace eagle::simulated
