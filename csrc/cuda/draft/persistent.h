#pragma once
// The draft phase as one launch, where it fits; in persistent.cu.
#include <cstdint>

#include "eagle_cuda/draft.h"

namespace eagle::cuda {

// Bytes of workspace, from the sizes (head, caches) and the current device alone; -1: this draft does not fit
// the kernel and goes by launches. It takes bf16 and fp16 heads of head size 64 or 128, weight formats but
// int8_dynamic, up to 4096 candidates a request, and up to 64 rows of accepted paths and of a level's beams
// in the batch.
int64_t persistent_draft_bytes(const DraftParams& p);

// With a workspace of so many bytes.
void persistent_draft(const DraftParams& p, CUstream_st* stream);

}  // namespace eagle::cuda
