// compact_kv: the accepted rows move down to the end of the prefix, in place, all caches in one launch.
//
// What moves is split into planes: the K, the V or the scales of one cache. A row of a plane is a number of
// pieces (heads) of equal length; a column is one slot of a piece, as wide as addresses and strides allow, at
// most 16 bytes. Grid: x requests, y planes, z slices of a plane's columns. The first warp of a block lists
// the rows to move, then every thread moves its column of all of them. Without rows to move the block ends.
//
// Why nothing is overwritten before it was read. A thread owns its column in all rows of the request, and
// distinct rows and columns share no byte, so threads have nothing to do with each other. Within a thread
// rows are moved in ascending i, in groups: all loads of a group, then all its stores. Compare with what is
// meant, every row read before any is written:
//   - a load of row path[j] behind a store to row i (in an earlier group, so i < j) reads another row, since
//     path[j] >= j > i;
//   - a load of row path[j] before a store to row i cannot see it.
// Only path[i] >= i is used, and the list ends before the first entry that breaks it: sorted or not, repeated
// or not, makes no difference. A row that is in place or missing is no move, and no other row waits for it.
#include <algorithm>

#include "common/check.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"
#include "eagle_cuda/kv_cache.h"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxSlices = 64;
constexpr int kMaxMoves = 255;  // an entry is at least its index and below max_nodes <= 256
constexpr int kGroup = 8;       // rows in flight per thread

struct Plane {
  unsigned char* base;
  int64_t page_stride, row_stride, piece_stride;  // bytes
  uint32_t columns, columns_per_piece;
  uint32_t num_pages;  // at most 2^31, so that no negative id is below it
  uint32_t page_size;
  int32_t width;  // bytes of a column: 1, 2, 4, 8 or 16
};

// Kernel parameters, so that no copy to the device precedes the launch. They are copied at each: few caches
// shall not pay for many.
template <int kCapacity>
struct Planes {
  Plane plane[kCapacity];
};
constexpr int kFewPlanes = 64;    // below 4 KB: 32 layers without scales
constexpr int kManyPlanes = 512;  // below 32 KB: 256 layers without scales, 128 with

struct Requests {
  const int32_t* path;
  const int32_t* num_accepted;
  const int32_t* seq_lens;
  const int32_t* page_table;  // or nullptr
  int64_t page_table_stride;
  int max_path, max_nodes, max_pages;
};

struct Move {
  int64_t from, to;  // bytes from the plane's base
};

struct SharedMemory {
  Move moves[kMaxMoves];
  int count;
};

// The page that holds the `index`th run of page_size rows of a request; 2^31 or more where there is none.
__device__ __forceinline__ uint32_t page_at(const Requests& r, int64_t request, uint32_t index) {
  if (!r.page_table) return index == 0 ? static_cast<uint32_t>(request) : ~0u;
  if (index >= static_cast<uint32_t>(r.max_pages)) return ~0u;
  return static_cast<uint32_t>(load_read_only(r.page_table + request * r.page_table_stride + index));
}

// Finds both rows; false where one of them does not exist.
__device__ __forceinline__ bool find_rows(const Plane& plane, const Requests& r, int64_t request,
                                          uint32_t from, uint32_t to, Move& move) {
  const uint32_t from_index = from / plane.page_size, from_slot = from % plane.page_size;
  const uint32_t to_index = to / plane.page_size, to_slot = to % plane.page_size;
  const uint32_t from_page = page_at(r, request, from_index);  // both before the first use of one
  const uint32_t to_page = page_at(r, request, to_index);
  if (from_page >= plane.num_pages || to_page >= plane.num_pages) return false;
  move = {from_page * plane.page_stride + from_slot * plane.row_stride,
          to_page * plane.page_stride + to_slot * plane.row_stride};
  return true;
}

// Writes the rows to move, in ascending order of i, and their number. For one whole warp.
__device__ __forceinline__ void list_moves(const Plane& plane, const Requests& r, int64_t request,
                                           SharedMemory& shared) {
  const int lane = lane_id();
  const int32_t accepted = load_read_only(r.num_accepted + request);
  const uint32_t first = static_cast<uint32_t>(max(load_read_only(r.seq_lens + request), 0));
  int count = 0;
  uint32_t bad = 0;
  for (int base = 1; bad == 0; base += kWarpSize) {  // at index max_nodes, at the latest, no entry is good
    const int i = base + lane;
    const int32_t entry = i < r.max_path ? load_read_only(r.path + request * r.max_path + i) : -1;
    bad = ~__ballot_sync(kFullMask, i <= accepted && entry >= i && entry < r.max_nodes);
    const bool good = (bad & ((2u << lane) - 1)) == 0;  // this entry, and all before it
    Move move{};
    const bool moves = good && entry != i && find_rows(plane, r, request, first + entry, first + i, move);
    const uint32_t movers = __ballot_sync(kFullMask, moves);
    if (moves) shared.moves[count + __popc(movers & ((1u << lane) - 1))] = move;
    count += __popc(movers);
  }
  if (lane == 0) shared.count = count;
}

