#pragma once
// The emulator's face towards device code: what the emulated CUDA C++ of this folder and the twins of
// device/ptx*.cuh call. Arguments and results travel in registers, so that the instrumentation of checked
// builds sees no memory here, and every function takes its caller's address as the place to report: callers
// are always inlined.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "simt/qualifiers.h"

#pragma GCC visibility push(hidden)

namespace simt {

// ---- who runs ---------------------------------------------------------------------------------------------

struct BlockView {
  uint3 index;
  unsigned char* shared;  // dynamic shared memory
};
struct ThreadView {
  uint3 index;
  BlockView* block;
};
extern ThreadView* current;  // null outside a launch

// Special registers are no memory: an assembly load is invisible to the instrumentation.
template <class T>
__forceinline__ T unseen(const T* p) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  T value;
  if constexpr (sizeof(T) == 8)
    asm("movq %1, %0" : "=r"(value) : "m"(*p));
  else
    asm("movl %1, %0" : "=r"(value) : "m"(*p));
  return value;
}
__forceinline__ uint3 unseen3(const unsigned* x, const unsigned* y, const unsigned* z) {
  return {unseen(x), unseen(y), unseen(z)};
}
__forceinline__ uint3 thread_index() {
  const uint3& i = unseen(&current)->index;
  return unseen3(&i.x, &i.y, &i.z);
}
__forceinline__ uint3 block_index() {
  const uint3& i = unseen(&unseen(&current)->block)->index;
  return unseen3(&i.x, &i.y, &i.z);
}

// ---- standing together ------------------------------------------------------------------------------------

enum class Collective : uint8_t {
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kMatchAny,
  kAdd,
  kMin,
  kMax,
  kMinUnsigned,
  kMaxUnsigned,
  kAnd,
  kOr,
  kXor,
  kSyncWarp,
  kLoadMatrices,
  kLoadTransposed,
  kStoreMatrices,
  kStoreTransposed,
  kMultiplyBf16,
  kMultiplyHalf,
  kMultiplyInt8,
};
// The lanes of `mask` give one value each and take the result. Shuffles take a lane or a distance and a
// width.
uint64_t collective(Collective op, uint32_t mask, uint64_t value, int operand, int width);

enum class Barrier : uint8_t { kSync, kCount, kAnd, kOr };
int barrier(Barrier op, int predicate);  // of the whole block

// ---- memory -----------------------------------------------------------------------------------------------

// The block's dynamic shared memory; `bytes` must not exceed what was launched with.
void* dynamic_shared(size_t bytes, size_t alignment);

// Global memory, counted as traffic: `size` is 1, 2, 4, 8 or 16 bytes and the address a multiple of it.
using Bits = unsigned __int128;
enum class Path : uint8_t { kCoherent, kReadOnly };
Bits load_bits(const void* p, uint32_t size, Path path);
void store_bits(void* p, uint32_t size, Bits bits);

template <class T>
using Word = std::conditional_t<
    sizeof(T) == 16, Bits,
    std::conditional_t<
        sizeof(T) == 8, uint64_t,
        std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>>;
template <class T>
__forceinline__ T global_load(const T* p, Path path = Path::kCoherent) {
  static_assert(sizeof(Word<T>) == sizeof(T), "1, 2, 4, 8 or 16 bytes");
  return __builtin_bit_cast(T, Word<T>(load_bits(p, sizeof(T), path)));
}
template <class T>
__forceinline__ void global_store(T* p, T value) {
  static_assert(sizeof(Word<T>) == sizeof(T), "1, 2, 4, 8 or 16 bytes");
  store_bits(p, sizeof(T), __builtin_bit_cast(Word<T>, value));
}

// ---- synchronising accesses: atomics, acquire, release, fences --------------------------------------------

enum class Order : uint8_t { kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Scope : uint8_t { kBlock, kDevice };
enum class Atomic : uint8_t { kAdd, kExchange, kCompareAndSwap, kMin, kMax, kAnd, kOr, kXor };
enum class Number : uint8_t { kInt32, kUint32, kInt64, kUint64, kFloat, kDouble };

uint64_t atomic(Atomic op, Number type, void* p, uint64_t operand, uint64_t expected, Order order,
                Scope scope);
uint64_t ordered_load(const void* p, uint32_t size, Order order, Scope scope);  // other threads run first
void ordered_store(void* p, uint32_t size, uint64_t value, Order order, Scope scope);
void fence(Scope scope);
void poll();             // other threads run first
void need_whole_grid();  // reported where the launch is not cooperative
void arrives_at_grid();  // by all threads of a block, in front of a barrier of the grid
void passes_grid();      // behind it
[[noreturn]] void trap();

// What devices from compute capability 9.0 on have; on an older one the launch ends here.
enum class Feature : uint8_t { kBulkCopies, kStoreMatrices };
void need(Feature feature);

// ---- copies to shared memory that a thread waits for ------------------------------------------------------

// 16 bytes, of which the first `bytes` come from global memory.
void copy_async(void* to, const void* from, int bytes);
void copy_async_commit();
void copy_async_wait(int pending_groups);

// ---- barriers in shared memory, and copies that end at one ------------------------------------------------

void mbarrier_init(void* p, uint32_t arrivals);
void mbarrier_arrive(void* p, uint32_t bytes);           // and expects so many bytes
bool mbarrier_try_wait(const void* p, uint32_t parity);  // other threads run first
void mbarrier_wait(const void* p, uint32_t parity);
void copy_bulk(void* to, const void* from, uint32_t bytes, void* barrier);
void copy_async_arrive(void* barrier);
void fence_proxy_async();

// ---- matrix instructions: all 32 lanes -------------------------------------------------------------------

Bits load_matrices(const void* row, bool transposed);
void store_matrices(void* row, Bits x, bool transposed);
Bits multiply_add(Bits a, uint64_t b, Bits c, bool bf16);
Bits multiply_add_int8(Bits a, uint64_t b, Bits c);

}  // namespace simt

#pragma GCC visibility pop
