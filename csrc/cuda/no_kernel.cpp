// cuda:: entry points of the ops that have no CUDA kernel yet. Linked into every build.
#include <stdexcept>
#include <string>

namespace eagle::cuda {

[[noreturn, maybe_unused]] static void no_kernel(const char* op) {
  throw std::runtime_error(std::string("eagle_cuda: this version has no CUDA kernel for ") + op +
                           "; pass CPU tensors");
}

}  // namespace eagle::cuda
