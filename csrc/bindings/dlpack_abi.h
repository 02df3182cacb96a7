#pragma once
// The part of DLPack's C ABI that the bindings use, declared here so that no dependency is shipped.
// Source of the layout: the DLPack specification, version 1.3 (exchange table: dlpack RFC #175).
#include <cstdint>

namespace eagle::bindings::dlpack {

inline constexpr uint32_t kMajorVersion = 1;

enum DeviceCode : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kFloat8E4M3 = 10 };

struct Device {
  int32_t device_type;
  int32_t device_id;
};
struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; nullptr: compact row-major
  uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* manager_ctx;
  void (*deleter)(ManagedTensor*);
};
struct Version {
  uint32_t major, minor;
};
inline constexpr uint64_t kFlagReadOnly = 1;
struct ManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};
struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;
};
struct ExchangeTable {
  ExchangeHeader header;
  void* managed_tensor_allocator;  // unused here
  int (*managed_tensor_from_py_object)(void* py_object, ManagedTensorVersioned** out);
  int (*managed_tensor_to_py_object)(ManagedTensorVersioned* tensor, void** out);
  int (*tensor_from_py_object)(void* py_object, Tensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace eagle::bindings::dlpack
