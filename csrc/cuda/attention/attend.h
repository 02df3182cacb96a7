#pragma once
// tree_attention for some nodes of a request: what the public op and the draft share.
#include "eagle_cuda/attention.h"

namespace eagle::cuda {

// The rows of q, mask, out and lse are those of nodes first_node, first_node + 1, ..., max_nodes of them, the
// first num_nodes[b] of a request exist. Node i has its key at row seq_lens + i, as in tree_attention, which
// is the case first_node = 0, all_nodes = max_nodes.
struct AttendParams : TreeAttentionParams {
  int first_node;
  int all_nodes;  // at least first_node + max_nodes; a mask row is ceil(all_nodes / 32) words
  // mask = nullptr: a chain, in which every node sees all before it.
};

// From the sizes, all_nodes and the current device alone: first_node does not matter.
int64_t attend_workspace_bytes(const AttendParams& p);
void attend(const AttendParams& p, CUstream_st* stream);

}  // namespace eagle::cuda
