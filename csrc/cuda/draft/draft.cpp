// The whole draft phase: extend along the accepted path, `levels` levels of top-k expansion, rerank
// (SEMANTICS.md 2.2, 2.8). In one launch where that is possible (persistent.cu), else in many (launches.cu);
// the results are the same to the bit.
#include "common/check.h"
#include "cuda/draft/memory.h"
#include "cuda/draft/persistent.h"

namespace eagle::cuda {

int64_t draft_workspace_bytes(const DraftParams& p) {
  validate(p);
  if (p.batch_size == 0) return 0;
  if (const int64_t bytes = persistent_draft_bytes(p); bytes >= 0) return bytes;
  Arena arena(nullptr);
  const DraftMemory memory(p, launches_scratch_bytes(p), arena);
  return arena.bytes();
}

void draft(const DraftParams& p, CUstream_st* stream) {
  validate(p);
  if (p.batch_size == 0) return;
  if (const int64_t bytes = persistent_draft_bytes(p); bytes >= 0) {
    check_draft_workspace(p.workspace, p.workspace_bytes, bytes);
    return persistent_draft(p, stream);
  }
  Arena arena(p.workspace);
  const DraftMemory memory(p, launches_scratch_bytes(p), arena);
  check_draft_workspace(p.workspace, p.workspace_bytes, arena.bytes());
  draft_by_launches(p, memory, stream);
}

}  // namespace eagle::cuda
