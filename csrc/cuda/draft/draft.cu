// The whole draft phase: extend along the accepted path, `levels` levels of top-k expansion, rerank
// (eagle_cuda/draft.h). In one cooperative launch (persistent.cuh) where that is possible, else in many
// (launches.cuh); the results are the same to the bit. The kernel takes bf16 and fp16 heads of head size 64
// or 128, of up to 3 layers and 128 KV heads, whose rows (embedding, features and their parts, MLP) are
// multiples of 16 bytes; weight formats but int8_dynamic; up to 64 rows of a level's beams in the batch; and
// paths of up to 64 rows each: 64 of those rows at a time.
//
// grid: [blocks]     one a multiprocessor, fewer for small heads
#include "cuda/draft/persistent.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>

#include "common/dispatch.h"
#include "cuda/draft/launches.cuh"
#include "cuda/draft/memory.h"
#include "cuda/launch.h"
#include "cuda/linear/plan.cuh"

namespace eagle::cuda {
namespace {

// registers: <= 255
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    persistent_draft_kernel(const __grid_constant__ PersistentParams p) {
  PersistentDraft<T, kHeadDim>().run(p);
}

template <class T, int kHeadDim>
constexpr bool kTaken = sizeof(T) == 2 && (kHeadDim == 64 || kHeadDim == 128);

constexpr WarpShape kShape{kPersistentThreads / kWarpSize, 1, kPersistentRows / 8};
constexpr int64_t kRing = kPersistentRing;
static_assert(kPersistentRing + sizeof(PersistentBuild) <= 99 * 1024);  // what the smallest devices have

// A block with less than this to read in any phase would only make the others wait longer at the barriers.
constexpr int64_t kLeastBytes = 16 * 1024;

// The kernel's parameters without addresses of the workspace, and what the launch wants.
struct PersistentLaunch {
  PersistentParams params{};
  int blocks;
  int64_t scratch = 0, words = 0, lists = 0, sums = 0;  // bytes of the workspace
  size_t shared_bytes = 0;
};

bool whole(std::initializer_list<const void*> addresses, std::initializer_list<int64_t> bytes) {
  return row_vectors(addresses, bytes);
}

// What can be said before anything is planned.
bool is_taken(const DraftParams& p) {
  const DraftHead& h = *p.head;
  const int64_t width = element_size(h.dtype), B = p.batch_size;
  if (h.dtype == DType::kFloat32 || (h.head_dim != 64 && h.head_dim != 128)) return false;
  if (h.layers.size() > kPersistentLayers || h.num_kv_heads > kPersistentKvHeads) return false;
  if (p.max_path > kPersistentRows || B * p.top_k > kPersistentRows) return false;
  if (h.fc.format == WeightFormat::kInt8Dynamic || h.lm_head.format == WeightFormat::kInt8Dynamic)
    return false;
  bool taken = whole({h.embedding, h.norm}, {h.hidden_size * width, h.intermediate_size * width,
                                             h.feature_size * width, h.feature_size / h.num_aux * width});
  for (const DraftLayer& l : h.layers) {
    taken &= whole({l.input_norm, l.hidden_norm, l.post_norm}, {});
    for (const PackedWeight* w : {&l.qkv, &l.o, &l.gate_up, &l.down})
      taken &= w->format != WeightFormat::kInt8Dynamic;
  }
  return taken;
}

class Planner {
 public:
  explicit Planner(const DraftParams& p) : p_(p), head_(*p.head) {}

