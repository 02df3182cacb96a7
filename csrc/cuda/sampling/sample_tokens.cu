// The target's own token for every row of logits, with its log-probability.
//
// grid: [B N]     one block streams one row; what it keeps of it is shared memory and registers
//
// Reads of the row: one at T = 0 and with temperature alone; else at most four (row_sampler.cuh). The first
// pass finds the largest logit and the sums of the log-probability, and as much of the rest as can be had
// before z_max is known.
#include "cuda/launch.h"

#include <limits>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/exp_sum.h"
#include "cuda/sampling/row_sampler.cuh"
#include "cuda/sampling/top_tokens.cuh"
#include "eagle_cuda/sampling.h"

namespace eagle::cuda {
namespace {

constexpr int kThreads = 512, kSmallThreads = kWarpSize;
static_assert(kThreads * Row<float>::kPerThread == kExpSumLanes);    // a thread's 8 logits keep their lanes
static_assert(sizeof(SamplingMemory<kThreads, true>) <= 99 * 1024);  // what a block of sm_86 can have
constexpr int kLoadsAhead = 4;
constexpr int64_t kSmallVocab =
    kSmallThreads * Row<float>::kPerThread - 8;  // one round, whatever the alignment

// What the first pass does beside finding the largest logit.
enum class First { kNothing, kTryAll, kList, kCountBins };

template <class T, int kThreads>
__device__ __forceinline__ First first_pass_of(const Settings& s, uint32_t vocab) {
  if (s.temperature == 0.0f) return First::kNothing;
  if (s.top_k == 0 && s.top_p == 1.0f) return s.min_p > 0.0f ? First::kNothing : First::kTryAll;
  return vocab <= SamplingMemory<kThreads, false>::kCapacity ? First::kList : First::kCountBins;
}

__device__ __forceinline__ float usable_log_prob(float value) {
  return value <= 0.0f ? value : (value > 0.0f ? 0.0f : -kInfinity);
}

// A row that its request does not have.
__device__ __forceinline__ void store_nothing(const SampleTokensParams& p, int64_t at) {
  if (threadIdx.x == 0) {
    store(p.tokens + at, 0);
    if (p.log_probs) store(p.log_probs + at, 0.0f);
    if (p.flags) store(p.flags + at, 0);
  }
  if (static_cast<int>(threadIdx.x) < p.num_top) {
    store(p.top_tokens + at * p.num_top + threadIdx.x, 0);
    store(p.top_log_probs + at * p.num_top + threadIdx.x, 0.0f);
  }
}

// kExtended: with a state, or the n best.
// registers: <= 128
template <class T, int kThreads, bool kExtended>
__global__ void __launch_bounds__(kThreads) sample_tokens_kernel(const SampleTokensParams p) {
  using Memory = SamplingMemory<kThreads, kExtended>;
  auto& shared = shared_memory<Memory>();
  const int64_t at = blockIdx.x, request = at / p.max_nodes, node = at % p.max_nodes;
  if (threadIdx.x == 0) shared.settings = load_settings(p, request, at);
  if constexpr (kExtended) {
    shared.state.filter[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.state.set(p, request, at);
  }
  __syncthreads();
  if (!shared.settings.exists) return store_nothing(p, at);
  if constexpr (kExtended) shared.state.fill_filter();
  const int64_t offset = request * p.logits_strides[0] + node * p.logits_strides[1];
  const Row<T> row = Row<T>::of(static_cast<const T*>(p.logits) + offset, p.vocab_size);
  RowSampler<T, kThreads, kExtended> sampler{{row, shared.settings, shared, 0.0f}};
  const Settings& s = sampler.s;
  const First first_pass = first_pass_of<T, kThreads>(s, row.size);

  // The first pass.
  if (first_pass == First::kCountBins) sampler.clear_counts(shared.bins(), kBins - 1);
  sampler.clear_list();
  Trial trial{s.seed, s.position, kLowestFloat, ~uint64_t{0}, &shared.limit};
  BinCounter counter{shared.bins(), 0, 0};
  float largest = -kInfinity, largest_untouched = -kInfinity;
  uint32_t largest_token = 0;
  float lane_max[Row<T>::kPerThread], lane_sum[Row<T>::kPerThread];
#pragma unroll
  for (int i = 0; i < Row<T>::kPerThread; ++i) lane_max[i] = kLowestFloat, lane_sum[i] = 0.0f;
  const auto compare = [&](const auto& x, uint32_t first, int) {
#pragma unroll
    for (int i = 0; i < Row<T>::kPerVector; ++i)
      if (x[i] > largest) largest = x[i], largest_token = first + i;
  };
  const bool with_log_probs = p.log_probs || (kExtended && p.num_top > 0);
  if (!kExtended && first_pass == First::kNothing && !p.log_probs)
    for_each_vector<kThreads, kLoadsAhead>(row, compare);  // little work: more loads must be under way
  else
    for_each_vector<kThreads>(row, [&](const auto& untouched, uint32_t first, int j) {
      constexpr int kCount = Row<T>::kPerVector;
      float x[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = untouched[i];
        if constexpr (kExtended) largest_untouched = fmaxf(largest_untouched, x[i]);
        if (with_log_probs) exp_sum_add(lane_max[j * kCount + i], lane_sum[j * kCount + i], x[i]);
      }
      if constexpr (kExtended) shared.state.apply(x, first);
      compare(x, first, j);
      if (first_pass == First::kNothing) return;
      float z[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) z[i] = sampler.scaled(x[i]);
      if (first_pass == First::kTryAll) {
        if (j == 0) trial.listen();
        trial.try_tokens(z, first);
      } else if (first_pass == First::kList) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          if (z[i] > -kInfinity) sampler.list(order_key(z[i]), first + i);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) counter.add(order_key(z[i]) >> kKeyBits);
      }
    });
  if constexpr (Memory::kWithBuckets) counter.flush();
  const uint64_t top = block_min<kThreads>(rank(largest, largest_token), shared.scratch);
  const float max = from_order_key(static_cast<uint32_t>(top >> 32));
  uint32_t token = static_cast<uint32_t>(top);
  const bool usable_row = max > -kInfinity;

