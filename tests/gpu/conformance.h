#pragma once
// A case of ptx_conformance: a launch over words, and in plain C++ what it must leave behind.
#include <cstdint>
#include <vector>

struct CUstream_st;

namespace conformance {

inline constexpr int kWords = 4096;  // of the input and of the output

struct Case {
  const char* name;
  void (*launch)(const uint32_t* in, uint32_t* out, CUstream_st* stream);
  void (*expected)(const uint32_t* in, uint32_t* out);
};
std::vector<Case> memory_cases();      // ptx_conformance.cu
std::vector<Case> bulk_cases();        // bulk_conformance.cu
std::vector<Case> grid_cases();        // grid_conformance.cu
std::vector<Case> matrix_cases();      // matrix_conformance.cu
std::vector<Case> purity_cases();      // purity_conformance.cu
std::vector<Case> planted_cases();     // the same, with faults to be found
std::vector<Case> collective_cases();  // cuda_conformance.cu

// Runs the launch over copies on the device and waits: device_cuda.cpp on a GPU, device_simt.cpp under the
// emulator.
void run(const Case& c, const std::vector<uint32_t>& in, std::vector<uint32_t>& out);

}  // namespace conformance
