#pragma once
// Runtime value -> compile-time constant, without macros.
//
//   using HeadDims = Values<64, 128>;
//   dispatch(HeadDims{}, p.head_dim, "head_dim", [&](auto head_dim) { attend<head_dim()>(p); });
#include <type_traits>

#include "common/check.h"
#include "common/numeric.h"

namespace eagle {

template <auto... Vs>
struct Values {};
template <class T>
struct Type {
  using type = T;
};
template <class... Ts>
struct Types {};

template <auto... Vs, class V, class F>
void dispatch(Values<Vs...>, V value, const char* what, F&& f) {
  const bool found = ((value == Vs ? (f(std::integral_constant<decltype(Vs), Vs>{}), true) : false) || ...);
  if (found) return;
  std::ostringstream supported;
  ((supported << " " << Vs), ...);
  check(false, what, " = ", value, " is not supported; supported:", supported.str());
}

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct dtype_of<bf16_t> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct dtype_of<half_t> {
  static constexpr DType value = DType::kFloat16;
};

using FloatTypes = Types<float, bf16_t, half_t>;
using HeadDims = Values<64, 80, 96, 128, 192, 256>;  // head sizes that attention has kernels for

template <class... Ts, class F>
void dispatch(Types<Ts...>, DType dtype, const char* what, F&& f) {
  const bool found = ((dtype == dtype_of<Ts>::value ? (f(Type<Ts>{}), true) : false) || ...);
  check(found, what, ": dtype ", name(dtype), " is not supported");
}

}  // namespace eagle
