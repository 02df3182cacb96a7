// What accesses cost: global sectors and shared wavefronts with known answers, first of made-up warps, then
// of kernels.
#include <initializer_list>

#include "simt/selftest/kernel.h"
#include "simt/traffic.h"

namespace simt::selftest {
namespace {

// ---- traffic::account itself ---------------------------------------------------------------------------

using Log = std::vector<traffic::Access>;

struct Sum {
  uint64_t requests, units, ideal_or_bytes;
  bool operator==(const Sum&) const = default;
};

// The counters' change by one warp of which lane i accesses `address(i)`; a negative address: takes no part.
template <class Address>
Sum one_request(bool shared, bool write, uint32_t size, Address address) {
  Log logs[32];
  const Log* lanes[32];
  for (int lane = 0; lane < 32; ++lane) {
    if (const int64_t at = address(lane); at >= 0)
      logs[lane].push_back(
          {uint64_t(at), reinterpret_cast<const void*>(&one_request<Address>), size, write, shared});
    lanes[lane] = lane % 2 && logs[lane].empty() ? nullptr : &logs[lane];
  }
  Counters& c = counters();
  c = {};
  traffic::account(lanes);
  const Counters d = c;
  c = {};
  if (shared && write) return {d.shared_store_requests, d.shared_store_waves, d.shared_store_ideal};
  if (shared) return {d.shared_load_requests, d.shared_load_waves, d.shared_load_ideal};
  if (write) return {d.global_store_requests, d.global_store_sectors, d.global_store_bytes};
  return {d.global_load_requests, d.global_load_sectors, d.global_load_bytes};
}

template <class Address>
bool both_ways(bool shared, uint32_t size, Sum expected, Address address) {
  return one_request(shared, false, size, address) == expected &&
         one_request(shared, true, size, address) == expected;
}

// requests, sectors, bytes
bool account_global() {
  const auto is = [](uint32_t size, Sum expected, auto address) {
    return both_ways(false, size, expected, address);
  };
  return is(4, {1, 4, 128}, [](int i) { return 4096 + i * 4; }) &&               // side by side
         is(8, {1, 8, 256}, [](int i) { return 4096 + i * 8; }) &&               //
         is(16, {1, 16, 512}, [](int i) { return 4096 + i * 16; }) &&            //
         is(1, {1, 1, 32}, [](int i) { return 4096 + i; }) &&                    //
         is(2, {1, 2, 64}, [](int i) { return 4096 + i * 2; }) &&                //
         is(4, {1, 4, 128}, [](int i) { return 4096 + (31 - i) * 4; }) &&        // backwards
         is(4, {1, 4, 128}, [](int i) { return 4096 + (i * 7 % 32) * 4; }) &&    // in any order
         is(4, {1, 5, 128}, [](int i) { return 4100 + i * 4; }) &&               // four bytes off a sector
         is(16, {1, 17, 512}, [](int i) { return 4112 + i * 16; }) &&            //
         is(4, {1, 8, 128}, [](int i) { return 4096 + i * 8; }) &&               // every second word
         is(4, {1, 32, 128}, [](int i) { return 4096 + i * 128; }) &&            // a column
         is(4, {1, 1, 128}, [](int) { return 4096; }) &&                         // everybody the same
         is(4, {1, 2, 64}, [](int i) { return i < 16 ? 4096 + i * 4 : -1; }) &&  // half a warp
         is(4, {1, 2, 32}, [](int i) { return i % 4 == 0 ? 4096 + i * 2 : -1; }) &&  // every fourth lane
         is(4, {1, 1, 4}, [](int i) { return i == 31 ? 4096 : -1; }) &&
         is(4, {0, 0, 0}, [](int) { return -1; }) &&
         is(64, {1, 64, 2048}, [](int i) { return 4096 + i * 64; }) &&  // bulk copies
         is(4096, {1, 129, 4096}, [](int i) { return i == 7 ? 4112 : -1; });
}

// requests, wavefronts, ideal
bool account_shared() {
  const auto is = [](uint32_t size, Sum expected, auto address) {
    return both_ways(true, size, expected, address);
  };
  return is(4, {1, 1, 1}, [](int i) { return i * 4; }) &&                    // side by side
         is(8, {1, 2, 2}, [](int i) { return i * 8; }) &&                    //
         is(16, {1, 4, 4}, [](int i) { return i * 16; }) &&                  //
         is(1, {1, 1, 1}, [](int i) { return i; }) &&                        // four lanes to a word
         is(2, {1, 1, 1}, [](int i) { return i * 2; }) &&                    //
         is(4, {1, 1, 1}, [](int i) { return (31 - i) * 4; }) &&             // backwards
         is(4, {1, 1, 1}, [](int i) { return 52 + i * 4; }) &&               // from any word on
         is(4, {1, 1, 1}, [](int) { return 256; }) &&                        // a broadcast
         is(4, {1, 2, 1}, [](int i) { return i * 8; }) &&                    // every second word
         is(4, {1, 4, 1}, [](int i) { return i * 16; }) &&                   //
         is(4, {1, 32, 1}, [](int i) { return i * 128; }) &&                 // a column
         is(4, {1, 1, 1}, [](int i) { return i * 132; }) &&                  // a column of padded rows
         is(4, {1, 2, 1}, [](int i) { return i % 2 * 128; }) &&              // two words of one bank
         is(4, {1, 1, 1}, [](int i) { return i % 2 * 132; }) &&              // two words of two banks
         is(8, {1, 4, 2}, [](int i) { return i * 16; }) &&                   // every second pair
         is(8, {1, 32, 2}, [](int i) { return i * 128; }) &&                 //
         is(16, {1, 32, 4}, [](int i) { return i * 128; }) &&                // eight rows at one column
         is(16, {1, 4, 4}, [](int i) { return i * 128 + (i % 8) * 16; }) &&  // the same, swizzled
         is(16, {1, 4, 4}, [](int) { return 64; }) &&                        //
         is(4, {1, 1, 1}, [](int i) { return i < 16 ? i * 4 : -1; }) &&      // half a warp
         is(16, {1, 2, 2}, [](int i) { return i < 16 ? i * 16 : -1; }) &&    // two phases of four
         is(8, {1, 1, 1}, [](int i) { return i >= 20 && i < 24 ? i * 8 : -1; });
}

// Lanes that took different ways: the n-th time at an instruction is one request, whatever lies between.
bool account_diverged() {
  const void* const here = reinterpret_cast<const void*>(&account_diverged);
  const void* const there = reinterpret_cast<const void*>(&account_shared);
  Log logs[32];
  const Log* lanes[32];
  for (int lane = 0; lane < 32; ++lane) {
    lanes[lane] = &logs[lane];
    // A loop that lane i goes through i times, after which odd lanes do something else.
    for (int round = 0; round < lane; ++round)
      logs[lane].push_back({uint64_t(4096 + round * 128 + lane * 4), here, 4, false, false});
    if (lane % 2) logs[lane].push_back({uint64_t(lane), there, 1, true, false});
  }
  counters() = {};
  traffic::account(lanes);
  const Counters c = counters();
  counters() = {};
  uint64_t sectors = 0;
  for (int round = 0; round < 31; ++round) sectors += 4 - (round + 1) * 4 / 32;  // of lanes round + 1 to 31
  return c.global_load_requests == 31 && c.global_load_bytes == 4 * 31 * 32 / 2 &&
         c.global_load_sectors == sectors && c.global_store_requests == 1 && c.global_store_sectors == 1 &&
         c.global_store_bytes == 16;
}

bool table_names_the_costliest() {
  clear_traffic();
  one_request(true, false, 4, [](int i) { return i * 128; });
  one_request(false, true, 4, [](int i) { return i * 4; });
  const std::string table = traffic_table();
  clear_traffic();
  const size_t conflicts = table.find("above the ideal"), store = table.find("global  store");
  return conflicts != std::string::npos && store != std::string::npos && conflicts < store &&
         table.find("32.00") < conflicts && traffic_table().find("global") == std::string::npos;
}

// ---- kernels -------------------------------------------------------------------------------------------

// Threads `stride` words apart, the first one at word `first`.
template <class T>
__global__ void __launch_bounds__(64) stride_kernel(const int32_t* x, T* y, int first, int stride) {
  const int t = threadIdx.x;
  store(y + t, load(reinterpret_cast<const T*>(x + first + t * stride)));
}

template <class T>
bool strided(int first, int stride, uint64_t sectors_of_a_warp) {
  Buffer<int32_t> x(64 * 32 + 64, 3);
  Buffer<T> y(64);
  counters() = {};
  emulate({x.in("x"), y.out("y")},
          [&] { launch(stride_kernel<T>, {.grid = 1, .block = 64}, x.data(), y.data(), first, stride); });
  const Counters& c = counters();
  return c.global_load_requests == 2 && c.global_load_bytes == 64 * sizeof(T) &&
         c.global_load_sectors == 2 * sectors_of_a_warp && c.global_store_requests == 2 &&
         c.global_store_bytes == 64 * sizeof(T) && c.global_store_sectors == 2 * sizeof(T) &&
         c.launches == 1 && c.threads == 64;
}

bool coalescing() {
  return strided<int32_t>(0, 1, 4) && strided<int2>(0, 2, 8) && strided<int4>(0, 4, 16) &&  // side by side
         strided<int32_t>(0, 2, 8) && strided<int32_t>(0, 32, 32) && strided<int32_t>(0, 0, 1) &&
         strided<int32_t>(1, 1, 5) && strided<int4>(4, 4, 17) && strided<int4>(0, 8, 32);
}

// A loop in which every lane has its own number of rounds, and a branch within.
__global__ void __launch_bounds__(32) ragged_kernel(const int32_t* x, int32_t* y) {
  const int t = threadIdx.x;
  int32_t sum = 0;
  for (int round = 0; round < t; ++round) sum += load(x + round * 32 + t);
  if (t % 2) store(y + t, sum);
}

bool ragged() {
  Buffer<int32_t> x(32 * 32, 1), y(32, 0);
  counters() = {};
  emulate({x.in("x"), y.inout("y")},
          [&] { launch(ragged_kernel, {.grid = 1, .block = 32}, x.data(), y.data()); });
  const Counters& c = counters();
  return c.global_load_requests == 31 && c.global_load_bytes == 4 * 31 * 32 / 2 &&
         c.global_store_requests == 1 && c.global_store_sectors == 4 && c.global_store_bytes == 64 &&
         y[31] == 31;
}

constexpr int kTile = 32;

template <int kPadding>
struct Tile {
  int32_t value[kTile][kTile + kPadding];
};

// Rows in, columns out.
template <int kPadding>
__global__ void __launch_bounds__(kTile) transpose_kernel(const int32_t* x, int32_t* y) {
  auto& shared = shared_memory<Tile<kPadding>>();
  const int t = threadIdx.x;
  for (int row = 0; row < kTile; ++row) shared.value[row][t] = load(x + row * kTile + t);
  __syncthreads();
  for (int row = 0; row < kTile; ++row) store(y + row * kTile + t, shared.value[t][row]);
}

template <int kPadding>
bool transpose() {
  auto x = counting(kTile * kTile);
  Buffer<int32_t> y(kTile * kTile, -1);
  counters() = {};
  emulate({x.in("x"), y.out("y")}, [&] {
    launch(transpose_kernel<kPadding>, {.grid = 1, .block = kTile, .shared_bytes = sizeof(Tile<kPadding>)},
           x.data(), y.data());
  });
  for (int i = 0; i < kTile * kTile; ++i)
    if (y[i] != i % kTile * kTile + i / kTile) return false;
  const Counters& c = counters();
  return c.global_load_sectors == 4 * kTile && c.global_store_sectors == 4 * kTile && c.barriers == 1 &&
         c.shared_store_requests == kTile && c.shared_store_waves == kTile && c.shared_store_ideal == kTile &&
         c.shared_load_requests == kTile && c.shared_load_waves == kTile * (kPadding ? 1 : 32) &&
         c.shared_load_ideal == kTile;
}

// Shared vectors of 8 and 16 bytes, and one word for all.
struct Vectors {
  int4 quad[32];
  int2 pair[32];
  int32_t word;
};

__global__ void __launch_bounds__(32) shared_vectors_kernel(int32_t* y) {
  auto& shared = shared_memory<Vectors>();
  const int t = threadIdx.x;
  shared.quad[t] = make_int4(t, t, t, t);
  shared.pair[t] = make_int2(t, t);
  if (t == 0) shared.word = 1;
  __syncwarp();
  const int4 quad = shared.quad[31 - t];
  const int2 pair = shared.pair[t ^ 1];
  store(y + t, quad.x + quad.w + pair.x + pair.y + shared.word);
}

bool shared_vectors() {
  Buffer<int32_t> y(32, -1);
  counters() = {};
  emulate({y.out("y")}, [&] {
    launch(shared_vectors_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Vectors)}, y.data());
  });
  const Counters& c = counters();
  return y[3] == 28 + 28 + 2 + 2 + 1 && c.warp_barriers == 1 && c.shared_store_requests == 3 &&
         c.shared_store_waves == 7 && c.shared_store_ideal == 7 && c.shared_load_requests == 3 &&
         c.shared_load_waves == 7 && c.shared_load_ideal == 7;
}

}  // namespace

std::vector<Case> traffic_cases() {
  constexpr auto kChecked = Builds::kChecked;
  return {
      {"account/global", "", account_global},
      {"account/shared", "", account_shared},
      {"account/diverged", "", account_diverged},
      {"account/table", "", table_names_the_costliest},
      {"coalescing", "", coalescing},
      {"ragged", "", ragged},
      {"transpose/plain", "", transpose<0>, kChecked},
      {"transpose/padded", "", transpose<1>, kChecked},
      {"shared_vectors", "", shared_vectors, kChecked},
  };
}

}  // namespace simt::selftest
