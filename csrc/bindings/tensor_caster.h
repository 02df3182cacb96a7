#pragma once
// Python tensor -> eagle::TensorView, by DLPack. No libtorch, no copies, no synchronisation.
//
// Fast path: the C exchange table that a framework publishes on its tensor type (torch does). Fallback: a
// __dlpack__ capsule (NumPy, JAX, older frameworks). None becomes an absent view. One rule on both paths:
// tensors that require grad are taken as they are; null data with elements, negative strides and pending
// conjugation or negation raise ValueError.
//
// A conversion that fails throws BadTensor, which does not know its argument's name; module.cpp adds it
// (argument_names.h).
#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "bindings/dlpack_abi.h"
#include "eagle_cuda/tensor_view.h"

namespace eagle::bindings {
namespace py = pybind11;

// The stream of the first CUDA tensor of the call that this thread is in: the framework's current stream on
// its device.
inline thread_local CUstream_st* current_stream = nullptr;

// An object that cannot be taken as a tensor: ValueError, or TypeError where it is no tensor at all.
class BadTensor : public py::builtin_exception {
 public:
  BadTensor(const std::string& message, PyObject* type = PyExc_ValueError, py::handle object = {})
      : py::builtin_exception(message), type_(type), object_(object) {}
  void set_error() const override { PyErr_SetString(type_, what()); }

  py::handle object() const { return object_; }
  BadTensor about(py::handle object) const { return BadTensor(what(), type_, object_ ? object_ : object); }
  BadTensor named(const std::string& name) const { return BadTensor(name + ": " + what(), type_, object_); }

 private:
  PyObject* type_;
  py::handle object_;  // borrowed from the caller's arguments, compared but never read
};

// PyEval_RestoreThread. When the interpreter is shutting down, Python ends a thread that asks for the GIL by
// unwinding its stack; through a destructor that would end the whole process. Such a thread waits here for
// the process to end.
inline void take_gil_back(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();
  }
}

// Runs `f` without the GIL. Every op is called through here, after all arguments were converted.
template <class F>
inline void without_gil(F&& f) {
  PyThreadState* const state = PyEval_SaveThread();
  try {
    f();
  } catch (...) {
    take_gil_back(state);
    throw;
  }
  take_gil_back(state);
}

inline DType dtype_from_dlpack(dlpack::DataType t) {
  using namespace dlpack;
  struct Row {
    uint8_t code, bits;
    DType dtype;
  };
  constexpr Row kTable[] = {
      {kFloat, 32, DType::kFloat32}, {kBfloat, 16, DType::kBFloat16}, {kFloat, 16, DType::kFloat16},
      {kInt, 32, DType::kInt32},     {kInt, 64, DType::kInt64},       {kUInt, 8, DType::kUInt8},
      {kInt, 8, DType::kInt8},       {kBool, 8, DType::kBool},        {kFloat8E4M3, 8, DType::kFloat8E4M3}};
  for (const Row& row : kTable)
    if (row.code == t.code && row.bits == t.bits && t.lanes == 1) return row.dtype;
  constexpr const char* kKinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  throw BadTensor(
      "expected a dtype that some op takes (float32, bfloat16, float16, int32, int64, uint8, int8, bool, "
      "float8_e4m3fn), got " +
      (t.code < 7 ? kKinds[t.code] + std::to_string(t.bits) : "DLPack type " + std::to_string(t.code)) +
      (t.lanes == 1 ? "" : " with " + std::to_string(t.lanes) + " lanes"));
}

inline TensorView from_dlpack(const dlpack::Tensor& t, bool read_only) {
  if (t.ndim > TensorView::kMaxDims)
    throw BadTensor("expected at most " + std::to_string(TensorView::kMaxDims) + " dimensions, got " +
                    std::to_string(t.ndim));
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
      throw BadTensor("expected a tensor on the CPU or on a CUDA device, got DLPack device type " +
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
    if (view.strides[d] < 0)
      throw BadTensor("expected strides of 0 or more, got " + std::to_string(view.strides[d]) +
                      " in dimension " + std::to_string(d) + "; pass a contiguous copy");
  }
  if (!t.data && elements > 0)
    throw BadTensor("expected data, got a null pointer for " + std::to_string(elements) + " elements");
  view.data = t.data ? static_cast<char*>(t.data) + t.byte_offset : nullptr;
  return view;
}

struct TensorType {
  PyTypeObject* type;
  const dlpack::ExchangeTable* table;  // nullptr: only capsules
  bool lazy_negation;                  // its tensors can ask for is_neg()
};

// What `type` offers. Types are few: remember them, and keep them alive.
inline TensorType tensor_type(PyTypeObject* type) {
  static TensorType known[8] = {};
  static int next = 0;
  for (const TensorType& e : known)
    if (e.type == type) return e;
  const py::handle object(reinterpret_cast<PyObject*>(type));
  TensorType entry{type, nullptr, py::hasattr(object, "is_neg")};
  if (PyObject* capsule = PyObject_GetAttrString(object.ptr(), "__dlpack_c_exchange_api__")) {
    const auto* table =
        static_cast<const dlpack::ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (table && table->header.version.major == dlpack::kMajorVersion && table->tensor_from_py_object)
      entry.table = table;
  }
  PyErr_Clear();
  if (known[next].type) Py_DECREF(reinterpret_cast<PyObject*>(known[next].type));
  object.inc_ref();
  known[next] = entry;
  next = (next + 1) % 8;
  return entry;
}

