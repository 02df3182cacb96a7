// verify_rejection: one block walks one request's tree, testing the children of each visited node.
//
// grid: [B]
//
// A visited node costs two reads of its row of p (the largest entry, the sum), which the cache serves the
// second time, and where a token is drawn part of a third; the sampled schemes as many of q, and one of both
// for each child that is rejected. Rows of nodes that are not visited are not read. All threads decide alike:
// what they decide by are sums over the block.
//
// A rejected child of a sampled scheme changes all masses. They are not kept, there is no room: whoever needs
// one repeats the rounds so far from p and q.
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/verify/mass_row.cuh"
#include "cuda/verify/stop_tokens.cuh"
#include "eagle_cuda/verify.h"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 512, kSmallThreads = kWarpSize;
constexpr int64_t kSmallVocab = 248;  // as sample_tokens: what one warp reads at once
constexpr int32_t kStopToken = 1, kLength = 2;

// A child that was rejected: what the masses were divided by.
struct Round {
  PartOf target, proposal;
};

template <int kThreads>
struct SharedMemory {
  int32_t tokens[kMaxRejectionNodes];
  int32_t first_child[kMaxRejectionNodes];
  int32_t next_sibling[kMaxRejectionNodes];
  int32_t rejected[kMaxRejectionNodes];  // tokens
  Round rounds[kMaxRejectionNodes];
  uint64_t segments[RowSums<kThreads>::kSegments];
  BlockScratch<kThreads> scratch;
};

template <int kThreads>
struct Walk {
  const VerifyRejectionParams& p;
  SharedMemory<kThreads>& shared;
  int64_t request;
  int32_t nodes, seq_len;
  int32_t visited = 0, flags = 0;
  int32_t accepted = -1;     // of choose(): the child that carries the emitted token
  int32_t num_rejected = 0;  // different tokens of children of the node

  __device__ __forceinline__ uint64_t noise(int32_t index, uint32_t stream) const {
    const uint32_t position = static_cast<uint32_t>(seq_len) + static_cast<uint32_t>(visited) + 1;
    return uniform_from_noise(static_cast<uint64_t>(load_read_only(p.seeds + request)),
                              static_cast<uint32_t>(index), position, stream);
  }
  __device__ __forceinline__ uint64_t coin(int32_t node, int32_t index) const {
    return p.coins ? uniform_of(load_read_only(p.coins + request * p.max_nodes + node))
                   : noise(index, kAcceptStream);
  }
  __device__ __forceinline__ uint64_t final_coin() const {
    return p.coins ? uniform_of(load_read_only(p.final_coins + request)) : noise(0, kResidualStream);
  }

  __device__ __forceinline__ bool exists(int32_t node) const { return node >= 0 && node < nodes; }
  __device__ __forceinline__ bool was_rejected(int32_t token) const {
    for (int32_t i = 0; i < num_rejected; ++i)
      if (shared.rejected[i] == token) return true;
    return false;
  }

  // The mass of a token that is left: p less what was rejected, or, where children were sampled, after the
  // rounds so far.
  __device__ __forceinline__ uint64_t remainder(uint64_t w, uint64_t v) const {
    for (int32_t i = 0; i < num_rejected; ++i) {
      const Round& round = shared.rounds[i];
      const uint64_t a = round.target.of(w), b = round.proposal.of(v);
      w = a > b ? a - b : 0;
    }
    return w;
  }

