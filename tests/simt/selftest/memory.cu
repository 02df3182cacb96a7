// Which memory a kernel may touch, and how: initialised, inside a region, writable, aligned.
#include "simt/selftest/kernel.h"

namespace simt::selftest {
namespace {

constexpr int kThreads = 64;

struct Values {
  int32_t value[kThreads];
};

// ---- uninitialised memory ------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) fill_shared_kernel(int32_t* y, int filled) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  if (t < filled) shared.value[t] = t;
  __syncthreads();
  store(y + blockIdx.x * kThreads + t, shared.value[kThreads - 1 - t]);  // <- reported: fill_shared
}

template <int kFilled>
bool fill_shared() {
  Buffer<int32_t> y(2 * kThreads, -1);
  emulate({y.out("y")}, [&] {
    launch(fill_shared_kernel, {.grid = 2, .block = kThreads, .shared_bytes = sizeof(Values)}, y.data(),
           kFilled);
  });
  for (int i = 0; i < 2 * kThreads; ++i)
    if (y[i] != kThreads - 1 - i % kThreads) return false;
  return true;
}

// A word of which one byte was never written.
struct Bytes {
  uint8_t value[kThreads * 4];
};

__global__ void __launch_bounds__(kThreads) fill_bytes_kernel(uint32_t* y, int bytes) {
  auto& shared = shared_memory<Bytes>();
  const int t = threadIdx.x;
  for (int i = 0; i < bytes; ++i) shared.value[t * 4 + i] = uint8_t(i);
  store(y + t, *reinterpret_cast<const uint32_t*>(shared.value + t * 4));  // <- reported: fill_bytes
}

template <int kBytes>
bool fill_bytes() {
  Buffer<uint32_t> y(kThreads, 0);
  emulate({y.out("y")}, [&] {
    launch(fill_bytes_kernel, {.grid = 1, .block = kThreads, .shared_bytes = sizeof(Bytes)}, y.data(),
           kBytes);
  });
  for (int t = 0; t < kThreads; ++t)
    if (y[t] != 0x03020100u) return false;
  return true;
}

// An `out` region holds nothing before a kernel writes it, whatever the host left there.
__global__ void __launch_bounds__(kThreads) increment_kernel(int32_t* y, bool write_first) {
  const int t = threadIdx.x;
  if (write_first) store(y + t, t);
  store(y + t, load(y + t) + 1);  // <- reported: increment
}

template <bool kWriteFirst, Access kAccess>
bool increment() {
  auto y = counting(kThreads);
  emulate({bytes("y", y.data(), kThreads * sizeof(int32_t), kAccess)},
          [&] { launch(increment_kernel, {.grid = 1, .block = kThreads}, y.data(), kWriteFirst); });
  for (int t = 0; t < kThreads; ++t)
    if (y[t] != t + 1) return false;
  return true;
}

// ---- the read-only path --------------------------------------------------------------------------------

// Its cache knows nothing of writes by the same launch, whatever orders them.
__global__ void __launch_bounds__(kThreads) read_only_kernel(int32_t* x, int32_t* y) {
  const int t = threadIdx.x;
  store(x + t, t);                      // <- other: read_only
  store(y + t, load_read_only(x + t));  // <- reported: read_only
}

bool read_only_after_write() {
  Buffer<int32_t> x(kThreads, -1), y(kThreads, -1);
  emulate({x.inout("x"), y.out("y")},
          [&] { launch(read_only_kernel, {.grid = 1, .block = kThreads}, x.data(), y.data()); });
  return true;
}

// Nor may a later store change what was loaded through it, not even behind a barrier.
__global__ void __launch_bounds__(kThreads) read_only_first_kernel(int32_t* x, int32_t* y, bool write) {
  const int t = threadIdx.x;
  store(y + t, load_read_only(x + t));  // <- other: read_only_first
  __syncthreads();
  if (write) store(x + (t + 1) % kThreads, t);  // <- reported: read_only_first
}

__global__ void __launch_bounds__(kThreads) negate_kernel(int32_t* x, const int32_t* y) {
  const int t = threadIdx.x;
  store(x + t, -load_read_only(y + t));
}

template <bool kSameLaunch>
bool read_only_before_write() {
  auto x = counting(kThreads);
  Buffer<int32_t> y(kThreads, -1);
  emulate({x.inout("x"), y.out("y")}, [&] {
    launch(read_only_first_kernel, {.grid = 1, .block = kThreads}, x.data(), y.data(), kSameLaunch);
    launch(negate_kernel, {.grid = 1, .block = kThreads}, x.data(), y.data());
  });
  for (int t = 0; t < kThreads; ++t)
    if (x[t] != -t) return false;
  return true;
}

// ---- outside every region ------------------------------------------------------------------------------

// One thread at the given word, the others at their own.
__global__ void __launch_bounds__(32) read_kernel(const int32_t* x, int32_t* y, int64_t first_word) {
  const int t = threadIdx.x;
  store(y + t, load(x + (t == 0 ? first_word : t)));  // <- reported: read
}
__global__ void __launch_bounds__(32) write_kernel(int32_t* x, int64_t first_word) {
  const int t = threadIdx.x;
  store(x + (t == 0 ? first_word : t), t);  // <- reported: write
}

// Words 32 to 63 and 80 to 111 of one allocation are regions, so that no case touches foreign memory.
struct Arena {
  Buffer<int32_t> words{128, 7};
  int32_t* x() { return words.data() + 32; }
  int32_t* other() { return words.data() + 80; }
};

template <int kFirstWord>
bool read() {
  Arena arena;
  Buffer<int32_t> y(32, -1);
  emulate({in("x", arena.x(), 32), in("other", arena.other(), 32), y.out("y")},
          [&] { launch(read_kernel, {.grid = 1, .block = 32}, arena.x(), y.data(), int64_t(kFirstWord)); });
  return y[0] == 7 && y[31] == 7;
}

template <int kFirstWord>
bool write() {
  Arena arena;
  emulate({inout("x", arena.x(), 32), inout("other", arena.other(), 32)},
          [&] { launch(write_kernel, {.grid = 1, .block = 32}, arena.x(), int64_t(kFirstWord)); });
  return arena.x()[31] == 31 && arena.x()[kFirstWord] == 0;
}

bool write_input() {
  Buffer<int32_t> x(32, 7);
  emulate({x.in("x")}, [&] { launch(write_kernel, {.grid = 1, .block = 32}, x.data(), int64_t(0)); });
  return true;
}

bool read_null() {
  Buffer<int32_t> y(32, -1);
  emulate({in("x", static_cast<const int32_t*>(nullptr), 32), y.out("y")}, [&] {
    launch(read_kernel, {.grid = 1, .block = 32}, static_cast<const int32_t*>(nullptr), y.data(), int64_t(0));
  });
  return true;
}

// The regions of an op end with it.
bool read_regions_of_an_earlier_op() {
  Buffer<int32_t> x(32, 7), y(32, -1);
  const auto run = [&] { launch(read_kernel, {.grid = 1, .block = 32}, x.data(), y.data(), int64_t(0)); };
  emulate({x.in("x"), y.out("y")}, run);
  emulate({y.out("y")}, run);
  return true;
}

// Sixteen bytes of which the last four lie outside.
__global__ void __launch_bounds__(32) read_vectors_kernel(const int4* x, int4* y) {
  const int t = threadIdx.x;
  store(y + t, load(x + t));  // <- reported: read_vectors
}

template <int kWords>
bool read_vectors() {
  Buffer<int4> x(32, make_int4(1, 2, 3, 4)), y(32, make_int4(0, 0, 0, 0));
  emulate({in("x", reinterpret_cast<int32_t*>(x.data()), kWords), y.out("y")},
          [&] { launch(read_vectors_kernel, {.grid = 1, .block = 32}, x.data(), y.data()); });
  return y[31].w == 4 && y[0].x == 1;
}

// ---- outside shared memory -----------------------------------------------------------------------------

__global__ void __launch_bounds__(32) shared_read_kernel(int32_t* y, int first_word) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  shared.value[t] = t;
  shared.value[t + 32] = t;
  __syncwarp();
  const int32_t* at = shared.value + (t == 0 ? first_word : t);
  store(y + t, *at);  // <- reported: shared_read
}
__global__ void __launch_bounds__(32) shared_write_kernel(int32_t* y, int first_word) {
  auto& shared = shared_memory<Values>();
  const int t = threadIdx.x;
  int32_t* at = shared.value + (t == 0 ? first_word : t);
  *at = t;  // <- reported: shared_write
  store(y + t, t);
}

