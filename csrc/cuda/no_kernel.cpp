// cuda:: entry points of the ops that have no CUDA kernel yet. Linked into every build.
#include <stdexcept>
#include <string>

#include "eagle_cuda/attention.h"
#include "eagle_cuda/draft.h"
#include "eagle_cuda/linear.h"

namespace eagle::cuda {

[[noreturn]] static void no_kernel(const char* op) {
  throw std::runtime_error(std::string("eagle_cuda: this version has no CUDA kernel for ") + op +
                           "; pass CPU tensors");
}

int64_t packed_weight_bytes(int64_t, int64_t, WeightFormat) { no_kernel("pack_weight"); }
void pack_weight(const PackWeightParams&, CUstream_st*) { no_kernel("pack_weight"); }
void unpack_weight(const UnpackWeightParams&, CUstream_st*) { no_kernel("unpack_weight"); }
void linear(const LinearParams&, CUstream_st*) { no_kernel("linear"); }
void rms_norm(const RmsNormParams&, CUstream_st*) { no_kernel("rms_norm"); }
void lm_head_topk(const LmHeadTopkParams&, CUstream_st*) { no_kernel("lm_head_topk"); }
int64_t linear_workspace_bytes(const PackedWeight&, int64_t) { no_kernel("linear"); }
int64_t lm_head_topk_workspace_bytes(const PackedWeight&, int64_t, int) { no_kernel("lm_head_topk"); }
void extend_draft(const ExtendDraftParams&, CUstream_st*) { no_kernel("extend_draft"); }
void draft(const DraftParams&, CUstream_st*) { no_kernel("draft"); }

}  // namespace eagle::cuda
