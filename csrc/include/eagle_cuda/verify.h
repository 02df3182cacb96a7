#pragma once
// verify: which draft tokens the target accepts: the children that equal its own token (verify), or by tests
// of probabilities (verify_rejection).
#include <cstdint>

#include "eagle_cuda/tensor_view.h"

namespace eagle {

// Every visited node emits target_tokens[node]. The walk ends at a stop token (finished 1), when `budget`
// tokens have been emitted (finished 2; a stop token at the same place wins), or when no child equals the
// emitted token (finished 0). A request with num_nodes <= 0 or budget <= 0 emits nothing: num_accepted -1,
// next_tokens 0, path -1, new_seq_lens = seq_lens, finished 0 (2 if only the budget was at fault). Links
// outside [0, num_nodes) count as absent, a walk visits at most max_path nodes.
struct VerifyParams {
  int batch_size;       // B
  int max_nodes;        // N
  int max_path;         // P: width of path, root included
  int num_stop_tokens;  // S, 0 without stop tokens

  const int32_t* tokens;         // [B, N]
  const int32_t* first_child;    // [B, N]
  const int32_t* next_sibling;   // [B, N]
  const int32_t* num_nodes;      // [B]
  const int32_t* target_tokens;  // [B, N]  the target's token after each node
  const int32_t* seq_lens;       // [B]
  const int32_t* stop_tokens;    // [B, S]  -1 unused
  const int32_t* budget;         // [B] tokens that may still be emitted, or nullptr

  int32_t* path;          // [B, P]  visited nodes from the root, -1 padded
  int32_t* num_accepted;  // [B]     draft tokens kept: visited nodes - 1
  int32_t* next_tokens;   // [B]     last emitted token: the next root
  int32_t* finished;      // [B]     0 no, 1 stop token, 2 length
  int32_t* new_seq_lens;  // [B]     seq_lens + num_accepted + 1, at most INT32_MAX
};

// The tests of one visited node, whose children in rank order carry x_1 .. x_c. p: what target_probs holds
// for the node, q: what draft_probs holds, each divided by its sum. A child that passes is accepted and
// visited next; where none does, the node emits a token of what is left of p and the walk ends.
//   kPointMass    children chosen without chance (EAGLE-2 and -3): p_1 = p; x_j passes if u_j < p_j(x_j),
//   else
//                 p_{j+1} = p_j without x_j, renormalised. Exact.
//   kCoinWalk     the same law with one uniform: the first x_j with u < (p(x_1) + .. + p(x_j)) /
//   threshold_acc
//                 or p(x_j) >= threshold_single passes, if p(x_j) > 0. Exact at thresholds of 1, which is
//                 "off"; below 1 it emits too much of what was drafted.
//   kSampledTree  children drawn from q without replacement (EAGLE-1, SpecInfer): q_1 = q; x_j passes if
//                 u_j < p_j(x_j) / q_j(x_j), else p_{j+1} = max(p_j - q_j, 0), renormalised, and q_{j+1} =
//                 q_j without x_j, renormalised. Exact if the draws decided what is in the tree, no later
//                 choice.
//   kChain        kSampledTree that looks at the first child only: speculative sampling of a chain.
enum class RejectionScheme : uint8_t { kPointMass, kCoinWalk, kSampledTree, kChain };

// All of it in integers (common/fixed_mass.h). Masses w of p and v of q, relative to the row's largest, exact
// sums; u < a / b is multiply_high(u, b) < a. Sampled schemes: of equal parts of 2^62, the sum A of the a's
// (w at first) and the sum B of the v's not tried yet, x passes if multiply_high(u, v_x / B) < a_x / A; else
// every a becomes max(a / A - v / B, 0), and x passes after all if that leaves nothing (p and q equal but for
// rounding). The token that a node emits itself: the lowest whose masses up to and with it exceed
// multiply_high(u, their sum). So no token without mass is ever emitted or accepted.
//
// The uniforms are the caller's: the test of child i has coins[i] (kCoinWalk: that of node i's children has
// coins[i]), the last draw has final_coins, which must be independent. Or, with seeds, they are our noise, of
// 64 bits: Philox counter (child's token or 0 for kCoinWalk, seq_lens + visited nodes, kAcceptStream, 0), and
// (0, the same, kResidualStream, 0) for the last draw.
//
// NaN, infinite and negative entries of the rows that are read count as 0. A row without mass emits token 0.
// A child whose token is outside [0, V), equals an elder sibling's, or has no mass in q in a sampled scheme,
// is passed over. Absent requests, stop tokens, budget, max_path, links: as for verify; emitted tokens are
// cut off by a limit, never chosen otherwise.
struct VerifyRejectionParams {
  int batch_size;       // B
  int max_nodes;        // N, at most 256
  int max_path;         // P: width of path and emitted, root included
  int num_stop_tokens;  // S, 0 without stop tokens
  int64_t vocab_size;   // V
  RejectionScheme scheme;
  double threshold_single, threshold_acc;  // 0 to 1; other than 1 for kCoinWalk only

