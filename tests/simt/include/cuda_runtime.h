#pragma once
// CUDA C++ for the host compiler. Stands before the toolkit's header of the same name on the include path of
// emulated kernels and offers what a kernel or its launcher may use; what it lacks is not to be used:
// `<<<>>>`, `__shared__` variables, cooperative groups, CUB, textures.
#include <cstddef>
#include <cstdint>

#include "simt/qualifiers.h"
// The emulator's entry points need the vector types above them.
#include "simt/device.h"
#include "simt/host.h"
#include "simt/math.h"
#include "simt/thread.h"
