// The head over committed rows, tile by tile: a prompt of any length needs scratch memory for one tile only.
#include <algorithm>

#include "common/check.h"
#include "cpu/draft/head.h"
#include "cpu/scratch.h"

namespace eagle::cpu {

void extend_draft(const ExtendDraftParams& p) {
  validate(p);
  constexpr int64_t kTileRows = 256;
  const DraftHead& head = *p.head;
  const int64_t width = element_size(head.dtype), H = head.hidden_size;
  const int64_t capacity = p.batch_size > 0 ? cache_capacity(p.caches[0]) : 0;
  HeadRow* rows = scratch<HeadRow, struct ExtendRows>(kTileRows);
  char* hidden = scratch<char, struct ExtendHidden>(std::min(kTileRows, p.num_rows) * H * width);

  int b = 0;
  for (int64_t begin = 0; begin < p.num_rows; begin += kTileRows) {
    const int64_t count = std::min(kTileRows, p.num_rows - begin);
    for (int64_t i = 0; i < count; ++i) {
      while (begin + i >= p.row_offsets[b + 1]) ++b;
      const int64_t start = std::clamp<int64_t>(p.seq_lens[b], 0, capacity);
      const int64_t row = std::min<int64_t>(start + begin + i - p.row_offsets[b], capacity);
      const int32_t at = static_cast<int32_t>(row);
      rows[i] = {.token = p.tokens[begin + i],
                 .request = b,
                 .cache_row = at,
                 .position = at,
                 .prefix = at + 1,
                 .tail_length = 0,
                 .tail = nullptr};
    }
    fuse_features(head, static_cast<const char*>(p.features) + begin * p.features_stride * width,
                  p.features_stride, count, hidden);
    run_head(head, p.caches, rows, count, hidden,
             p.hidden ? static_cast<char*>(p.hidden) + begin * H * width : nullptr);
  }
}

}  // namespace eagle::cpu
