#pragma once
// How launchers start kernels. The device is one of 132 multiprocessors and compute capability 9.0; every
// call is done when it returns.
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "simt/qualifiers.h"

#pragma GCC visibility push(hidden)

namespace simt {

// Runs `call(arguments)` once per thread; `arguments` holds the kernel and its parameters.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, void (*call)(const void*),
                   const void* arguments, size_t argument_bytes);

}  // namespace simt

#pragma GCC visibility pop

template <class... Expected>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Expected...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <class... Expected>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Expected...),
                                                          int block_threads, size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void*>(kernel),
                                                       block_threads, shared_bytes);
}

template <class... Expected, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...),
                               Args&&... args) {
  // By value, as a real launch takes its parameters.
  const auto call = [kernel, arguments = std::tuple<std::decay_t<Expected>...>(std::forward<Args>(args)...)] {
    std::apply(kernel, arguments);
  };
  using Call = decltype(call);
  return simt::launch(
      *config, reinterpret_cast<const void*>(kernel), [](const void* c) { (*static_cast<Call*>(c))(); },
      &call, sizeof call);
}
