#pragma once
// Threads of the CPU backend. Results never depend on their number.

namespace eagle {

// Threads that a CPU op may use, the caller's included. Default: EAGLE_NUM_THREADS, else the cores this
// process may run on (its affinity and its container's quota).
int num_threads();

// Throws std::invalid_argument unless 1 <= n <= 256. Waits for an op that is running.
void set_num_threads(int n);

// Instruction set the CPU kernels were chosen for: "generic", "avx2", "avx512" or "avx512_bf16".
// EAGLE_CPU_ISA lowers it (for tests); asking for more than the processor has throws std::invalid_argument.
const char* cpu_isa();

}  // namespace eagle
