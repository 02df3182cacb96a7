// Linked instead of csrc/cuda/**/*.cu when the CUDA backend is off: the entry points of every op, throwing.
#include <stdexcept>

#include "eagle_cuda/attention.h"
#include "eagle_cuda/draft.h"
#include "eagle_cuda/kv_cache.h"
#include "eagle_cuda/linear.h"
#include "eagle_cuda/sampling.h"
#include "eagle_cuda/tree.h"
#include "eagle_cuda/verify.h"

namespace eagle::cuda {

[[noreturn]] static void no_cuda() {
  throw std::runtime_error(
      "eagle_cuda was built without the CUDA backend; pass CPU tensors, or rebuild with EAGLE_CUDA=ON");
}

int64_t packed_weight_bytes(int64_t, int64_t, WeightFormat) { no_cuda(); }
void pack_weight(const PackWeightParams&, CUstream_st*) { no_cuda(); }
void unpack_weight(const UnpackWeightParams&, CUstream_st*) { no_cuda(); }
int64_t linear_workspace_bytes(const PackedWeight&, int64_t) { no_cuda(); }
void linear(const LinearParams&, CUstream_st*) { no_cuda(); }
void rms_norm(const RmsNormParams&, CUstream_st*) { no_cuda(); }
int64_t lm_head_topk_workspace_bytes(const PackedWeight&, int64_t, int) { no_cuda(); }
void lm_head_topk(const LmHeadTopkParams&, CUstream_st*) { no_cuda(); }
void expand_tree(const ExpandTreeParams&, CUstream_st*) { no_cuda(); }
void build_tree(const BuildTreeParams&, CUstream_st*) { no_cuda(); }
void retrieve_indices(const RetrieveIndicesParams&, CUstream_st*) { no_cuda(); }
void sample_tokens(const SampleTokensParams&, CUstream_st*) { no_cuda(); }
void gumbel_noise(const GumbelNoiseParams&, CUstream_st*) { no_cuda(); }
void verify(const VerifyParams&, CUstream_st*) { no_cuda(); }
void verify_rejection(const VerifyRejectionParams&, CUstream_st*) { no_cuda(); }
void compact_kv(const CompactKvParams&, CUstream_st*) { no_cuda(); }
void append_kv(const AppendKvParams&, CUstream_st*) { no_cuda(); }
int64_t tree_attention_workspace_bytes(const TreeAttentionParams&) { no_cuda(); }
void tree_attention(const TreeAttentionParams&, CUstream_st*) { no_cuda(); }
int64_t extend_draft_workspace_bytes(const ExtendDraftParams&) { no_cuda(); }
void extend_draft(const ExtendDraftParams&, CUstream_st*) { no_cuda(); }
int64_t draft_workspace_bytes(const DraftParams&) { no_cuda(); }
void draft(const DraftParams&, CUstream_st*) { no_cuda(); }

}  // namespace eagle::cuda