  // Of the untouched logits.
  float log_prob_max = max, log_sum = 0.0f;
  if constexpr (kExtended)
    log_prob_max = from_order_key(
        static_cast<uint32_t>(block_min<kThreads>(order_key(largest_untouched), shared.scratch)));
  const bool finite = log_prob_max > -kInfinity && log_prob_max < kInfinity;
  if (with_log_probs && finite) {
    const float scale = exp_sum_scale(p.vocab_size);
    int64_t sum = 0;
#pragma unroll
    for (int i = 0; i < Row<T>::kPerThread; ++i)
      sum += exp_sum_fixed(lane_max[i], lane_sum[i], log_prob_max, scale);
    const int64_t total =
        static_cast<int64_t>(block_sum<kThreads>(static_cast<uint64_t>(sum), shared.scratch));
    log_sum = log_f32(static_cast<float>(static_cast<double>(total) / static_cast<double>(scale)));
  }

  // The largest logit where noise has no say: at T = 0, of +inf, and where division overflows to -inf.
  if (usable_row && s.temperature > 0.0f) {
    sampler.z_max = sampler.scaled(max);
    if (max < kInfinity && sampler.z_max > -kInfinity)
      token = first_pass == First::kTryAll
                  ? sampler.winner(trial)
                  : sampler.sample(first_pass == First::kList, first_pass == First::kCountBins);
  }

  if constexpr (kExtended)
    if (!usable_row)
      token = static_cast<uint32_t>(block_min<kThreads>(shared.state.lowest_allowed(), shared.scratch));

  if (threadIdx.x == 0) {
    token = token < row.size ? token : 0;
    store(p.tokens + at, static_cast<int32_t>(token));
    if (p.flags) store(p.flags + at, usable_row ? 0 : 1);
    if (p.log_probs)
      store(p.log_probs + at,
            finite ? usable_log_prob((row.at(token) - log_prob_max) - log_sum) : -kInfinity);
  }
  if constexpr (kExtended)
    if (p.num_top > 0) {
      find_top<kThreads, Memory::kCapacity>(row, p.num_top, largest_untouched, shared.list, shared.listed);
      if (static_cast<int>(threadIdx.x) < p.num_top) {
        const uint64_t best = shared.list[threadIdx.x];
        const float logit = from_order_key(static_cast<uint32_t>(best >> 32));
        store(p.top_tokens + at * p.num_top + threadIdx.x, static_cast<int32_t>(best));
        store(p.top_log_probs + at * p.num_top + threadIdx.x,
              finite ? usable_log_prob((logit - log_prob_max) - log_sum) : -kInfinity);
      }
    }
}

// Whether the extended kernel is needed.
bool is_extended(const SampleTokensParams& p) {
  const SamplingState& s = p.state;
  return p.num_top > 0 || s.repetition_penalty || s.presence_penalty || s.frequency_penalty ||
         s.bias_tokens || (s.min_new_tokens && s.stop_tokens) || s.token_mask;
}

}  // namespace

void sample_tokens(const SampleTokensParams& p, CUstream_st* stream) {
  validate(p);
  const int64_t rows = int64_t{p.batch_size} * p.max_nodes;
  check(rows <= std::numeric_limits<int32_t>::max(), "logits: expected fewer than 2^31 rows, got ", rows);
  dispatch(FloatTypes{}, p.logits_dtype, "logits", [&](auto type) {
    using T = typename decltype(type)::type;
    const auto start = [&](auto threads, auto extended) {
      constexpr int kBlock = threads();
      constexpr bool kExtended = extended();
      launch(sample_tokens_kernel<T, kBlock, kExtended>,
             {dim3(static_cast<unsigned>(rows)), dim3(kBlock), stream,
              sizeof(SamplingMemory<kBlock, kExtended>)},
             p);
    };
    const auto start_for = [&](auto extended) {
      if (p.vocab_size <= kSmallVocab)
        start(std::integral_constant<int, kSmallThreads>{}, extended);
      else
        start(std::integral_constant<int, kThreads>{}, extended);
    };
    if (is_extended(p))
      start_for(std::true_type{});
    else
      start_for(std::false_type{});
  });
}

}  // namespace eagle::cuda
