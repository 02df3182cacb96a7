#pragma once
// What a request's state makes of the logits of one row, as they are read.
//
// Counts and mask are read beside the row, each time that it is read: 4 bytes a token for each of the counts
// that a penalty asks for, one bit of the mask. What concerns few tokens (bias, the node's ancestors, stop
// tokens that come too early) is looked up only for vectors near one of these tokens, which a filter in
// shared memory knows.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/penalties.h"
#include "cuda/device/ptx.cuh"
#include "cuda/sampling/row.cuh"
#include "eagle_cuda/sampling.h"

namespace eagle::cuda {

template <int kThreads>
struct RowState {
  static constexpr uint32_t kGroup = 16;  // tokens of a bit of the filter; at least a vector's

  bool active;
  bool with_penalties;
  Penalties penalties;
  uint32_t size;  // V
  int node, max_bias, num_stop_tokens;
  // Of this row or its request; nullptr: off.
  const int32_t *prompt_counts, *output_counts;
  const int32_t *tree_tokens, *tree_parents;
  const int32_t* bias_tokens;
  const float* bias_values;
  const int32_t* stop_tokens;  // none of which is allowed
  const int32_t* mask;
  uint32_t filter[kThreads];

  // By one thread, between barriers.
  __device__ __forceinline__ void set(const SampleTokensParams& p, int64_t request, int64_t row) {
    const SamplingState& s = p.state;
    const auto of_request = [&](const auto* array, int64_t width, bool wanted) {
      return array && wanted ? array + request * width : nullptr;
    };
    const auto value = [&](const float* values, float neutral) {
      return values ? load_read_only(values + request) : neutral;
    };
    size = static_cast<uint32_t>(p.vocab_size);
    node = static_cast<int>(row - request * p.max_nodes);
    penalties = usable_penalties(value(s.repetition_penalty, 1.0f), value(s.frequency_penalty, 0.0f),
                                 value(s.presence_penalty, 0.0f));
    with_penalties = !off(penalties);
    prompt_counts = of_request(s.prompt_counts, p.vocab_size, penalties.repetition != 1.0f);
    output_counts = of_request(s.output_counts, p.vocab_size, with_penalties);
    const bool with_tree = with_penalties && p.tree_tokens && p.tree_parents;
    tree_tokens = of_request(p.tree_tokens, p.max_nodes, with_tree);
    tree_parents = of_request(p.tree_parents, p.max_nodes, with_tree);
    max_bias = s.max_bias;
    bias_tokens = of_request(s.bias_tokens, s.max_bias, true);
    bias_values = of_request(s.bias_values, s.max_bias, true);
    bool early = false;
    if (s.stop_tokens && s.min_new_tokens)
      early = load_read_only(p.positions + row) <
              int64_t{load_read_only(s.prompt_lens + request)} + load_read_only(s.min_new_tokens + request);
    num_stop_tokens = s.num_stop_tokens;
    stop_tokens = of_request(s.stop_tokens, s.num_stop_tokens, early);
    mask = s.token_mask ? s.token_mask + request * s.token_mask_strides[0] + node * s.token_mask_strides[1]
                        : nullptr;
    active = with_penalties || bias_tokens || stop_tokens || mask;
  }

  // By all threads, behind `set` and a barrier; another barrier before `apply`. Each word has been cleared.
  __device__ __forceinline__ void fill_filter() {
    if (bias_tokens)
      for (int i = threadIdx.x; i < max_bias; i += kThreads) mark(load_read_only(bias_tokens + i));
    if (stop_tokens)
      for (int i = threadIdx.x; i < num_stop_tokens; i += kThreads) mark(load_read_only(stop_tokens + i));
    if (threadIdx.x == 0) for_each_ancestor([&](int32_t token) { mark(token); });
  }

  // `x`: the logits of the tokens from `first` on, as Row reads them.
  template <int kCount>
  __device__ __forceinline__ void apply(float (&x)[kCount], uint32_t first) const {
    static_assert(kCount <= static_cast<int>(kGroup));
    const bool before = first + kGroup < kGroup;  // begins before the row: wrapped below 0
    if (!active || (first >= size && !before)) return;
    const uint32_t last = first + (kCount - 1);
    const uint32_t begin = before ? 0 : first, end = last < size ? last : size - 1;
    const bool special = marked(begin) || marked(end);
    if (special && bias_tokens) add_bias(x, first);
    if (with_penalties) penalise(x, first, special);
    if (special && stop_tokens) forbid_stops(x, first);
    if (mask) forbid_masked(x, first, begin, end);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = usable(x[i]);
  }

