// The walk of a draft tree along the children that equal the target's own token.
#include <algorithm>
#include <limits>

#include "cpu/parallel.h"
#include "eagle_cuda/verify.h"

namespace eagle::cpu {
namespace {

constexpr int32_t kStopToken = 1, kLength = 2;

// The child of `node` that carries `token`, the first in rank order; -1 if none. A sibling list has at most
// `nodes` entries, whatever the links say.
int32_t matching_child(const VerifyParams& p, int64_t row, int32_t nodes, int32_t node, int32_t token) {
  int32_t child = p.first_child[row + node];
  for (int32_t steps = 0; steps < nodes && child >= 0 && child < nodes; ++steps) {
    if (p.tokens[row + child] == token) return child;
    child = p.next_sibling[row + child];
  }
  return -1;
}

void verify_request(const VerifyParams& p, int64_t request) {
  const int64_t row = request * p.max_nodes;
  const int32_t nodes = std::min(p.num_nodes[request], p.max_nodes);
  const int32_t* const stop = p.stop_tokens + request * p.num_stop_tokens;
  const auto is_stop = [&](int32_t token) {
    return token != -1 && std::find(stop, stop + p.num_stop_tokens, token) != stop + p.num_stop_tokens;
  };
  int32_t* const path = p.path + request * p.max_path;
  int32_t visited = 0, emitted = 0, finished = 0;

  const bool exhausted = p.budget && p.budget[request] <= 0;
  if (nodes > 0 && exhausted) finished = kLength;
  for (int32_t node = nodes > 0 && !exhausted ? 0 : -1; node >= 0 && visited < p.max_path;) {
    path[visited++] = node;
    emitted = p.target_tokens[row + node];
    if (is_stop(emitted)) {
      finished = kStopToken;
      break;
    }
    if (p.budget && visited >= p.budget[request]) {
      finished = kLength;
      break;
    }
    node = matching_child(p, row, nodes, node, emitted);
  }
  std::fill(path + visited, path + p.max_path, -1);
  p.num_accepted[request] = visited - 1;
  p.next_tokens[request] = emitted;
  p.finished[request] = finished;
  p.new_seq_lens[request] = static_cast<int32_t>(  // a garbage length must not overflow
      std::min<int64_t>(int64_t{p.seq_lens[request]} + visited, std::numeric_limits<int32_t>::max()));
}

}  // namespace

void verify(const VerifyParams& p) {
  validate(p);
  parallel_for(p.batch_size, 64, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) verify_request(p, request);
  });
}

}  // namespace eagle::cpu
