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

}  // namespace eagle
