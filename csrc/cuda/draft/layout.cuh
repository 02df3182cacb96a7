#pragma once
// What a phase of the persistent draft kernel works with: its plan and pointers, in shared memory, and where
// the rows stand that it multiplies.
#include <cuda_runtime.h>

#include "common/dispatch.h"
#include "cuda/draft/phases.cuh"
#include "cuda/draft/rows.cuh"
#include "cuda/linear/finish.cuh"
#include "cuda/linear/stream.cuh"
#include "cuda/linear/topk.cuh"

namespace eagle::cuda {

// The rows of the accepted paths, as far as they exist, in tiles of at most kPersistentRows: of as many whole
// requests as fit, in their order. An absent request has a row too, which the LM head reads.
struct PathTiles {
  int count;
  uint8_t first[kPersistentRows + 1];   // a tile's first request; of `count`: the batch
  uint16_t begin[kPersistentRows + 1];  // rows of the requests before each
};

// At the beginning of shared memory; behind it the ring, or what a phase without one keeps.
struct PersistentShared {
  // The kernel's: what is read here is read where it is used. From the parameters' own memory the compiler
  // would keep hundreds of words in registers through all phases.
  PersistentParams params;
  Walk ahead;  // of the product's weights
  int first;   // the place of its first stage
  Mbarrier arrived[kMaxRing];
  RowTable table;
  uint16_t place[kMaxTableRows];  // of a row in [B, P] or [B, K], where the product's results go
  PathTiles tiles;
  // Of the phase; thread 0 fills them in. Here rather than in registers, which the products want.
  alignas(16) Phase phase;  // moved in one piece
  uint32_t barriers;        // of the grid, that are passed
  uint32_t parities;        // of the ring's barriers
  uint32_t items_of_head;   // what a KV head's counter says behind this phase, a prefix', the LM head's
  uint32_t parts, lm_heads;
  alignas(16) StreamPlan plan;
  alignas(16) FinishParams finish;
  alignas(16) TopkParams topk;
  alignas(16) AttendParams attend;
  alignas(16) AppendKvParams append;
  RowShared row;
  bool last;                          // the block that came last does what is left
  bool finishes[kPersistentKvHeads];  // the KV heads whose q, k and v are this block's to finish
};

inline constexpr int kPersistentRing = (static_cast<int>(sizeof(PersistentShared)) + 127) / 128 * 128;
static_assert(kPersistentRing <= 12 * 1024);  // benchmarks/linear_plan.py leaves it so much

template <class T, int kHeadDim>
class PhaseLayout {
 protected:
  __device__ __forceinline__ PhaseLayout()
      : p_(shared_memory<PersistentShared>().params), shared_(shared_memory<PersistentShared>()) {}

  static __device__ __forceinline__ int block() { return static_cast<int>(blockIdx.x); }
  static __device__ __forceinline__ int blocks() { return static_cast<int>(gridDim.x); }
  // Behind PersistentShared: the ring, or what a phase without one keeps.
  __device__ __forceinline__ unsigned char* scratch() const {
    return reinterpret_cast<unsigned char*>(&shared_) + kPersistentRing;
  }

  __device__ __forceinline__ const Phase& phase() const { return shared_.phase; }

