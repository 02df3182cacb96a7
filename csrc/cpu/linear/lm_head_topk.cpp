// Logits chunk by chunk, each chunk scored while it is in cache; then the chunks of a row are folded from
// left to right.
#include "cpu/linear/products.h"

namespace eagle::cpu {
namespace {

constexpr int64_t kChunkGroups = 32;
constexpr int64_t kChunk = kChunkGroups * kGroupRows;

bool coupled(const LmHeadTopkParams& p, int64_t row) { return p.temperature && p.temperature[row] >= 1e-5f; }

// One chunk of ids, all rows. `logits` [M, kChunk], `work` [2, kChunk].
void score_chunk(const LmHeadTopkParams& p, const LinearKernels& kernels, int64_t chunk, float* logits,
                 float* work, ChunkBest* best) {
  const int64_t first_id = chunk * kChunk, count = std::min(kChunk, p.weight.n - first_id);
  int64_t noise_row = -1;  // the row whose noise stands in `work`
  for (int64_t row = 0; row < p.m; ++row) {
    ChunkScores scores{};
    scores.q = logits + row * kChunk;
    scores.first_id = first_id;
    scores.count = count;
    scores.top_k = p.top_k;
    scores.coupled = coupled(p, row);
    scores.scratch = work + kChunk;
    if (scores.coupled) {
      if (noise_row < 0 || p.seeds[noise_row] != p.seeds[row] || p.positions[noise_row] != p.positions[row]) {
        kernels.noise({static_cast<uint64_t>(p.seeds[row]), p.positions[row], first_id, count,
                       p.draft_to_target, work});
        noise_row = row;
      }
      scores.temperature = p.temperature[row];
      scores.tau = p.tau;
      scores.noise = work;
    }
    kernels.best(scores, &best[row]);
  }
}

float log_prob(float y, float lse) {
  const float lp = y - lse;
  return lp == lp ? std::min(lp, 0.0f) : -__builtin_inff();
}

void fold_row(const LmHeadTopkParams& p, int64_t row, const ChunkBest* best, int64_t chunks,
              int64_t chunk_stride) {
  constexpr float kInfinity = __builtin_inff();
  ChunkBest all{};
  all.max = -kInfinity;
  for (int64_t c = 0; c < chunks; ++c) {
    const ChunkBest& part = best[c * chunk_stride];
    if (part.max > -kInfinity && part.max < kInfinity) {
      const float max = std::max(all.max, part.max);
      all.sum = all.sum * exp_f32(all.max - max) + part.sum * exp_f32(part.max - max);
    }
    all.max = std::max(all.max, part.max);
    // Ids ascend from chunk to chunk, so among equal scores the one that is already there stays in front.
    for (int i = 0; i < part.count; ++i) {
      int at = all.count;
      if (at == p.top_k && !(part.score[i] > all.score[at - 1])) break;
      at = at < p.top_k ? all.count++ : at - 1;
      for (; at > 0 && all.score[at - 1] < part.score[i]; --at) {
        all.score[at] = all.score[at - 1];
        all.id[at] = all.id[at - 1];
      }
      all.score[at] = part.score[i];
      all.id[at] = part.id[i];
    }
  }
  const float lse = all.max > -kInfinity && all.max < kInfinity ? all.max + log_f32(all.sum) : all.max;
  if (p.lse) p.lse[row] = lse;
  const int usable = all.count;
  for (int32_t id = 0; all.count < p.top_k; ++id) {
    if (std::find(all.id, all.id + usable, id) != all.id + usable) continue;
    all.score[all.count] = -kInfinity;
    all.id[all.count++] = id;
  }
  for (int i = 0; i < p.top_k; ++i) {
    const float y = coupled(p, row) ? all.score[i] / p.tau : all.score[i];
    p.tokens[row * p.top_k + i] = p.draft_to_target ? p.draft_to_target[all.id[i]] : all.id[i];
    p.log_probs[row * p.top_k + i] = log_prob(y, lse);
  }
}

// Rows at a time, so that scratch stays small for a prompt's rows.
constexpr int64_t kRowsPerPass = 64;

void run_pass(const LmHeadTopkParams& p) {
  struct Best;
  struct Logits;
  const LinearKernels& kernels = linear_kernels();
  const PanelLayout layout(p.weight);
  const int64_t chunks = ceil_div(layout.n, kChunk);
  ChunkBest* best = scratch<ChunkBest, Best>(chunks * p.m);

  GroupProducts products{};
  products.x_dtype = p.x_dtype;
  products.out_dtype = DType::kFloat32;
  products.m = p.m;
  products.out_stride = kChunk;
  const int64_t chunk_bytes = kChunkGroups * layout.group_bytes();
  for_products(kernels, p.weight, p.x, p.x_stride, p.norm_weight, p.norm_eps, products, kChunkGroups, 1,
               [&](const GroupProducts& all, int64_t begin, int64_t end) {
                 float* logits = scratch<float, Logits>((p.m + 2) * kChunk);
                 for (int64_t chunk = begin; chunk < end; ++chunk) {
                   GroupProducts part = all;
                   part.weight += chunk * chunk_bytes;
                   part.n = std::min(kChunk, layout.n - chunk * kChunk);
                   part.out = logits;
                   kernels.multiply(part, 0, ceil_div<int64_t>(part.n, kGroupRows));
                   score_chunk(p, kernels, chunk, logits, logits + p.m * kChunk, best + chunk * p.m);
                 }
               });
  for (int64_t row = 0; row < p.m; ++row) fold_row(p, row, best + row, chunks, p.m);
}

}  // namespace

void lm_head_topk(const LmHeadTopkParams& p) {
  validate(p);
  expect_packed_here(p.weight);
  for (int64_t row = 0; row < p.m; row += kRowsPerPass) {
    LmHeadTopkParams pass = p;
    pass.m = std::min(kRowsPerPass, p.m - row);
    pass.x = static_cast<const char*>(p.x) + row * p.x_stride * element_size(p.x_dtype);
    if (p.temperature) {
      pass.temperature += row;
      pass.seeds += row;
      pass.positions += row;
    }
    pass.tokens += row * p.top_k;
    pass.log_probs += row * p.top_k;
    if (p.lse) pass.lse += row;
    run_pass(pass);
  }
}

}  // namespace eagle::cpu
