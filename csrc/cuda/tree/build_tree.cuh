#pragma once
// Reranking of one request's candidates by one block: the body of build_tree, and of the end of a larger
// kernel.
//
// 1. effective scores: thread t has candidates t, t + threads, ...; pointer jumping towards the root
// 2. selection: 8 bits of the score at a time, ties by index with a bit per candidate
// 3. thread n has node n: the root is node 0, then the chosen candidates in flat order; order, links, masks
// Everything between the candidates and the tree stays in shared memory: 43 KB up to 1024 candidates, 88 KB
// for more.
#include "common/numeric.h"
#include "cuda/device/block.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/tree/ancestors.cuh"
#include "cuda/tree/score_key.cuh"
#include "eagle_cuda/tree.h"

namespace eagle::cuda {

inline constexpr int kRadixPasses = 32 / kRadixBits;

// A set of candidates by bits, with the number of members in all words before each.
template <int kCandidates>
struct CandidateSet {
  uint32_t words[kCandidates / 32];
  int32_t before[kCandidates / 32];

  __device__ bool has(int i) const { return (words[i / 32] >> (i % 32) & 1) != 0; }
  __device__ int members_below(int i) const {
    return before[i / 32] + __popc(words[i / 32] & bits_below(i % 32));
  }
};

template <int kCandidates>
struct BuildShared {
  int32_t node_limit;
  int32_t num_chosen;

  // Of candidates.
  float scores[kCandidates];  // smallest score of the candidate and the ancestors joined so far
  int16_t ups[kCandidates];   // nearest ancestor that is not joined yet, -1 none
  int32_t histograms[kRadixPasses][kRadixBins];
  uint32_t above[kCandidates / 32];  // better than the threshold
  uint32_t equal[kCandidates / 32];  // at the threshold
  CandidateSet<kCandidates> chosen;

  // Of nodes in flat order.
  int32_t candidates[kMaxTreeNodes];
  int32_t parents[kMaxTreeNodes];
  float node_scores[kMaxTreeNodes];
  uint32_t best_keys[kMaxTreeNodes];                 // largest score key among the children
  int32_t best_children[kMaxTreeNodes];              // first child with it
  uint32_t chain[kMaxNodeWords];                     // nodes on the chain of best children, root included
  int32_t slots[kMaxTreeNodes];                      // place in the tree
  uint32_t children[kMaxTreeNodes * kMaxNodeWords];  // [max_nodes, words]

  AncestorWords ancestors;
};

// The parents of a thread's own candidates, two in a register.
template <int kItems>
struct OwnParents {
  uint32_t pairs[kItems / 2];

  __device__ int operator[](int j) const { return static_cast<int16_t>(pairs[j / 2] >> (j % 2 * 16)); }
};

// Scores and parents of the candidates of a request, from `first` on in p's arrays, into shared memory; whose
// way to the root is broken has neither. Whether any of the thread's has a parent.
template <int kItems, int kCandidates>
__device__ __forceinline__ bool take_candidates(const BuildTreeParams& p, int64_t first, int count,
                                                OwnParents<kItems>& own, BuildShared<kCandidates>& shared) {
  constexpr int kAtOnce = kItems < 16 ? kItems : 16;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  bool unfinished = false;
#pragma unroll
  for (int j = 0; j < kItems / 2; ++j) own.pairs[j] = 0;
#pragma unroll
  for (int part = 0; part < kItems; part += kAtOnce) {
    if (part * threads >= count) break;
    if (part > 0) __syncthreads();  // so that registers hold the one part
    int parents[kAtOnce];
    float scores[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = thread + (part + j) * threads;
      parents[j] = i < count ? load(p.candidate_parents + first + i) : -1;
      scores[j] = i < count ? load(p.candidate_scores + first + i) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = thread + (part + j) * threads, parent = parents[j];
      if (i >= count) continue;
      const bool linked = parent >= -1 && parent < i && scores[j] == scores[j];
      const int up = linked ? parent : -1;
      own.pairs[(part + j) / 2] |= (static_cast<uint32_t>(up) & 0xffffu) << (j % 2 * 16);
      shared.scores[i] = linked ? scores[j] : kNegativeInfinity;
      shared.ups[i] = static_cast<int16_t>(up);
      unfinished |= up >= 0;
    }
  }
  return unfinished;
}

// Effective scores, in shared.scores: the smallest on the way from the root. Of equal ones (0 and -0) the one
// nearest to the root stands, as in a walk from there.
template <int kItems, int kCandidates>
__device__ __forceinline__ void join_scores(bool unfinished, int count, BuildShared<kCandidates>& shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  // Some at a time: none is written while another reads it, and registers hold only those.
  constexpr int kAtOnce = kItems < 8 ? kItems : 8;
  for (int distance = 1; __syncthreads_or(unfinished) && distance < kCandidates; distance *= 2) {
    unfinished = false;
#pragma unroll 1
    for (int first = thread; first - thread < count; first += kAtOnce * threads) {
      float scores[kAtOnce];
      int ups[kAtOnce];
      if (first != thread) __syncthreads();
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * threads;
        const int up = i < count ? shared.ups[i] : -1;
        ups[j] = -2;  // nothing to write
        if (up < 0) continue;
        const float score = shared.scores[i], limit = shared.scores[up];
        scores[j] = score < limit ? score : limit;
        ups[j] = shared.ups[up];
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (ups[j] == -2) continue;
        shared.scores[first + j * threads] = scores[j];
        shared.ups[first + j * threads] = static_cast<int16_t>(ups[j]);
        unfinished |= ups[j] >= 0;
      }
    }
  }
}

