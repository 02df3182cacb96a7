// cuda:: entry points of the ops that have no CUDA kernel yet. Linked into every build.
#include <stdexcept>
#include <string>

#include "eagle_cuda/draft.h"

namespace eagle::cuda {

[[noreturn]] static void no_kernel(const char* op) {
  throw std::runtime_error(std::string("eagle_cuda: this version has no CUDA kernel for ") + op +
                           "; pass CPU tensors");
}

void extend_draft(const ExtendDraftParams&, CUstream_st*) { no_kernel("extend_draft"); }
void draft(const DraftParams&, CUstream_st*) { no_kernel("draft"); }

}  // namespace eagle::cuda
