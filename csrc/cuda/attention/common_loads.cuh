#pragma once
// How the keys and values of the common pass come into shared memory.
//
// Items are the keys and the values of the steps, in turn. Of T, an item is a tile of the ring that ldmatrix
// reads. Codes of float8 travel as they are, in a ring of their own; while the warps work on one tile, the
// next one is converted: keys to the same numbers, values to their product with the scale, rounded to T.
// Keys' scales multiply the scores (common_pass.cuh).
#include <cuda_runtime.h>

#include <type_traits>

#include "common/float8.h"
#include "cuda/attention/common_layout.cuh"
#include "cuda/device/ptx_matrix.cuh"
#include "cuda/device/warp.cuh"

namespace eagle::cuda {

template <class T, class C, int kHeadDim>
class CommonLoads {
 protected:
  static constexpr bool kCodes = std::is_same_v<C, float8_t>;
  static constexpr int kLag = kCodes ? 0 : 1;   // a tile of the ring is free one item later: it is worked on
  static constexpr int kPairs = kHeadDim / 16;  // of 8 dimensions of the output
  using Layout = Tile<kHeadDim>;

  __device__ __forceinline__ CommonLoads(const AttendParams& p, const Plan& plan, CommonShared& shared)
      : p_(p), plan_(plan), shared_(shared) {
    unsigned char* const behind =
        reinterpret_cast<unsigned char*>(&shared_) + (sizeof(CommonShared) + 127) / 128 * 128;
    queries_ = reinterpret_cast<uint4*>(behind);
    ring_ = queries_ + plan.rows_per_block * Layout::kPitch;
  }

  // Of the task, behind a barrier.
  __device__ __forceinline__ int request() const { return shared_.task.request; }
  __device__ __forceinline__ int kv_head() const { return shared_.task.kv_head; }
  __device__ __forceinline__ int first_row() const { return shared_.task.row_block * plan_.rows_per_block; }

  __device__ __forceinline__ void load_queries() {
    const int first_row = this->first_row();
    const T* const q = static_cast<const T*>(p_.q) + request() * p_.q_strides[0];
    for (int i = static_cast<int>(threadIdx.x); i < plan_.rows_per_block * Layout::kPieces;
         i += static_cast<int>(blockDim.x)) {
      const int row = i / Layout::kPieces, piece = i % Layout::kPieces;
      const int node = (first_row + row) / plan_.group,
                head = kv_head() * plan_.group + (first_row + row) % plan_.group;
      const T* const from =
          q + (row < rows_ ? node * p_.q_strides[1] + head * p_.q_strides[2] + piece * 8 : 0);
      copy_piece(queries_ + Layout::at(row, piece), from, row < rows_, plan_.vectors);
    }
  }

  // Of a position.
  struct Place {
    CacheSlot slot{-1, 0};
    float k_scale = 0.0f, v_scale = 0.0f;  // of codes
  };

  // Where position `first` + lane lies; for one warp.
  __device__ __forceinline__ Place look_up(int first) const {
    const int wanted = first + lane_id();
    Place place;
    if (first >= 0 && wanted >= shared_.begin && wanted < shared_.end)
      place.slot = cache_slot(p_.cache, request(), wanted);
    if (kCodes && place.slot.page >= 0) {
      place.k_scale = load(k_scale_at(p_.cache, place.slot, kv_head()));
      place.v_scale = load(v_scale_at(p_.cache, place.slot, kv_head()));
    }
    return place;
  }
  __device__ __forceinline__ void publish(int index, const Place& found) const {
    shared_.slots[index][lane_id()] = found.slot;
    const uint32_t present = __ballot_sync(kFullMask, found.slot.page >= 0);
    if (lane_id() == 0) shared_.present[index] = present;
    if constexpr (kCodes) {
      scales().k[index][lane_id()] = found.k_scale;
      scales().v[index][lane_id()] = found.v_scale;
    }
  }
  // What lies behind the tiles is computed, as registers are scarce.
  __device__ __forceinline__ float2* group_out() const {
    return reinterpret_cast<float2*>(ring_ + (kCodes ? 2 : plan_.ring) * kStep * Layout::kPitch) +
           warp_id() * 4 * kPairs * kWarpSize + lane_id();
  }
  __device__ __forceinline__ CodeScales& scales() const {
    return *reinterpret_cast<CodeScales*>(codes() + plan_.ring * kStep * (kHeadDim / 16));
  }
  __device__ __forceinline__ uint4* codes() const {
    return ring_ + 2 * kStep * Layout::kPitch + plan_.rows_per_block * (kHeadDim / 4);
  }