  // Whether everything fits.
  bool plan(PersistentLaunch& launch) {
    if (!is_taken(p_)) return false;
    choose_blocks();
    launch_ = &launch;
    if (!attention(launch.params)) return false;
    launch.blocks = blocks_;
    PersistentParams& k = launch.params;
    const int path_rows = std::min(p_.batch_size * p_.max_path, kPersistentRows),  // of a tile
        rows = p_.batch_size * p_.top_k;
    bool fits = weight(head_.fc, path_rows, rows, k.fc);
    for (size_t i = 0; fits && i < head_.layers.size(); ++i) {
      const DraftLayer& from = head_.layers[i];
      PersistentLayer& to = k.layer[i];
      to.input_norm = from.input_norm;
      to.hidden_norm = from.hidden_norm;
      to.qkv_bias = from.qkv_bias;
      to.q_norm = from.q_norm;
      to.k_norm = from.k_norm;
      to.post_norm = from.post_norm;
      to.cache = p_.caches[i];
      fits = weight(from.qkv, path_rows, rows, to.qkv) && weight(from.o, path_rows, rows, to.o) &&
             weight(from.gate_up, path_rows, rows, to.gate_up) && weight(from.down, path_rows, rows, to.down);
      if (fits) stream_past_attention({path_rows, rows}, to.o);
    }
    if (!fits || !lm_head(rows, k)) return false;
    launch.shared_bytes =
        static_cast<size_t>(kRing) +
        std::max({sizeof(ExpandShared), sizeof(PersistentBuild), static_cast<size_t>(ring_bytes_)});
    k.bulk = has_bulk_copies();
    launch.words = static_cast<int64_t>(sizeof(GridBarrierWord)) +
                   4 * (2 + most_tiles_ + head_.num_kv_heads * (1 + int64_t{p_.batch_size}));
    return launch.shared_bytes <= shared_memory_limit();
  }

 private:
  void choose_blocks() {
    int64_t most = std::max(PackedLayout(head_.fc).bytes(), PackedLayout(head_.lm_head).bytes());
    for (const DraftLayer& l : head_.layers)
      for (const PackedWeight* w : {&l.qkv, &l.o, &l.gate_up, &l.down})
        most = std::max(most, PackedLayout(*w).bytes());
    blocks_ = static_cast<int>(std::clamp<int64_t>(ceil_div(most, kLeastBytes), 1, multiprocessors()));
  }

  // How a weight is gone through for each of two numbers of rows.
  template <class Behind>
  bool passes(const PackedWeight& from, int slices, int unit, const int (&rows)[2], PersistentWeight& to,
              Behind&& behind) {
    const PackedLayout layout(from);
    const int row_bytes = row_bytes_of(layout, head_.dtype);
    const auto* data = static_cast<const unsigned char*>(from.data);
    to.data = data;
    to.scales = layout.row_scales() ? reinterpret_cast<const float*>(data + layout.scales_at()) : nullptr;
    to.n = static_cast<int>(from.n);
    to.k = static_cast<int>(from.k);
    to.tiles = layout.tiles;
    to.steps = layout.steps;
    to.tile_bytes = static_cast<uint16_t>(layout.tile_bytes);
    to.slices = static_cast<uint8_t>(slices);
    to.unit = static_cast<uint8_t>(unit);
    to.paired = from.paired;
    to.format = from.format;
    for (int i = 0; i < 2; ++i) {
      StreamPlan plan{};
      plan.tiles = layout.tiles;
      plan.steps = layout.steps;
      plan.slices = slices;
      plan.unit = unit;
      plan.bulk = has_bulk_copies();
      plan.m = rows[i];
      plan_passes(plan, layout.tile_bytes, row_bytes, {kShape, blocks_, kRing},
                  [&](int tiles) { return behind(rows[i], tiles); });
      if (plan.ring < 3) return false;
      to.pass_tiles[i] = static_cast<uint8_t>(plan.pass_tiles);
      to.stage_steps[i] = static_cast<uint8_t>(plan.stage_steps);
      to.ring[i] = static_cast<uint8_t>(plan.ring);
      to.row_ring[i] = static_cast<uint8_t>(plan.row_ring);
      const int64_t ring = ring_bytes(plan, layout.tile_bytes);
      launch_->params.topk_offset[i] =
          static_cast<int>(kRing + ring);  // the LM head, which is last, has something there
      ring_bytes_ = std::max(ring_bytes_, ring + behind(rows[i], plan.pass_tiles));
      if (slices > 1)
        launch_->scratch = std::max(launch_->scratch, int64_t{slices} * layout.tiles * plan.token_tiles() *
                                                          kWarpSize * int64_t{sizeof(float4)});
    }
    most_tiles_ = std::max(most_tiles_, layout.tiles);
    return true;
  }

  bool weight(const PackedWeight& from, int path_rows, int rows, PersistentWeight& to) {
    return passes(from, slices_of(PackedLayout(from)), 1, {path_rows, rows}, to,
                  [](int, int) { return int64_t{0}; });
  }

