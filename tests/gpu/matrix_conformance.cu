// The asynchronous copies and matrix instructions of csrc/cuda/device (ptx.cuh, ptx_matrix.cuh) against plain
// C++, as in ptx_conformance.cu. The lane maps are written down once more, from the matrix's side. Where a
// device has no store_matrices, plain stores bring the same words.
#include <cstring>

#include "common/numeric.h"
#include "conformance.h"
#include "cuda/device/ptx_matrix.cuh"
#include "cuda/launch.h"

namespace conformance {
namespace {

using namespace eagle;
using namespace eagle::cuda;

constexpr int kPieces = kWords / 4;  // of 16 bytes

// ---- copy_async: two groups, of which the first is waited for before the second; 0 to 16 bytes, rest zero

struct CopyMemory {
  uint4 first[256], second[256];
};

__device__ __forceinline__ uint4 joined(uint4 a, uint4 b) {
  return {a.x ^ b.w, a.y ^ b.z, a.z ^ b.y, a.w ^ b.x};
}

__global__ void __launch_bounds__(256) copy_async_kernel(const uint32_t* in, uint32_t* out) {
  auto& shared = shared_memory<CopyMemory>();
  const int i = static_cast<int>(threadIdx.x), piece = static_cast<int>(blockIdx.x) * 256 + i;
  const uint4* const from = reinterpret_cast<const uint4*>(in);
  copy_async(&shared.first[i], from + piece, i % 17);
  copy_async_commit();
  copy_async(&shared.second[i], from + (piece * 5 + 3) % kPieces, 16);
  copy_async_commit();
  copy_async_wait<1>();
  __syncthreads();
  const uint4 first = shared.first[255 - i];
  copy_async_wait<0>();
  __syncthreads();
  keep_order();
  store(reinterpret_cast<uint4*>(out) + piece, joined(first, shared.second[(i + 1) % 256]));
}

void copy_async_cases(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(copy_async_kernel,
         {.grid = kPieces / 256, .block = 256, .stream = stream, .shared_bytes = sizeof(CopyMemory)}, in,
         out);
}

void copied_async(const uint32_t* in, uint32_t* out) {
  for (int piece = 0; piece < kPieces; ++piece) {
    const int base = piece / 256 * 256, i = piece % 256, other = base + (i + 1) % 256;
    uint32_t first[4] = {}, second[4];
    std::memcpy(first, in + (base + 255 - i) * 4, (255 - i) % 17);
    std::memcpy(second, in + (other * 5 + 3) % kPieces * 4, 16);
    for (int w = 0; w < 4; ++w) out[piece * 4 + w] = first[w] ^ second[3 - w];
  }
}

// ---- load_matrices: a warp has 32 rows of 16 bytes, and lane l names row l + 8

struct Rows {
  uint4 row[32];
};

template <bool kTransposed>
__global__ void __launch_bounds__(32) matrices_kernel(const uint32_t* in, uint32_t* out) {
  auto& shared = shared_memory<Rows>();
  const int lane = static_cast<int>(threadIdx.x), base = static_cast<int>(blockIdx.x) * 32;
  shared.row[lane] = load(reinterpret_cast<const uint4*>(in) + base + lane);
  __syncwarp();
  const void* const row = &shared.row[(lane + 8) % 32];
  store(reinterpret_cast<uint4*>(out) + base + lane,
        kTransposed ? load_matrices_transposed(row) : load_matrices(row));
}

template <bool kTransposed>
void matrices(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(matrices_kernel<kTransposed>,
         {.grid = kPieces / 32, .block = 32, .stream = stream, .shared_bytes = sizeof(Rows)}, in, out);
}

template <bool kTransposed>
void matrices_by_hand(const uint32_t* in, uint32_t* out) {
  const auto* const element = reinterpret_cast<const uint16_t*>(in);
  auto* const result = reinterpret_cast<uint16_t*>(out);
  for (int warp = 0; warp < kPieces / 32; ++warp)
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int row = 0; row < 8; ++row)
        for (int column = 0; column < 8; ++column) {
          const int holder = kTransposed ? 4 * column + row / 2 : 4 * row + column / 2;
          const int half = kTransposed ? row % 2 : column % 2;
          result[((warp * 32 + holder) * 4 + matrix) * 2 + half] =
              element[(warp * 32 + (8 * matrix + row + 8) % 32) * 8 + column];
        }
}

// ---- store_matrices: lane l names row l + 8 and brings four words, then reads row l

template <bool kTransposed, bool kInstruction>
__global__ void __launch_bounds__(32) stored_kernel(const uint32_t* in, uint32_t* out) {
  auto& shared = shared_memory<Rows>();
  const int lane = static_cast<int>(threadIdx.x), base = static_cast<int>(blockIdx.x) * 32;
  const uint4 words = load(reinterpret_cast<const uint4*>(in) + base + lane);
  if (kInstruction) {
    void* const row = &shared.row[(lane + 8) % 32];
    if (kTransposed)
      store_matrices_transposed(row, words);
    else
      store_matrices(row, words);
  } else {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    for (int i = 0; i < 8; ++i) {  // half i % 2 of word i / 2
      const int first = (i / 2 * 8 + 8) % 32, along = lane % 4 * 2 + i % 2, across = lane / 4;
      auto* const row = reinterpret_cast<uint16_t*>(&shared.row[first + (kTransposed ? along : across)]);
      row[kTransposed ? across : along] = static_cast<uint16_t>(word[i / 2] >> 16 * (i % 2));
    }
  }
  __syncwarp();
  store(reinterpret_cast<uint4*>(out) + base + lane, shared.row[lane]);
}

template <bool kTransposed>
void stored(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  const LaunchConfig config{
      .grid = kPieces / 32, .block = 32, .stream = stream, .shared_bytes = sizeof(Rows)};
  if (has_bulk_copies())
    launch(stored_kernel<kTransposed, true>, config, in, out);
  else
    launch(stored_kernel<kTransposed, false>, config, in, out);
}

template <bool kTransposed>
void stored_by_hand(const uint32_t* in, uint32_t* out) {
  const auto* const fragment = reinterpret_cast<const uint16_t*>(in);
  auto* const result = reinterpret_cast<uint16_t*>(out);
  for (int warp = 0; warp < kPieces / 32; ++warp)
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int row = 0; row < 8; ++row)
        for (int column = 0; column < 8; ++column) {
          const int holder = kTransposed ? 4 * column + row / 2 : 4 * row + column / 2;
          const int half = kTransposed ? row % 2 : column % 2;
          result[(warp * 32 + (8 * matrix + row + 8) % 32) * 8 + column] =
              fragment[((warp * 32 + holder) * 4 + matrix) * 2 + half];
        }
}

