#include "cuda/launch.h"

#include <string_view>

#include "cuda/driver.h"

namespace eagle::cuda {

void check_cuda(cudaError_t status, const char* expression, const char* file, int line) {
  if (status == cudaSuccess) return;
  explain_failure(static_cast<int>(status));
  const std::string_view path = file;  // of the machine that compiled this
  const size_t csrc = path.rfind("csrc/");
  std::ostringstream message;
  message << "eagle_cuda: " << cudaGetErrorString(status) << " (" << path.substr(csrc == path.npos ? 0 : csrc)
          << ":" << line << ": " << expression << ")";
  throw std::runtime_error(message.str());
}

}  // namespace eagle::cuda