  // The places of o's ring that attention leaves alone are the first to be filled, while it runs. Without
  // bulk copies it would wait for them.
  void stream_past_attention(const int (&rows)[2], PersistentWeight& o) const {
    if (!has_bulk_copies()) return;
    for (int i = 0; i < 2; ++i) {
      StreamPlan plan{};
      plan.stage_steps = o.stage_steps[i];
      plan.row_ring = o.row_ring[i];
      const int64_t left =
          attention_bytes_[i] - row_ring_bytes(plan, kPersistentRowBytes, ceil_div(rows[i], 8));
      const int64_t stage = int64_t{o.stage_steps[i]} * o.tile_bytes * o.pass_tiles[i];
      const int64_t first = std::max<int64_t>(left > 0 ? ceil_div(left, stage) : 0, 1);
      if (first < o.ring[i]) o.first[i] = static_cast<uint8_t>(first);
    }
  }

  bool lm_head(int rows, PersistentParams& k) {
    const PackedLayout layout(head_.lm_head);
    const int unit = chunk_tiles(layout);
    launch_->lists = int64_t{rows} * blocks_ * p_.top_k * int64_t{sizeof(uint64_t)};
    launch_->sums = int64_t{rows} * ceil_div(layout.tiles, unit) * int64_t{sizeof(float2)};
    return passes(head_.lm_head, 1, unit, {p_.batch_size, rows}, k.lm_head,
                  [](int m, int tiles) { return topk_bytes(m, tiles); });
  }

  bool attention(PersistentParams& k) {
    Arena none(nullptr);
    const DraftMemory shapes(p_, 0, none);
    const RowGroup groups[2] = {shapes.path_group(p_), shapes.level_group(p_, 1)};
    const int64_t prefixes = int64_t{p_.batch_size} * head_.num_kv_heads;
    // A part of a prefix a block, as far as there are blocks.
    const auto halves = static_cast<int>(std::max<int64_t>(blocks_ / prefixes * prefixes / 2, 1));
    for (int i = 0; i < 2; ++i) {
      for (size_t j = head_.layers.size(); j-- > 0;) {
        AttendParams a = attend_params(head_, p_.caches[j], groups[i], shapes.head);
        const Plan plan = attend_plan(a, {halves, shared_memory_limit() - kRing, kPersistentAttendRows});
        if (!plan.vectors || !plan.pairs) return false;
        k.attend_plan[i] = plan;  // of all layers
        launch_->scratch = std::max(launch_->scratch, partials_bytes(a, plan));
        dispatch(HeadDims{}, head_.head_dim, "head_dim", [&](auto dim) {
          attention_bytes_[i] = std::max<int64_t>(
              {attention_bytes_[i],
               static_cast<int64_t>(common_shared_bytes<dim()>(plan.rows_per_block, plan.ring, false)),
               int64_t{sizeof(FinishShared<bf16_t, bf16_t, dim()>)}});
          ring_bytes_ = std::max(ring_bytes_, attention_bytes_[i]);
        });
      }
    }
    return true;
  }

  const DraftParams& p_;
  const DraftHead& head_;
  PersistentLaunch* launch_ = nullptr;
  int blocks_ = 1, most_tiles_ = 0;
  int64_t ring_bytes_ = 0, attention_bytes_[2] = {};
};

// What the kernel keeps in the workspace.
struct PersistentMemory {
  DraftMemory memory;
  unsigned char* words;
  uint64_t* lists;
  float2* sums;

