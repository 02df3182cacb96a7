#pragma once
// What lm_head_topk does with logits while they are in shared memory: noise, a partial log-sum-exp for every
// chunk of ids, the best few of the block.
//
// The partial sums are what bits depend on: a chunk's ids, their order within it and the order of the chunks
// are functions of the vocabulary's size. The best few are not: by (score descending, id ascending) they are
// the same in whatever order they are found.
#include <cuda_runtime.h>

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/linear/finish.cuh"
#include "cuda/linear/stream.cuh"
#include "cuda/sampling/noise.cuh"

namespace eagle::cuda {

inline constexpr int kMaxTopK = kWarpSize;  // a lane has the i-th best
inline constexpr int kMaxChunkTiles = 8;
inline constexpr int kTopkTokens = 64;  // rows of x that a launch takes

struct TopkParams {
  Scales scales;
  int n, top_k;
  int chunks;
  const int32_t* draft_to_target;
  const float* temperature;
  const int64_t* seeds;
  const int32_t* positions;
  float tau;
  int32_t* tokens;
  float* log_probs;
  float* lse;
  uint64_t* lists;    // [m, blocks, top_k]  rank()s, the best first
  float2* sums;       // [m, chunks]         (max, sum of exp(y - max)); no sum where max is not finite
  uint32_t* counter;  // zero
};

// Behind the ring: scores [m][pitch], then these of every row.
struct TopkRow {
  uint64_t best[kMaxTopK];
};
EAGLE_INLINE int score_pitch(int pass_tiles) { return pass_tiles * 16 + 4; }  // tokens in different banks
inline int64_t topk_bytes(int64_t rows, int pass_tiles) {
  return rows * (int64_t{sizeof(TopkRow)} + score_pitch(pass_tiles) * int64_t{sizeof(float)});
}

// Row tiles whose ids are summed together: some four chunks a multiprocessor, so that blocks have the same to
// do and the last has little to fold. A function of the vocabulary's size alone.
inline int chunk_tiles(const PackedLayout& layout) {
  int tiles = 2;
  while (tiles < kMaxChunkTiles && layout.tiles / (2 * tiles) >= 512) tiles *= 2;
  return tiles;
}

inline constexpr uint64_t kNobody = ~uint64_t{0};

// The lanes' list, best first, and a candidate a lane; the `top_k`th and what is worse falls out.
__device__ __forceinline__ uint64_t insert(uint64_t mine, uint64_t candidate, int top_k) {
  uint64_t worst = __shfl_sync(kFullMask, mine, top_k - 1);
  uint32_t waiting = __ballot_sync(kFullMask, candidate < worst);
  while (waiting != 0) {
    const int source = __ffs(static_cast<int>(waiting)) - 1;
    const uint64_t taken = __shfl_sync(kFullMask, candidate, source);
    const int place = __popc(__ballot_sync(kFullMask, mine < taken));
    const uint64_t above = __shfl_up_sync(kFullMask, mine, 1);
    mine = lane_id() < place ? mine : lane_id() == place ? taken : above;
    worst = __shfl_sync(kFullMask, mine, top_k - 1);
    candidate = lane_id() == source ? kNobody : candidate;
    waiting = __ballot_sync(kFullMask, candidate < worst);
  }
  return mine;
}

// Folds two partial sums; commutative.
__device__ __forceinline__ float2 fold_sums(float2 a, float2 b) {
  const float max = fmaxf(a.x, b.x);
  if (!(max > -kInfinity && max < kInfinity)) return {max, 0.0f};
  return {max, a.y * exp_f32(a.x - max) + b.y * exp_f32(b.x - max)};
}

class Topk {
 public:
  __device__ __forceinline__ Topk(const TopkParams& p, const StreamPlan& plan, unsigned char* behind_ring)
      : p_(p), plan_(plan), pitch_(score_pitch(plan.pass_tiles)) {
    rows_ = reinterpret_cast<TopkRow*>(behind_ring);
    scores_ = reinterpret_cast<float*>(rows_ + plan.m);
  }