// Fills shared.chosen and shared.num_chosen: the `wanted` best by shared.scores, 1 <= wanted <= count, as far
// as they are usable. Each thread looks at the scores that it wrote.
template <int kItems, int kCandidates>
__device__ __forceinline__ void choose(int count, int wanted, BuildShared<kCandidates>& shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const uint32_t unusable = score_key(kNegativeInfinity);
  const auto key_of = [&](int i) { return i < count ? score_key(shared.scores[i]) : 0; };

  // The `wanted`-th largest key, as far down as it takes: candidates with larger bits are chosen, and `ties`
  // of those with equal bits.
  uint32_t bits = 0;
  int shift = 32, ties = wanted;
  for (int pass = 0; pass < kRadixPasses; ++pass) {
#pragma unroll 4
    for (int i = thread; i < count; i += threads) {
      const uint32_t key = key_of(i);
      if (pass == 0 || key >> shift == bits)
        atomicAdd(&shared.histograms[pass][radix_bin(key >> (shift - kRadixBits) & (kRadixBins - 1))], 1);
    }
    __syncthreads();
    const RadixDigit<int32_t> found = find_digit(shared.histograms[pass], ties);
    bits = bits << kRadixBits | found.digit;
    shift -= kRadixBits;
    ties -= found.above;
    if (ties == found.count) break;
  }
#pragma unroll 4
  for (int j = 0; j < kItems; ++j) {
    const int i = thread + j * threads;
    const uint32_t key = key_of(i);
    const bool usable = i < count && key > unusable;
    const uint32_t above = __ballot_sync(kFullMask, usable && key >> shift > bits);
    const uint32_t equal = __ballot_sync(kFullMask, usable && key >> shift == bits);
    if (lane_id() == 0) {
      shared.above[i / 32] = above;
      shared.equal[i / 32] = equal;
    }
  }
  __syncthreads();

  // Of equal ones the first in flat order. One warp: at most 256 words.
  if (warp_id() == 0) {
    constexpr int kWords = kCandidates / 32 / kWarpSize;
    int equal = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) equal += __popc(shared.equal[lane_id() * kWords + w]);
    int left = ties - (warp_inclusive_sum(equal) - equal), members = 0;
    uint32_t words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t word = shared.equal[lane_id() * kWords + w];
      const int here = __popc(word);
      if (left < here) word &= left <= 0 ? 0 : bits_below(nth_set_bit(word, left));
      left -= here;
      words[w] = word | shared.above[lane_id() * kWords + w];
      members += __popc(words[w]);
    }
    int before = warp_inclusive_sum(members) - members;
    if (lane_id() == kWarpSize - 1) shared.num_chosen = before + members;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      shared.chosen.words[lane_id() * kWords + w] = words[w];
      shared.chosen.before[lane_id() * kWords + w] = before;
      before += __popc(words[w]);
    }
  }
  __syncthreads();
}

// Slots of the nodes: the chain of best-scoring children first (of equal ones the first in flat order), then
// the others in flat order.
template <int kCandidates>
__device__ __forceinline__ void order_by_path(int nodes, BuildShared<kCandidates>& shared) {
  const int node = static_cast<int>(threadIdx.x);
  const bool child = node > 0 && node < nodes;
  const int parent = child ? shared.parents[node] : -1;
  const uint32_t key = child ? score_key(shared.node_scores[node]) : 0;
  if (child) atomicMax(&shared.best_keys[parent], key);
  __syncthreads();
  if (child && shared.best_keys[parent] == key) atomicMin(&shared.best_children[parent], node);
  __syncthreads();

  // The chain: the root, and the nodes that are best children together with all their ancestors.
  if (node < nodes) {
    shared.ancestors.up[0][node] = parent;
    shared.ancestors.words[0][node] = child && shared.best_children[parent] != node;
  }
  const int copy = join_ancestors(shared.ancestors, nodes, 1);
  const bool on_chain = node < nodes && shared.ancestors.words[copy][node] == 0;
  const uint32_t chain_of_warp = __ballot_sync(kFullMask, on_chain);
  if (lane_id() == 0 && warp_id() < kMaxNodeWords) shared.chain[warp_id()] = chain_of_warp;
  __syncthreads();
  if (node < nodes) {
    const int before = members_below(shared.chain, node);
    shared.slots[node] = on_chain ? before : members_below(shared.chain, kMaxTreeNodes) + node - before;
  }
}

