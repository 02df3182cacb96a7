// The walk of a draft tree by tests of probabilities. What is computed stands in eagle_cuda/verify.h.
#include <algorithm>
#include <limits>

#include "common/fixed_mass.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "eagle_cuda/verify.h"

namespace eagle::cpu {
namespace {

constexpr int32_t kStopToken = 1, kLength = 2;
constexpr int64_t kEntriesPerPiece = 1 << 15;  // of probabilities that a thread takes on at a time, at least
struct ResidualSlot {};

// One row of probabilities as masses.
struct Masses {
  const float* p;
  int64_t size;
  MassScale scale;
  uint64_t sum;

  Masses(const float* row, int64_t vocab_size, int32_t& flags) : p(row), size(vocab_size), sum(0) {
    uint32_t largest = 0;
    bool usable = true;
    for (int64_t i = 0; i < size; ++i) {
      largest = std::max(largest, probability_bits(p[i]));
      usable &= is_probability(p[i]);
    }
    if (!usable) flags |= kBadProbability;
    scale = mass_scale(largest, size);
    for (int64_t i = 0; i < size; ++i) sum += at(i);
  }
  uint64_t at(int64_t token) const { return fixed_mass(p[token], scale); }
};

class Request {
 public:
  Request(const VerifyRejectionParams& p, int64_t request)
      : p_(p),
        request_(request),
        row_(request * p.max_nodes),
        nodes_(std::min(p.num_nodes[request], p.max_nodes)) {}

  void verify() {
    int32_t* const path = p_.path + request_ * p_.max_path;
    int32_t* const emitted = p_.emitted + request_ * p_.max_path;
    const bool exhausted = p_.budget && p_.budget[request_] <= 0;
    int32_t finished = nodes_ > 0 && exhausted ? kLength : 0, token = 0;
    for (int32_t node = nodes_ > 0 && !exhausted ? 0 : -1; node >= 0 && visited_ < p_.max_path;) {
      path[visited_] = node;
      token = choose(node);  // and what comes next
      emitted[visited_++] = token;
      if (is_stop(token)) {
        finished = kStopToken;
        break;
      }
      if (p_.budget && visited_ >= p_.budget[request_]) {
        finished = kLength;
        break;
      }
      node = accepted_;
    }
    std::fill(path + visited_, path + p_.max_path, -1);
    std::fill(emitted + visited_, emitted + p_.max_path, -1);
    p_.num_accepted[request_] = visited_ - 1;
    p_.next_tokens[request_] = token;
    p_.finished[request_] = finished;
    p_.flags[request_] = flags_;
    p_.new_seq_lens[request_] = static_cast<int32_t>(  // a garbage length must not overflow
        std::min<int64_t>(int64_t{p_.seq_lens[request_]} + visited_, std::numeric_limits<int32_t>::max()));
  }

 private:
  bool is_stop(int32_t token) const {
    const int32_t *const begin = p_.stop_tokens + request_ * p_.num_stop_tokens, *const end =
                                                                                     begin +
                                                                                     p_.num_stop_tokens;
    return token != -1 && std::find(begin, end, token) != end;
  }

  uint64_t noise(int32_t index, uint32_t stream) const {
    const uint32_t position = uint32_t(p_.seq_lens[request_]) + uint32_t(visited_) + 1;
    return uniform_from_noise(uint64_t(p_.seeds[request_]), uint32_t(index), position, stream);
  }
  // Of the test of `node`, or of its children: `index` is its token, or 0.
  uint64_t coin(int32_t node, int32_t index) const {
    return p_.coins ? uniform_of(p_.coins[row_ + node]) : noise(index, kAcceptStream);
  }
  uint64_t final_coin() const {
    return p_.coins ? uniform_of(p_.final_coins[request_]) : noise(0, kResidualStream);
  }

  bool exists(int32_t node) const { return node >= 0 && node < nodes_; }
  bool in_vocabulary(int32_t token) const { return token >= 0 && token < p_.vocab_size; }

  bool was_rejected(int32_t token) const {
    return std::find(rejected_, rejected_ + num_rejected_, token) != rejected_ + num_rejected_;
  }

  // What the node emits. `accepted_`: the child that carries it, if one was accepted; else -1.
  int32_t choose(int32_t node) {
    const float* const target =
        p_.target_probs + request_ * p_.target_strides[0] + node * p_.target_strides[1];
    const Masses w(target, p_.vocab_size, flags_);
    accepted_ = -1;
    num_rejected_ = 0;
    if (w.sum == 0) flags_ |= kNoMass;
    return p_.draft_probs ? choose_sampled(node, w) : choose_given(node, w);
  }

