// append_kv: optional norm and rotation of every q and k head, then k and v into the cache, in one launch.
//
// Grid: x requests, y nodes, z blocks of kHeadsPerBlock heads: first those of q, then of k, then of v. Half a
// warp has one head: thread i of it owns dimensions i, i + 16, ..., so that the sum of squares runs in the
// CPU's sixteen lanes and gives its bits. Rotation partners meet in shared memory; a head that becomes codes
// is first searched for its largest magnitude. A block whose node does not exist ends.
#include <cuda_runtime.h>

#include <type_traits>

#include "common/dispatch.h"
#include "common/numeric.h"
#include "common/quantize.h"
#include "cuda/attention/cache_rows.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"
#include "eagle_cuda/attention.h"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadThreads = 16;
constexpr int kHeadsPerBlock = kThreads / kHeadThreads;
constexpr int kMaxHeadDim = 256;
constexpr int kPerThread = kMaxHeadDim / kHeadThreads;

template <class C>
constexpr bool kCodes = std::is_same_v<C, float8_t>;

struct SharedMemory {
  float row[kHeadsPerBlock][kMaxHeadDim + kHeadThreads];  // the other half of a warp has the other banks
};

// Element `d` of a head, and what becomes of it.
struct Head {
  const void* from;
  void* to;          // nullptr: a head that does not exist, or a cache row that does not
  const void* norm;  // nullptr: none
  bool rotates;      // else copied bit for bit
  float* scale;      // of a head that becomes codes, else nullptr
};

// From the first element of an array to the node's head.
__device__ __forceinline__ int64_t head_offset(const int64_t* strides, int request, int node, int head) {
  return request * strides[0] + node * strides[1] + head * strides[2];
}

template <class T, class C>
__device__ __forceinline__ Head find_head(const AppendKvParams& p, int request, int node, int64_t length,
                                          int head) {
  const auto at = [](const void* base, int64_t offset) { return static_cast<const T*>(base) + offset; };
  if (head < p.num_heads) {
    T* const to = static_cast<T*>(p.q_out) + head_offset(p.q_out_strides, request, node, head);
    return {at(p.q, head_offset(p.q_strides, request, node, head)), to, p.q_norm, true, nullptr};
  }
  head -= p.num_heads;
  if (head >= 2 * p.cache.num_kv_heads) return {};
  const CacheSlot slot = cache_slot(p.cache, request, length + node);
  if (slot.page < 0) return {};
  if (head < p.cache.num_kv_heads)
    return {at(p.k, head_offset(p.k_strides, request, node, head)),
            static_cast<C*>(p.cache.k) + k_offset(p.cache, slot, head), p.k_norm, true,
            kCodes<C> ? k_scale_at(p.cache, slot, head) : nullptr};
  head -= p.cache.num_kv_heads;
  return {at(p.v, head_offset(p.v_strides, request, node, head)),
          static_cast<C*>(p.cache.v) + v_offset(p.cache, slot, head), nullptr, false,
          kCodes<C> ? v_scale_at(p.cache, slot, head) : nullptr};
}

// x * weight / sqrt(mean(x^2) + eps) for the heads that have a weight; all lanes take part.
template <class T>
__device__ __forceinline__ void normalise(const AppendKvParams& p, const Head& head, int first,
                                          float (&x)[kPerThread]) {
  const int head_dim = p.cache.head_dim;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (first + i * kHeadThreads < head_dim) sum = fma(x[i], x[i], sum);
  for (int half = kHeadThreads / 2; half > 0; half /= 2) sum += __shfl_xor_sync(kFullMask, sum, half);
  if (!head.norm) return;
  const float scale = rsqrt_f32(sum / static_cast<float>(head_dim) + p.norm_eps);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int d = first + i * kHeadThreads;
    if (d < head_dim) x[i] = x[i] * scale * to_float(load(static_cast<const T*>(head.norm) + d));
  }
}