  PersistentMemory(const DraftParams& p, const PersistentLaunch& l, Arena& arena)
      : memory(p, l.scratch, arena),
        words(arena.take<unsigned char>(l.words)),
        lists(reinterpret_cast<uint64_t*>(arena.take<unsigned char>(l.lists))),
        sums(reinterpret_cast<float2*>(arena.take<unsigned char>(l.sums))) {}
};

void fill_words(const DraftParams& p, unsigned char* at, PersistentWords& w) {
  w.barrier = reinterpret_cast<GridBarrierWord*>(at);
  w.over = reinterpret_cast<int32_t*>(w.barrier + 1);
  w.lm_head = reinterpret_cast<uint32_t*>(w.over + 1);
  w.kv_heads = w.lm_head + 1;
  w.prefixes = w.kv_heads + p.head->num_kv_heads;
  w.tiles = w.prefixes + int64_t{p.batch_size} * p.head->num_kv_heads;
}

void fill(const DraftParams& p, const PersistentMemory& m, PersistentParams& k) {
  const DraftHead& h = *p.head;
  const int64_t width = element_size(h.dtype);
  k.batch_size = p.batch_size;
  k.max_feature_nodes = p.max_feature_nodes;
  k.max_path = p.max_path;
  k.max_nodes = p.max_nodes;
  k.top_k = p.top_k;
  k.levels = p.levels;
  k.order = p.order;
  k.tau = p.tau;
  k.features = p.features;
  std::copy_n(p.features_strides, 2, k.features_strides);
  k.target_tokens = p.target_tokens;
  k.path = p.path;
  k.num_accepted = p.num_accepted;
  k.seq_lens = p.seq_lens;
  k.node_limit = p.node_limit;
  k.temperature = p.temperature;
  k.seeds = p.seeds;
  k.tree = p.tree;
  k.shape = p.shape ? *p.shape : TreeShape{};
  k.memory = m.memory;
  k.eagle3 = h.kind == HeadKind::kEagle3;
  k.feedback_post_norm = h.feedback_post_norm;
  k.norm_before_residual = h.norm_before_residual;
  k.num_layers = static_cast<int>(h.layers.size());
  k.hidden_size = h.hidden_size;
  k.feature_size = h.feature_size;
  k.num_aux = h.num_aux;
  k.intermediate_size = h.intermediate_size;
  k.vocab_size = h.vocab_size;
  k.row_capacity = row_capacity(p.caches[0]);
  k.norm_eps = h.norm_eps;
  k.embedding = h.embedding;
  k.fc_bias = h.fc_bias;
  k.fc_norm = h.fc_norm;
  k.norm = h.norm;
  k.draft_to_target = h.draft_to_target;
  const RowGroup groups[2] = {m.memory.path_group(p), m.memory.level_group(p, 1)};
  for (int i = 0; i < 2; ++i) {
    k.attend[i] = attend_params(h, p.caches[0], groups[i], m.memory.head);
    k.append[i] = append_params(h, h.layers[0], p.caches[0], groups[i], m.memory.head);
  }
  fill_words(p, m.words, k.words);
  k.lists = m.lists;
  k.sums = m.sums;
  k.feature_vectors = row_vectors(
      {p.features, h.fc_norm},
      {h.feature_size / h.num_aux * width, p.features_strides[0] * width, p.features_strides[1] * width});
}

// Bytes of workspace; -1: this draft does not fit the kernel and goes by launches.
int64_t persistent_draft_bytes(const DraftParams& p) {
  PersistentLaunch l;
  if (!Planner(p).plan(l)) return -1;
  Arena arena(nullptr);
  const PersistentMemory memory(p, l, arena);
  return arena.bytes();
}

void persistent_draft(const DraftParams& p, CUstream_st* stream) {
  PersistentLaunch l;
  check(Planner(p).plan(l), "draft: expected what the persistent kernel takes");
  Arena arena(p.workspace);
  const PersistentMemory memory(p, l, arena);
  fill(p, memory, l.params);
  const LaunchConfig config{dim3(static_cast<unsigned>(l.blocks)), dim3(kPersistentThreads), stream,
                            l.shared_bytes};
  const Cleared words{memory.words, static_cast<size_t>(l.words)};
  dispatch(FloatTypes{}, p.head->dtype, "features", [&](auto type) {
    dispatch(HeadDims{}, p.head->head_dim, "head_dim", [&](auto dim) {
      using T = typename decltype(type)::type;
      if constexpr (kTaken<T, dim()>)
        launch_together(persistent_draft_kernel<T, dim()>, config, words, l.params);
    });
  });
}

}  // namespace

int64_t draft_workspace_bytes(const DraftParams& p) {
  validate(p);
  if (p.batch_size == 0) return 0;
  if (const int64_t bytes = persistent_draft_bytes(p); bytes >= 0) return bytes;
  Arena arena(nullptr);
  const DraftMemory memory(p, launches_scratch_bytes(p), arena);
  return arena.bytes();
}

void draft(const DraftParams& p, CUstream_st* stream) {
  validate(p);
  if (p.batch_size == 0) return;
  if (const int64_t bytes = persistent_draft_bytes(p); bytes >= 0) {
    check_draft_workspace(p.workspace, p.workspace_bytes, bytes);
    return persistent_draft(p, stream);
  }
  Arena arena(p.workspace);
  const DraftMemory memory(p, launches_scratch_bytes(p), arena);
  check_draft_workspace(p.workspace, p.workspace_bytes, arena.bytes());
  draft_by_launches(p, memory, stream);
}

}  // namespace eagle::cuda
