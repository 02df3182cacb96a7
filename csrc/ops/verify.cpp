#include "eagle_cuda/verify.h"

#include <limits>

#include "common/check.h"
#include "eagle_cuda/device.h"

namespace eagle {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();

int checked_int(const char* what, int64_t n) {
  check(n <= kMaxInt, what, ": expected a dimension below 2^31, got ", n);
  return static_cast<int>(n);
}

int32_t* per_request(const char* what, const TensorView& t, int64_t batch, const TensorView& device) {
  Expect(what, t).dtype(DType::kInt32).shape({batch}).contiguous().writable().same_device(device);
  return t.as<int32_t>();
}

}  // namespace

void validate(const VerifyParams& p) {
  check(p.batch_size >= 0, "batch_size: expected at least 0, got ", p.batch_size);
  check(p.max_nodes >= 0, "max_nodes: expected at least 0, got ", p.max_nodes);
  check(p.max_path >= 1, "max_path: expected at least 1, got ", p.max_path);
  check(p.num_stop_tokens >= 0, "num_stop_tokens: expected at least 0, got ", p.num_stop_tokens);
}

void validate(const VerifyRejectionParams& p) {
  check(p.batch_size >= 0, "batch_size: expected at least 0, got ", p.batch_size);
  check(p.max_nodes >= 0 && p.max_nodes <= kMaxRejectionNodes, "max_nodes: expected 0 to ",
        kMaxRejectionNodes, ", got ", p.max_nodes);
  check(p.max_path >= 1, "max_path: expected at least 1, got ", p.max_path);
  check(p.num_stop_tokens >= 0, "num_stop_tokens: expected at least 0, got ", p.num_stop_tokens);
  check(p.vocab_size >= 1 && p.vocab_size <= kMaxInt - 64, "vocab_size: expected 1 to 2^31 - 65, got ",
        p.vocab_size);
  const auto threshold = [&](const char* what, double value) {
    check(value >= 0.0 && value <= 1.0, what, ": expected 0 to 1, got ", value);
    check(value == 1.0 || p.scheme == RejectionScheme::kCoinWalk, what,
          ": expected 1 (off), which alone is exact, unless scheme is \"coin_walk\"; got ", value);
  };
  threshold("threshold_single", p.threshold_single);
  threshold("threshold_acc", p.threshold_acc);
}

void verify(TensorView tokens, TensorView first_child, TensorView next_sibling, TensorView num_nodes,
            TensorView target_tokens, TensorView seq_lens, TensorView stop_tokens, TensorView budget,
            TensorView path, TensorView num_accepted, TensorView next_tokens, TensorView finished,
            TensorView new_seq_lens, CUstream_st* stream) {
  Expect("tokens", tokens).dtype(DType::kInt32).rank(2).contiguous();
  const int64_t b = tokens.shape[0], n = tokens.shape[1];
  const auto nodes = [&](const char* what, const TensorView& t) {
    Expect(what, t).dtype(DType::kInt32).shape({b, n}).contiguous().same_device(tokens);
    return t.as<const int32_t>();
  };
  const auto requests = [&](const char* what, const TensorView& t) {
    Expect(what, t).dtype(DType::kInt32).shape({b}).contiguous().same_device(tokens);
    return t.as<const int32_t>();
  };

  VerifyParams p{};
  p.batch_size = checked_int("tokens", b);
  p.max_nodes = checked_int("tokens", n);
  p.tokens = tokens.as<const int32_t>();
  p.first_child = nodes("first_child", first_child);
  p.next_sibling = nodes("next_sibling", next_sibling);
  p.num_nodes = requests("num_nodes", num_nodes);
  p.target_tokens = nodes("target_tokens", target_tokens);
  p.seq_lens = requests("seq_lens", seq_lens);
  if (stop_tokens.present()) {
    Expect("stop_tokens", stop_tokens).dtype(DType::kInt32).shape({b, -1}).contiguous().same_device(tokens);
    p.num_stop_tokens = checked_int("stop_tokens", stop_tokens.shape[1]);
    p.stop_tokens = stop_tokens.as<const int32_t>();
  }
  if (budget.present()) p.budget = requests("budget", budget);
  Expect("path", path).dtype(DType::kInt32).shape({b, -1}).contiguous().writable().same_device(tokens);
  check(path.shape[1] >= 1, "path: expected a width of at least 1, got ", path.shape[1]);
  p.max_path = checked_int("path", path.shape[1]);
  p.path = path.as<int32_t>();
  p.num_accepted = per_request("num_accepted", num_accepted, b, tokens);
  p.next_tokens = per_request("next_tokens", next_tokens, b, tokens);
  p.finished = per_request("finished", finished, b, tokens);
  p.new_seq_lens = per_request("new_seq_lens", new_seq_lens, b, tokens);
  check_disjoint({{"path", path},
                  {"num_accepted", num_accepted},
                  {"next_tokens", next_tokens},
                  {"finished", finished},
                  {"new_seq_lens", new_seq_lens}});
  const DeviceGuard guard(tokens);
  tokens.device == DeviceType::kCPU ? cpu::verify(p) : cuda::verify(p, stream);
}

