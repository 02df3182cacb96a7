#pragma once
// The whole draft phase by blocks that stay: phases.cuh in order, each phase's weights on their way before
// the blocks meet.
//
// What a phase works with (a plan, pointers, the rows' addresses) stands in shared memory in front of the
// ring, where every phase finds its own. Between arriving at a barrier and waiting there a block lays out the
// next phase and asks for its first weights; those of o in part before attention, which needs none itself and
// works in the front of the ring.
//
// A block's ring runs empty at the end of its product: its last sums, what follows them and the arrival pass
// before it asks again. Memory is busy with the blocks that are not as far; what the gap costs is for a GPU
// to show.
#include <cuda_runtime.h>

#include "cuda/draft/growth.cuh"
#include "cuda/draft/layer_work.cuh"

namespace eagle::cuda {

template <class T, int kHeadDim>
class PersistentDraft : LayerWork<T, kHeadDim> {
  using Base = LayerWork<T, kHeadDim>;
  using Base::p_, Base::shared_, Base::phase, Base::block, Base::blocks;

 public:
  __device__ __forceinline__ void run(const PersistentParams& params) const {
    Base::begin(params);
    place();
    while (advance()) {
      if (phase().work == Work::kAttention)
        Base::attend();
      else
        Base::multiply();
      if (phase().work == Work::kQkv) finish_qkv();
      if (phase().work == Work::kLmHead) finish_lm_head();
    }
    build();
  }

 private:
  // To the next phase, with its weights on their way; whether there is another one.
  __device__ __forceinline__ bool advance() const {
    fence_proxy_async();  // the next phase's bulk copies come where this one has written
    GridBarrier barrier(p_.words.barrier, shared_.barriers);
    barrier.arrive();
    Base::lay_out();
    if (phase().work == Work::kAttention) Base::prefetch_o();
    if (phase().is_product()) Base::prefetch();
    barrier.wait();
    if (phase().begins_level(p_.eagle3) && load(p_.words.over) != 0) {
      Base::drop();
      return false;
    }
    return phase().work != Work::kTree;
  }

  // Four out of line, so that the compiler does not mix them with the products and the attention, which want
  // all registers. They find everything in shared memory.

  static __device__ __noinline__ void place() {
    const PersistentDraft self;
    place_paths<T>(self.p_, self.shared_.row, block(), blocks());
  }

  static __device__ __noinline__ void finish_qkv() { PersistentDraft().Base::finish_qkv(); }

  // The last block to come has the best tokens of all rows, and grows the trees by a level.
  static __device__ __noinline__ void finish_lm_head() {
    const PersistentDraft self;
    if (self.p_.feedback_post_norm) self.write_feedback();
    const Topk topk = self.topk();
    topk.leave(block(), blocks());
    if (!self.is_last_of_grid()) return;
    topk.fold(blocks());
    __syncthreads();
    grow_trees(self.p_, self.phase().level + 1, self.scratch());
  }

  // No beam grows further than to the phase's level: the candidates of the levels up to it exist.
  static __device__ __noinline__ void build() {
    const PersistentDraft self;
    build_trees(self.p_, self.phase().level, *reinterpret_cast<PersistentBuild*>(self.scratch()), block(),
                blocks());
  }
};

}  // namespace eagle::cuda
