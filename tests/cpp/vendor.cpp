// A framework vendor's program: the static library and its public headers, raw pointers, no Python. Exit code
// 0, or 1.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "eagle_cuda/attention.h"
#include "eagle_cuda/device.h"
#include "eagle_cuda/draft.h"
#include "eagle_cuda/kv_cache.h"
#include "eagle_cuda/linear.h"
#include "eagle_cuda/sampling.h"
#include "eagle_cuda/threads.h"
#include "eagle_cuda/tree.h"
#include "eagle_cuda/verify.h"

namespace {

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "vendor: %s\n", what);
  std::exit(1);
}

template <class T>
eagle::TensorView view(std::vector<T>& data, std::initializer_list<int64_t> shape, eagle::DType dtype) {
  eagle::TensorView t;
  t.data = data.data();
  t.dtype = dtype;
  t.ndim = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.shape[d] = shape.begin()[d];
    t.strides[d] = stride;
    stride *= t.shape[d];
  }
  return t;
}

// y = x W^T with raw parameters, as an embedder calls it who owns shapes and memory himself.
void linear_by_params() {
  constexpr int64_t kRows = 3, kN = 40, kK = 70;
  std::vector<float> x(kRows * kK), w(kN * kK), y(kRows * kN, -1.0f);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i * 7 % 11) - 5);
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(static_cast<int>(i * 5 % 13) - 6);

  eagle::PackedWeight packed;
  packed.format = eagle::WeightFormat::kFloat32;
  packed.n = kN;
  packed.k = kK;
  packed.bytes = eagle::packed_weight_bytes(kN, kK, packed.format, eagle::DeviceType::kCPU);
  void* memory = std::aligned_alloc(64, static_cast<size_t>((packed.bytes + 63) / 64 * 64));
  packed.data = memory;
  eagle::PackWeightParams pack{};
  pack.n = kN;
  pack.k = kK;
  pack.format = packed.format;
  pack.rows = kN;
  pack.weight_dtype = eagle::DType::kFloat32;
  pack.weight = w.data();
  pack.weight_stride = kK;
  pack.packed = memory;
  eagle::cpu::pack_weight(pack);

  eagle::LinearParams p{};
  p.m = kRows;
  p.weight = packed;
  p.activation = eagle::Activation::kNone;
  p.x_dtype = p.out_dtype = eagle::DType::kFloat32;
  p.x = x.data();
  p.x_stride = kK;
  p.out = y.data();
  p.out_stride = kN;
  eagle::cpu::linear(p);

  for (int64_t m = 0; m < kRows; ++m)
    for (int64_t n = 0; n < kN; ++n) {
      float want = 0;  // small integers: exact in any order
      for (int64_t k = 0; k < kK; ++k) want += x[m * kK + k] * w[n * kK + k];
      expect(y[m * kN + n] == want, "linear: wrong product");
    }
  std::free(memory);
}

// A chain of three drafts of which the target confirms two, through the checked tensor form.
void verify_by_tensors() {
  std::vector<int32_t> tokens{9, 5, 6, 7}, child{1, 2, 3, -1}, sibling{-1, -1, -1, -1}, nodes{4},
      target{5, 6, 8, 1}, lengths{10}, path(4), accepted(1), next(1), finished(1), new_lengths(1);
  const auto i32 = eagle::DType::kInt32;
  const auto walk = [&](int64_t width) {
    eagle::verify(view(tokens, {1, 4}, i32), view(child, {1, 4}, i32), view(sibling, {1, 4}, i32),
                  view(nodes, {1}, i32), view(target, {1, width}, i32), view(lengths, {1}, i32), {}, {},
                  view(path, {1, 4}, i32), view(accepted, {1}, i32), view(next, {1}, i32),
                  view(finished, {1}, i32), view(new_lengths, {1}, i32), nullptr);
  };
  walk(4);
  expect(accepted[0] == 2 && next[0] == 8 && new_lengths[0] == 13, "verify: wrong acceptance");
  expect(path == std::vector<int32_t>({0, 1, 2, -1}), "verify: wrong path");
  std::string words;
  try {
    walk(3);
  } catch (const std::invalid_argument& error) {
    words = error.what();
  }
  expect(words.find("target_tokens: expected shape [1, 4], got [1, 3]") != std::string::npos,
         "verify: a wrong shape is not reported by name");
}

// CUDA entry points always link; where they cannot run, they say so in one line, whichever way they are
// called.
void cuda_is_absent_politely() {
  if (eagle::cuda_error().empty()) return;
  const bool built = *eagle::cuda_toolkit() != '\0';
  const std::string expected = built ? "no usable CUDA device" : "without the CUDA backend";
  expect(eagle::cuda_error().find(expected) != std::string::npos, "cuda_error: expected the reason");
  std::vector<int32_t> data(1);
  const auto says = [&](auto&& call) {
    std::string words;
    try {
      call();
    } catch (const std::runtime_error& error) {
      words = error.what();
    }
    return words.find(expected) != std::string::npos && words.find('\n') == std::string::npos;
  };
  expect(says([&] {
           eagle::VerifyParams p{};
           p.batch_size = p.max_nodes = p.max_path = 1;
           eagle::cuda::verify(p, nullptr);
         }),
         "cuda::verify: expected a clear error");
  expect(says([&] {
           std::vector<int32_t> words(5);  // outputs share no memory
           const auto at = [&](std::vector<int32_t>& from, int i, std::initializer_list<int64_t> shape) {
             auto t = view(from, shape, eagle::DType::kInt32);
             t.data = from.data() + i;
             t.device = eagle::DeviceType::kCUDA;
             return t;
           };
           const auto nodes = at(data, 0, {1, 1}), row = at(data, 0, {1});
           eagle::verify(nodes, nodes, nodes, row, nodes, row, {}, {}, at(words, 0, {1, 1}),
                         at(words, 1, {1}), at(words, 2, {1}), at(words, 3, {1}), at(words, 4, {1}), nullptr);
         }),
         "verify: expected a clear error");
}

}  // namespace

int main() {
  eagle::set_num_threads(2);
  expect(eagle::num_threads() == 2 && std::strlen(eagle::cpu_isa()) > 0, "threads: wrong state");
  linear_by_params();
  verify_by_tensors();
  cuda_is_absent_politely();
  std::puts("vendor: ok");
  return 0;
}
