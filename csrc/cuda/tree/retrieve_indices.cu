// Parents -> EAGLE's retrieve_indices.
//
// grid: [batch_size]   one block converts one request; thread i has node i, later every thread takes output
// words
//
// Ancestors have smaller numbers than their descendants, so the node of a path at depth d is the d-th member
// of its leaf's ancestor set: every output word is found alone and written once, in order.
#include "common/numeric.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"
#include "cuda/tree/ancestors.cuh"
#include "eagle_cuda/tree.h"

namespace eagle::cuda {
namespace {

struct SharedMemory {
  AncestorWords ancestors;
  int32_t leaves[kMaxTreeNodes];
  uint32_t inner[kMaxNodeWords];  // nodes with a child that counts
  uint32_t leaf_bits[kMaxNodeWords];
  int32_t num_nodes;
};

// registers: <= 48
__global__ void __launch_bounds__(kMaxTreeNodes) retrieve_indices_kernel(const RetrieveIndicesParams p) {
  SharedMemory& shared = shared_memory<SharedMemory>();
  const int64_t request = blockIdx.x;
  const int node = static_cast<int>(threadIdx.x);
  const int words = ceil_div(p.max_nodes, 32);
  int parent = node > 0 && node < p.max_nodes ? load_read_only(p.parents + request * p.max_nodes + node) : -1;
  if (node == 0) shared.num_nodes = load_read_only(p.num_nodes + request);
  if (node < kMaxNodeWords) shared.inner[node] = 0;
  __syncthreads();
  const int given = shared.num_nodes, nodes = given < 0 ? 0 : given < p.max_nodes ? given : p.max_nodes;

  // A node counts if its parents lead to the root, that is if the root is among its ancestors; parents stand
  // before their children.
  if (parent >= node) parent = -1;
  shared.ancestors.up[0][node] = parent < 0 ? -1 : parent;
  for (int i = node; i < nodes * words; i += kMaxTreeNodes) {
    const int own = i / words;
    shared.ancestors.words[0][i] = own / 32 == i % words ? uint32_t{1} << (own % 32) : 0;
  }
  const uint32_t* const sets = shared.ancestors.words[join_ancestors(shared.ancestors, nodes, words)];
  const bool counts = node < nodes && (sets[node * words] & 1) != 0;
  if (counts && parent >= 0) atomicOr(&shared.inner[parent / 32], uint32_t{1} << (parent % 32));
  __syncthreads();

  // Leaves in node order.
  const bool leaf = counts && (shared.inner[node / 32] >> (node % 32) & 1) == 0;
  const uint32_t leaves_of_warp = __ballot_sync(kFullMask, leaf);
  if (lane_id() == 0) shared.leaf_bits[warp_id()] = leaves_of_warp;
  __syncthreads();
  if (leaf) shared.leaves[members_below(shared.leaf_bits, node)] = node;
  const int found = members_below(shared.leaf_bits, kMaxTreeNodes);
  const int num_leaves = found < p.max_leaves ? found : p.max_leaves;
  if (node == 0) store(p.num_leaves + request, num_leaves);
  __syncthreads();

  // Output words, strided over the threads; row and depth follow without a division per word.
  if (p.max_path == 0) return;
  const int64_t size = int64_t{p.max_leaves} * p.max_path;
  int32_t* const out = p.retrieve_indices + request * size;
  int row = node / p.max_path, depth = node % p.max_path;
  for (int64_t i = node; i < size; i += kMaxTreeNodes) {
    store(out + i, row < num_leaves ? nth_member(sets + shared.leaves[row] * words, words, depth) : -1);
    row += kMaxTreeNodes / p.max_path;
    depth += kMaxTreeNodes % p.max_path;
    if (depth >= p.max_path) {
      depth -= p.max_path;
      ++row;
    }
  }
}

}  // namespace

void retrieve_indices(const RetrieveIndicesParams& p, CUstream_st* stream) {
  validate(p);
  launch(retrieve_indices_kernel,
         {.grid = static_cast<unsigned>(p.batch_size),
          .block = kMaxTreeNodes,
          .stream = stream,
          .shared_bytes = sizeof(SharedMemory)},
         p);
}

}  // namespace eagle::cuda
