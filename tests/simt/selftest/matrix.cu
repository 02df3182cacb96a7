// Matrix instructions. The lane maps stand here from the thread's side, as the PTX ISA gives them (groupID,
// threadID_in_group, register i); the emulator has them from the matrix's side.
#include "common/numeric.h"
#include "cuda/device/ptx_matrix.cuh"
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

using eagle::bf16_t;
using eagle::half_t;
using eagle::cuda::load_matrices;
using eagle::cuda::load_matrices_transposed;
using eagle::cuda::pack;
using eagle::cuda::store_matrices;
using eagle::cuda::store_matrices_transposed;

// ---- four 8x8 matrices from shared memory ----------------------------------------------------------------

constexpr int kRows = 32;
constexpr int kPitch = 8;  // pieces of 16 bytes from row to row: as far apart as conflicts can be

struct Rows {
  uint4 piece[kRows][kPitch];
};

enum class Layout { kPlain, kSwizzled };

__global__ void __launch_bounds__(32)
    rows_kernel(const uint4* x, uint4* y, bool transposed, Layout layout, bool waits) {
  auto& shared = shared_memory<Rows>();
  const int t = threadIdx.x, piece = layout == Layout::kSwizzled ? t % 8 : 0;
  shared.piece[t][piece] = load(x + t);  // <- other: rows
  if (waits) __syncwarp();
  // Lane t names the row of lane t + 8: other lanes' data.
  const int row = (t + 8) % kRows;
  const void* const address = &shared.piece[row][layout == Layout::kSwizzled ? row % 8 : 0];
  uint4 result;
  if (transposed)
    result = load_matrices_transposed(address);  // <- reported: rows
  else
    result = load_matrices(address);  // <- reported: rows
  store(y + t, result);
}

template <bool kTransposed, Layout kLayout, bool kWaits = true>
bool rows() {
  Buffer<uint4> x(kRows), y(kRows);
  auto* const element = reinterpret_cast<uint16_t*>(x.data());
  for (int i = 0; i < kRows * 8; ++i) element[i] = uint16_t(i);
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(rows_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Rows)}, x.data(), y.data(),
           kTransposed, kLayout, kWaits);
  });
  const auto* const got = reinterpret_cast<const uint16_t*>(y.data());
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half) {
        const int first_row = (8 * i + 8) % kRows;
        const int row = kTransposed ? lane % 4 * 2 + half : lane / 4,
                  column = kTransposed ? lane / 4 : lane % 4 * 2 + half;
        if (got[lane * 8 + 2 * i + half] != (first_row + row) * 8 + column) return false;
      }
  // Eight rows at a time, 16 bytes each: once through the banks, or eight times.
  const uint64_t waves = kLayout == Layout::kSwizzled ? 4 : 32;
  return counters().shared_load_requests == 1 && counters().shared_load_waves == waves &&
         counters().shared_load_ideal == 4;
}

// ---- and back --------------------------------------------------------------------------------------------

enum class Store {
  kGood,
  kNoBarrierBehind,
  kNoBarrierBefore,
  kOneRowTwice,
  kShifted,
  kElsewhere,
  kHalfAWarp
};

// Lane t brings four words and names the row of lane t + 8; then it reads its own.
__global__ void __launch_bounds__(32)
    stored_kernel(const uint4* x, uint4* y, bool transposed, Layout layout, Store how, int shift) {
  auto& shared = shared_memory<Rows>();
  const int t = threadIdx.x, row = how == Store::kOneRowTwice && t == 9 ? 16 : (t + 8) % kRows;
  const auto piece = [&](int r) { return &shared.piece[r][layout == Layout::kSwizzled ? r % 8 : 0]; };
  *piece(t) = load(x + 31 - t);  // <- other: stored
  if (how != Store::kNoBarrierBefore) __syncwarp();
  void* address = reinterpret_cast<char*>(piece(row)) + (t == 31 ? shift : 0);
  if (how == Store::kElsewhere && t == 31) address = y;
  const uint4 words = load(x + t);
  if (how == Store::kHalfAWarp && t >= 16) return;
  if (transposed)
    store_matrices_transposed(address, words);  // <- reported: stored
  else
    store_matrices(address, words);                  // <- reported: stored
  if (how != Store::kNoBarrierBehind) __syncwarp();  // <- other: stored
  store(y + t, *piece(t));                           // <- other: stored
}