  const int32_t* tokens;        // [B, N]
  const int32_t* first_child;   // [B, N]
  const int32_t* next_sibling;  // [B, N]
  const int32_t* num_nodes;     // [B]
  const float* target_probs;    // [B, N, V]  row i: the target after node i; any sum; strides batch, node
  int64_t target_strides[2];
  const float*
      draft_probs;  // [B, N, V]  row i: what node i's children were drawn from; nullptr unless sampled
  int64_t draft_strides[2];
  const float* coins;          // [B, N] in [0, 1), with final_coins; or nullptr
  const float* final_coins;    // [B]
  const int64_t* seeds;        // [B]  bits of the 64-bit seed; or nullptr
  const int32_t* seq_lens;     // [B]
  const int32_t* stop_tokens;  // [B, S]  -1 unused
  const int32_t* budget;       // [B] tokens that may still be emitted, or nullptr

  int32_t* path;          // [B, P]  visited nodes from the root, -1 padded
  int32_t* num_accepted;  // [B]     draft tokens kept: visited nodes - 1
  int32_t* next_tokens;   // [B]     last emitted token: the next root
  int32_t* finished;      // [B]     0 no, 1 stop token, 2 length
  int32_t* new_seq_lens;  // [B]     seq_lens + num_accepted + 1, at most INT32_MAX
  int32_t* emitted;       // [B, P]  the token that each visited node emitted, -1 padded
  int32_t* flags;         // [B]     1: an entry that is no probability, 2: a row of p without mass,
                          //         4: a child that its row of q cannot have drawn, or outside the vocabulary
};

inline constexpr int kMaxRejectionNodes = 256;
inline constexpr int32_t kBadProbability = 1, kNoMass = 2, kBadProposal = 4;  // flags

void validate(const VerifyParams& p);
void validate(const VerifyRejectionParams& p);
namespace cpu {
void verify(const VerifyParams& p);
void verify_rejection(const VerifyRejectionParams& p);
}  // namespace cpu
namespace cuda {
void verify(const VerifyParams& p, CUstream_st* stream);
void verify_rejection(const VerifyRejectionParams& p, CUstream_st* stream);
}  // namespace cuda

// Tensor forms. `stop_tokens` and `budget` may be absent. Either coins and final_coins or seeds are given,
// and draft_probs with the sampled schemes only.
void verify(TensorView tokens, TensorView first_child, TensorView next_sibling, TensorView num_nodes,
            TensorView target_tokens, TensorView seq_lens, TensorView stop_tokens, TensorView budget,
            TensorView path, TensorView num_accepted, TensorView next_tokens, TensorView finished,
            TensorView new_seq_lens, CUstream_st* stream);
void verify_rejection(TensorView tokens, TensorView first_child, TensorView next_sibling,
                      TensorView num_nodes, TensorView target_probs, TensorView draft_probs,
                      RejectionScheme scheme, double threshold_single, double threshold_acc, TensorView coins,
                      TensorView final_coins, TensorView seeds, TensorView seq_lens, TensorView stop_tokens,
                      TensorView budget, TensorView path, TensorView num_accepted, TensorView next_tokens,
                      TensorView finished, TensorView new_seq_lens, TensorView emitted, TensorView flags,
                      CUstream_st* stream);

}  // namespace eagle
