#include "eagle_cuda/draft.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"
#include "common/weight_format.h"

namespace eagle::bindings {
namespace py = pybind11;
using namespace py::literals;

namespace {

// A head as Python holds it: every tensor was checked when it was made, and is kept alive.
struct OwnedHead {
  DraftHead head;
  py::object arguments;
};

// Reads one head's keyword arguments, with the argument's name in front of every fault.
struct Arguments {
  const py::dict& values;
  std::string at;  // "" or "layers[i]."
  py::list& keep;

  py::object get(const char* name) const {
    return values.contains(name) ? py::object(values[name]) : py::object(py::none());
  }
  TensorView tensor(const char* name) const {
    py::object owner = py::none();
    try {
      const TensorView view = to_view(get(name), owner);
      keep.append(owner);
      return view;
    } catch (const BadTensor& e) {
      throw e.named(at + name);
    }
  }
  PackedWeight weight(const char* name) const {
    const py::object object = get(name);
    if (!py::hasattr(object, "paired") || !py::hasattr(object, "data"))
      throw py::value_error(at + name + ": expected a PackedWeight, got " +
                            std::string(Py_TYPE(object.ptr())->tp_name));
    py::object owner = py::none();
    const TensorView bytes = to_view(object.attr("data"), owner);
    keep.append(owner);
    PackedWeight w;
    w.data = bytes.data;
    w.bytes = bytes.shape[0];
    w.backend = bytes.device;
    w.device_id = bytes.device_id;
    w.format = parse_weight_format(object.attr("format").cast<std::string>());
    w.paired = object.attr("paired").cast<bool>();
    w.n = object.attr("n").cast<int64_t>();
    w.k = object.attr("k").cast<int64_t>();
    return w;
  }
};

HeadKind parse_kind(const std::string& kind) {
  check(kind == "eagle1" || kind == "eagle3", "kind: expected eagle1 or eagle3, got ", kind);
  return kind == "eagle1" ? HeadKind::kEagle1 : HeadKind::kEagle3;
}

TreeOrder parse_order(const std::string& order) {
  check(order == "path" || order == "candidate", "order: expected path or candidate, got ", order);
  return order == "path" ? TreeOrder::kPath : TreeOrder::kCandidate;
}

OwnedHead make_head(const std::string& kind, int num_heads, int num_kv_heads, int head_dim, float norm_eps,
                    float softmax_scale, bool feedback_post_norm, bool norm_before_residual,
                    const py::list& layers, const py::dict& tensors) {
  py::list keep;
  const Arguments a{tensors, "", keep};
  DraftHeadViews v{};
  v.kind = parse_kind(kind);
  v.num_heads = num_heads;
  v.num_kv_heads = num_kv_heads;
  v.head_dim = head_dim;
  v.norm_eps = norm_eps;
  v.softmax_scale = softmax_scale;
  v.feedback_post_norm = feedback_post_norm;
  v.norm_before_residual = norm_before_residual;
  v.embedding = a.tensor("embedding");
  v.fc_bias = a.tensor("fc_bias");
  v.fc_norm = a.tensor("fc_norm");
  v.norm = a.tensor("norm");
  v.draft_to_target = a.tensor("draft_to_target");
  v.cos = a.tensor("cos");
  v.sin = a.tensor("sin");
  v.fc = a.weight("fc");
  v.lm_head = a.weight("lm_head");
  for (size_t i = 0; i < layers.size(); ++i) {
    const py::dict values = layers[i];
    const Arguments l{values, "layers[" + std::to_string(i) + "].", keep};
    v.layers.push_back({.input_norm = l.tensor("input_norm"),
                        .hidden_norm = l.tensor("hidden_norm"),
                        .qkv_bias = l.tensor("qkv_bias"),
                        .q_norm = l.tensor("q_norm"),
                        .k_norm = l.tensor("k_norm"),
                        .post_norm = l.tensor("post_norm"),
                        .qkv = l.weight("qkv"),
                        .o = l.weight("o"),
                        .gate_up = l.weight("gate_up"),
                        .down = l.weight("down")});
  }
  return {draft_head(v), py::make_tuple(tensors, layers, keep)};
}

const char* dtype_name(const OwnedHead& h) { return name(h.head.dtype); }

}  // namespace

void bind_draft(py::module_& m) {
  py::class_<OwnedHead>(m, "DraftHead",
                        "A draft head's weights, norms, maps and sizes; made by eagle_cuda.DraftHead.")
      .def(py::init(&make_head), "kind"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "norm_eps"_a,
           "softmax_scale"_a, "feedback_post_norm"_a, "norm_before_residual"_a, "layers"_a, "tensors"_a)
      .def_property_readonly(
          "kind", [](const OwnedHead& h) { return h.head.kind == HeadKind::kEagle1 ? "eagle1" : "eagle3"; })
      .def_property_readonly("dtype", &dtype_name)
      .def_property_readonly("hidden_size", [](const OwnedHead& h) { return h.head.hidden_size; })
      .def_property_readonly("feature_size", [](const OwnedHead& h) { return h.head.feature_size; })
      .def_property_readonly("num_heads", [](const OwnedHead& h) { return h.head.num_heads; })
      .def_property_readonly("num_kv_heads", [](const OwnedHead& h) { return h.head.num_kv_heads; })
      .def_property_readonly("head_dim", [](const OwnedHead& h) { return h.head.head_dim; })
      .def_property_readonly("intermediate_size", [](const OwnedHead& h) { return h.head.intermediate_size; })
      .def_property_readonly("vocab_size", [](const OwnedHead& h) { return h.head.vocab_size; })
      .def_property_readonly("draft_vocab_size", [](const OwnedHead& h) { return h.head.draft_vocab_size; })
      .def_property_readonly("num_layers", [](const OwnedHead& h) { return h.head.layers.size(); })
      .def_property_readonly("max_positions", [](const OwnedHead& h) { return h.head.max_positions; });

  m.def(
      "extend_draft",
      [](const OwnedHead& head, const TensorView& features, const TensorView& tokens,
         const std::vector<int32_t>& row_offsets, const TensorView& seq_lens,
         const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
         const TensorView& page_table, const TensorView& hidden, const TensorView& workspace) {
        without_gil([&] {
          extend_draft(head.head, features, tokens, row_offsets, seq_lens, k_caches, v_caches, page_table,
                       hidden, workspace, current_stream);
        });
      },
      "head"_a, "features"_a, "tokens"_a, "row_offsets"_a, "seq_lens"_a, "k_caches"_a, "v_caches"_a,
      "page_table"_a, "hidden"_a, "workspace"_a = py::none());
  m.def(
      "extend_draft_workspace_bytes",
      [](const OwnedHead& head, const std::vector<int32_t>& row_offsets,
         const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
         const TensorView& page_table) {
        return extend_draft_workspace_bytes(head.head, row_offsets, k_caches, v_caches, page_table);
      },
      "head"_a, "row_offsets"_a, "k_caches"_a, "v_caches"_a, "page_table"_a);
  m.def(
      "draft_workspace_bytes",
      [](const OwnedHead& head, int64_t batch_size, int max_path, int top_k, int levels,
         const std::vector<TensorView>& k_caches, const std::vector<TensorView>& v_caches,
         const TensorView& page_table) {
        return draft_workspace_bytes(head.head, batch_size, max_path, top_k, levels, k_caches, v_caches,
                                     page_table);
      },
      "head"_a, "batch_size"_a, "max_path"_a, "top_k"_a, "levels"_a, "k_caches"_a, "v_caches"_a,
      "page_table"_a);
  m.def(
      "draft",
      [](const OwnedHead& head, const TensorView& features, const TensorView& target_tokens,
         const TensorView& path, const TensorView& num_accepted, const TensorView& seq_lens,
         const TensorView& node_limit, const TensorView& temperature, const TensorView& seeds, float tau,
         int top_k, int levels, const std::string& order, const std::vector<TensorView>& k_caches,
         const std::vector<TensorView>& v_caches, const TensorView& page_table, const TensorView& tokens,
         const TensorView& parents, const TensorView& depths, const TensorView& mask,
         const TensorView& scores, const TensorView& num_nodes, const TensorView& first_child,
         const TensorView& next_sibling, const TreeShape* shape, const TensorView& workspace) {
        const TreeOrder parsed = parse_order(order);
        const DraftTreeViews tree{tokens, parents,   depths,      mask,
                                  scores, num_nodes, first_child, next_sibling};
        without_gil([&] {
          draft(head.head, features, target_tokens, path, num_accepted, seq_lens, node_limit, temperature,
                seeds, tau, top_k, levels, parsed, k_caches, v_caches, page_table, tree, shape, workspace,
                current_stream);
        });
      },
      "head"_a, "features"_a, "target_tokens"_a, "path"_a, "num_accepted"_a, "seq_lens"_a, "node_limit"_a,
      "temperature"_a, "seeds"_a, "tau"_a, "top_k"_a, "levels"_a, "order"_a, "k_caches"_a, "v_caches"_a,
      "page_table"_a, "tokens"_a, "parents"_a, "depths"_a, "mask"_a, "scores"_a, "num_nodes"_a,
      "first_child"_a, "next_sibling"_a, "shape"_a = py::none(), "workspace"_a = py::none());
}

}  // namespace eagle::bindings
