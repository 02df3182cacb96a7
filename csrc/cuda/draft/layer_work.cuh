#pragma once
// The head's layers and LM head within the persistent draft kernel: what each phase multiplies and attends
// to.
#include <cuda_runtime.h>

#include "cuda/attention/append_kv.cuh"
#include "cuda/attention/common_pass.cuh"
#include "cuda/attention/finish.cuh"
#include "cuda/draft/layout.cuh"
#include "cuda/linear/codes.cuh"

namespace eagle::cuda {

template <class T, int kHeadDim>
class LayerWork : protected PhaseLayout<T, kHeadDim> {
  using Base = PhaseLayout<T, kHeadDim>;
  static constexpr int kTokenTiles = kPersistentRows / 8;
  static constexpr int kHalves = kPersistentThreads / kHeadThreads;

 protected:
  using Base::block, Base::blocks, Base::scratch, Base::kv_heads;
  using Base::p_, Base::shared_, Base::phase;

  __device__ __forceinline__ Topk topk() const {
    return {shared_.topk, shared_.plan,
            reinterpret_cast<unsigned char*>(&shared_) + p_.topk_offset[phase().level > 0]};
  }

  // ---- products ------------------------------------------------------------------------------------------

  using Products = Stream<AnyProducts<T>, 1, kTokenTiles, TableRows<T>>;
  struct TablePlaces {
    const uint16_t* place;
    __device__ __forceinline__ int operator()(int token) const { return place[token]; }
  };

  __device__ __forceinline__ Products products() const {
    return {shared_.plan,    {shared_.plan, shared_.table},
            shared_.arrived, &shared_.ahead,
            scratch(),       shared_.parities,
            shared_.first};
  }
  // Behind a product: for the next one.
  __device__ __forceinline__ void keep_parities(const Products& products) const {
    __syncthreads();
    if (threadIdx.x == 0) shared_.parities = products.parities();
  }

  __device__ __forceinline__ void prefetch() const {
    fence_proxy_async();
    products().prefetch(shared_.first == 0 ? 0 : early(), shared_.plan.ring - 1, block(), blocks());
  }
  // Before attention, as far as there is room behind its scratch.
  __device__ __forceinline__ void prefetch_o() const {
    if (shared_.first == 0) return;
    fence_proxy_async();
    products().prefetch(0, early(), block(), blocks());
  }
  __device__ __forceinline__ int early() const { return shared_.plan.ring - shared_.first; }
  __device__ __forceinline__ void drop() const {
    Products products = this->products();
    products.drop(block(), blocks());
    keep_parities(products);
  }

  __device__ __forceinline__ void multiply() const {
    Base::find_rows();
    __syncthreads();
    if (phase().work == Work::kLmHead) topk().clear();
    Products products = this->products();
    products.template run<true>(block(), blocks(), [&](const Walk& walk, typename Products::Sums& sum) {
      if (phase().work == Work::kLmHead)
        TopkFinish<Products, 1, kTokenTiles>{topk(), shared_.topk.scales, shared_.plan, products}(walk, sum);
      else
        LinearFinish<Products, 1, kTokenTiles, TablePlaces>(shared_.finish, shared_.plan, products,
                                                            {shared_.place})(walk, sum);
    });
    keep_parities(products);
    if (phase().work == Work::kQkv && phase().layer == 0 && p_.eagle3) write_residual();
  }

  // A row of the table, or its normed form, to `to`; blocks take turns. Roots are known.
  __device__ __forceinline__ void write_rows(int segment, bool normed, void* to) const {
    constexpr int kElements = Piece<T>::kElements;
    const int64_t H = p_.hidden_size;
    const RowTable& table = shared_.table;
    for (int row = block(); row < shared_.plan.m; row += blocks()) {
      const T* const from = static_cast<const T*>(table.row[segment][row]);
      uint4* const into = reinterpret_cast<uint4*>(static_cast<T*>(to) + shared_.place[row] * H);
      const float root = table.root[segment][row];
      for (int64_t i = threadIdx.x; i < H / kElements; i += kPersistentThreads) {
        Piece<T> piece = load_piece(from, i);
        if (normed) {
          const Piece<T> weight = load_piece(static_cast<const T*>(table.norm[segment]), i);
#pragma unroll
          for (int j = 0; j < kElements; ++j)
            piece.element[j] = normalised(piece.element[j], root, weight.element[j]);
        }
        store(into + i, __builtin_bit_cast(uint4, piece));
      }
    }
  }
  // What layer 0 of EAGLE-3 adds to: the hidden state.
  __device__ __forceinline__ void write_residual() const {
    write_rows(1, p_.norm_before_residual, p_.memory.head.stream);
  }
  // What the next level starts from.
  __device__ __forceinline__ void write_feedback() const { write_rows(0, true, p_.memory.input); }