// ---- multiply_add: small integers, so that every sum is exact; and products that are all zero, which must
// leave every accumulator as it is, -0 too

constexpr int kM = 16, kN = 8, kK = 16, kTile = kM * kN;

// Element i of a warp's a, then b, then c, as a word of the input; and the number that it stands for.
__host__ __device__ constexpr int word_at(int tile, int i) { return (tile * kTile + i) % kWords; }
__host__ __device__ constexpr float number(uint32_t word) { return static_cast<float>(word % 17u) - 8.0f; }
__host__ __device__ constexpr float accumulator(uint32_t word) {
  return word % 5u == 0 ? -0.0f : static_cast<float>(word % 1000u) * 0.37f - 185.0f;
}

template <class T, bool kZero>
__global__ void __launch_bounds__(32) product_kernel(const uint32_t* in, uint32_t* out) {
  const int lane = static_cast<int>(threadIdx.x), tile = static_cast<int>(blockIdx.x);
  const int row = lane / 4, column = lane % 4 * 2;
  const auto a = [&](int r, int c) { return kZero ? 0.0f : number(load(in + word_at(tile, r * kK + c))); };
  const auto b = [&](int r, int c) { return number(load(in + word_at(tile, kM * kK + r * kN + c))); };
  const uint4 left{pack<T>(a(row, column), a(row, column + 1)),
                   pack<T>(a(row + 8, column), a(row + 8, column + 1)),
                   pack<T>(a(row, column + 8), a(row, column + 9)),
                   pack<T>(a(row + 8, column + 8), a(row + 8, column + 9))};
  const uint32_t upper = pack<T>(b(column, row), b(column + 1, row));
  const uint32_t lower = pack<T>(b(column + 8, row), b(column + 9, row));
  float c[4];
  for (int i = 0; i < 4; ++i) {
    const uint32_t word =
        load(in + word_at(tile, kM * kK + kK * kN + (row + i / 2 * 8) * kN + column + i % 2));
    c[i] = kZero ? accumulator(word) : number(word);
  }
  multiply_add<T>(c, left, upper, lower);
  for (int i = 0; i < 4; ++i)
    store(out + tile * kTile + (row + i / 2 * 8) * kN + column + i % 2, float_bits(c[i]));
}

template <class T, bool kZero>
void product(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(product_kernel<T, kZero>, {.grid = kWords / kTile, .block = 32, .stream = stream}, in, out);
}

