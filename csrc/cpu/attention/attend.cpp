// Attention of explicit rows to explicit cache rows.
//
// A tile is a few rows of one request with all query heads of one key head; it shares the loaded keys and
// values. A piece of work is a tile and key head over all its chunks, or over one chunk when there are too
// few tiles for the threads; whoever finishes the last chunk folds. Neither choice changes the order of any
// sum.
#include "cpu/attention/attend.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "common/check.h"
#include "common/numeric.h"
#include "cpu/attention/attend_job.h"
#include "cpu/attention/cache_rows.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace eagle::cpu {
namespace {

constexpr int kGroup = 2048 / kChunk;  // chunks folded among themselves first
constexpr int kTileRows = 24;          // query rows of a tile: four blocks of six accumulator rows
// Below this many multiply-adds a job is not worth a second thread: handing it over costs about as much as
// the work.
constexpr int64_t kSerialWork = 60'000;

AttendNode resolve(const AttendRow& row, int window, int64_t capacity) {
  AttendNode node{&row, row.tail, 0, std::clamp<int64_t>(row.prefix, 0, capacity), 0, 0, 0};
  int64_t left = std::max(row.tail_length, 0);
  for (; left > 0 && node.prefix < capacity && *node.tail == node.prefix; --left) ++node.prefix, ++node.tail;
  node.end = node.prefix + left;
  node.begin = window > 0 ? std::max<int64_t>(node.end - window, 0) : 0;
  node.first_chunk = static_cast<int>(node.begin / kChunk);
  node.end_chunk = static_cast<int>(ceil_div<int64_t>(node.end, kChunk));
  return node;
}

alignas(64) constexpr float kNoValue[kMaxHeadDim] = {};  // that of a sink

// ---- folding ----------------------------------------------------------------------------------------------

void fold_into(const AttendJob& job, const AttendPartial& a, const AttendPartial& b, int row, bool empty) {
  const int64_t offset = int64_t{row} * job.head_dim, size = int64_t{job.group} * job.head_dim;
  if (!empty)
    return job.kernels.fold(job.group, job.head_dim, a.max + row, a.sum + row, a.out + offset, b.max + row,
                            b.sum + row, b.out + offset);
  std::copy_n(b.max + row, job.group, a.max + row);
  std::copy_n(b.sum + row, job.group, a.sum + row);
  std::copy_n(b.out + offset, size, a.out + offset);
}

// Adds a chunk to the running groups and totals of the rows that see it; chunks come in ascending order.
void fold_chunk(const AttendJob& job, const AttendTile& tile, int chunk, const AttendPartial& part,
                const AttendPartial& group, const AttendPartial& total) {
  for (int n = 0; n < tile.num_nodes; ++n) {
    const AttendNode& node = job.nodes[tile.first_node + n];
    if (chunk < node.first_chunk || chunk >= node.end_chunk) continue;
    const bool first = chunk == node.first_chunk || chunk % kGroup == 0;
    fold_into(job, group, part, n * job.group, first);
    if (chunk % kGroup == kGroup - 1 || chunk == node.end_chunk - 1)
      fold_into(job, total, group, n * job.group, chunk / kGroup == node.first_chunk / kGroup);
  }
}

void write_results(const AttendJob& job, const AttendTile& tile, int kv_head, const AttendPartial& total) {
  const int64_t size = element_size(job.p.dtype);
  for (int n = 0; n < tile.num_nodes; ++n) {
    const AttendNode& node = job.nodes[tile.first_node + n];
    const bool empty = node.first_chunk >= node.end_chunk;
    for (int g = 0; g < job.group; ++g) {
      const int r = n * job.group + g, head = kv_head * job.group + g;
      char* out = static_cast<char*>(node.row->out) + head * job.p.out_head_stride * size;
      float* x = total.out + int64_t{r} * job.head_dim;
      if (empty) {
        std::fill_n(x, job.head_dim, 0.0f);
        total.max[r] = kMinusInfinity;
        total.sum[r] = 0.0f;
      }
      if (job.p.sinks) {
        const float one = 1.0f;
        job.kernels.fold(1, job.head_dim, total.max + r, total.sum + r, x, job.p.sinks + head, &one,
                         kNoValue);
      }
      const float sum = total.sum[r];
      job.kernels.finish(x, sum, job.head_dim, out);
      if (node.row->lse) node.row->lse[head] = sum == 0.0f ? kMinusInfinity : total.max[r] + log_f32(sum);
    }
  }
}

// ---- pieces of work ---------------------------------------------------------------------------------------

void run_piece(const AttendJob& job, int64_t piece) {
  struct QuerySlot {};
  struct StateSlot {};
  const int num_kv_heads = job.p.cache.num_kv_heads;
  const int64_t unit = piece / job.splits;
  const int split = static_cast<int>(piece % job.splits), kv_head = static_cast<int>(unit % num_kv_heads);
  const AttendTile& tile = job.tiles[unit / num_kv_heads];
  const int chunks = tile.end_chunk - tile.first_chunk;
  if (split > 0 && split >= chunks) return;

  const int64_t size = element_size(job.p.dtype);
  float* q = scratch<float, QuerySlot>(int64_t{job.max_rows} * job.head_dim);
  for (int r = 0; r < tile.num_nodes * job.group; ++r) {
    const int head = kv_head * job.group + r % job.group;
    const void* row = job.nodes[tile.first_node + r / job.group].row->q;
    job.kernels.widen(static_cast<const char*>(row) + head * job.p.q_head_stride * size, job.head_dim,
                      q + int64_t{r} * job.head_dim);
  }
  float* state = scratch<float, StateSlot>(3 * job.partial_size());
  const AttendPartial group = job.partial(state), total = job.partial(state + job.partial_size());
  if (job.splits == 1) {
    const AttendPartial part = job.partial(state + 2 * job.partial_size());
    for (int chunk = tile.first_chunk; chunk < tile.end_chunk; ++chunk) {
      reduce_chunk(job, tile, kv_head, chunk, q, part);
      fold_chunk(job, tile, chunk, part, group, total);
    }
    return write_results(job, tile, kv_head, total);
  }
  float* parts = job.partials + unit * job.splits * job.partial_size();
  if (chunks > 0)
    reduce_chunk(job, tile, kv_head, tile.first_chunk + split, q,
                 job.partial(parts + split * job.partial_size()));
  if (std::atomic_ref<int>(job.chunks_left[unit]).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  for (int i = 0; i < chunks; ++i)
    fold_chunk(job, tile, tile.first_chunk + i, job.partial(parts + i * job.partial_size()), group, total);
  write_results(job, tile, kv_head, total);
}

const AttendKernels& choose_kernels(DType dtype, bool codes) {
  switch (isa()) {
    case Isa::kGeneric:
      return attend_kernels_generic(dtype, codes);
    case Isa::kAvx2:
      return attend_kernels_avx2(dtype, codes);
    default:
      return attend_kernels_avx512(dtype, codes);
  }
}

}  // namespace

void attend(const AttendParams& p) {
  struct NodeSlot {};
  struct TileSlot {};
  struct CountSlot {};
  struct PartialSlot {};
  if (p.num_rows <= 0) return;
  const int group = p.num_heads / p.cache.num_kv_heads, nodes_per_tile = std::max(1, kTileRows / group);
  const int64_t capacity = cache_capacity(p.cache);
  AttendNode* nodes = scratch<AttendNode, NodeSlot>(p.num_rows);
  AttendTile* tiles = scratch<AttendTile, TileSlot>(p.num_rows);
  int num_tiles = 0, max_chunks = 1, max_nodes = 1;
  int64_t keys = 0;
  for (int i = 0; i < p.num_rows; ++i) {
    nodes[i] = resolve(p.rows[i], p.window, capacity);
    keys += nodes[i].end - nodes[i].begin;
    const bool joins = i > 0 && p.rows[i].request == p.rows[i - 1].request &&
                       tiles[num_tiles - 1].num_nodes < nodes_per_tile;
    if (!joins) tiles[num_tiles++] = {i, 0, std::numeric_limits<int>::max(), 0};
    AttendTile& tile = tiles[num_tiles - 1];
    ++tile.num_nodes;
    if (nodes[i].first_chunk < nodes[i].end_chunk)
      tile.first_chunk = std::min(tile.first_chunk, nodes[i].first_chunk);
    tile.end_chunk = std::max(tile.end_chunk, nodes[i].end_chunk);
  }
  for (int t = 0; t < num_tiles; ++t) {
    tiles[t].first_chunk = std::min(tiles[t].first_chunk, tiles[t].end_chunk);
    max_chunks = std::max(max_chunks, tiles[t].end_chunk - tiles[t].first_chunk);
    max_nodes = std::max(max_nodes, tiles[t].num_nodes);
  }

  AttendJob job{p,
                choose_kernels(p.dtype, p.cache.dtype == DType::kFloat8E4M3),
                group,
                p.cache.head_dim,
                max_nodes * group,
                nodes,
                tiles,
                1,
                nullptr,
                nullptr};
  const int64_t units = int64_t{num_tiles} * p.cache.num_kv_heads;
  const bool serial = keys * p.num_heads * p.cache.head_dim * 2 < kSerialWork || num_threads() == 1;
  if (!serial && units < 4 * num_threads() && max_chunks > 1) {
    job.splits = max_chunks;
    job.chunks_left = scratch<int, CountSlot>(units);
    job.partials = scratch<float, PartialSlot>(units * max_chunks * job.partial_size());
    for (int64_t u = 0; u < units; ++u) {
      const AttendTile& tile = tiles[u / p.cache.num_kv_heads];
      job.chunks_left[u] = std::max(1, tile.end_chunk - tile.first_chunk);
    }
  }
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) run_piece(job, piece);
  };
  const int64_t pieces = units * job.splits;
  serial ? body(0, pieces) : parallel_for(pieces, 1, body);
}

}  // namespace eagle::cpu
