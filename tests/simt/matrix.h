#pragma once
// Matrix instructions of a warp (ldmatrix, stmatrix, mma): run when all 32 lanes have arrived.
#include <cstdint>

#include "simt/machine.h"

namespace simt::matrix {

// What one lane brings and takes. Its address is the lane's value in the collective.
struct Operands {
  void* row;            // load, store: eight 16-bit elements in shared memory
  uint32_t a[4], b[2];  // multiply
  uint32_t c[4];        // multiply: accumulators, then the result; load: the result; store: what is stored
};

// Nothing without all 32 lanes, which has been reported then.
void load(Warp& warp, uint32_t lanes, bool transposed);
void store(Warp& warp, uint32_t lanes, bool transposed);
void multiply_add(Warp& warp, uint32_t lanes, bool bf16);
void multiply_add_int8(Warp& warp, uint32_t lanes);

}  // namespace simt::matrix