// The tree of a request from its first `count` candidates, at most kThreads x kItems of its p.num_candidates
// and at least all that are to be counted: those behind them are not read. A block of kThreads, all of whom
// take part. `shared` is free before and behind it only with a barrier of the caller's. What it reads may
// have been written in the same launch.
template <int kThreads, int kItems>
__device__ __forceinline__ void build_request(const BuildTreeParams& p, int request, int count,
                                              BuildShared<kThreads * kItems>& shared) {
  static_assert(kThreads >= kMaxTreeNodes && kThreads * kItems % (32 * kWarpSize) == 0);
  const int64_t candidate_row = int64_t{request} * p.num_candidates, row = int64_t{request} * p.max_nodes;
  const int thread = static_cast<int>(threadIdx.x), words = ceil_div(p.max_nodes, 32);

  // The candidates are read before it is known whether the request is absent: one latency instead of two.
  OwnParents<kItems> own;
  const bool unfinished = take_candidates(p, candidate_row, count, own, shared);
  if (thread == 0) {
    shared.node_limit = p.node_limit ? load(p.node_limit + request) : p.max_nodes;
    shared.num_chosen = 0;
  }
  for (int i = thread; i < kRadixPasses * kRadixBins; i += kThreads)
    shared.histograms[i / kRadixBins][i % kRadixBins] = 0;
  for (int i = thread; i < p.max_nodes * words; i += kThreads) shared.children[i] = 0;
  if (thread < kMaxTreeNodes) {
    shared.best_keys[thread] = 0;
    shared.best_children[thread] = kMaxTreeNodes;
  }
  __syncthreads();
  const int limit = min(max(shared.node_limit, 0), p.max_nodes);
  const int wanted = min(max(limit - 1, 0), count);

  if (wanted > 0) {
    join_scores<kItems>(unfinished, count, shared);
    choose<kItems>(count, wanted, shared);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int i = thread + j * kThreads;
      if (!shared.chosen.has(i)) continue;
      const int parent = own[j], node = 1 + shared.chosen.members_below(i);
      shared.candidates[node] = i;
      shared.parents[node] = parent < 0 ? 0 : 1 + shared.chosen.members_below(parent);
      shared.node_scores[node] = shared.scores[i];
    }
    __syncthreads();
  }
  const int nodes = limit == 0 ? 0 : 1 + shared.num_chosen;

  // From here on thread n has node n in flat order, until the tree is stored.
  const int node = thread;
  const bool exists = node < nodes, child = exists && node > 0;
  const int candidate = child ? shared.candidates[node] : -1, parent = child ? shared.parents[node] : -1;
  int32_t token = 0;
  if (exists) token = load(child ? p.candidate_tokens + candidate_row + candidate : p.root_tokens + request);
  if (child) atomicOr(&shared.children[parent * words + node / 32], uint32_t{1} << (node % 32));
  if (p.order == TreeOrder::kPath)
    order_by_path(nodes, shared);
  else if (exists)
    shared.slots[node] = node;
  __syncthreads();

  // Ancestor masks by slots.
  if (exists) shared.ancestors.up[0][shared.slots[node]] = child ? shared.slots[parent] : -1;
  for (int i = thread; i < nodes * words; i += kThreads) {
    const int slot = i / words;
    shared.ancestors.words[0][i] = slot / 32 == i % words ? uint32_t{1} << (slot % 32) : 0;
  }
  const uint32_t* const masks = shared.ancestors.words[join_ancestors(shared.ancestors, nodes, words)];

  // The tree.
  if (node < p.max_nodes) {
    const int64_t out = row + (exists ? shared.slots[node] : node);
    int depth = 0, first_child = -1, next_sibling = -1;
    if (exists) {
      for (int w = 0; w < words; ++w) depth += __popc(masks[shared.slots[node] * words + w]);
      --depth;
      first_child = next_member(&shared.children[node * words], words, 0);
    }
    if (child) next_sibling = next_member(&shared.children[parent * words], words, node + 1);
    store(p.tree.tokens + out, token);
    store(p.tree.parents + out, child ? shared.slots[parent] : exists ? -1 : -2);
    store(p.tree.depths + out, depth);
    store(p.tree.scores + out, child ? shared.node_scores[node] : 0.0f);
    store(p.tree.first_child + out, first_child < 0 ? -1 : shared.slots[first_child]);
    store(p.tree.next_sibling + out, next_sibling < 0 ? -1 : shared.slots[next_sibling]);
    if (p.selected) store(p.selected + out, candidate);
  }
  if (thread == 0) store(p.tree.num_nodes + request, nodes);
  for (int i = thread; i < p.max_nodes * words; i += kThreads)
    store(p.tree.mask + row * words + i, i < nodes * words ? static_cast<int32_t>(masks[i]) : 0);
}

}  // namespace eagle::cuda
