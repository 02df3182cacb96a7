#pragma once
// append_kv for one head of one node at a time, by half a warp: the body of append_kv, and of the end of q, k
// and v in a larger kernel.
//
// Thread i of a half owns dimensions i, i + 16, ..., so that the sum of squares runs in the CPU's sixteen
// lanes and gives its bits. Rotation partners meet in shared memory; a head that becomes codes is first
// searched for its largest magnitude.
#include <cuda_runtime.h>

#include <type_traits>

#include "common/numeric.h"
#include "common/quantize.h"
#include "cuda/attention/cache_rows.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "eagle_cuda/attention.h"

namespace eagle::cuda {

inline constexpr int kHeadThreads = 16;

// Of a block with so many halves of warps, for heads of at most kMaxHeadDim.
template <int kHalves, int kMaxHeadDim>
struct AppendShared {
  float row[kHalves][kMaxHeadDim + kHeadThreads];  // the other half of a warp has the other banks
};

// What q, k and v hold may have been written in the same launch, lengths, depths and counts too; the tables,
// norms, pages and a tensor's scales may not.
template <class T, class C, int kMaxHeadDim>
class AppendKv {
  static constexpr bool kCodes = std::is_same_v<C, float8_t>;
  static constexpr int kPerThread = kMaxHeadDim / kHeadThreads;

 public:
  __device__ __forceinline__ explicit AppendKv(const AppendKvParams& p) : p_(p) {}

  // Heads are those of q, then of k, then of v. Whole warps; of a half without a head `exists` is false, the
  // others are valid all the same. `row` is the half's own, and free again behind a __syncwarp().
  __device__ __forceinline__ void run(int request, int node, int index, bool exists, float* row) const {
    const int first = static_cast<int>(threadIdx.x) % kHeadThreads, head_dim = p_.cache.head_dim;
    const int64_t length = max(load(p_.seq_lens + request), 0);
    const Head head = exists ? find_head(request, node, length, index) : Head{};
    const T* const from = static_cast<const T*>(head.from);
    T* const to = static_cast<T*>(head.to);

    T raw[kPerThread];
    float x[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int d = first + i * kHeadThreads;
      raw[i] = to && d < head_dim ? load(from + d) : T{};
      x[i] = to_float(raw[i]);
    }
    if (p_.q_norm || p_.k_norm) normalise(head, first, x);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) row[first + i * kHeadThreads] = x[i];
    __syncwarp();
    if (!kCodes && !to) return;