template <class T>
__device__ __forceinline__ void move_columns(const Plane& plane, const SharedMemory& shared) {
  const int count = shared.count;
  for (uint32_t column = blockIdx.z * blockDim.x + threadIdx.x; column < plane.columns;
       column += gridDim.z * blockDim.x) {
    const uint32_t piece = column / plane.columns_per_piece, slot = column % plane.columns_per_piece;
    unsigned char* const base = plane.base + piece * plane.piece_stride + int64_t{slot} * sizeof(T);
    for (int begin = 0; begin < count; begin += kGroup) {
      T value[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        if (begin + i < count)
          value[i] = load(reinterpret_cast<const T*>(base + shared.moves[begin + i].from));
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        if (begin + i < count) store(reinterpret_cast<T*>(base + shared.moves[begin + i].to), value[i]);
    }
  }
}

// registers: <= 56
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    compact_kv_kernel(const Planes<kCapacity> planes, const Requests r) {
  const Plane& plane = planes.plane[blockIdx.y];
  if (blockIdx.z * blockDim.x >= plane.columns) return;
  SharedMemory& shared = shared_memory<SharedMemory>();
  if (warp_id() == 0) list_moves(plane, r, blockIdx.x, shared);
  __syncthreads();
  if (shared.count == 0) return;
  switch (plane.width) {
    case 16:
      return move_columns<uint4>(plane, shared);
    case 8:
      return move_columns<uint2>(plane, shared);
    case 4:
      return move_columns<uint32_t>(plane, shared);
    case 2:
      return move_columns<uint16_t>(plane, shared);
    default:
      return move_columns<uint8_t>(plane, shared);
  }
}

// Strides in bytes.
Plane make_plane(const KVCacheView& cache, void* base, int64_t page_stride, int64_t row_stride,
                 int64_t piece_stride, int64_t pieces, int64_t piece_bytes) {
  if (pieces == 1 || piece_stride == piece_bytes) {  // adjacent: one piece
    piece_bytes *= pieces;
    pieces = 1;
    piece_stride = 0;
  }
  int64_t common =
      reinterpret_cast<intptr_t>(base) | piece_bytes | piece_stride;  // what addresses are made of
  if (cache.num_pages > 1) common |= page_stride;
  if (cache.page_size > 1) common |= row_stride;
  Plane plane{};
  plane.base = static_cast<unsigned char*>(base);
  plane.page_stride = page_stride;
  plane.row_stride = row_stride;
  plane.piece_stride = piece_stride;
  plane.width = static_cast<int32_t>(std::min<int64_t>(common & -common, 16));
  plane.columns_per_piece = static_cast<uint32_t>(piece_bytes / plane.width);
  plane.columns = static_cast<uint32_t>(pieces) * plane.columns_per_piece;
  plane.num_pages = static_cast<uint32_t>(std::min<int64_t>(cache.num_pages, int64_t{1} << 31));
  plane.page_size = static_cast<uint32_t>(cache.page_size);
  return plane;
}

// The planes of the next launch.
class Batch {
 public:
  Batch(const CompactKvParams& p, CUstream_st* stream) : p_(p), stream_(stream) {}

  void add(const KVCacheView& c) {
    if (c.num_pages == 0 || c.num_kv_heads == 0) return;
    const int64_t size = element_size(c.dtype), bytes = c.head_dim * size;
    constexpr int64_t kScale = sizeof(float);
    const int64_t scales = c.num_kv_heads * kScale;
    if (bytes > 0) {
      add(make_plane(c, c.k, c.k_page_stride * size, c.k_row_stride * size, c.k_head_stride * size,
                     c.num_kv_heads, bytes));
      add(make_plane(c, c.v, c.v_page_stride * size, c.v_row_stride * size, c.v_head_stride * size,
                     c.num_kv_heads, bytes));
    }
    if (c.tensor_scales) return;
    if (c.k_scale)
      add(make_plane(c, c.k_scale, c.k_scale_page_stride * kScale, c.k_scale_row_stride * kScale, 0, 1,
                     scales));
    if (c.v_scale)
      add(make_plane(c, c.v_scale, c.v_scale_page_stride * kScale, c.v_scale_row_stride * kScale, 0, 1,
                     scales));
  }

  void flush() {
    if (count_ > kFewPlanes)
      launch_planes(planes_);
    else if (count_ > 0) {
      Planes<kFewPlanes> few;
      std::copy_n(planes_.plane, kFewPlanes, few.plane);
      launch_planes(few);
    }
    count_ = 0;
  }

 private:
  void add(const Plane& plane) {
    if (count_ == kManyPlanes) flush();
    planes_.plane[count_++] = plane;
  }

  template <int kCapacity>
  void launch_planes(const Planes<kCapacity>& planes) const {
    uint32_t columns = 0;
    for (int i = 0; i < count_; ++i) columns = std::max(columns, planes.plane[i].columns);
    const unsigned threads = std::min<unsigned>((columns + kWarpSize - 1) / kWarpSize * kWarpSize, kThreads);
    const unsigned slices = std::min<unsigned>((columns + threads - 1) / threads, kMaxSlices);
    const Requests requests{p_.path,
                            p_.num_accepted,
                            p_.seq_lens,
                            p_.caches[0].page_table,
                            p_.caches[0].page_table_stride,
                            p_.max_path,
                            p_.max_nodes,
                            p_.caches[0].max_pages};
    const LaunchConfig config{
        dim3(static_cast<unsigned>(p_.batch_size), static_cast<unsigned>(count_), slices), dim3(threads),
        stream_, sizeof(SharedMemory)};
    launch(compact_kv_kernel<kCapacity>, config, planes, requests);
  }

  const CompactKvParams& p_;
  CUstream_st* stream_;
  Planes<kManyPlanes> planes_{};
  int count_ = 0;
};

}  // namespace

void compact_kv(const CompactKvParams& p, CUstream_st* stream) {
  validate(p);
  Batch batch(p, stream);
  for (int i = 0; i < p.num_caches; ++i) batch.add(p.caches[i]);
  batch.flush();
}

}  // namespace eagle::cuda
