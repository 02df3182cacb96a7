#include <atomic>

#include "cpu/linear/streams.h"
#include "eagle_cuda/linear.h"

namespace eagle::cpu {

uint64_t read_probe(const void* data, int64_t bytes) {
  constexpr int64_t kWords = 8192;  // 64 KiB a piece
  const auto* words = static_cast<const uint64_t*>(data);
  std::atomic<uint64_t> total{0};
  Streams(bytes / 8 / kWords, 1, num_threads()).run([&](auto&& take) {
    uint64_t lanes[32] = {};
    take([&](int64_t begin, int64_t end) {
      for (int64_t i = begin * kWords; i < end * kWords; i += 32)
        for (int lane = 0; lane < 32; ++lane) lanes[lane] += words[i + lane];
    });
    uint64_t sum = 0;
    for (uint64_t lane : lanes) sum += lane;
    total.fetch_add(sum, std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace eagle::cpu
