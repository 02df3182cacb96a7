#pragma once
// Which instruction set the CPU kernels use, decided once per process.
//
// A kernel that profits has one file per instruction set, compiled with that set's flags (CMakeLists.txt).
// Such a file must not instantiate ordinary inline functions or templates of the standard library: the linker
// would keep one copy for all.

namespace eagle::cpu {

enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512Bf16 };  // the last with VNNI and VBMI

Isa isa();

}  // namespace eagle::cpu
