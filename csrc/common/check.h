#pragma once
// Host-side checks. Messages name the argument, what was expected and what was given.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "eagle_cuda/tensor_view.h"

namespace eagle {

// The one host-side assertion. Message parts are streamed only on failure.
template <class... Parts>
inline void check(bool ok, const Parts&... parts) {
  if (ok) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline const char* name(DType t) {
  constexpr const char* kNames[] = {"bool",    "uint8",   "int8",     "int32",        "int64",
                                    "float32", "float16", "bfloat16", "float8_e4m3fn"};
  return kNames[static_cast<int>(t)];
}

inline int64_t element_size(DType t) {
  constexpr int64_t kSizes[] = {1, 1, 1, 4, 8, 4, 2, 2, 1};
  return kSizes[static_cast<int>(t)];
}

inline std::string device_name(DeviceType type, int id) {
  return type == DeviceType::kCPU ? "cpu" : "cuda:" + std::to_string(id);
}

// Fluent tensor checks: Expect("tokens", tokens).dtype(DType::kInt32).shape({B,
// N}).contiguous().same_device(q);
class Expect {
 public:
  Expect(const char* what, const TensorView& t) : what_(what), t_(t) {
    check(t.present(), what, ": expected a tensor, got None");
  }

  const Expect& dtype(DType want) const {
    check(t_.dtype == want, what_, ": expected dtype ", name(want), ", got ", name(t_.dtype));
    return *this;
  }
  const Expect& dtype(std::initializer_list<DType> any_of) const {
    if (std::find(any_of.begin(), any_of.end(), t_.dtype) != any_of.end()) return *this;
    std::string wanted;
    for (DType d : any_of) wanted += (wanted.empty() ? "" : ", ") + std::string(name(d));
    check(false, what_, ": expected a dtype of ", wanted, ", got ", name(t_.dtype));
    return *this;
  }
  const Expect& rank(int want) const {
    check(t_.ndim == want, what_, ": expected ", want, " dimensions, got ", t_.ndim, " (shape ", shape_text(),
          ")");
    return *this;
  }
  // A size of -1 in `want` matches anything.
  const Expect& shape(std::initializer_list<int64_t> want) const {
    bool same = t_.ndim == static_cast<int>(want.size());
    for (int d = 0; same && d < t_.ndim; ++d) same = want.begin()[d] == -1 || want.begin()[d] == t_.shape[d];
    check(same, what_, ": expected shape ", text(want.begin(), want.size()), ", got ", shape_text());
    return *this;
  }
  const Expect& contiguous() const {
    int64_t expected = 1;
    for (int d = t_.ndim - 1; d >= 0; --d) {
      check(t_.shape[d] <= 1 || t_.strides[d] == expected || empty(), what_,
            ": expected a contiguous tensor, got shape ", shape_text(), " with strides ",
            text(t_.strides, t_.ndim));
      expected *= t_.shape[d];
    }
    return *this;
  }
  const Expect& last_dim_contiguous() const {
    check(t_.ndim >= 1 && (t_.shape[t_.ndim - 1] <= 1 || t_.strides[t_.ndim - 1] == 1 || empty()), what_,
          ": expected the last dimension to be contiguous, got strides ",
          text(t_.strides, std::max(t_.ndim, 0)));
    return *this;
  }
  const Expect& same_device(const TensorView& other) const { return on(other.device, other.device_id); }
  const Expect& on(DeviceType device, int device_id) const {
    check(t_.device == device && (device == DeviceType::kCPU || t_.device_id == device_id), what_,
          ": expected device ", device_name(device, device_id), ", got ",
          device_name(t_.device, t_.device_id));
    return *this;
  }
  // For outputs: may be written, and no two elements share memory.
  const Expect& writable() const {
    check(!t_.read_only, what_, ": expected a writable tensor, got a read-only one");
    check(!overlapping(), what_, ": expected an output without overlapping elements, got shape ",
          shape_text(), " with strides ", text(t_.strides, std::max(t_.ndim, 0)));
    return *this;
  }

 private:
  // By ascending stride, each dimension must step over all that the smaller ones span.
  bool overlapping() const {
    if (empty()) return false;
    int64_t span = 0;
    for (unsigned done = 0;;) {
      int smallest = -1;
      for (int d = 0; d < t_.ndim; ++d)
        if (t_.shape[d] > 1 && !(done >> d & 1) && (smallest < 0 || t_.strides[d] < t_.strides[smallest]))
          smallest = d;
      if (smallest < 0) return false;
      if (t_.strides[smallest] <= span) return true;
      span += (t_.shape[smallest] - 1) * t_.strides[smallest];
      done |= 1u << smallest;
    }
  }
  bool empty() const {
    return std::find(t_.shape, t_.shape + std::max(t_.ndim, 0), 0) != t_.shape + std::max(t_.ndim, 0);
  }
  // Written out only when a check fails: building the text on every call would cost more than all checks.
  struct Text {
    const int64_t* v;
    size_t n;
    friend std::ostream& operator<<(std::ostream& s, const Text& t) {
      s << "[";
      for (size_t i = 0; i < t.n; ++i) s << (i ? ", " : "") << t.v[i];
      return s << "]";
    }
  };
  static Text text(const int64_t* v, size_t n) { return {v, n}; }
  Text shape_text() const { return text(t_.shape, static_cast<size_t>(std::max(t_.ndim, 0))); }
  const char* what_;
  const TensorView& t_;
};

// Outputs of one call: no two of them share memory.
struct NamedOutput {
  const char* what;
  const TensorView& tensor;
};
inline void check_disjoint(std::initializer_list<NamedOutput> outputs) {
  struct Span {
    uintptr_t begin, end;
  };
  const auto span = [](const TensorView& t) {
    int64_t last = 0;
    for (int d = 0; d < t.ndim; ++d) {
      if (t.shape[d] == 0) return Span{};
      last += (t.shape[d] - 1) * t.strides[d];
    }
    const auto begin = reinterpret_cast<uintptr_t>(t.data);
    return t.present() ? Span{begin, begin + static_cast<uintptr_t>((last + 1) * element_size(t.dtype))}
                       : Span{};
  };
  for (auto a = outputs.begin(); a != outputs.end(); ++a)
    for (auto b = outputs.begin(); b != a; ++b) {
      const Span x = span(a->tensor), y = span(b->tensor);
      check(x.begin >= y.end || y.begin >= x.end, a->what, ": expected memory of its own, got that of ",
            b->what);
    }
}

}  // namespace eagle