  // Before all passes.
  __device__ __forceinline__ void clear() const {
    for (int row = warp_id(); row < plan_.m; row += warps()) rows_[row].best[lane_id()] = kNobody;
  }

  __device__ __forceinline__ float* score(int row) const { return scores_ + row * pitch_; }

  // The logits of a pass stand in scores, and every warp has arrived.
  __device__ __forceinline__ void scan(const Walk& walk) const {
    for (int row = warp_id(); row < plan_.m; row += warps()) {
      const Noise noise = noise_of(row);
      uint64_t mine = rows_[row].best[lane_id()];
      for (int tile = 0; tile < walk.tiles; tile += plan_.unit)
        mine = scan_chunk(row, noise, (walk.first_tile + tile) / plan_.unit, score(row) + tile * 16, mine);
      rows_[row].best[lane_id()] = mine;
    }
  }

  // All passes are done.
  __device__ __forceinline__ void leave(int block, int blocks) const {
    for (int row = warp_id(); row < plan_.m; row += warps())
      if (lane_id() < p_.top_k)
        store(p_.lists + (int64_t{row} * blocks + block) * p_.top_k + lane_id(), rows_[row].best[lane_id()]);
  }

  // For the last block: everything that the others left.
  __device__ __forceinline__ void fold(int blocks) const {
    for (int row = warp_id(); row < plan_.m; row += warps()) fold_row(row, blocks);
  }

 private:
  struct Noise {
    bool coupled;
    float temperature;
    uint64_t seed;
    int32_t position;
  };

  __device__ __forceinline__ static int warps() { return static_cast<int>(blockDim.x) / kWarpSize; }

  __device__ __forceinline__ Noise noise_of(int row) const {
    Noise noise{};
    if (!p_.temperature) return noise;
    noise.temperature = load(p_.temperature + row);
    noise.coupled = noise.temperature >= 1e-5f;
    if (!noise.coupled) return noise;
    noise.seed = static_cast<uint64_t>(load(p_.seeds + row));
    noise.position = load(p_.positions + row);
    return noise;
  }

  __device__ __forceinline__ static float gumbel_of(const Noise& noise, uint32_t token) {
    const Philox4 random =
        philox_4x32_10(noise.seed, token / 4, static_cast<uint32_t>(noise.position), kTargetStream, 0);
    return gumbel_from_bits(Trial::lane_of(random, token % 4));
  }

