// append_kv: optional norm and rotation of every q and k head, then k and v into the cache, in one launch.
//
// Grid: x requests, y nodes, z blocks of kHeadsPerBlock heads: first those of q, then of k, then of v. Half a
// warp has one head (append_kv.cuh). A block whose node does not exist ends.
#include <cuda_runtime.h>

#include "common/dispatch.h"
#include "cuda/attention/append_kv.cuh"
#include "cuda/launch.h"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadsPerBlock = kThreads / kHeadThreads;
constexpr int kMaxHeadDim = 256;

using SharedMemory = AppendShared<kHeadsPerBlock, kMaxHeadDim>;

// registers: <= 80
template <class T, class C>
__global__ void __launch_bounds__(kThreads) append_kv_kernel(const AppendKvParams p) {
  const int request = static_cast<int>(blockIdx.x), node = static_cast<int>(blockIdx.y);
  if (node >= load(p.num_nodes + request)) return;
  const int in_block = static_cast<int>(threadIdx.x) / kHeadThreads;
  AppendKv<T, C, kMaxHeadDim>(p).run(request, node, static_cast<int>(blockIdx.z) * kHeadsPerBlock + in_block,
                                     true, shared_memory<SharedMemory>().row[in_block]);
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