  // The token that the node emits.
  __device__ __forceinline__ int32_t choose(int32_t node) {
    const bool sampled = p.draft_probs != nullptr, walk = p.scheme == RejectionScheme::kCoinWalk;
    accepted = -1;
    num_rejected = 0;

    // Scale and sum of q, then of p, whose pieces stay in shared.segments.
    Row<float> row{}, draft{};
    MassScale scale{}, draft_scale{};
    uint64_t left = 0, draft_left = 0;
#pragma unroll 1
    for (bool of_target = !sampled;; of_target = true) {
      draft = row, draft_scale = scale, draft_left = left;
      const int64_t (&strides)[2] = of_target ? p.target_strides : p.draft_strides;
      row = Row<float>::of(
          (of_target ? p.target_probs : p.draft_probs) + request * strides[0] + node * strides[1],
          p.vocab_size);
      const RowSums<kThreads> sums{row, shared.segments, shared.scratch};
      scale = mass_scale(sums.largest(flags), p.vocab_size);
      left = sums.sum([&](uint32_t first, uint64_t (&w)[4]) {
        float x[4];
        sums.read(row, first, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = fixed_mass(x[i], scale);
      });
      if (of_target) break;
    }
    const RowSums<kThreads> sums{row, shared.segments, shared.scratch};
    const uint64_t sum = left;
    if (sum == 0) flags |= kNoMass;

    const bool with_single = p.threshold_single < 1.0;
    const uint64_t single = with_single ? fixed_threshold(p.threshold_single) : 0;
    uint64_t reached = walk ? multiply_high(coin(node, 0), sum) : 0;
    if (p.threshold_acc < 1.0) reached = multiply_high(reached, fixed_threshold(p.threshold_acc));

    // Sibling lists have at most `nodes` entries, whatever the links say.
    const int32_t most = p.scheme == RejectionScheme::kChain ? 1 : nodes;
    int32_t child = shared.first_child[node];
    for (int32_t count = 0; count < most && exists(child); child = shared.next_sibling[child], ++count) {
      const int32_t token = shared.tokens[child];
      const bool known = token >= 0 && token < p.vocab_size, again = was_rejected(token);
      const uint64_t v = sampled && known ? fixed_mass(draft.at(token), draft_scale) : 0;
      const bool possible = known && (!sampled || (v > 0 && !again));
      if (!possible) flags |= kBadProposal;
      if (!possible || again || left == 0) continue;
      const uint64_t w =
          sampled ? remainder(fixed_mass(row.at(token), scale), v) : fixed_mass(row.at(token), scale);
      Round round{};
      bool accept;
      if (sampled) {
        round = {part_of(left), part_of(draft_left)};
        accept = below(coin(child, token), round.target.of(w), round.proposal.of(v));
      } else if (walk) {
        accept = w > 0 && (reached < sum - left + w || (with_single && reaches(w, sum, single)));
      } else {
        accept = below(coin(child, token), w, left);
      }
      if (!accept) {
        __syncthreads();  // the lists may still be read
        if (threadIdx.x == 0) {
          shared.rejected[num_rejected] = token;
          shared.rounds[num_rejected] = round;
          if (!sampled) shared.segments[sums.segment_of(token)] -= w;
        }
        __syncthreads();
        ++num_rejected;
        if (sampled) {
          left = sums.sum([&](uint32_t first, uint64_t (&masses)[4]) {
            float x[4], y[4];
            sums.read(row, first, x);
            sums.read(draft, first, y);
#pragma unroll
            for (int i = 0; i < 4; ++i)
              masses[i] = remainder(fixed_mass(x[i], scale), fixed_mass(y[i], draft_scale));
          });
          draft_left -= v;
          accept = left == 0;
        } else {
          left -= w;
        }
      }
      if (accept) {
        accepted = child;
        return token;
      }
    }
    if (left == 0) return 0;
    return static_cast<int32_t>(sums.find(multiply_high(final_coin(), left), [&](uint32_t token) {
      const uint64_t w = fixed_mass(row.at(token), scale);
      if (sampled) return remainder(w, fixed_mass(draft.at(token), draft_scale));
      return was_rejected(static_cast<int32_t>(token)) ? 0 : w;
    }));
  }
};

// registers: <= 128
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1) verify_rejection_kernel(const VerifyRejectionParams p) {
  auto& shared = shared_memory<SharedMemory<kThreads>>();
  const int64_t request = blockIdx.x, row = request * p.max_nodes;
  const int thread = static_cast<int>(threadIdx.x);

  const int32_t nodes = min(load_read_only(p.num_nodes + request), p.max_nodes);
  const int64_t budget = p.budget ? load_read_only(p.budget + request) : INT64_MAX;
  const StopTokens stop(p, request, lane_id());
  for (int i = thread; i < p.max_nodes; i += kThreads) {
    shared.tokens[i] = load_read_only(p.tokens + row + i);
    shared.first_child[i] = load_read_only(p.first_child + row + i);
    shared.next_sibling[i] = load_read_only(p.next_sibling + row + i);
  }
  // Not through the read-only path: new_seq_lens may be seq_lens.
  Walk<kThreads> walk{p, shared, request, nodes, load(p.seq_lens + request)};
  __syncthreads();

  int32_t* const path = p.path + request * p.max_path;
  int32_t* const emitted = p.emitted + request * p.max_path;
  int32_t finished = nodes > 0 && budget <= 0 ? kLength : 0, token = 0;
  for (int32_t node = nodes > 0 && budget > 0 ? 0 : -1; node >= 0 && walk.visited < p.max_path;) {
    token = walk.choose(node);
    if (thread == 0) {
      store(path + walk.visited, node);
      store(emitted + walk.visited, token);
    }
    ++walk.visited;
    if (stop.contain(token)) {
      finished = kStopToken;
      break;
    }
    if (walk.visited >= budget) {
      finished = kLength;
      break;
    }
    node = walk.accepted;
  }

  for (int64_t i = walk.visited + thread; i < p.max_path; i += kThreads) {
    store(path + i, -1);
    store(emitted + i, -1);
  }
  if (thread != 0) return;
  store(p.num_accepted + request, walk.visited - 1);
  store(p.next_tokens + request, token);
  store(p.finished + request, finished);
  store(p.flags + request, walk.flags);
  const int64_t seq_len = int64_t{walk.seq_len} + walk.visited;  // a garbage length must not overflow
  store(p.new_seq_lens + request, static_cast<int32_t>(min(seq_len, int64_t{INT32_MAX})));
}

}  // namespace

void verify_rejection(const VerifyRejectionParams& p, CUstream_st* stream) {
  validate(p);
  const auto start = [&](auto threads) {
    constexpr int kBlock = threads();
    launch(verify_rejection_kernel<kBlock>,
           {dim3(static_cast<unsigned>(p.batch_size)), dim3(kBlock), stream, sizeof(SharedMemory<kBlock>)},
           p);
  };
  if (p.vocab_size <= kSmallVocab)
    start(std::integral_constant<int, kSmallThreads>{});
  else
    start(std::integral_constant<int, kThreads>{});
}

}  // namespace eagle::cuda