void verify_rejection(TensorView tokens, TensorView first_child, TensorView next_sibling,
                      TensorView num_nodes, TensorView target_probs, TensorView draft_probs,
                      RejectionScheme scheme, double threshold_single, double threshold_acc, TensorView coins,
                      TensorView final_coins, TensorView seeds, TensorView seq_lens, TensorView stop_tokens,
                      TensorView budget, TensorView path, TensorView num_accepted, TensorView next_tokens,
                      TensorView finished, TensorView new_seq_lens, TensorView emitted, TensorView flags,
                      CUstream_st* stream) {
  Expect("tokens", tokens).dtype(DType::kInt32).rank(2).contiguous();
  const int64_t b = tokens.shape[0], n = tokens.shape[1];
  const auto input = [&](const char* what, const TensorView& t, std::initializer_list<int64_t> shape,
                         DType dtype = DType::kInt32) {
    Expect(what, t).dtype(dtype).shape(shape).contiguous().same_device(tokens);
  };
  const auto integers = [&](const char* what, const TensorView& t, std::initializer_list<int64_t> shape) {
    input(what, t, shape);
    return t.as<const int32_t>();
  };
  VerifyRejectionParams p{};
  const auto rows = [&](const char* what, const TensorView& t, int64_t vocab, int64_t (&strides)[2]) {
    Expect(what, t).dtype(DType::kFloat32).shape({b, n, vocab}).last_dim_contiguous().same_device(tokens);
    strides[0] = t.strides[0];
    strides[1] = t.strides[1];
    return t.as<const float>();
  };

  p.batch_size = checked_int("tokens", b);
  p.max_nodes = checked_int("tokens", n);
  p.scheme = scheme;
  p.threshold_single = threshold_single;
  p.threshold_acc = threshold_acc;
  p.tokens = tokens.as<const int32_t>();
  p.first_child = integers("first_child", first_child, {b, n});
  p.next_sibling = integers("next_sibling", next_sibling, {b, n});
  p.num_nodes = integers("num_nodes", num_nodes, {b});
  p.target_probs = rows("target_probs", target_probs, -1, p.target_strides);
  p.vocab_size = target_probs.shape[2];
  check(p.vocab_size >= 1, "target_probs: expected a vocabulary of at least 1, got 0");
  const bool sampled = scheme == RejectionScheme::kSampledTree || scheme == RejectionScheme::kChain;
  check(sampled || !draft_probs.present(),
        "draft_probs: expected None where children were not sampled, got a tensor");
  if (sampled) p.draft_probs = rows("draft_probs", draft_probs, p.vocab_size, p.draft_strides);
  check(seeds.present() != coins.present(), "seeds: expected either seeds or coins and final_coins, got ",
        seeds.present() ? "both" : "neither");
  check(coins.present() == final_coins.present(), "final_coins: expected to come with coins");
  if (seeds.present()) {
    input("seeds", seeds, {b}, DType::kInt64);
    p.seeds = seeds.as<const int64_t>();
  } else {
    input("coins", coins, {b, n}, DType::kFloat32);
    input("final_coins", final_coins, {b}, DType::kFloat32);
    p.coins = coins.as<const float>();
    p.final_coins = final_coins.as<const float>();
  }
  p.seq_lens = integers("seq_lens", seq_lens, {b});
  if (stop_tokens.present()) {
    p.stop_tokens = integers("stop_tokens", stop_tokens, {b, -1});
    p.num_stop_tokens = checked_int("stop_tokens", stop_tokens.shape[1]);
  }
  if (budget.present()) p.budget = integers("budget", budget, {b});
  const auto paths = [&](const char* what, const TensorView& t, int64_t width) {
    Expect(what, t).dtype(DType::kInt32).shape({b, width}).contiguous().writable().same_device(tokens);
    return t.as<int32_t>();
  };
  p.path = paths("path", path, -1);
  check(path.shape[1] >= 1, "path: expected a width of at least 1, got ", path.shape[1]);
  p.max_path = checked_int("path", path.shape[1]);
  p.emitted = paths("emitted", emitted, p.max_path);
  p.num_accepted = per_request("num_accepted", num_accepted, b, tokens);
  p.next_tokens = per_request("next_tokens", next_tokens, b, tokens);
  p.finished = per_request("finished", finished, b, tokens);
  p.new_seq_lens = per_request("new_seq_lens", new_seq_lens, b, tokens);
  p.flags = per_request("flags", flags, b, tokens);
  check_disjoint({{"path", path},
                  {"num_accepted", num_accepted},
                  {"next_tokens", next_tokens},
                  {"finished", finished},
                  {"new_seq_lens", new_seq_lens},
                  {"emitted", emitted},
                  {"flags", flags}});
  const DeviceGuard guard(tokens);
  tokens.device == DeviceType::kCPU ? cpu::verify_rejection(p) : cuda::verify_rejection(p, stream);
}

}  // namespace eagle