template <void (*kKernel)(int32_t*, int), int kFirstWord>
bool shared_bounds() {
  Buffer<int32_t> y(32, -1);
  emulate({y.out("y")}, [&] {
    launch(kKernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Values)}, y.data(), kFirstWord);
  });
  return y[31] == 31;
}

// The kernel's struct is larger than what it was launched with.
__global__ void __launch_bounds__(kThreads) too_little_shared_kernel(int32_t* y) {
  auto& shared = shared_memory<Values>();             // <- reported: too_little_shared
  shared.value[threadIdx.x] = 1;                      // <- other: too_little_shared
  store(y + threadIdx.x, shared.value[threadIdx.x]);  // <- other: too_little_shared
}

template <int kBytes>
bool too_little_shared() {
  Buffer<int32_t> y(kThreads, -1);
  emulate({y.out("y")}, [&] {
    launch(too_little_shared_kernel, {.grid = 1, .block = kThreads, .shared_bytes = kBytes}, y.data());
  });
  return y[kThreads - 1] == 1;
}

// ---- alignment -----------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(32) aligned_kernel(const char* x, T* y, int shift) {
  const int t = threadIdx.x;
  store(y + t, load(reinterpret_cast<const T*>(x + shift) + t));  // <- reported: aligned
}

template <class T, int kShift>
bool aligned() {
  Buffer<char> x(33 * sizeof(T), 1);
  Buffer<T> y(32);
  emulate({x.in("x"), y.out("y")},
          [&] { launch(aligned_kernel<T>, {.grid = 1, .block = 32}, x.data(), y.data(), kShift); });
  return true;
}