    int64_t position = 0;
    if (p_.rotary_dim > 0) {
      const int64_t wanted = length + load(p_.depths + int64_t{request} * p_.max_nodes + node);
      position = wanted < 0 ? 0 : min(wanted, int64_t{p_.max_positions} - 1);
    }
    const float* const cos = p_.cos + position * (p_.rotary_dim / 2);
    const float* const sin = p_.sin + position * (p_.rotary_dim / 2);
    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int d = first + i * kHeadThreads;
        if (to && head.rotates && d < head_dim) x[i] = rotate(cos, sin, row, d);
      }
      store_codes(head, first, x);
      if (!to || head.scale) return;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int d = first + i * kHeadThreads;
      if (d >= head_dim) continue;
      if constexpr (kCodes)
        store(to + d, from_float<T>(x[i]));  // of q
      else
        store(to + d, head.rotates ? from_float<T>(rotate(cos, sin, row, d)) : raw[i]);
    }
  }

  // A KV head's rows: all nodes of requests [first_request, last_request), its queries, its key and its
  // value. Whole block, of kHalves halves of warps; no barrier of the block's.
  template <int kHalves>
  __device__ __forceinline__ void run_kv_head(int kv_head, int first_request, int last_request,
                                              AppendShared<kHalves, kMaxHeadDim>& shared) const {
    const int half = static_cast<int>(threadIdx.x) / kHeadThreads;
    const int kv_heads = p_.cache.num_kv_heads, group = p_.num_heads / kv_heads, heads = group + 2;
    const int items = (last_request - first_request) * p_.max_nodes * heads;
    for (int first = 0; first + half / 2 * 2 < items; first += kHalves) {  // the same for a whole warp
      const int item = min(first + half, items - 1), row = item / heads, part = item % heads;
      const int request = first_request + row / p_.max_nodes, node = row % p_.max_nodes;
      const int head =
          part < group ? kv_head * group + part : p_.num_heads + (part - group) * kv_heads + kv_head;
      run(request, node, head, first + half < items && node < load(p_.num_nodes + request), shared.row[half]);
      __syncwarp();
    }
  }

 private:
  // Element `d` of a head, and what becomes of it.
  struct Head {
    const void* from;
    void* to;          // nullptr: a head that does not exist, or a cache row that does not
    const void* norm;  // nullptr: none
    bool rotates;      // else copied bit for bit
    float* scale;      // of a head that becomes codes, else nullptr
  };

  // From the first element of an array to the node's head.
  static __device__ __forceinline__ int64_t head_offset(const int64_t* strides, int request, int node,
                                                        int head) {
    return request * strides[0] + node * strides[1] + head * strides[2];
  }

  __device__ __forceinline__ Head find_head(int request, int node, int64_t length, int head) const {
    const auto at = [](const void* base, int64_t offset) { return static_cast<const T*>(base) + offset; };
    if (head < p_.num_heads) {
      T* const to = static_cast<T*>(p_.q_out) + head_offset(p_.q_out_strides, request, node, head);
      return {at(p_.q, head_offset(p_.q_strides, request, node, head)), to, p_.q_norm, true, nullptr};
    }
    head -= p_.num_heads;
    if (head >= 2 * p_.cache.num_kv_heads) return {};
    const CacheSlot slot = cache_slot(p_.cache, request, length + node);
    if (slot.page < 0) return {};
    if (head < p_.cache.num_kv_heads)
      return {at(p_.k, head_offset(p_.k_strides, request, node, head)),
              static_cast<C*>(p_.cache.k) + k_offset(p_.cache, slot, head), p_.k_norm, true,
              kCodes ? k_scale_at(p_.cache, slot, head) : nullptr};
    head -= p_.cache.num_kv_heads;
    return {at(p_.v, head_offset(p_.v_strides, request, node, head)),
            static_cast<C*>(p_.cache.v) + v_offset(p_.cache, slot, head), nullptr, false,
            kCodes ? v_scale_at(p_.cache, slot, head) : nullptr};
  }

  // x * weight / sqrt(mean(x^2) + eps) for the heads that have a weight; all lanes take part.
  __device__ __forceinline__ void normalise(const Head& head, int first, float (&x)[kPerThread]) const {
    const int head_dim = p_.cache.head_dim;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      if (first + i * kHeadThreads < head_dim) sum = fma(x[i], x[i], sum);
    for (int half = kHeadThreads / 2; half > 0; half /= 2) sum += __shfl_xor_sync(kFullMask, sum, half);
    if (!head.norm) return;
    const float scale = rsqrt_f32(sum / static_cast<float>(head_dim) + p_.norm_eps);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int d = first + i * kHeadThreads;
      if (d < head_dim) x[i] = x[i] * scale * to_float(load(static_cast<const T*>(head.norm) + d));
    }
  }

  // The pair (a, b) becomes (a cos - b sin, b cos + a sin); `row` holds all elements of the head.
  __device__ __forceinline__ float rotate(const float* cos, const float* sin, const float* row, int d) const {
    const int half = p_.rotary_dim / 2;
    if (d >= 2 * half) return row[d];
    const bool second = p_.interleaved ? d % 2 != 0 : d >= half;
    const int pair = p_.interleaved ? d / 2 : second ? d - half : d;
    const float other = row[p_.interleaved ? d ^ 1 : second ? pair : pair + half];
    const float product = other * load_read_only(sin + pair);
    return fma(row[d], load_read_only(cos + pair), second ? product : -product);
  }

  // The head's codes, and its scale where rows have their own; all lanes take part, some without a head.
  __device__ __forceinline__ void store_codes(const Head& head, int first,
                                              const float (&x)[kPerThread]) const {
    const KVCacheView& cache = p_.cache;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) largest = max(largest, magnitude_bits(x[i]));
    for (int half = kHeadThreads / 2; half > 0; half /= 2)
      largest = max(largest, __shfl_xor_sync(kFullMask, largest, half));
    if (!head.scale) return;
    const float scale =
        cache.tensor_scales ? load_read_only(head.scale) : quantize_scale(largest, kFloat8Max);
    if (!cache.tensor_scales && first == 0) store(head.scale, scale);
    float8_t* const to = static_cast<float8_t*>(head.to);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int d = first + i * kHeadThreads;
      if (d < cache.head_dim) store(to + d, quantize_float8(x[i], scale));
    }
  }

  const AppendKvParams& p_;
};

}  // namespace eagle::cuda
