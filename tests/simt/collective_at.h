#pragma once
#include "simt/device.h"

namespace simt {

// A collective that device code entered at `pc`.
uint64_t collective_at(Collective op, uint32_t mask, uint64_t value, int operand, int width, const void* pc);

}  // namespace simt