// The pair (a, b) becomes (a cos - b sin, b cos + a sin); `row` holds all elements of the head.
__device__ __forceinline__ float rotate(const AppendKvParams& p, const float* cos, const float* sin,
                                        const float* row, int d) {
  const int half = p.rotary_dim / 2;
  if (d >= 2 * half) return row[d];
  const bool second = p.interleaved ? d % 2 != 0 : d >= half;
  const int pair = p.interleaved ? d / 2 : second ? d - half : d;
  const float other = row[p.interleaved ? d ^ 1 : second ? pair : pair + half];
  const float product = other * load_read_only(sin + pair);
  return fma(row[d], load_read_only(cos + pair), second ? product : -product);
}

// The head's codes, and its scale where rows have their own; all lanes take part, some without a head.
__device__ __forceinline__ void store_codes(const KVCacheView& cache, const Head& head, int first,
                                            const float (&x)[kPerThread]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) largest = max(largest, magnitude_bits(x[i]));
  for (int half = kHeadThreads / 2; half > 0; half /= 2)
    largest = max(largest, __shfl_xor_sync(kFullMask, largest, half));
  if (!head.scale) return;
  const float scale = cache.tensor_scales ? load_read_only(head.scale) : quantize_scale(largest, kFloat8Max);
  if (!cache.tensor_scales && first == 0) store(head.scale, scale);
  float8_t* const to = static_cast<float8_t*>(head.to);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int d = first + i * kHeadThreads;
    if (d < cache.head_dim) store(to + d, quantize_float8(x[i], scale));
  }
}

// registers: <= 80
template <class T, class C>
__global__ void __launch_bounds__(kThreads) append_kv_kernel(const AppendKvParams p) {
  const int request = static_cast<int>(blockIdx.x), node = static_cast<int>(blockIdx.y);
  if (node >= load_read_only(p.num_nodes + request)) return;
  SharedMemory& shared = shared_memory<SharedMemory>();
  const int in_block = static_cast<int>(threadIdx.x) / kHeadThreads,
            first = static_cast<int>(threadIdx.x) % kHeadThreads;
  const int head_dim = p.cache.head_dim;
  const int64_t length = max(load_read_only(p.seq_lens + request), 0);
  const Head head =
      find_head<T, C>(p, request, node, length, static_cast<int>(blockIdx.z) * kHeadsPerBlock + in_block);
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
  if (p.q_norm || p.k_norm) normalise<T>(p, head, first, x);
  float* const row = shared.row[in_block];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) row[first + i * kHeadThreads] = x[i];
  __syncwarp();
  if (!kCodes<C> && !to) return;

  int64_t position = 0;
  if (p.rotary_dim > 0) {
    const int64_t wanted = length + load_read_only(p.depths + int64_t{request} * p.max_nodes + node);
    position = wanted < 0 ? 0 : min(wanted, int64_t{p.max_positions} - 1);
  }
  const float* const cos = p.cos + position * (p.rotary_dim / 2);
  const float* const sin = p.sin + position * (p.rotary_dim / 2);
  if constexpr (kCodes<C>) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int d = first + i * kHeadThreads;
      if (to && head.rotates && d < head_dim) x[i] = rotate(p, cos, sin, row, d);
    }
    store_codes(p.cache, head, first, x);
    if (!to || head.scale) return;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int d = first + i * kHeadThreads;
    if (d >= head_dim) continue;
    if constexpr (kCodes<C>)
      store(to + d, from_float<T>(x[i]));  // of q
    else
      store(to + d, head.rotates ? from_float<T>(rotate(p, cos, sin, row, d)) : raw[i]);
  }
}

}  // namespace

void append_kv(const AppendKvParams& p, CUstream_st* stream) {
  validate(p);
  const int heads = p.num_heads + 2 * p.cache.num_kv_heads;
  const LaunchConfig config{dim3(static_cast<unsigned>(p.batch_size), static_cast<unsigned>(p.max_nodes),
                                 static_cast<unsigned>(ceil_div(heads, kHeadsPerBlock))),
                            dim3(kThreads), stream, sizeof(SharedMemory)};
  dispatch(FloatTypes{}, p.dtype, "q", [&](auto type) {
    using T = typename decltype(type)::type;
    p.cache.dtype == DType::kFloat8E4M3 ? launch(append_kv_kernel<T, float8_t>, config, p)
                                        : launch(append_kv_kernel<T, T>, config, p);
  });
}

}  // namespace eagle::cuda
