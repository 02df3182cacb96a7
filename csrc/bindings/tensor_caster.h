#pragma once
// Python tensor -> eagle::TensorView, by DLPack. No libtorch, no copies, no synchronisation.
//
// Fast path: the C exchange table that a framework publishes on its tensor type (torch does). Fallback: a __dlpack__ capsule
// (NumPy, JAX, older frameworks). None becomes an absent view. One rule on both paths: tensors that require grad are taken as
// they are; null data with elements, negative strides and pending conjugation or negation raise ValueError.
#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "bindings/dlpack_abi.h"
#include "eagle_cuda/tensor_view.h"

namespace eagle::bindings {
namespace py = pybind11;

// The stream of the latest CUDA tensor converted on this thread: the framework's current stream on its device.
inline thread_local CUstream_st* current_stream = nullptr;

// Runs `f` without the GIL.
template <class F>
inline void without_gil(F&& f) {
  py::gil_scoped_release release;
  f();
}

inline DType dtype_from_dlpack(dlpack::DataType t) {
  using namespace dlpack;
  struct Row {
    uint8_t code, bits;
    DType dtype;
  };
  constexpr Row kTable[] = {{kFloat, 32, DType::kFloat32}, {kBfloat, 16, DType::kBFloat16}, {kFloat, 16, DType::kFloat16},
                            {kInt, 32, DType::kInt32},     {kInt, 64, DType::kInt64},       {kUInt, 8, DType::kUInt8},
                            {kInt, 8, DType::kInt8},       {kBool, 8, DType::kBool}};
  for (const Row& row : kTable)
    if (row.code == t.code && row.bits == t.bits && t.lanes == 1) return row.dtype;
  throw py::value_error("tensor dtype is not supported (DLPack code " + std::to_string(t.code) + ", " +
                        std::to_string(t.bits) +
                        " bits); supported: float32, bfloat16, float16, int32, int64, uint8, int8, bool");
}

inline TensorView from_dlpack(const dlpack::Tensor& t, bool read_only) {
  if (t.ndim > TensorView::kMaxDims)
    throw py::value_error("tensor has " + std::to_string(t.ndim) + " dimensions; at most " +
                          std::to_string(TensorView::kMaxDims) + " are supported");
  TensorView view;
  switch (t.device.device_type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      view.device = DeviceType::kCPU;
      break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      view.device = DeviceType::kCUDA;
      view.device_id = t.device.device_id;
      break;
    default:
      throw py::value_error("tensor must be on the CPU or on a CUDA device, got DLPack device type " +
                            std::to_string(t.device.device_type));
  }
  view.dtype = dtype_from_dlpack(t.dtype);
  view.read_only = read_only;
  view.ndim = t.ndim;
  int64_t elements = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    view.shape[d] = t.shape[d];
    view.strides[d] = t.strides ? t.strides[d] : elements;
    elements *= t.shape[d];
    if (view.strides[d] < 0) throw py::value_error("tensor has a negative stride; pass a contiguous copy");
  }
  if (!t.data && elements > 0) throw py::value_error("tensor has elements but no data (null pointer)");
  view.data = t.data ? static_cast<char*>(t.data) + t.byte_offset : nullptr;
  return view;
}

// The exchange table that `type` publishes, or nullptr. Types are few: remember them, and keep them alive.
inline const dlpack::ExchangeTable* exchange_table(PyTypeObject* type) {
  struct Entry {
    PyTypeObject* type;
    const dlpack::ExchangeTable* table;
  };
  static Entry known[8] = {};
  static int next = 0;
  for (const Entry& e : known)
    if (e.type == type) return e.table;
  const dlpack::ExchangeTable* table = nullptr;
  if (PyObject* capsule =
          PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__")) {
    table = static_cast<const dlpack::ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (table && (table->header.version.major != dlpack::kMajorVersion || !table->tensor_from_py_object)) table = nullptr;
  }
  PyErr_Clear();
  if (known[next].type) Py_DECREF(reinterpret_cast<PyObject*>(known[next].type));
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  known[next] = {type, table};
  next = (next + 1) % 8;
  return table;
}

inline TensorView from_capsule(py::handle capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* m = static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (m->version.major != dlpack::kMajorVersion)
      throw py::value_error("tensor speaks DLPack " + std::to_string(m->version.major) + ", expected version 1");
    return from_dlpack(m->tensor, (m->flags & dlpack::kFlagReadOnly) != 0);
  }
  auto* m = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!m) throw py::error_already_set();
  return from_dlpack(m->tensor, false);
}

// `obj.__dlpack__()`, asking for what it can give: version 1 (which carries the read-only flag), then the old form.
inline py::object request_capsule(py::handle obj) {
  try {
    return obj.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
  } catch (py::error_already_set& e) {
    if (!e.matches(PyExc_TypeError)) throw;
  }
  return obj.attr("__dlpack__")();
}

// A tensor held beyond one call: the view and the Python object that owns its memory.
struct OwnedTensor {
  TensorView view;
  py::object owner;
};

// Converts one object; `keep` receives what must outlive the view (nothing on the fast path).
inline TensorView to_view(py::handle src, py::object& keep) {
  if (src.is_none()) return TensorView{};
  if (const dlpack::ExchangeTable* table = exchange_table(Py_TYPE(src.ptr()))) {
    dlpack::Tensor t;
    if (table->tensor_from_py_object(src.ptr(), &t) != 0) throw py::error_already_set();
    TensorView view = from_dlpack(t, false);
    if (view.device == DeviceType::kCUDA && table->current_work_stream) {
      void* stream = nullptr;
      if (table->current_work_stream(t.device.device_type, t.device.device_id, &stream) != 0)
        throw py::error_already_set();
      current_stream = static_cast<CUstream_st*>(stream);
    }
    return view;
  }
  if (!py::hasattr(src, "__dlpack__")) throw py::type_error("expected a tensor with __dlpack__, got " +
                                                            std::string(Py_TYPE(src.ptr())->tp_name));
  try {
    keep = request_capsule(src);
  } catch (py::error_already_set& e) {
    // Read-only or non-exportable memory: the framework's own words, as a ValueError.
    if (e.matches(PyExc_BufferError)) throw py::value_error(py::str(e.value()));
    throw;
  }
  return from_capsule(keep);
}

}  // namespace eagle::bindings

namespace pybind11::detail {
template <>
struct type_caster<eagle::TensorView> {
  PYBIND11_TYPE_CASTER(eagle::TensorView, const_name("Tensor | None"));
  object keep_alive_;

  bool load(handle src, bool) {
    value = eagle::bindings::to_view(src, keep_alive_);
    return true;
  }
};
}  // namespace pybind11::detail