  // The lowest allowed token that is this thread's share; ~0 if there is none.
  __device__ __forceinline__ uint32_t lowest_allowed() const {
    for (uint32_t token = threadIdx.x; token < size; token += kThreads) {
      bool allowed = !mask || (static_cast<uint32_t>(load_read_only(mask + token / 32)) >> token % 32 & 1);
      if (stop_tokens)
        for (int i = 0; i < num_stop_tokens; ++i)
          if (static_cast<uint32_t>(load_read_only(stop_tokens + i)) == token) allowed = false;
      if (allowed) return token;
    }
    return ~0u;
  }

 private:
  static __device__ __forceinline__ uint32_t bit_of(uint32_t token) {
    return token / kGroup % (32 * kThreads);
  }
  __device__ __forceinline__ void mark(int32_t token) {
    if (static_cast<uint32_t>(token) >= size) return;
    const uint32_t bit = bit_of(static_cast<uint32_t>(token));
    atomicOr(filter + bit / 32, 1u << bit % 32);
  }
  __device__ __forceinline__ bool marked(uint32_t token) const {
    const uint32_t bit = bit_of(token);
    return filter[bit / 32] >> bit % 32 & 1;
  }

  // f of the tokens that the output holds at the node, beyond what output_counts knows.
  template <class F>
  __device__ __forceinline__ void for_each_ancestor(F&& f) const {
    if (!tree_tokens) return;
    for (int at = node; at > 0;) {
      f(load_read_only(tree_tokens + at));
      const int parent = load_read_only(tree_parents + at);
      if (parent < 0 || parent >= at) return;
      at = parent;
    }
  }

  // Ids that are not in the vocabulary may hit elements beside the row: these have -inf and keep it.
  template <int kCount>
  __device__ __forceinline__ void add_bias(float (&x)[kCount], uint32_t first) const {
#pragma unroll 1
    for (int j = 0; j < max_bias; ++j) {
      const uint32_t at = static_cast<uint32_t>(load_read_only(bias_tokens + j)) - first;
      if (at >= kCount) continue;
      const float value = load_read_only(bias_values + j);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (at == static_cast<uint32_t>(i)) x[i] += value;
    }
  }

  template <int kCount>
  __device__ __forceinline__ void penalise(float (&x)[kCount], uint32_t first, bool special) const {
    uint64_t in_tree = 0;  // a byte per element: a tree has at most 255 nodes beside the root
    if (special)
      for_each_ancestor([&](int32_t token) {
        const uint32_t at = static_cast<uint32_t>(token) - first;
        if (at < kCount) in_tree += uint64_t{1} << 8 * at;
      });
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t in_prompt = 0, in_output = static_cast<uint32_t>(in_tree >> 8 * i) & 255;
      if (first + i < size) {
        if (output_counts) in_output += usable_count(load_read_only(output_counts + (first + i)));
        if (prompt_counts) in_prompt = usable_count(load_read_only(prompt_counts + (first + i)));
      }
      x[i] = penalised(x[i], penalties, in_prompt, in_output);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void forbid_stops(float (&x)[kCount], uint32_t first) const {
#pragma unroll 1
    for (int j = 0; j < num_stop_tokens; ++j) {
      const uint32_t at = static_cast<uint32_t>(load_read_only(stop_tokens + j)) - first;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (at == static_cast<uint32_t>(i)) x[i] = bits_float(0xff800000u);
    }
  }

  // The vector's tokens from `begin` to `end` are those of the row.
  template <int kCount>
  __device__ __forceinline__ void forbid_masked(float (&x)[kCount], uint32_t first, uint32_t begin,
                                                uint32_t end) const {
    const uint32_t low = static_cast<uint32_t>(load_read_only(mask + begin / 32));
    uint32_t high = 0;
    if (end / 32 != begin / 32) high = static_cast<uint32_t>(load_read_only(mask + end / 32));
    const uint32_t bits = static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> begin % 32)
                          << (begin - first);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (!(bits >> i & 1)) x[i] = bits_float(0xff800000u);
  }
};

}  // namespace eagle::cuda