  // kPointMass and kCoinWalk.
  int32_t choose_given(int32_t node, const Masses& w) {
    const bool walk = p_.scheme == RejectionScheme::kCoinWalk;
    const uint64_t single = p_.threshold_single < 1.0 ? fixed_threshold(p_.threshold_single) : 0;
    uint64_t reached = walk ? multiply_high(coin(node, 0), w.sum) : 0;
    if (p_.threshold_acc < 1.0) reached = multiply_high(reached, fixed_threshold(p_.threshold_acc));

    uint64_t left = w.sum;
    int32_t count = 0;  // a sibling list has at most `nodes_` entries, whatever the links say
    for (int32_t child = p_.first_child[row_ + node]; count < nodes_ && exists(child);
         child = p_.next_sibling[row_ + child], ++count) {
      const int32_t token = p_.tokens[row_ + child];
      if (!in_vocabulary(token)) flags_ |= kBadProposal;
      if (!in_vocabulary(token) || was_rejected(token)) continue;
      const uint64_t mass = w.at(token);
      const bool accept = walk ? mass > 0 && (reached < w.sum - left + mass ||
                                              (p_.threshold_single < 1.0 && reaches(mass, w.sum, single)))
                               : below(coin(child, token), mass, left);
      if (accept) {
        accepted_ = child;
        return token;
      }
      left -= mass;
      rejected_[num_rejected_++] = token;
    }
    std::sort(rejected_, rejected_ + num_rejected_);
    return draw(left, [&, next = 0](int64_t i) mutable {  // for ascending i
      if (next == num_rejected_ || rejected_[next] != i) return w.at(i);
      ++next;
      return uint64_t{0};
    });
  }

  // kSampledTree and kChain.
  int32_t choose_sampled(int32_t node, const Masses& w) {
    const float* const draft = p_.draft_probs + request_ * p_.draft_strides[0] + node * p_.draft_strides[1];
    const Masses v(draft, p_.vocab_size, flags_);
    const int32_t most = p_.scheme == RejectionScheme::kChain ? 1 : nodes_;
    uint64_t* const residual = scratch<uint64_t, ResidualSlot>(w.size);
    const auto remaining = [&](int64_t i) { return num_rejected_ > 0 ? residual[i] : w.at(i); };

    uint64_t left = w.sum, draft_left = v.sum;
    int32_t count = 0;
    for (int32_t child = p_.first_child[row_ + node]; count < most && exists(child);
         child = p_.next_sibling[row_ + child], ++count) {
      const int32_t token = p_.tokens[row_ + child];
      if (!in_vocabulary(token) || v.at(token) == 0 || was_rejected(token)) {
        flags_ |= kBadProposal;
        continue;
      }
      if (left == 0) continue;
      const PartOf target = part_of(left), proposal = part_of(draft_left);
      bool accept = below(coin(child, token), target.of(remaining(token)), proposal.of(v.at(token)));
      if (!accept) {
        uint64_t sum = 0;
        for (int64_t i = 0; i < w.size; ++i) {
          const uint64_t a = target.of(remaining(i)), b = proposal.of(v.at(i));
          residual[i] = a > b ? a - b : 0;
          sum += residual[i];
        }
        accept = sum == 0;
        left = sum;
        draft_left -= v.at(token);
        rejected_[num_rejected_++] = token;
      }
      if (accept) {
        accepted_ = child;
        return token;
      }
    }
    return draw(left, remaining);
  }

  // The lowest token whose masses up to and with it exceed the final coin's part of `sum`, their sum.
  template <class Mass>
  int32_t draw(uint64_t sum, Mass mass) const {
    if (sum == 0) return 0;
    const uint64_t target = multiply_high(final_coin(), sum);
    uint64_t reached = 0;
    for (int64_t i = 0;; ++i)
      if ((reached += mass(i)) > target) return static_cast<int32_t>(i);
  }

  const VerifyRejectionParams& p_;
  const int64_t request_, row_;
  const int32_t nodes_;
  int32_t visited_ = 0, accepted_ = -1, flags_ = 0;
  int32_t rejected_[kMaxRejectionNodes], num_rejected_ = 0;  // different tokens of children of one node
};

}  // namespace

void verify_rejection(const VerifyRejectionParams& p) {
  validate(p);
  const int64_t grain = std::max<int64_t>(1, kEntriesPerPiece / p.vocab_size);
  parallel_for(p.batch_size, grain, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) Request(p, request).verify();
  });
}

}  // namespace eagle::cpu
