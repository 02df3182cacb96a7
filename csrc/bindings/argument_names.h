#pragma once
// Puts the argument's name in front of conversion errors, for every function of the module at once.
//
// pybind11 converts arguments one by one and does not tell a type caster which one it works on. The whole
// call does know, so each function's entry is replaced by one that catches BadTensor, finds the object among
// the arguments, and throws it again with the name: `positions: expected strides of 0 or more, got -1 in
// dimension 0`. Costs a table look-up per call.
#include <pybind11/pybind11.h>

#include <string>
#include <unordered_map>

#include "bindings/tensor_caster.h"

namespace eagle::bindings {

using Entry = py::handle (*)(py::detail::function_call&);

// The original entry of every wrapped function. Filled while the module is imported, read-only afterwards.
inline std::unordered_map<const py::detail::function_record*, Entry>& original_entries() {
  static auto* entries = new std::unordered_map<const py::detail::function_record*, Entry>;
  return *entries;
}

// The first argument of a constructor is pybind11's own record, not a Python object.
inline size_t first_object(const py::detail::function_call& call) {
  return call.func.is_new_style_constructor ? 1 : 0;
}

// "name", or "name[i]" for an element of a list or tuple.
inline std::string name_of(const py::detail::function_call& call, py::handle object) {
  for (size_t i = first_object(call); i < call.args.size(); ++i) {
    const std::string name = i < call.func.args.size() && call.func.args[i].name
                                 ? call.func.args[i].name
                                 : "argument " + std::to_string(i + 1);
    const py::handle arg = call.args[i];
    if (arg.is(object)) return name;
    if (!py::isinstance<py::list>(arg) && !py::isinstance<py::tuple>(arg)) continue;
    const auto items = py::reinterpret_borrow<py::sequence>(arg);
    for (size_t j = 0; j < items.size(); ++j)
      if (py::object(items[j]).is(object)) return name + "[" + std::to_string(j) + "]";
  }
  return call.func.name;
}

// pybind11's own message prints every tensor in full.
[[noreturn]] inline void throw_mismatch(const py::detail::function_call& call) {
  std::string got;
  for (size_t i = first_object(call); i < call.args.size(); ++i)
    got += (got.empty() ? "" : ", ") + std::string(Py_TYPE(call.args[i].ptr())->tp_name);
  throw py::type_error(std::string(call.func.name) + ": expected " + call.func.signature + ", got (" + got +
                       ")");
}

inline py::handle call_naming_arguments(py::detail::function_call& call) {
  current_stream = nullptr;
  try {
    const py::handle result = original_entries().find(&call.func)->second(call);
    if (result.ptr() == PYBIND11_TRY_NEXT_OVERLOAD && !call.func.next && !call.func.is_operator)
      throw_mismatch(call);
    return result;
  } catch (const BadTensor& e) {
    throw e.named(name_of(call, e.object()));
  }
}

inline void name_arguments_of(py::handle function) {
  const py::handle plain = py::detail::get_function(function);
  if (!plain || !PyCFunction_Check(plain.ptr()) || !PyCFunction_GET_SELF(plain.ptr())) return;
  auto* record = py::detail::function_record_ptr_from_PyObject(PyCFunction_GET_SELF(plain.ptr()));
  for (; record; record = record->next)
    if (original_entries().emplace(record, record->impl).second) record->impl = call_naming_arguments;
}

// Wraps every function of the module and every method of its classes. Call it last.
inline void name_arguments(py::module_& m) {
  for (auto [name, value] : py::dict(m.attr("__dict__"))) {
    name_arguments_of(value);
    if (!PyType_Check(value.ptr())) continue;
    for (auto method : py::dict(value.attr("__dict__"))) name_arguments_of(method.second);
  }
}

}  // namespace eagle::bindings
