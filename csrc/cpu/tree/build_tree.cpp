// Reranking: the best candidates of all levels as a DraftTree (EAGLE-2's reranking phase).
#include <algorithm>
#include <limits>

#include "common/numeric.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "eagle_cuda/tree.h"

namespace eagle::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Larger scores, then smaller indices, have larger ranks.
uint64_t rank(float score, int index) {
  const uint32_t bits = float_bits(score + 0.0f);
  const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{key} << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}
int index_of(uint64_t rank) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank)); }

struct Work {
  float effective[kMaxCandidates];  // smallest score on the way from the root: never above the parent's
  uint64_t ranks[kMaxCandidates];
  int16_t slot[kMaxCandidates];   // node of a selected candidate, -1 otherwise
  int selected[kMaxTreeNodes];    // candidates in flat order
  int best_child[kMaxTreeNodes];  // of a selected candidate (index into `selected`), -1 none
};

// Fills work.selected; returns how many. Equal scores go to the smaller index, a child is never above its
// parent and stands behind it, so a chosen child's parent is always chosen too.
int select_candidates(const BuildTreeParams& p, int64_t request, int wanted, Work& work) {
  const float* const scores = p.candidate_scores + request * p.num_candidates;
  const int32_t* const parents = p.candidate_parents + request * p.num_candidates;
  int usable = 0;
  for (int i = 0; i < p.num_candidates; ++i) {
    const float limit = parents[i] == -1                    ? std::numeric_limits<float>::infinity()
                        : parents[i] >= 0 && parents[i] < i ? work.effective[parents[i]]
                                                            : kNegativeInfinity;
    const float score = scores[i] < limit ? scores[i] : limit;
    work.effective[i] = scores[i] == scores[i] ? score : kNegativeInfinity;
    if (work.effective[i] > kNegativeInfinity) work.ranks[usable++] = rank(work.effective[i], i);
  }
  const int chosen = std::min(wanted, usable);
  if (chosen < usable)
    std::nth_element(work.ranks, work.ranks + chosen, work.ranks + usable, std::greater<uint64_t>());
  for (int i = 0; i < chosen; ++i) work.selected[i] = index_of(work.ranks[i]);
  std::sort(work.selected, work.selected + chosen);
  return chosen;
}

// Gives the chain of best-scoring children the first slots and the rest the flat order; under kCandidate all
// flat order.
void assign_slots(const BuildTreeParams& p, const int32_t* parents, int chosen, Work& work) {
  std::fill(work.slot, work.slot + p.num_candidates, int16_t{-1});
  int next = 1;
  if (p.order == TreeOrder::kPath) {
    // Index in `selected` of every candidate, for now in `slot`; children stand behind their parents.
    for (int i = 0; i < chosen; ++i) work.slot[work.selected[i]] = static_cast<int16_t>(i);
    int best_of_root = -1;
    std::fill(work.best_child, work.best_child + chosen, -1);
    for (int i = 0; i < chosen; ++i) {
      const int candidate = work.selected[i], parent = parents[candidate];
      int& best = parent == -1 ? best_of_root : work.best_child[work.slot[parent]];
      if (best == -1 || work.effective[candidate] > work.effective[work.selected[best]]) best = i;
    }
    for (int i = 0; i < chosen; ++i) work.slot[work.selected[i]] = -1;
    for (int i = best_of_root; i != -1; i = work.best_child[i])
      work.slot[work.selected[i]] = static_cast<int16_t>(next++);
  }
  for (int i = 0; i < chosen; ++i)
    if (work.slot[work.selected[i]] == -1) work.slot[work.selected[i]] = static_cast<int16_t>(next++);
}

void build_request(const BuildTreeParams& p, int64_t request, Work& work) {
  const int n = p.max_nodes, words = static_cast<int>(mask_words(n));
  const int64_t row = request * n, candidate_row = request * p.num_candidates;
  const DraftTree& t = p.tree;
  std::fill(t.tokens + row, t.tokens + row + n, 0);
  std::fill(t.parents + row, t.parents + row + n, -2);
  std::fill(t.depths + row, t.depths + row + n, 0);
  std::fill(t.mask + row * words, t.mask + (row + n) * words, 0);
  std::fill(t.scores + row, t.scores + row + n, 0.0f);
  std::fill(t.first_child + row, t.first_child + row + n, -1);
  std::fill(t.next_sibling + row, t.next_sibling + row + n, -1);
  if (p.selected) std::fill(p.selected + row, p.selected + row + n, -1);

  const int limit = p.node_limit ? std::clamp(p.node_limit[request], 0, n) : n;
  t.num_nodes[request] = 0;
  if (limit == 0) return;

  const int32_t* const parents = p.candidate_parents + candidate_row;
  const int chosen = select_candidates(p, request, limit - 1, work);
  assign_slots(p, parents, chosen, work);
  t.num_nodes[request] = chosen + 1;
  t.tokens[row] = p.root_tokens[request];
  t.parents[row] = -1;
  t.mask[row * words] = 1;

  // Last child linked so far of every node, so that siblings hang in flat candidate order.
  int last_child[kMaxTreeNodes];
  std::fill(last_child, last_child + chosen + 1, -1);
  for (int i = 0; i < chosen; ++i) {
    const int candidate = work.selected[i], node = work.slot[candidate];
    const int parent = parents[candidate] == -1 ? 0 : work.slot[parents[candidate]];
    t.tokens[row + node] = p.candidate_tokens[candidate_row + candidate];
    t.scores[row + node] = work.effective[candidate];
    t.parents[row + node] = parent;
    t.depths[row + node] = t.depths[row + parent] + 1;
    int32_t* const mask = t.mask + (row + node) * words;
    std::copy_n(t.mask + (row + parent) * words, words, mask);
    mask[node / 32] |= static_cast<int32_t>(uint32_t{1} << (node % 32));
    (last_child[parent] == -1 ? t.first_child[row + parent] : t.next_sibling[row + last_child[parent]]) =
        node;
    last_child[parent] = node;
    if (p.selected) p.selected[row + node] = candidate;
  }
}

}  // namespace

void build_tree(const BuildTreeParams& p) {
  validate(p);
  parallel_for(p.batch_size, 4, [&](int64_t begin, int64_t end) {
    struct BuildTree;
    Work& work = *scratch<Work, BuildTree>(1);
    for (int64_t request = begin; request < end; ++request) build_request(p, request, work);
  });
}

}  // namespace eagle::cpu