struct Bits128 {
  alignas(16) char byte[33 * 16];
};

__global__ void __launch_bounds__(32) shared_aligned_kernel(int32_t* y, int shift) {
  auto& shared = shared_memory<Bits128>();
  const int t = threadIdx.x;
  for (int i = t; i < 33 * 16; i += 32) shared.byte[i] = char(i);
  __syncwarp();
  const int4 value = reinterpret_cast<const int4*>(shared.byte + shift)[t];  // <- reported: shared_aligned
  store(y + t, value.x);
}

template <int kShift>
bool shared_aligned() {
  Buffer<int32_t> y(32, -1);
  emulate({y.out("y")}, [&] {
    launch(shared_aligned_kernel, {.grid = 1, .block = 32, .shared_bytes = sizeof(Bits128)}, y.data(),
           kShift);
  });
  return y[0] == 0x03020100;
}

// ---- what is nobody's business -------------------------------------------------------------------------

__device__ constexpr int32_t kTable[4] = {3, 1, 4, 1};

struct Parameters {
  int32_t add[4];
  int32_t* y;
};

// A thread's own array, a table of the program and the kernel's parameters, all indexed at run time.
__global__ void __launch_bounds__(32) private_kernel(const Parameters p) {
  int32_t own[8];
  const int t = threadIdx.x;
  for (int i = 0; i < 8; ++i) own[(i + t) % 8] = i;
  store(p.y + t, own[t % 8] + kTable[t % 4] + p.add[t % 4]);
}

