#pragma once
// Non-owning, framework-free description of a tensor. Built from DLPack in csrc/bindings, or by hand by a C++
// embedder. Strides are in elements. A default-constructed view stands for an absent optional argument.
#include <cstdint>

struct CUstream_st;  // cudaStream_t, without including CUDA headers

namespace eagle {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kInt32,
  kInt64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3  // finite values and NaN, no infinity (OCP e4m3fn)
};
enum class DeviceType : uint8_t { kCPU, kCUDA };

struct TensorView {
  static constexpr int kMaxDims = 6;
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  DeviceType device = DeviceType::kCPU;
  bool read_only = false;
  int device_id = 0;
  int ndim = -1;  // -1: absent
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};

  bool present() const { return ndim >= 0; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace eagle
