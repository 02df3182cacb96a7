// verify: one warp walks one request's tree, from the root along the children that equal the target's own
// token.
//
// The cost is latency: every step of the walk depends on the one before. So tokens, links and target tokens
// of the request are staged in shared memory first, by loads that all fly together, and a step costs one
// shared read. Trees of more than kStagedNodes nodes are walked in global memory instead. All lanes walk
// alike; they differ in which stop token they hold and which entries of the path they keep until 32 can be
// written at once.
#include "eagle_cuda/verify.h"

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"
#include "cuda/verify/stop_tokens.cuh"

namespace eagle::cuda {
namespace {

constexpr int kWarps = 4;  // requests per block, one for each scheduler of a multiprocessor
constexpr int kStagedNodes = 256;
constexpr int32_t kStopToken = 1, kLength = 2;

struct alignas(16) Node {
  int32_t token, first_child, next_sibling, target;
};

struct SharedMemory {
  Node nodes[kWarps][kStagedNodes];
};

__device__ __forceinline__ Node load_node(const VerifyParams& p, int64_t index) {
  return {load_read_only(p.tokens + index), load_read_only(p.first_child + index),
          load_read_only(p.next_sibling + index), load_read_only(p.target_tokens + index)};
}

// registers: <= 72
template <bool kStaged>
__global__ void __launch_bounds__(kWarps* kWarpSize) verify_kernel(const VerifyParams p) {
  const int lane = lane_id();
  const int64_t request = int64_t{blockIdx.x} * kWarps + warp_id();
  if (request >= p.batch_size) return;
  const int64_t row = request * p.max_nodes;

  // All loads that do not depend on each other, before the first use of one.
  const int32_t nodes = min(load_read_only(p.num_nodes + request), p.max_nodes);
  const int64_t budget = p.budget ? load_read_only(p.budget + request) : INT64_MAX;
  const StopTokens stop(p, request, lane);
  if constexpr (kStaged) {
    Node* const staged = shared_memory<SharedMemory>().nodes[warp_id()];
    for (int i = lane; i < p.max_nodes; i += kWarpSize) staged[i] = load_node(p, row + i);
    __syncwarp();
  }
  const auto node_at = [&](int32_t i) {
    if constexpr (kStaged) return shared_memory<SharedMemory>().nodes[warp_id()][i];
    return load_node(p, row + i);
  };

  int32_t* const path = p.path + request * p.max_path;
  int32_t kept = -1;  // this lane's entry of the 32 that are written next
  int32_t visited = 0, emitted = 0;
  int32_t finished = nodes > 0 && budget <= 0 ? kLength : 0;
  int32_t node = nodes > 0 && budget > 0 ? 0 : -1;
  Node here = node == 0 ? node_at(0) : Node{};
  while (node >= 0 && visited < p.max_path) {
    if (visited % kWarpSize == lane) kept = node;
    if (++visited % kWarpSize == 0) {
      store(path + visited - kWarpSize + lane, kept);
      kept = -1;
    }
    emitted = here.target;
    if (stop.contain(emitted)) {
      finished = kStopToken;
      break;
    }
    if (visited >= budget) {
      finished = kLength;
      break;
    }
    // The first child in rank order that carries the token. A sibling list has at most `nodes` entries,
    // whatever the links say.
    node = -1;
    int32_t child = here.first_child;
    for (int32_t steps = 0; steps < nodes && child >= 0 && child < nodes; ++steps) {
      const Node candidate = node_at(child);
      if (candidate.token == emitted) {
        node = child;
        here = candidate;
        break;
      }
      child = candidate.next_sibling;
    }
  }

  const int64_t written = visited / kWarpSize * kWarpSize;
  for (int64_t i = written + lane; i < p.max_path; i += kWarpSize) {
    store(path + i, kept);
    kept = -1;
  }
  if (lane != 0) return;
  store(p.num_accepted + request, visited - 1);
  store(p.next_tokens + request, emitted);
  store(p.finished + request, finished);
  // Not through the read-only path: new_seq_lens may be seq_lens. A garbage length must not overflow.
  const int64_t seq_len = int64_t{load(p.seq_lens + request)} + visited;
  store(p.new_seq_lens + request, static_cast<int32_t>(min(seq_len, int64_t{INT32_MAX})));
}

}  // namespace

void verify(const VerifyParams& p, CUstream_st* stream) {
  validate(p);
  const bool staged = p.max_nodes <= kStagedNodes;
  const unsigned blocks = static_cast<unsigned>((int64_t{p.batch_size} + kWarps - 1) / kWarps);
  const LaunchConfig config{blocks, kWarps * kWarpSize, stream, staged ? sizeof(SharedMemory) : 0};
  launch(staged ? verify_kernel<true> : verify_kernel<false>, config, p);
}

}  // namespace eagle::cuda
