// The head over committed rows, tile by tile, so that a prompt of any length needs memory for one tile only;
// and how rows enter the head.
//
// A tile is up to 256 rows of any requests: weights are read once for all of them. A request's rows in it are
// a piece, with appends and attention of its own.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "common/dispatch.h"
#include "cuda/draft/head.h"
#include "cuda/draft/rows.cuh"
#include "cuda/launch.h"

namespace eagle::cuda {
namespace {

constexpr int64_t kTileRows = 256;
constexpr int kPlaceThreads = 256;

// Rows `begin` to `begin + rows` that a request is extended by.
struct PieceParams {
  const int32_t* seq_len;
  int begin, rows, capacity;
  int32_t* start;   // where its first row stands
  int32_t* count;   // `rows`
  int32_t* depths;  // [rows]
};

// grid: [1]
// registers: <= 32
__global__ void __launch_bounds__(kPlaceThreads) place_rows_kernel(const PieceParams p) {
  const int first = clamped(load_read_only(p.seq_len), 0, p.capacity);
  const int start = clamped(int64_t{first} + p.begin, 0, p.capacity);
  for (int i = static_cast<int>(threadIdx.x); i < p.rows; i += kPlaceThreads)
    store(p.depths + i, clamped(int64_t{start} + i, 0, p.capacity) - start);
  if (threadIdx.x == 0) {
    store(p.start, start);
    store(p.count, p.rows);
  }
}

// grid: [m, 2]   the row's embedding, and its hidden state
// registers: <= 64
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    join_rows_kernel(const __grid_constant__ JoinRowsParams p, bool vectors) {
  RowShared& shared = shared_memory<RowShared>();
  const int64_t row = blockIdx.x;
  const bool second = blockIdx.y != 0;
  const T* from = static_cast<const T*>(p.hidden) + row * p.hidden_stride;
  if (!second) {
    const int token = clamped(load_read_only(p.tokens + row), 0, p.vocab_size - 1);
    from = static_cast<const T*>(p.embedding) + token * p.size;
  }
  T* const to = static_cast<T*>(p.joined) + (2 * row + second) * p.size;
  move_row(shared, from, to, p.size, static_cast<const T*>(second ? p.hidden_norm : p.input_norm), p.norm_eps,
           vectors);
}

// What a tile keeps in the workspace.
struct TileMemory {
  int32_t *starts, *counts, *depths;
  void *normed, *hidden;
  HeadMemory head;

  TileMemory(const DraftHead& h, int64_t rows, int64_t attention, Arena& arena)
      : starts(arena.take<int32_t>(rows)),
        counts(arena.take<int32_t>(rows)),
        depths(arena.take<int32_t>(rows)),
        normed(arena.take<char>(h.fc_norm ? rows * h.feature_size * element_size(h.dtype) : 0)),
        hidden(arena.take<char>(rows * h.hidden_size * element_size(h.dtype))),
        head(h, rows, attention, arena) {}
};

// The pieces of the tile that begins at row `begin`; pointers are set for a tile that has memory.
void find_pieces(const ExtendDraftParams& p, int64_t begin, int64_t count, const TileMemory* memory,
                 std::vector<RowGroup>& pieces) {
  pieces.clear();
  for (int b = 0; b < p.batch_size; ++b) {
    const int64_t first = std::max<int64_t>(p.row_offsets[b], begin),
                  last = std::min<int64_t>(p.row_offsets[b + 1], begin + count);
    if (first >= last) continue;
    RowGroup piece{};
    piece.first_row = first - begin;
    piece.request = b;
    piece.batch = 1;
    piece.nodes = piece.all_nodes = static_cast<int>(last - first);
    if (memory) {
      piece.lengths = piece.append_at = memory->starts + pieces.size();
      piece.counts = memory->counts + pieces.size();
      piece.depths = memory->depths + piece.first_row;
    }
    pieces.push_back(piece);
  }
}

int64_t attention_bytes(const ExtendDraftParams& p) {
  int64_t most = 0;
  std::vector<RowGroup> pieces;
  for (int64_t begin = 0; begin < p.num_rows; begin += kTileRows) {
    find_pieces(p, begin, std::min(kTileRows, p.num_rows - begin), nullptr, pieces);
    for (const RowGroup& piece : pieces) most = std::max(most, attention_bytes(*p.head, p.caches, piece));
  }
  return most;
}

}  // namespace

void join_rows(const JoinRowsParams& p, CUstream_st* stream) {
  const int64_t size = element_size(p.dtype);
  const bool vectors = row_vectors({p.embedding, p.hidden, p.input_norm, p.hidden_norm, p.joined},
                                   {p.size * size, p.hidden_stride * size});
  const LaunchConfig config{dim3(static_cast<unsigned>(p.m), 2), dim3(kRowThreads), stream,
                            sizeof(RowShared)};
  dispatch(FloatTypes{}, p.dtype, "hidden",
           [&](auto type) { launch(join_rows_kernel<typename decltype(type)::type>, config, p, vectors); });
}

int64_t extend_draft_workspace_bytes(const ExtendDraftParams& p) {
  validate(p);
  if (p.num_rows == 0) return 0;
  Arena arena(nullptr);
  const TileMemory memory(*p.head, std::min(kTileRows, p.num_rows), attention_bytes(p), arena);
  return arena.bytes();
}

void extend_draft(const ExtendDraftParams& p, CUstream_st* stream) {
  validate(p);
  if (p.num_rows == 0) return;
  Arena arena(p.workspace);
  const TileMemory memory(*p.head, std::min(kTileRows, p.num_rows), attention_bytes(p), arena);
  check_draft_workspace(p.workspace, p.workspace_bytes, arena.bytes());
  const DraftHead& head = *p.head;
  const int64_t width = element_size(head.dtype), H = head.hidden_size;

  std::vector<RowGroup> pieces;
  for (int64_t begin = 0; begin < p.num_rows; begin += kTileRows) {
    const int64_t count = std::min(kTileRows, p.num_rows - begin);
    find_pieces(p, begin, count, &memory, pieces);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const RowGroup& piece = pieces[i];
      launch(place_rows_kernel, {dim3(1), dim3(kPlaceThreads), stream, 0},
             PieceParams{p.seq_lens + piece.request,
                         static_cast<int>(begin + piece.first_row - p.row_offsets[piece.request]),
                         piece.nodes, row_capacity(p.caches[0]), memory.starts + i, memory.counts + i,
                         memory.depths + piece.first_row});
    }
    const void* hidden = static_cast<const char*>(p.features) + begin * p.features_stride * width;
    int64_t hidden_stride = p.features_stride;
    if (head.kind == HeadKind::kEagle3) {
      fuse_features(head, hidden, p.features_stride, count, memory.normed, memory.hidden, memory.head,
                    stream);
      hidden = memory.hidden;
      hidden_stride = H;
    }
    run_head(head, p.caches, pieces, count, p.tokens + begin, hidden, hidden_stride,
             p.hidden ? static_cast<char*>(p.hidden) + begin * H * width : nullptr, memory.head, stream);
  }
}

}  // namespace eagle::cuda
