#pragma once
// verify: walk from the root along the children that equal the target's own token.
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

void validate(const VerifyParams& p);
namespace cpu {
void verify(const VerifyParams& p);
}
namespace cuda {
void verify(const VerifyParams& p, CUstream_st* stream);
}

// Tensor form. `stop_tokens` and `budget` may be absent.
void verify(TensorView tokens, TensorView first_child, TensorView next_sibling, TensorView num_nodes,
            TensorView target_tokens, TensorView seq_lens, TensorView stop_tokens, TensorView budget,
            TensorView path, TensorView num_accepted, TensorView next_tokens, TensorView finished,
            TensorView new_seq_lens, CUstream_st* stream);

}  // namespace eagle