  __device__ __forceinline__ void begin(const PersistentParams& params) const {
    const uint32_t* const from = reinterpret_cast<const uint32_t*>(&params);
    uint32_t* const to = reinterpret_cast<uint32_t*>(&shared_.params);
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(params) / 4);
         i += kPersistentThreads)
      to[i] = from[i];
    for (int request = static_cast<int>(threadIdx.x); request < params.batch_size;
         request += kPersistentThreads)
      shared_.tiles.begin[request] = static_cast<uint16_t>(
          clamped(load_read_only(params.num_accepted + request), 0, params.max_path - 1) + 1);
    if (threadIdx.x == 0) {
      shared_.phase = {Work::kRows, 0, 0, 0};
      shared_.barriers = shared_.parities = 0;
      shared_.items_of_head = shared_.parts = shared_.lm_heads = 0;
      for (int slot = 0; slot < kMaxRing; ++slot) mbarrier_init(&shared_.arrived[slot], 1);
      mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) cut_paths(params.batch_size);
  }

  // From the rows of each path, in `begin`.
  __device__ __forceinline__ void cut_paths(int requests) const {
    PathTiles& tiles = shared_.tiles;
    int count = 0, rows = 0, of_tile = 0;
    for (int request = 0; request < requests; ++request) {
      const int own = tiles.begin[request];
      tiles.begin[request] = static_cast<uint16_t>(rows);
      if (request == 0 || of_tile + own > kPersistentRows) {
        tiles.first[count++] = static_cast<uint8_t>(request);
        of_tile = 0;
      }
      of_tile += own;
      rows += own;
    }
    tiles.first[count] = static_cast<uint8_t>(requests);
    tiles.begin[requests] = static_cast<uint16_t>(rows);
    tiles.count = count;
  }

  // The next phase, from nothing that another one has written. Behind a barrier.
  __device__ __forceinline__ void lay_out() const {
    if (threadIdx.x == 0) {
      ++shared_.barriers;
      shared_.phase = phase().next(p_.eagle3, p_.num_layers, p_.levels, shared_.tiles.count);
      if (phase().work == Work::kAttention)
        lay_out_attention();
      else if (phase().is_product())
        lay_out_product();
    }
    __syncthreads();
  }

  // Whether the phase is of a tile of paths. The LM head has the last rows of all of them.
  __device__ __forceinline__ bool of_tile() const {
    return phase().level == 0 && phase().work != Work::kLmHead;
  }
  __device__ __forceinline__ int first_request() const {
    return of_tile() ? shared_.tiles.first[phase().tile] : 0;
  }
  __device__ __forceinline__ int last_request() const {  // the one behind it
    return of_tile() ? shared_.tiles.first[phase().tile + 1] : p_.batch_size;
  }
  __device__ __forceinline__ int rows() const {
    if (of_tile()) return shared_.tiles.begin[last_request()] - shared_.tiles.begin[first_request()];
    return p_.batch_size * (phase().level > 0 ? p_.top_k : 1);
  }
  // Where a row of the phase stands among those of all requests.
  __device__ __forceinline__ int place_of(int row) const {
    if (!of_tile()) return row;
    const uint16_t* const begin = shared_.tiles.begin;
    int request = first_request(), last = last_request();
    row += begin[request];
    while (last - request > 1) {
      const int middle = (request + last) / 2;
      if (begin[middle] <= row)
        request = middle;
      else
        last = middle;
    }
    return request * p_.max_path + row - begin[request];
  }
  __device__ __forceinline__ const PersistentLayer& layer() const { return p_.layer[phase().layer]; }
  __device__ __forceinline__ int query_size() const { return p_.append[0].num_heads * kHeadDim; }
  __device__ __forceinline__ int kv_heads() const { return layer().cache.num_kv_heads; }

  __device__ __forceinline__ void lay_out_product() const {
    const PersistentLayer& l = layer();
    const HeadMemory& memory = p_.memory.head;
    const int H = p_.hidden_size;
    FinishParams f{};
    f.x_dtype = f.out_dtype = dtype_of<T>::value;
    f.again = true;
    f.partials = static_cast<float4*>(memory.scratch);
    f.counters = p_.words.tiles;
    f.out_stride = f.residual_stride = H;
    const PersistentWeight* w = nullptr;
    const Work work = phase().work == Work::kAttention ? Work::kO : phase().work;
    switch (work) {
      case Work::kFc:  // what layer 0 begins with: the features fused, or embedding and hidden state
        w = &p_.fc;
        f.bias = p_.fc_bias;
        f.out = p_.eagle3 ? p_.memory.path_hidden : memory.stream;
        break;
      case Work::kQkv:
        w = &l.qkv;
        f.bias = l.qkv_bias;
        f.out = memory.qkv;
        f.out_stride = w->n;
        break;
      case Work::kO:
        w = &l.o;
        f.residual = f.out = memory.stream;
        break;
      case Work::kGateUp:
        w = &l.gate_up;
        f.swiglu = true;
        f.out = memory.gated;
        f.out_stride = p_.intermediate_size;
        break;
      case Work::kDown:
        w = &l.down;
        f.residual = f.out = memory.stream;
        if (phase().layer + 1 == p_.num_layers)
          f.out = phase().level > 0 ? p_.memory.output : p_.memory.path_output;
        break;
      default:
        w = &p_.lm_head;
    }
    f.scales = {w->scales, nullptr};
    f.n = w->n;
    f.paired = w->paired;
    shared_.finish = f;

    const int which = phase().level > 0;
    StreamPlan plan{};
    plan.weight = w->data;
    plan.tiles = w->tiles;
    plan.steps = w->steps;
    plan.slices = w->slices;
    plan.tile_bytes = w->tile_bytes;
    plan.format = w->format;
    plan.unit = w->unit;
    plan.pass_tiles = w->pass_tiles[which];
    plan.stage_steps = w->stage_steps[which];
    plan.ring = w->ring[which];
    plan.row_ring = w->row_ring[which];
    shared_.first = w->first[which];
    plan.weights_at = row_ring_bytes(plan, kPersistentRowBytes, ceil_div(most_rows(work), 8));
    plan.token_groups = 1;
    plan.bulk = p_.bulk;
    plan.m = rows();
    plan.k = w->k;
    plan.norm_eps = p_.norm_eps;
    shared_.plan = plan;

    if (phase().work == Work::kLmHead) lay_out_topk(which);
    if (phase().work == Work::kQkv) {
      shared_.append = p_.append[which];
      shared_.append.q_norm = l.q_norm;
      shared_.append.k_norm = l.k_norm;
      shared_.append.cache = l.cache;
      shared_.items_of_head += static_cast<uint32_t>(plan.slices * plan.tiles / l.cache.num_kv_heads);
    }
  }

  // Rows that the ring of x is laid out for: also where there are fewer, weights stand in the same places.
  __device__ __forceinline__ int most_rows(Work work) const {
    if (phase().level > 0) return p_.batch_size * p_.top_k;
    return work == Work::kLmHead ? p_.batch_size : min(p_.batch_size * p_.max_path, kPersistentRows);
  }

  __device__ __forceinline__ void lay_out_topk(int which) const {
    TopkParams t{};
    t.scales = {p_.lm_head.scales, nullptr};
    t.n = p_.lm_head.n;
    t.top_k = p_.top_k;
    t.chunks = ceil_div(p_.lm_head.tiles, int{p_.lm_head.unit});
    t.draft_to_target = p_.draft_to_target;
    if (p_.temperature) {
      t.temperature = which ? p_.memory.temperature : p_.temperature;
      t.seeds = which ? p_.memory.seeds : p_.seeds;
      t.positions = p_.memory.positions;
    }
    t.tau = p_.tau;
    t.tokens = p_.memory.child_tokens;
    t.log_probs = p_.memory.child_log_probs;
    t.lists = p_.lists;
    t.sums = p_.sums;
    shared_.topk = t;
    shared_.lm_heads += gridDim.x;
  }

  __device__ __forceinline__ const Plan& plan() const { return p_.attend_plan[phase().level > 0]; }
  __device__ __forceinline__ void lay_out_attention() const {
    lay_out_product();  // o's, whose first weights are asked for beside attention
    shared_.attend = p_.attend[phase().level > 0];
    shared_.attend.cache = layer().cache;
    if (phase().level > 0) shared_.attend.first_node = (phase().level - 1) * p_.top_k;
    if (of_tile() && phase().layer == 0) shared_.parts = 0;  // of these requests nothing is done
    shared_.parts += static_cast<uint32_t>(plan().splits * plan().row_blocks);
  }

  // Where the phase's rows stand, and where what becomes of them goes.
  __device__ __forceinline__ void find_rows() const {
    const HeadMemory& memory = p_.memory.head;
    RowTable& table = shared_.table;
    const int64_t H = p_.hidden_size;
    const int row = static_cast<int>(threadIdx.x);
    const void *rows = memory.stream, *norm = nullptr;
    int64_t size = H;
    bool joined = false;
    switch (phase().work) {
      case Work::kFc:
        joined = !p_.eagle3;
        rows = p_.memory.path_features;
        size = p_.feature_size;
        break;
      case Work::kQkv:
        joined = p_.eagle3 && phase().layer == 0;
        norm = layer().input_norm;
        break;
      case Work::kO:
        rows = memory.attended;
        size = query_size();
        break;
      case Work::kGateUp:
        norm = layer().post_norm;
        break;
      case Work::kDown:
        rows = memory.gated;
        size = p_.intermediate_size;
        break;
      default:
        norm = p_.norm;
    }
    if (row == 0) {
      const bool eagle3 = joined && p_.eagle3;
      table.norm[0] = norm;
      table.norm[1] = eagle3 ? layer().hidden_norm : nullptr;
      table.size[0] = size;
      table.size[1] = joined ? H : 0;
    }
    if (row >= shared_.plan.m) return;
    const int place = place_of(row);
    shared_.place[row] = static_cast<uint16_t>(place);
    if (joined) {
      const int token =
          clamped(load((phase().level > 0 ? p_.memory.beam_tokens : p_.memory.path_tokens) + place), 0,
                  p_.vocab_size - 1);
      table.row[0][row] = element(p_.embedding, token * H);
      table.row[1][row] = hidden_row(place);
    } else if (phase().work == Work::kLmHead) {
      table.row[0][row] = phase().level > 0 ? element(p_.memory.output, row * H) : root_row(row);
    } else {
      table.row[0][row] = element(rows, place * size);
    }
  }

  static __device__ __forceinline__ const T* element(const void* data, int64_t at) {
    return static_cast<const T*>(data) + at;
  }
  // The head's output at a request's last token.
  __device__ __forceinline__ const T* root_row(int request) const {
    const int last = clamped(load_read_only(p_.num_accepted + request), 0, p_.max_path - 1);
    return element(p_.memory.path_output, (int64_t{request} * p_.max_path + last) * p_.hidden_size);
  }
  // The hidden state that a row of the head starts from.
  __device__ __forceinline__ const T* hidden_row(int row) const {
    const int64_t H = p_.hidden_size;
    if (phase().level == 0)
      return element(p_.eagle3 ? p_.memory.path_hidden : p_.memory.path_features, row * H);
    const int request = row / p_.top_k;
    if (phase().level == 1)
      return p_.feedback_post_norm ? element(p_.memory.input, request * H) : root_row(request);
    const int parent = request * p_.top_k + clamped(load(p_.memory.beam_rows + row), 0, p_.top_k - 1);
    return element(p_.feedback_post_norm ? p_.memory.input : p_.memory.output, parent * H);
  }

  const PersistentParams& p_;
  PersistentShared& shared_;
};

}  // namespace eagle::cuda