template <bool kTransposed, Layout kLayout, Store kHow = Store::kGood, int kShift = 0>
bool stored() {
  Buffer<uint4> x(32), y(kRows);
  auto* const element = reinterpret_cast<uint16_t*>(x.data());
  for (int i = 0; i < 32 * 8; ++i) element[i] = uint16_t(i * 3 + 1);
  emulate({x.in("x"), y.inout("y")}, [&] {
    launch(stored_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Rows)}, x.data(), y.data(),
           kTransposed, kLayout, kHow, kShift);
  });
  // A thread's words, as the PTX ISA has them of stmatrix: its row is %laneid / 4, its two columns begin at
  // %laneid % 4 * 2; with .trans its column and its two rows.
  const auto* const got = reinterpret_cast<const uint16_t*>(y.data());
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half) {
        const int along = lane % 4 * 2 + half, across = lane / 4;
        const int row = (8 * i + 8) % kRows + (kTransposed ? along : across);
        if (got[row * 8 + (kTransposed ? across : along)] != element[lane * 8 + 2 * i + half]) return false;
      }
  const uint64_t waves = kLayout == Layout::kSwizzled ? 4 : 32;  // as above
  const uint64_t plain = checked() ? 1 : 0;  // the other store of this kernel: seen in checked builds alone
  return counters().shared_store_requests == 1 + plain &&
         counters().shared_store_waves == waves * (1 + plain) &&
         counters().shared_store_ideal == 4 * (1 + plain);
}

bool stored_on_an_older_device() {
  device_model().compute_capability = 80;
  try {
    stored<false, Layout::kSwizzled>();
  } catch (...) {
    device_model() = {};
    throw;
  }
  device_model() = {};
  return false;
}

// ---- all lanes at one instruction ------------------------------------------------------------------------

enum class Apart { kNobody, kPlace, kKind };  // lane 5: at an instruction of its own, or of the other kind

template <bool kStores, bool kTransposed>
__device__ __forceinline__ uint4 through(uint4* row, uint4 words) {
  if constexpr (kStores && kTransposed)
    store_matrices_transposed(row, words);
  else if constexpr (kStores)
    store_matrices(row, words);
  else if constexpr (kTransposed)
    words = load_matrices_transposed(row);
  else
    words = load_matrices(row);
  return words;
}

template <bool kStores, bool kTransposed>
__global__ void __launch_bounds__(32) apart_kernel(const uint4* x, uint4* y, Apart apart) {
  auto& shared = shared_memory<Rows>();
  const int t = threadIdx.x;
  uint4* const row = &shared.piece[t][t % 8];
  uint4 words = *row = load(x + t);
  __syncwarp();
  if (apart == Apart::kPlace && t == 5) {
    words = through<kStores, kTransposed>(row, words);  // <- reported: apart
    words.x = ~words.x;                                 // or the compiler would make one call of both
  } else if (apart == Apart::kKind && t == 5) {
    words = through<kStores, !kTransposed>(row, words);  // <- reported: apart
  } else {
    words = through<kStores, kTransposed>(row, words);  // <- reported: apart
  }
  store(y + t, words);
}

template <bool kStores, bool kTransposed, Apart kApart>
bool apart() {
  Buffer<uint4> x(32), y(32);
  for (int i = 0; i < 32; ++i) x[i] = {uint32_t(i), 1, 2, 3 * uint32_t(i)};
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(apart_kernel<kStores, kTransposed>, {.grid = 1, .block = 32, .shared_bytes = sizeof(Rows)},
           x.data(), y.data(), kApart);
  });
  // The first two elements of all, and the last two: no lane gives them away.
  return y[0].x == x[0].x && y[31].w == x[31].w;
}

