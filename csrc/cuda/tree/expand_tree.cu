// One level of growth: scores of the new candidates, and the beam that grows the next level.
//
// grid: [batch_size]   one block grows one request (expand_tree.cuh); thread i has candidate i of the level
#include "cuda/launch.h"
#include "cuda/tree/expand_tree.cuh"

namespace eagle::cuda {
namespace {

// registers: <= 40
__global__ void __launch_bounds__(kMaxLevelCandidates)
    expand_tree_kernel(const ExpandTreeParams p, const LevelShape level,
                       const __grid_constant__ TreeShape shape) {
  TreeExpansion<1>(p, level, shape, static_cast<int>(blockIdx.x), shared_memory<ExpandShared>()).run();
}

}  // namespace

void expand_tree(const ExpandTreeParams& p, CUstream_st* stream) {
  validate(p);
  const int count = (p.level == 1 ? 1 : p.top_k) * p.top_k;
  launch(expand_tree_kernel,
         {.grid = static_cast<unsigned>(p.batch_size),
          .block = static_cast<unsigned>(ceil_div(count, kWarpSize) * kWarpSize),
          .stream = stream,
          .shared_bytes = sizeof(ExpandShared)},
         p, level_shape(p.top_k, p.level, p.levels), p.shape ? *p.shape : TreeShape{});
}

}  // namespace eagle::cuda