  // ---- who is last ---------------------------------------------------------------------------------------

  __device__ __forceinline__ bool is_last_of_grid() const {
    __syncthreads();
    if (threadIdx.x == 0)
      shared_.last = atomic_add_acq_rel<Scope::kDevice>(p_.words.lm_head, 1) + 1 == shared_.lm_heads;
    __syncthreads();
    return shared_.last;
  }

  // Of (slice, tile) items below `item`, those with a tile in [begin, end).
  __device__ __forceinline__ int items_below(int item, int begin, int end) const {
    const int tiles = shared_.plan.tiles;
    return item / tiles * (end - begin) + min(max(item % tiles - begin, 0), end - begin);
  }

  // The block to which the last item of a KV head falls rotates and appends what belongs to it.
  __device__ __forceinline__ void finish_qkv() const {
    const int kv = kv_heads(), group = p_.append[0].num_heads / kv, head_tiles = kHeadDim / kTileRows;
    const int64_t items = shared_.plan.items();
    const int first = static_cast<int>(items * block() / blocks()),
              last = static_cast<int>(items * (block() + 1) / blocks());
    __syncthreads();
    for (int head = static_cast<int>(threadIdx.x); head < kv; head += kPersistentThreads) {
      const int begins[3] = {head * group, group * kv + head, (group + 1) * kv + head};
      int mine = 0;
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const int begin = begins[part] * head_tiles, end = begin + (part == 0 ? group : 1) * head_tiles;
        mine += items_below(last, begin, end) - items_below(first, begin, end);
      }
      bool finishes = false;
      if (mine > 0) {
        const auto added = static_cast<uint32_t>(mine);
        finishes = atomic_add_acq_rel<Scope::kDevice>(p_.words.kv_heads + head, added) + added ==
                   shared_.items_of_head;
      }
      shared_.finishes[head] = finishes;
    }
    __syncthreads();
    auto& rows = *reinterpret_cast<AppendShared<kHalves, kHeadDim>*>(scratch());
    const AppendKv<T, T, kHeadDim> append(shared_.append);
    for (int head = 0; head < kv; ++head)
      if (shared_.finishes[head]) append.run_kv_head(head, Base::first_request(), Base::last_request(), rows);
  }

  // ---- attention -----------------------------------------------------------------------------------------

  // Parts of the prefixes first, counted where they belong; then a node's queries: their ends, and what the
  // parts have left as soon as all are there. Nobody waits who has not done his parts.
  __device__ __forceinline__ void attend() const {
    const AttendParams& a = shared_.attend;
    const Plan& plan = Base::plan();
    const int kv = kv_heads(), parts = plan.splits * plan.row_blocks;
    const int first_prefix = Base::first_request() * kv, prefixes = Base::last_request() * kv - first_prefix;
    for (int task = block(); task < prefixes * parts; task += blocks()) {
      const int prefix = first_prefix + task / parts, part = task % parts;
      CommonPass<T, T, kHeadDim>(a, plan, *reinterpret_cast<CommonShared*>(scratch()))
          .run({prefix / kv, prefix % kv, part / plan.row_blocks, part % plan.row_blocks});
      __syncthreads();
      if (threadIdx.x == 0) add_release<Scope::kDevice>(p_.words.prefixes + prefix, 1u);
    }
    const int head_blocks = (plan.group + kFinishWarps - 1) / kFinishWarps,
              row_tasks = a.max_nodes * head_blocks;
    for (int task = block(); task < prefixes * row_tasks; task += blocks()) {
      const int prefix = first_prefix + task / row_tasks, row = task % row_tasks;
      Finish<T, T, kHeadDim> finish(a, plan, *reinterpret_cast<FinishShared<T, T, kHeadDim>*>(scratch()));
      finish.tail({prefix / kv, row / head_blocks, prefix % kv, row % head_blocks});
      if (threadIdx.x == 0) {
        const uint32_t* const done = p_.words.prefixes + prefix;
        const uint32_t all = shared_.parts;
        while (static_cast<int32_t>(load_acquire<Scope::kDevice>(done) - all) < 0) {
        }
      }
      __syncthreads();
      finish.fold_and_write();
      __syncthreads();
    }
  }
};

}  // namespace eagle::cuda
