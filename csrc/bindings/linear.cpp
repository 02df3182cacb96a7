#include "eagle_cuda/linear.h"

#include <pybind11/pybind11.h>

#include "bindings/tensor_caster.h"
#include "common/weight_format.h"

namespace eagle::bindings {
namespace py = pybind11;
using namespace py::literals;

namespace {

// A packed weight as Python holds it: checked once when made, passed to ops as one object.
struct OwnedWeight {
  PackedWeight weight;
  py::object data;  // owns the packed bytes
};

PackedWeight describe(int64_t n, int64_t k, const std::string& format, bool paired,
                      const TensorView& packed) {
  PackedWeight w;
  w.data = packed.data;
  w.backend = packed.device;
  w.device_id = packed.device_id;
  w.format = parse_weight_format(format);
  w.paired = paired;
  w.n = n;
  w.k = k;
  w.bytes = packed_weight_bytes(n, k, w.format, w.backend);
  return w;
}

Activation parse_activation(py::handle activation) {
  if (activation.is_none()) return Activation::kNone;
  if (py::isinstance<py::str>(activation) && activation.equal(py::str("swiglu"))) return Activation::kSwiGLU;
  throw py::value_error("activation: expected None or \"swiglu\", got " + std::string(py::repr(activation)));
}

}  // namespace

void bind_linear(py::module_& m) {
  py::class_<OwnedWeight>(m, "PackedWeight",
                          "One [N, K] matrix in a backend's streaming order; made by eagle_cuda.pack_weight.")
      .def_property_readonly("n", [](const OwnedWeight& w) { return w.weight.n; })
      .def_property_readonly("k", [](const OwnedWeight& w) { return w.weight.k; })
      .def_property_readonly("format", [](const OwnedWeight& w) { return name(w.weight.format); })
      .def_property_readonly("paired", [](const OwnedWeight& w) { return w.weight.paired; })
      .def_property_readonly(
          "backend", [](const OwnedWeight& w) { return device_name(w.weight.backend, w.weight.device_id); })
      .def_property_readonly("data", [](const OwnedWeight& w) { return w.data; })
      .def("__repr__", [](const OwnedWeight& w) {
        return "PackedWeight(n=" + std::to_string(w.weight.n) + ", k=" + std::to_string(w.weight.k) +
               ", format='" + name(w.weight.format) + "', paired=" + (w.weight.paired ? "True" : "False") +
               ", backend='" + device_name(w.weight.backend, w.weight.device_id) + "')";
      });

  m.def(
      "packed_weight_bytes",
      [](int64_t n, int64_t k, const std::string& format, bool cuda) {
        check(n >= 0 && k >= 1, "weights: expected N >= 0 and K >= 1, got N = ", n, ", K = ", k);
        return packed_weight_bytes(n, k, parse_weight_format(format),
                                   cuda ? DeviceType::kCUDA : DeviceType::kCPU);
      },
      "n"_a, "k"_a, "format"_a, "cuda"_a);
  m.def(
      "pack_weight",
      [](const TensorView& weight, int64_t row_begin, int64_t n, int64_t k, const std::string& format,
         bool paired, const TensorView& packed) {
        const PackedWeight into = describe(n, k, format, paired, packed);
        without_gil([&] { pack_weight(weight, row_begin, into, packed, current_stream); });
      },
      "weight"_a, "row_begin"_a, "n"_a, "k"_a, "format"_a, "paired"_a, "packed"_a);
  m.def(
      "own_weight",
      [](int64_t n, int64_t k, const std::string& format, bool paired, py::object packed) {
        py::object keep;
        const TensorView view = to_view(packed, keep);
        OwnedWeight w{describe(n, k, format, paired, view), std::move(packed)};
        check(view.ndim == 1 && view.dtype == DType::kUInt8 && view.shape[0] >= w.weight.bytes,
              "packed: expected ", w.weight.bytes, " bytes as one uint8 dimension");
        return w;
      },
      "n"_a, "k"_a, "format"_a, "paired"_a, "packed"_a);
  m.def(
      "unpack_weight",
      [](const OwnedWeight& weight, const TensorView& out) {
        without_gil([&] { unpack_weight(weight.weight, out, current_stream); });
      },
      "weight"_a, "out"_a);
  m.def(
      "linear",
      [](const TensorView& x, const OwnedWeight& weight, const TensorView& norm_weight, float eps,
         const TensorView& bias, const TensorView& residual, py::handle activation, const TensorView& out,
         const TensorView& workspace) {
        const Activation a = parse_activation(activation);
        without_gil([&] {
          linear(x, weight.weight, norm_weight, eps, bias, residual, a, out, workspace, current_stream);
        });
      },
      "x"_a, "weight"_a, "rms_norm"_a, "eps"_a, "bias"_a, "residual"_a, "activation"_a, "out"_a,
      "workspace"_a = py::none());
  m.def(
      "linear_workspace_bytes",
      [](const OwnedWeight& weight, int64_t m) { return linear_workspace_bytes(weight.weight, m); },
      "weight"_a, "m"_a);
  m.def(
      "lm_head_topk_workspace_bytes",
      [](const OwnedWeight& weight, int64_t m, int top_k) {
        return lm_head_topk_workspace_bytes(weight.weight, m, top_k);
      },
      "weight"_a, "m"_a, "top_k"_a);
  m.def(
      "rms_norm",
      [](const TensorView& x, const TensorView& weight, float eps, const TensorView& out) {
        without_gil([&] { rms_norm(x, weight, eps, out, current_stream); });
      },
      "x"_a, "weight"_a, "eps"_a, "out"_a);
  m.def(
      "lm_head_topk",
      [](const TensorView& x, const OwnedWeight& weight, const TensorView& norm_weight, float eps,
         const TensorView& draft_to_target, const TensorView& temperature, const TensorView& seeds,
         const TensorView& positions, float tau, const TensorView& tokens, const TensorView& log_probs,
         const TensorView& lse, const TensorView& workspace) {
        without_gil([&] {
          lm_head_topk(x, weight.weight, norm_weight, eps, draft_to_target, temperature, seeds, positions,
                       tau, tokens, log_probs, lse, workspace, current_stream);
        });
      },
      "x"_a, "weight"_a, "rms_norm"_a, "eps"_a, "draft_to_target"_a, "temperature"_a, "seeds"_a,
      "positions"_a, "tau"_a, "tokens"_a, "log_probs"_a, "lse"_a, "workspace"_a = py::none());
  m.def(
      "read_probe",
      [](const TensorView& data) {
        check(data.ndim == 1 && data.dtype == DType::kUInt8 && data.device == DeviceType::kCPU,
              "data: expected one dimension of uint8 on the CPU");
        uint64_t sum = 0;
        without_gil([&] { sum = cpu::read_probe(data.data, data.shape[0]); });
        return sum;
      },
      "data"_a, "Reads the bytes once with all threads: the benchmarks' yardstick.");
}

}  // namespace eagle::bindings