bool private_memory() {
  Buffer<int32_t> y(32, -1);
  emulate({y.out("y")},
          [&] { launch(private_kernel, {.grid = 1, .block = 32}, Parameters{{10, 20, 30, 40}, y.data()}); });
  for (int t = 0; t < 32; ++t)
    if (y[t] != kTable[t % 4] + (t % 4 + 1) * 10) return false;
  return true;
}

}  // namespace

std::vector<Case> memory_cases() {
  constexpr auto kChecked = Builds::kChecked;
  return {
      {"fill_shared/all", "", fill_shared<kThreads>},
      {"fill_shared/half", "uninitialised read", fill_shared<kThreads / 2>, kChecked},
      {"fill_bytes/all", "", fill_bytes<4>},
      {"fill_bytes/three", "uninitialised read", fill_bytes<3>, kChecked},
      {"increment/inout", "", increment<false, Access::kInOut>},
      {"increment/written_before", "", increment<true, Access::kOut>},
      {"increment/out", "uninitialised read", increment<false, Access::kOut>, kChecked},
      {"read_only/written_by_this_launch", "read-only load of what the launch writes", read_only_after_write,
       kChecked},
      {"read_only_first/written_by_the_next_launch", "", read_only_before_write<false>},
      {"read_only_first/written_by_this_launch", "read-only load of what the launch writes",
       read_only_before_write<true>, kChecked},
      {"read/first", "", read<0>},
      {"read/other_region", "", read<48>},
      {"read/one_before", "out-of-bounds read", read<-1>},
      {"read/one_past", "out-of-bounds read", read<32>},
      {"read/between_regions", "out-of-bounds read", read<47>},
      {"read/null", "out-of-bounds read", read_null},
      {"read/regions_of_an_earlier_op", "out-of-bounds read", read_regions_of_an_earlier_op},
      {"read_vectors/all_inside", "", read_vectors<128>},
      {"read_vectors/last_word_outside", "out-of-bounds read", read_vectors<127>},
      {"write/first", "", write<0>},
      {"write/other_region", "", write<48>},
      {"write/one_before", "out-of-bounds write", write<-1>},
      {"write/one_past", "out-of-bounds write", write<32>},
      {"write/between_regions", "out-of-bounds write", write<47>},
      {"write/input", "write to an input", write_input},
      {"shared_read/last", "", shared_bounds<shared_read_kernel, kThreads - 1>},
      {"shared_read/one_before", "out-of-bounds read", shared_bounds<shared_read_kernel, -1>, kChecked},
      {"shared_read/one_past", "out-of-bounds read", shared_bounds<shared_read_kernel, kThreads>, kChecked},
      {"shared_write/last", "", shared_bounds<shared_write_kernel, kThreads - 1>},
      {"shared_write/one_before", "out-of-bounds write", shared_bounds<shared_write_kernel, -1>, kChecked},
      {"shared_write/one_past", "out-of-bounds write", shared_bounds<shared_write_kernel, kThreads>,
       kChecked},
      {"too_little_shared/enough", "", too_little_shared<sizeof(Values)>},
      {"too_little_shared/four_bytes_short", "too little shared memory",
       too_little_shared<sizeof(Values) - 4>},
      {"aligned/float4", "", aligned<float4, 16>},
      {"aligned/float4_by_4", "misaligned access", aligned<float4, 4>},
      {"aligned/float4_by_8", "misaligned access", aligned<float4, 8>},
      {"aligned/uint64_by_4", "misaligned access", aligned<uint64_t, 4>},
      {"aligned/float_by_2", "misaligned access", aligned<float, 2>},
      {"aligned/uint16_by_1", "misaligned access", aligned<uint16_t, 1>},
      {"shared_aligned/int4", "", shared_aligned<0>},
      {"shared_aligned/int4_by_4", "misaligned access", shared_aligned<4>, kChecked},
      {"private_memory", "", private_memory},
  };
}

}  // namespace simt::selftest