// ---- rounding --------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(32) pack_kernel(const float* x, uint32_t* y) {
  const int t = threadIdx.x;
  store(y + t, pack<T>(load(x + 2 * t), load(x + 2 * t + 1)));
}

template <class T>
bool rounding() {
  Buffer<float> x(64);
  Buffer<uint32_t> y(32);
  for (int i = 0; i < 64; ++i)
    x[i] = eagle::bits_float(0x3f800000u + uint32_t(i) * 0x00123457u * (i % 2 ? 1 : 113));
  x[7] = __builtin_nanf("");
  x[8] = -__builtin_inff();
  emulate({x.in("x"), y.out("y")},
          [&] { launch(pack_kernel<T>, {.grid = 1, .block = 32}, x.data(), y.data()); });
  for (int i = 0; i < 64; ++i) {
    const uint16_t got = uint16_t(y[i / 2] >> 16 * (i % 2));
    if (got != (x[i] != x[i] ? 0x7fff : eagle::from_float<T>(x[i]).bits)) return false;
  }
  return true;
}

}  // namespace

std::vector<Case> matrix_cases() {
  constexpr auto kChecked = Builds::kChecked;
  return {
      {"rows/swizzled", "", rows<false, Layout::kSwizzled>},
      {"rows/transposed", "", rows<true, Layout::kSwizzled>},
      {"rows/bank_conflicts", "", rows<false, Layout::kPlain>},
      {"rows/no_barrier", "race read-after-write", rows<false, Layout::kSwizzled, false>, kChecked},
      {"rows/transposed_no_barrier", "race read-after-write", rows<true, Layout::kSwizzled, false>, kChecked},
      {"stored/swizzled", "", stored<false, Layout::kSwizzled>},
      {"stored/transposed", "", stored<true, Layout::kSwizzled>},
      {"stored/bank_conflicts", "", stored<false, Layout::kPlain>},
      {"stored/no_barrier_behind", "race", stored<false, Layout::kSwizzled, Store::kNoBarrierBehind>,
       kChecked},
      {"stored/transposed_no_barrier_behind", "race",
       stored<true, Layout::kSwizzled, Store::kNoBarrierBehind>, kChecked},
      {"stored/no_barrier_before", "race", stored<false, Layout::kSwizzled, Store::kNoBarrierBefore>,
       kChecked},
      {"stored/one_row_twice", "race write-after-write",
       stored<false, Layout::kSwizzled, Store::kOneRowTwice>, kChecked},
      {"stored/misaligned", "misaligned access", stored<false, Layout::kSwizzled, Store::kShifted, 8>},
      {"stored/one_past", "out-of-bounds write",
       stored<false, Layout::kSwizzled, Store::kShifted, sizeof(Rows)>},
      {"stored/one_before", "out-of-bounds write",
       stored<false, Layout::kPlain, Store::kShifted, -7 * 128 - 16>},
      {"stored/global_memory", "out-of-bounds write", stored<false, Layout::kSwizzled, Store::kElsewhere>},
      {"stored/half_a_warp", "collective names exited lanes",
       stored<false, Layout::kSwizzled, Store::kHalfAWarp>},
      {"stored/older_device", "stmatrix on an older device", stored_on_an_older_device},
      {"apart/load_together", "", apart<false, false, Apart::kNobody>},
      {"apart/load_two_places", "divergent collective", apart<false, false, Apart::kPlace>},
      {"apart/load_transposed_two_places", "divergent collective", apart<false, true, Apart::kPlace>},
      {"apart/load_two_kinds", "divergent collective", apart<false, false, Apart::kKind>},
      {"apart/store_together", "", apart<true, false, Apart::kNobody>},
      {"apart/store_two_places", "divergent collective", apart<true, false, Apart::kPlace>},
      {"apart/store_transposed_two_places", "divergent collective", apart<true, true, Apart::kPlace>},
      {"apart/store_two_kinds", "divergent collective", apart<true, false, Apart::kKind>},
      {"rounding/bf16", "", rounding<bf16_t>},
      {"rounding/half", "", rounding<half_t>},
  };
}

}  // namespace simt::selftest