inline TensorView from_capsule(py::handle capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* m = static_cast<dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (m->version.major != dlpack::kMajorVersion)
      throw BadTensor("expected DLPack version 1, got " + std::to_string(m->version.major));
    return from_dlpack(m->tensor, (m->flags & dlpack::kFlagReadOnly) != 0);
  }
  auto* m = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!m) throw py::error_already_set();
  return from_dlpack(m->tensor, false);
}

// `obj.__dlpack__()`, asking for what it can give: version 1 (which carries the read-only flag), then the old
// form.
inline py::object request_capsule(py::handle obj) {
  static PyObject* const method = PyUnicode_InternFromString("__dlpack__");
  static PyObject* const keywords = py::make_tuple("max_version").release().ptr();
  static PyObject* const version = py::make_tuple(1, 0).release().ptr();
  PyObject* const arguments[] = {obj.ptr(), version};
  if (PyObject* capsule = PyObject_VectorcallMethod(method, arguments, 1, keywords))
    return py::reinterpret_steal<py::object>(capsule);
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
  PyErr_Clear();
  return obj.attr("__dlpack__")();
}

// Whether torch would still have to negate the elements: DLPack does not say so. Such views come from `.imag`
// of a conjugated tensor, whose elements are never adjacent. Asking costs 80 ns, so dense tensors are not
// asked.
inline bool pending_negation(py::handle obj, const TensorView& view) {
  if (view.dtype != DType::kFloat32 && view.dtype != DType::kFloat16) return false;
  for (int d = 0; d < view.ndim; ++d)
    if (view.shape[d] > 1 && view.strides[d] == 1) return false;
  static PyObject* const method = PyUnicode_InternFromString("is_neg");
  const auto answer = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(obj.ptr(), method));
  if (!answer) throw py::error_already_set();
  return answer.is(py::handle(Py_True));
}

// A tensor held beyond one call: the view and the Python object that owns its memory.
struct OwnedTensor {
  TensorView view;
  py::object owner;
};

inline TensorView convert(py::handle src, const TensorType& type, py::object& keep) {
  if (type.table) {
    dlpack::Tensor t;
    if (type.table->tensor_from_py_object(src.ptr(), &t) != 0) throw py::error_already_set();
    const TensorView view = from_dlpack(t, false);
    if (view.device == DeviceType::kCUDA && !current_stream && type.table->current_work_stream) {
      void* stream = nullptr;
      if (type.table->current_work_stream(t.device.device_type, t.device.device_id, &stream) != 0)
        throw py::error_already_set();
      current_stream = static_cast<CUstream_st*>(stream);
    }
    return view;
  }
  // torch refuses a capsule where a gradient is required; the detached tensor is the same memory.
  const bool detach = type.lazy_negation && py::hasattr(src, "detach");
  const py::object source = detach ? src.attr("detach")() : py::reinterpret_borrow<py::object>(src);
  keep = request_capsule(source);
  return from_capsule(keep);
}

// Converts one object; `keep` receives what must outlive the view (nothing on the fast path). None: an absent
// view.
inline TensorView to_view(py::handle src, py::object& keep) {
  if (src.is_none()) return TensorView{};
  const TensorType type = tensor_type(Py_TYPE(src.ptr()));
  if (!type.table && !py::hasattr(src, "__dlpack__"))
    throw BadTensor("expected a tensor, got " + std::string(Py_TYPE(src.ptr())->tp_name), PyExc_TypeError,
                    src);
  try {
    const TensorView view = convert(src, type, keep);
    if (type.lazy_negation && pending_negation(src, view))
      throw BadTensor("expected a plain tensor, got a negative view; call resolve_neg()");
    return view;
  } catch (const BadTensor& e) {
    throw e.about(src);
  } catch (py::error_already_set& e) {
    // A framework that will not hand out the memory: its own words, without the stack that torch appends.
    if (!e.matches(PyExc_BufferError) && !e.matches(PyExc_RuntimeError) && !e.matches(PyExc_ValueError))
      throw;
    const std::string words = py::str(e.value());
    throw BadTensor(words.substr(0, words.find('\n')), PyExc_ValueError, src);
  }
}

}  // namespace eagle::bindings

namespace pybind11::detail {
template <>
struct type_caster<eagle::TensorView> {
  PYBIND11_TYPE_CASTER(eagle::TensorView, const_name("Tensor | None"));

  bool load(handle src, bool) {
    object keep;
    value = eagle::bindings::to_view(src, keep);
    if (keep) loader_life_support::add_patient(keep);  // until the call returns, inside containers too
    return true;
  }
};
}  // namespace pybind11::detail