  __device__ __forceinline__ uint64_t scan_chunk(int row, const Noise& noise, int chunk, const float* scores,
                                                 uint64_t mine) const {
    constexpr int kMost = kMaxChunkTiles * 16 / kWarpSize;
    const int per_lane = plan_.unit * 16 / kWarpSize, first_id = chunk * plan_.unit * 16 + lane_id();
    float y[kMost], max = -kInfinity;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      y[i] = -kInfinity;
      const int id = first_id + i * kWarpSize;
      if (i < per_lane && id < p_.n) {
        float z = scores[i * kWarpSize + lane_id()];
        if (noise.coupled) {
          const int32_t target = p_.draft_to_target ? load_read_only(p_.draft_to_target + id) : id;
          z = fma(noise.temperature, gumbel_of(noise, static_cast<uint32_t>(target)), z);
        }
        z = z == z ? z + 0.0f : -kInfinity;  // no -0: rank() knows equal scores by their bits
        y[i] = z;
      }
      max = fmaxf(max, y[i]);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= per_lane) break;
      mine = insert(mine,
                    y[i] > -kInfinity ? rank(y[i], static_cast<uint32_t>(first_id + i * kWarpSize)) : kNobody,
                    p_.top_k);
    }
    // Division by a positive tau keeps the order.
    max = warp_reduce(max, [](float a, float b) { return fmaxf(a, b); });
    if (noise.coupled) max = max / p_.tau;
    float sum = 0.0f;
    if (max > -kInfinity && max < kInfinity) {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i >= per_lane) break;
        sum += exp_f32((noise.coupled ? y[i] / p_.tau : y[i]) - max);
      }
    }
    sum = warp_reduce(sum, [](float a, float b) { return a + b; });
    if (lane_id() == 0) store(p_.sums + int64_t{row} * p_.chunks + chunk, float2{max, sum});
    return mine;
  }

  __device__ __forceinline__ void fold_row(int row, int blocks) const {
    // Lane l has chunks l, l + 32, ... in this order; then lanes in pairs.
    float2 all{-kInfinity, 0.0f};
    for (int chunk = lane_id(); chunk < p_.chunks; chunk += kWarpSize)
      all = fold_sums(all, load(p_.sums + int64_t{row} * p_.chunks + chunk));
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
      all = fold_sums(
          all, {__shfl_xor_sync(kFullMask, all.x, distance), __shfl_xor_sync(kFullMask, all.y, distance)});
    const bool finite = all.x > -kInfinity && all.x < kInfinity;
    const float lse = finite ? all.x + log_f32(all.y) : all.x;

    const int entries = blocks * p_.top_k;
    uint64_t mine = kNobody;
    for (int first = 0; first < entries; first += kWarpSize) {
      const int at = first + lane_id();
      mine = insert(mine, at < entries ? load(p_.lists + int64_t{row} * entries + at) : kNobody, p_.top_k);
    }

    // What is missing: the lowest ids that are not there, at -inf.
    int count = min(__popc(__ballot_sync(kFullMask, mine != kNobody)), p_.top_k);
    uint32_t id = static_cast<uint32_t>(mine);
    float score = mine != kNobody ? from_order_key(static_cast<uint32_t>(mine >> 32)) : -kInfinity;
    const bool usable = lane_id() < count;
    for (uint32_t unused = 0; count < p_.top_k; ++unused) {  // top_k is at most the number of ids
      if (__any_sync(kFullMask, usable && id == unused)) continue;
      if (lane_id() == count) id = unused, score = -kInfinity;
      ++count;
    }
    const Noise noise = noise_of(row);
    const float y = noise.coupled ? score / p_.tau : score, lp = y - lse;
    const int64_t to = int64_t{row} * p_.top_k + lane_id();
    if (lane_id() < p_.top_k) {
      const int32_t token = static_cast<int32_t>(id);
      store(p_.tokens + to, p_.draft_to_target ? load_read_only(p_.draft_to_target + token) : token);
      store(p_.log_probs + to, lp == lp ? fminf(lp, 0.0f) : -kInfinity);
    }
    if (p_.lse && lane_id() == 0) store(p_.lse + row, lse);
  }

  const TopkParams& p_;
  const StreamPlan& plan_;
  int pitch_;
  TopkRow* rows_;
  float* scores_;
};

// Sums of a pass into the scores, then all warps scan them.
template <class Stream, int kRows, int kTokens>
struct TopkFinish {
  using Sums = typename Stream::Sums;
  const Topk topk;
  const Scales& scales;
  const StreamPlan& plan;
  const Stream& stream;

  // The loop stays one, as in LinearFinish.
  __device__ __forceinline__ void operator()(const Walk& walk, Sums& sum) const {
    const int row = lane_id() / 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int tile = stream.first_row() + r;
      if (tile >= walk.tiles) break;
      const float row_scales[2] = {scales.of_row(walk.first_tile + tile, row),
                                   scales.of_row(walk.first_tile + tile, row + 8)};
      int at = 8 * stream.first_token_tile() + lane_id() % 4 * 2;
#pragma unroll 1
      for (int n = 0; n < kTokens; ++n, at += 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (at + i % 2 < plan.m)
            topk.score(at + i % 2)[tile * 16 + row + i / 2 * 8] =
                scales.template operator()<Stream::kIntegers>(sum[r][0][i], row_scales[i / 2], at + i % 2);
#pragma unroll
        for (int later = 0; later + 1 < kTokens; ++later)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[r][later][i] = sum[r][later + 1][i];
      }
    }
    __syncthreads();
    topk.scan(walk);
  }
};

}  // namespace eagle::cuda