template <bool kZero>
void product_by_hand(const uint32_t* in, uint32_t* out) {
  for (int tile = 0; tile < kWords / kTile; ++tile)
    for (int row = 0; row < kM; ++row)
      for (int column = 0; column < kN; ++column) {
        const uint32_t word = in[word_at(tile, kM * kK + kK * kN + row * kN + column)];
        float sum = kZero ? accumulator(word) : number(word);
        for (int k = 0; k < kK && !kZero; ++k)
          sum +=
              number(in[word_at(tile, row * kK + k)]) * number(in[word_at(tile, kM * kK + k * kN + column)]);
        out[tile * kTile + row * kN + column] = float_bits(sum);
      }
}

// ---- multiply_add_int8: whole range, the lane map from the matrix's side; a 16x32, b 32x8

constexpr int kDeep = 32;

__host__ __device__ constexpr int byte_at(uint32_t word, int i) { return static_cast<int8_t>(word >> 8 * i); }

// Row i of a: eight words; row i of b: two; c behind them, a word each.
__global__ void __launch_bounds__(32) byte_product_kernel(const uint32_t* in, uint32_t* out) {
  const int lane = static_cast<int>(threadIdx.x), tile = static_cast<int>(blockIdx.x);
  const int row = lane / 4, group = lane % 4;
  const auto a = [&](int r, int word) { return load(in + word_at(tile, r * 8 + word)); };
  const auto b = [&](int k) {  // bytes (k .. k + 3, column row)
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i)
      bytes |= static_cast<uint32_t>(
                   byte_at(load(in + word_at(tile, kTile + (k + i) * 2 + row / 4)), row % 4) & 255)
               << 8 * i;
    return bytes;
  };
  int32_t c[4];
  for (int i = 0; i < 4; ++i)
    c[i] = static_cast<int32_t>(
        load(in + word_at(tile, 2 * kTile + (row + i / 2 * 8) * kN + group * 2 + i % 2)));
  multiply_add_int8(c, {a(row, group), a(row + 8, group), a(row, group + 4), a(row + 8, group + 4)},
                    b(group * 4), b(group * 4 + 16));
  for (int i = 0; i < 4; ++i)
    store(out + tile * kTile + (row + i / 2 * 8) * kN + group * 2 + i % 2, static_cast<uint32_t>(c[i]));
}

void byte_product(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(byte_product_kernel, {.grid = kWords / kTile, .block = 32, .stream = stream}, in, out);
}

void byte_product_by_hand(const uint32_t* in, uint32_t* out) {
  for (int tile = 0; tile < kWords / kTile; ++tile)
    for (int row = 0; row < kM; ++row)
      for (int column = 0; column < kN; ++column) {
        uint32_t sum = in[word_at(tile, 2 * kTile + row * kN + column)];
        for (int k = 0; k < kDeep; ++k)
          sum += static_cast<uint32_t>(byte_at(in[word_at(tile, row * 8 + k / 4)], k % 4) *
                                       byte_at(in[word_at(tile, kTile + k * 2 + column / 4)], column % 4));
        out[tile * kTile + row * kN + column] = sum;
      }
}

// ---- pack: every kind of number, NaN and infinity among them

template <class T>
__global__ void __launch_bounds__(256) pack_kernel(const uint32_t* in, uint32_t* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  store(out + i, pack<T>(bits_float(load(in + i)), bits_float(load(in + (i + 1) % kWords))));
}

template <class T>
void packs(const uint32_t* in, uint32_t* out, CUstream_st* stream) {
  launch(pack_kernel<T>, {.grid = kWords / 256, .block = 256, .stream = stream}, in, out);
}

template <class T>
void packed(const uint32_t* in, uint32_t* out) {
  const auto bits = [](float x) -> uint32_t { return x != x ? 0x7fffu : from_float<T>(x).bits; };
  for (int i = 0; i < kWords; ++i)
    out[i] = bits(bits_float(in[(i + 1) % kWords])) << 16 | bits(bits_float(in[i]));
}

}  // namespace

std::vector<Case> matrix_cases() {
  return {
      {"copy_async", copy_async_cases, copied_async},
      {"load_matrices", matrices<false>, matrices_by_hand<false>},
      {"load_matrices_transposed", matrices<true>, matrices_by_hand<true>},
      {"store_matrices", stored<false>, stored_by_hand<false>},
      {"store_matrices_transposed", stored<true>, stored_by_hand<true>},
      {"multiply_add bf16", product<bf16_t, false>, product_by_hand<false>},
      {"multiply_add fp16", product<half_t, false>, product_by_hand<false>},
      {"multiply_add of zeros bf16", product<bf16_t, true>, product_by_hand<true>},
      {"multiply_add of zeros fp16", product<half_t, true>, product_by_hand<true>},
      {"multiply_add_int8", byte_product, byte_product_by_hand},
      {"pack bf16", packs<bf16_t>, packed<bf16_t>},
      {"pack fp16", packs<half_t>, packed<half_t>},
  };
}

}  // namespace conformance
