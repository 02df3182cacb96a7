#pragma once
// What waiting threads wait for.
#include "simt/machine.h"

namespace simt {

// An exiting thread lets those go on that waited only for it.
void release_waiters_of(Thread& exited);

void complete_gatherings(Warp& warp);  // collectives that have all their lanes

}  // namespace simt
