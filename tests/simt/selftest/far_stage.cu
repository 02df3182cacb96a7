// A ring of many stages, with a barrier each: who has waited for another stage has not waited for this one.
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

using eagle::cuda::copy_bulk;
using eagle::cuda::Mbarrier;
using eagle::cuda::mbarrier_arrive_expect;
using eagle::cuda::mbarrier_init;
using eagle::cuda::mbarrier_init_fence;
using eagle::cuda::mbarrier_wait;

constexpr int kFarStages = 24;
struct FarRing {
  Mbarrier full[kFarStages];
  alignas(16) uint4 piece[kFarStages][32];
};

// The second warp waits for the stage `ahead` of the one it reads; the first has seen both come.
__global__ void __launch_bounds__(64) far_stage_kernel(const uint4* x, uint4* y, int ahead) {
  auto& shared = shared_memory<FarRing>();
  const int t = threadIdx.x, lane = t % 32;
  if (t == 0) {
    for (int i = 0; i < kFarStages; ++i) mbarrier_init(&shared.full[i], 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (t == 0)
    for (int i = 0; i < kFarStages; ++i) {
      mbarrier_arrive_expect(&shared.full[i], sizeof shared.piece[i]);
      copy_bulk(shared.piece[i], x + i * 32, sizeof shared.piece[i], &shared.full[i]);  // <- other: far_stage
    }
  if (t < 32) {
    for (int i = 0; i < kFarStages; ++i) mbarrier_wait(&shared.full[i], 0);
    return;
  }
  for (int i = 0; i + ahead < kFarStages; ++i) {
    mbarrier_wait(&shared.full[i + ahead], 0);
    const uint4 piece = shared.piece[i][31 - lane];  // <- reported: far_stage
    store(y + i * 32 + lane, piece);
  }
}

template <int kAhead>
bool far_stage() {
  Buffer<uint4> x(kFarStages * 32), y(kFarStages * 32);
  for (size_t i = 0; i < x.size(); ++i) x[i] = {uint32_t(i), 1, 2, 3};
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(far_stage_kernel, {.grid = 1, .block = 64, .shared_bytes = sizeof(FarRing)}, x.data(), y.data(),
           kAhead);
  });
  for (size_t i = 0; i + kAhead * 32 < x.size(); ++i)
    if (y[i].x != i / 32 * 32 + 31 - i % 32) return false;
  return true;
}

}  // namespace

std::vector<Case> far_stage_cases() {
  constexpr Builds kChecked = Builds::kChecked;
  constexpr auto kRead = "read of a copy in flight or race";
  return {
      {"far_stage/its_own", "", far_stage<0>},
      {"far_stage/eight_ahead", kRead, far_stage<8>, kChecked},
      {"far_stage/sixteen_ahead", kRead, far_stage<16>, kChecked},
  };
}

}  // namespace simt::selftest
