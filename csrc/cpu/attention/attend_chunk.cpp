// One chunk of keys for the rows of a tile: scores, softmax, values.
#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/numeric.h"
#include "cpu/attention/attend_job.h"
#include "cpu/attention/cache_rows.h"
#include "cpu/scratch.h"

namespace eagle::cpu {
namespace {

alignas(64) constexpr char kZeroRow[kMaxHeadDim * sizeof(float)] = {};

// Pointers to the keys and values of one chunk's prefix rows: index = position - first position of the chunk.
struct ChunkRows {
  const void* k[kChunk];
  const void* v[kChunk];
  uint8_t missing[kChunk];
  bool any_missing;
  float k_scale[kChunk];  // of codes; 0 where there is no row, whose scales nobody knows
  float v_scale[kChunk];
};

// Factors of `count` rows from `first` on, for one head.
void find_scales(const float* first, int64_t row_stride, bool of_tensor, int kv_head, int count, float* out) {
  for (int j = 0; j < count; ++j) out[j] = of_tensor ? *first : first[j * row_stride + kv_head];
}

void find_rows(const AttendJob& job, int64_t request, int kv_head, int64_t position, int begin, int end,
               ChunkRows& rows) {
  const KVCacheView& cache = job.p.cache;
  const int64_t size = element_size(cache.dtype);
  const int first = begin / kLaneKeys * kLaneKeys, last = ceil_div(end, kLaneKeys) * kLaneKeys;
  for (int j = first; j < begin; ++j) rows.k[j] = kZeroRow, rows.k_scale[j] = 0.0f;
  for (int j = end; j < last; ++j) rows.k[j] = kZeroRow, rows.k_scale[j] = 0.0f;
  rows.any_missing = false;
  for_each_run(cache, request, position + begin, position + end, [&](int index, int count, CacheRow from) {
    index += begin;
    const bool missing = from.k == nullptr;
    rows.any_missing |= missing;
    const int64_t k_stride = missing ? 0 : cache.k_row_stride * size,
                  v_stride = missing ? 0 : cache.v_row_stride * size;
    const char* k0 = missing ? kZeroRow : from.k + kv_head * cache.k_head_stride * size;
    const char* v0 = missing ? kZeroRow : from.v + kv_head * cache.v_head_stride * size;
    for (int j = 0; j < count; ++j) rows.k[index + j] = k0 + j * k_stride;
    for (int j = 0; j < count; ++j) rows.v[index + j] = v0 + j * v_stride;
    std::memset(rows.missing + index, missing, static_cast<size_t>(count));
    if (!job.codes()) return;
    if (missing) {
      std::fill_n(rows.k_scale + index, count, 0.0f);
      std::fill_n(rows.v_scale + index, count, 0.0f);
      return;
    }
    find_scales(k_scales(cache, from), cache.k_scale_row_stride, cache.tensor_scales, kv_head, count,
                rows.k_scale + index);
    find_scales(v_scales(cache, from), cache.v_scale_row_stride, cache.tensor_scales, kv_head, count,
                rows.v_scale + index);
  });
}

// The distinct cache rows that the tails of a tile name in one chunk, and where their scores are.
struct TailRows {
  int count = 0;
  int32_t lowest = 0;
  const int32_t* index_of = nullptr;  // [row - lowest]: index, or -1
  const void** k = nullptr;
  const void** v = nullptr;
  float* v_scale = nullptr;       // of codes
  const float* scores = nullptr;  // [rows, stride]
  int stride = 0;
  int find(int64_t row, int64_t capacity) const {
    return row >= 0 && row < capacity ? index_of[row - lowest] : -1;
  }
};

int tail_begin(const AttendNode& node, int64_t position) {
  return static_cast<int>(std::max({node.begin, node.prefix, position}) - position);
}
int tail_end(const AttendNode& node, int64_t position) {
  return static_cast<int>(std::clamp<int64_t>(node.end - position, 0, kChunk));
}

TailRows find_tails(const AttendJob& job, const AttendTile& tile, const AttendNode* nodes, int kv_head,
                    int64_t position, const float* q, int rows, float* key_scratch) {
  const KVCacheView& cache = job.p.cache;
  const int64_t capacity = cache_capacity(cache), size = element_size(cache.dtype);
  TailRows tails;
  int32_t highest = -1;
  int64_t entries = 0;
  tails.lowest = std::numeric_limits<int32_t>::max();
  const auto for_each_entry = [&](auto&& f) {
    for (int n = 0; n < tile.num_nodes; ++n)
      for (int j = tail_begin(nodes[n], position), end = tail_end(nodes[n], position); j < end; ++j) {
        const int32_t row = nodes[n].tail[position + j - nodes[n].prefix];
        if (row >= 0 && row < capacity) f(row);
      }
  };
  for_each_entry([&](int32_t row) {
    tails.lowest = std::min(tails.lowest, row);
    highest = std::max(highest, row);
    ++entries;
  });
  if (entries == 0) return tails;
  struct IndexSlot {};
  struct KeySlot {};
  struct ScaleSlot {};
  struct ScoreSlot {};
  const int64_t span = int64_t{highest} - tails.lowest + 1;
  int32_t* index_of = scratch<int32_t, IndexSlot>(span);
  std::fill(index_of, index_of + span, -1);
  const int64_t limit = ceil_div<int64_t>(std::min(span, entries), kLaneKeys) * kLaneKeys;
  tails.k = scratch<const void*, KeySlot>(2 * limit);
  tails.v = tails.k + limit;
  float* const k_scale = job.codes() ? scratch<float, ScaleSlot>(2 * limit) : nullptr;
  if (job.codes()) tails.v_scale = k_scale + limit;
  for_each_entry([&](int32_t row) {
    int32_t& index = index_of[row - tails.lowest];
    if (index >= 0) return;
    const CacheRow at = cache_row(cache, nodes->row->request, row);
    if (!at.k) return;
    index = tails.count++;
    tails.k[index] = at.k + kv_head * cache.k_head_stride * size;
    tails.v[index] = at.v + kv_head * cache.v_head_stride * size;
    if (!job.codes()) return;
    find_scales(k_scales(cache, at), 0, cache.tensor_scales, kv_head, 1, k_scale + index);
    find_scales(v_scales(cache, at), 0, cache.tensor_scales, kv_head, 1, tails.v_scale + index);
  });
  tails.index_of = index_of;
  tails.stride = ceil_div(tails.count, kLaneKeys) * kLaneKeys;
  for (int i = tails.count; i < tails.stride; ++i) tails.k[i] = kZeroRow;
  for (int i = tails.count; job.codes() && i < tails.stride; ++i) k_scale[i] = 0.0f;
  float* scores = scratch<float, ScoreSlot>(int64_t{rows} * tails.stride);
  job.kernels.scores(q, rows, job.head_dim, tails.k, tails.stride, job.p.softmax_scale, scores, tails.stride,
                     key_scratch);
  if (job.adjusts())
    job.kernels.adjust(scores, tails.stride, rows, tails.stride, k_scale, job.p.logit_softcap);
  tails.scores = scores;
  return tails;
}

}  // namespace

void reduce_chunk(const AttendJob& job, const AttendTile& tile, int kv_head, int chunk, const float* q,
                  const AttendPartial& out) {
  struct ScoreSlot {};
  struct KeySlot {};
  const AttendNode* nodes = job.nodes + tile.first_node;
  const int rows = tile.num_nodes * job.group, group = job.group, head_dim = job.head_dim;
  const int64_t position = int64_t{chunk} * kChunk;
  float* s = scratch<float, ScoreSlot>(int64_t{rows} * kChunk);
  float* key_scratch = scratch<float, KeySlot>(int64_t{head_dim} * kKeyBlock);
  const auto begin_of = [&](const AttendNode& n) {
    return static_cast<int>(std::clamp<int64_t>(n.begin - position, 0, kChunk));
  };
  const auto end_of = [&](const AttendNode& n) {
    return static_cast<int>(std::clamp<int64_t>(n.prefix - position, 0, kChunk));
  };

  // Scores of the prefix rows, all rows of the tile at once: the part that each row sees is cut out by the
  // softmax.
  int begin = kChunk, end = 0, common_begin = 0, common_end = kChunk;
  bool any_tail = false;
  for (int n = 0; n < tile.num_nodes; ++n) {
    const int b = begin_of(nodes[n]), e = end_of(nodes[n]);
    if (b < e) begin = std::min(begin, b), end = std::max(end, e);
    common_begin = std::max(common_begin, b);
    common_end = std::min(common_end, e);
    any_tail |= tail_begin(nodes[n], position) < tail_end(nodes[n], position);
  }
  ChunkRows prefix;
  if (begin < end) {
    find_rows(job, nodes->row->request, kv_head, position, begin, end, prefix);
    const int first = begin / kLaneKeys * kLaneKeys, count = ceil_div(end - first, kLaneKeys) * kLaneKeys;
    job.kernels.scores(q, rows, head_dim, prefix.k + first, count, job.p.softmax_scale, s + first, kChunk,
                       key_scratch);
    if (job.adjusts())
      job.kernels.adjust(s + first, kChunk, rows, count, job.codes() ? prefix.k_scale + first : nullptr,
                         job.p.logit_softcap);
    if (prefix.any_missing)
      for (int j = begin; j < end; ++j)
        if (prefix.missing[j])
          for (int r = 0; r < rows; ++r) s[r * kChunk + j] = kMinusInfinity;
  }

  // Scores of the tails, put at the positions where the ancestors stand.
  TailRows tails;
  if (any_tail) {
    tails = find_tails(job, tile, nodes, kv_head, position, q, rows, key_scratch);
    for (int n = 0; n < tile.num_nodes; ++n)
      for (int j = tail_begin(nodes[n], position), last = tail_end(nodes[n], position); j < last; ++j) {
        const int i = tails.count ? tails.find(nodes[n].tail[position + j - nodes[n].prefix],
                                               cache_capacity(job.p.cache))
                                  : -1;
        for (int r = n * group; r < (n + 1) * group; ++r)
          s[r * kChunk + j] = i < 0 ? kMinusInfinity : tails.scores[int64_t{r} * tails.stride + i];
      }
  }

  for (int n = 0; n < tile.num_nodes; ++n) {
    const int b = begin_of(nodes[n]),
              e = static_cast<int>(std::clamp<int64_t>(nodes[n].end - position, 0, kChunk));
    if (b < e)
      for (int r = n * group; r < (n + 1) * group; ++r)
        job.kernels.softmax(s + r * kChunk, b, e, out.max + r, out.sum + r);
    // The weights take the factors of the values along, now that they are summed.
    for (int r = n * group; job.codes() && r < (n + 1) * group; ++r)
      for (int j = b, last = end_of(nodes[n]); j < last; ++j) s[r * kChunk + j] *= prefix.v_scale[j];
  }

  // Values, in order of position for each row; what all rows see is read once for all of them.
  std::fill(out.out, out.out + int64_t{rows} * head_dim, 0.0f);
  const auto accumulate = [&](int first_row, int count, const void* const* values, int b, int e) {
    if (b < e)
      job.kernels.accumulate(s + first_row * kChunk + b, kChunk, count, values, e - b, head_dim,
                             out.out + int64_t{first_row} * head_dim);
  };
  const bool common = common_begin < common_end;
  for (int n = 0; n < tile.num_nodes; ++n)
    accumulate(n * group, group, prefix.v + begin_of(nodes[n]), begin_of(nodes[n]),
               common ? common_begin : end_of(nodes[n]));
  if (common) {
    accumulate(0, rows, prefix.v + common_begin, common_begin, common_end);
    for (int n = 0; n < tile.num_nodes; ++n)
      accumulate(n * group, group, prefix.v + common_end, common_end, end_of(nodes[n]));
  }
  if (any_tail) {
    const void* values[kChunk];
    for (int n = 0; n < tile.num_nodes; ++n) {
      const int b = tail_begin(nodes[n], position), e = tail_end(nodes[n], position);
      for (int j = b; j < e; ++j) {
        const int i = tails.count ? tails.find(nodes[n].tail[position + j - nodes[n].prefix],
                                               cache_capacity(job.p.cache))
                                  : -1;
        values[j] = i < 0 ? kZeroRow : tails.v[i];
        for (int r = n * group; i >= 0 && job.codes() && r < (n + 1) * group; ++r)
          s[r * kChunk + j] *= tails.v_scale[i];
      }
      accumulate(n * group, group, values + b, b, e);
    }
  }
}

}  // namespace eagle::cpu