  // Starts loading a tile: keys for an even item, values for an odd one, `ahead` steps from here.
  __device__ __forceinline__ void issue(int item, int ahead) const {
    const int step = item / 2;
    constexpr int kElements = 16 / static_cast<int>(sizeof(C)), kPieces = kHeadDim / kElements;
    if (shared_.steps.after(position_, ahead) >= 0) {
      uint4* const tile = kCodes ? codes() + item % plan_.ring * kStep * kPieces
                                 : ring_ + item % plan_.ring * kStep * Layout::kPitch;
      const bool values = item % 2 != 0;
      const C* const base = static_cast<const C*>(values ? p_.cache.v : p_.cache.k);
      const int64_t page_stride = values ? p_.cache.v_page_stride : p_.cache.k_page_stride;
      const int64_t row_stride = values ? p_.cache.v_row_stride : p_.cache.k_row_stride;
      const int64_t head = kv_head() * (values ? p_.cache.v_head_stride : p_.cache.k_head_stride);
#pragma unroll 1  // registers are scarce here, and copies wait for nothing
      for (int i = computed_here(static_cast<int>(threadIdx.x)); i < kStep * kPieces;
           i += static_cast<int>(blockDim.x)) {
        const int row = i / kPieces, piece = i % kPieces;
        const CacheSlot slot = shared_.slots[step % kLookahead][row];
        const bool present = slot.page >= 0;
        const C* const from =
            base + (present ? slot.page * page_stride + slot.row * row_stride + head + piece * kElements : 0);
        copy_piece(tile + (kCodes ? i : Layout::at(row, piece)), from, present, plan_.vectors);
      }
    }
    copy_async_commit();
  }
  // Codes of an item that have arrived become its tile; the warps are done with that of two items ago.
  __device__ __forceinline__ void convert(int item) const {
    const bool values = item % 2 != 0;
    const uint2* const from =
        reinterpret_cast<const uint2*>(codes() + item % plan_.ring * kStep * (kHeadDim / 16));
    uint4* const to = ring_ + tile_of(item) * kStep * Layout::kPitch;
    const float* const scale = scales().v[item / 2 % kLookahead];
#pragma unroll 1
    for (int i = computed_here(static_cast<int>(threadIdx.x)); i < kStep * Layout::kPieces;
         i += static_cast<int>(blockDim.x)) {
      const int row = i / Layout::kPieces, piece = i % Layout::kPieces;
      const uint2 codes = from[i];
      const float factor = values ? scale[row] : 1.0f;
      // A value first: g++ would store the members of a temporary one by one, and the emulator count them so.
      const uint4 numbers = {two_codes(codes.x, factor), two_codes(codes.x >> 16, factor),
                             two_codes(codes.y, factor), two_codes(codes.y >> 16, factor)};
      to[Layout::at(row, piece)] = numbers;
    }
  }
  static __device__ __forceinline__ uint32_t two_codes(uint32_t word, float factor) {
    return pack<T>(to_float(float8_t{static_cast<uint8_t>(word)}) * factor,
                   to_float(float8_t{static_cast<uint8_t>(word >> 8)}) * factor);
  }
  __device__ __forceinline__ int tile_of(int item) const { return kCodes ? item % 2 : item % plan_.ring; }

  // The oldest tile of the ring has arrived, and every warp is done with the one before it; of codes, the
  // oldest but one, whose predecessor is converted.
  __device__ __forceinline__ void arrive() const {
    if (plan_.ring == 2)
      copy_async_wait<0>();
    else if (plan_.ring == 3)
      copy_async_wait<1>();
    else
      copy_async_wait<2>();
    __syncthreads();
  }

  const AttendParams& p_;
  const Plan& plan_;
  CommonShared& shared_;
  int rows_;
  uint4* queries_;
  uint4* ring_;
  int position_;  // of the step; -1: no more
};

}  // namespace eagle::cuda
