// Reranking: the best candidates of all levels as a DraftTree.
//
// grid: [batch_size]   one block builds one tree (build_tree.cuh), in one launch
#include "cuda/launch.h"
#include "cuda/tree/build_tree.cuh"

namespace eagle::cuda {
namespace {

// registers: <= 64
template <int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads) build_tree_kernel(const BuildTreeParams p) {
  build_request<kThreads, kItems>(p, static_cast<int>(blockIdx.x), p.num_candidates,
                                  shared_memory<BuildShared<kThreads * kItems>>());
}

template <int kThreads, int kItems>
void launch_for(const BuildTreeParams& p, CUstream_st* stream) {
  launch(build_tree_kernel<kThreads, kItems>,
         {.grid = static_cast<unsigned>(p.batch_size),
          .block = kThreads,
          .stream = stream,
          .shared_bytes = sizeof(BuildShared<kThreads * kItems>)},
         p);
}

}  // namespace

void build_tree(const BuildTreeParams& p, CUstream_st* stream) {
  validate(p);
  // What a block has without asking, and what every device from sm_80 on grants.
  static_assert(sizeof(BuildShared<256 * 4>) <= 48 * 1024 && sizeof(BuildShared<1024 * 8>) <= 99 * 1024);
  p.num_candidates <= 1024 ? launch_for<256, 4>(p, stream) : launch_for<1024, 8>(p, stream);
}

}  // namespace eagle::cuda
