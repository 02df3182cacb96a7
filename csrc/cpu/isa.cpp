#include "cpu/isa.h"

#include <cstdlib>
#include <cstring>

#include "common/check.h"
#include "eagle_cuda/threads.h"

namespace eagle {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16"};

cpu::Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512vbmi"))
    return cpu::Isa::kAvx512Bf16;
  if (avx512) return cpu::Isa::kAvx512;
  if (avx2) return cpu::Isa::kAvx2;
#endif
  return cpu::Isa::kGeneric;
}

cpu::Isa choose() {
  const cpu::Isa best = detect();
  const char* asked = std::getenv("EAGLE_CPU_ISA");
  if (!asked || !*asked) return best;
  for (int i = 0; i < 4; ++i)
    if (!std::strcmp(asked, kNames[i])) {
      check(i <= static_cast<int>(best), "EAGLE_CPU_ISA: this processor has ", kNames[static_cast<int>(best)],
            ", got ", asked);
      return static_cast<cpu::Isa>(i);
    }
  check(false, "EAGLE_CPU_ISA: expected generic, avx2, avx512 or avx512_bf16, got ", asked);
  return best;
}

}  // namespace

cpu::Isa cpu::isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* cpu_isa() { return kNames[static_cast<int>(cpu::isa())]; }

}  // namespace eagle
