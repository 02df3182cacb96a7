// Measures common/numeric.h and common/philox.h against fp64 and prints one line per function:
//   name  largest error in ulp  argument (bits) of that error  checksum of all result bits
// Built by tests/test_numeric.py for several instruction sets; the checksums must be equal.
// Usage: numeric_check STRIDE   every STRIDE-th float of all 2^32 is tried (1: all).  STRIDE dump:
// conversions only, raw.  STRIDE order: exp alone, at every float from -24 to -2^-30.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/float8.h"
#include "common/numeric.h"
#include "common/philox.h"

namespace {

constexpr int kBlock = 4096;
uint64_t checksum;
double worst;
uint32_t worst_at;

uint32_t bits(float x) { return std::isnan(x) ? 0x7fc00000u : eagle::float_bits(x); }

// Error in units of the last place of the exact result; wrong specials and wrong signs of zero count as 1e9.
double ulp_error(float got, double exact) {
  const float nearest = float(exact);
  if (std::isnan(exact) || std::isnan(got)) return std::isnan(exact) == std::isnan(got) ? 0 : 1e9;
  if (std::isinf(got) && std::isinf(nearest)) return got == nearest ? 0 : 1e9;
  if (std::isinf(got) || std::isinf(nearest))
    return std::fabs(exact) > 3.4028233e38 && std::fabs(got) > 3.40282e38 ? 1 : 1e9;
  if (got == 0 && exact == 0) return std::signbit(got) == std::signbit(exact) ? 0 : 1e9;
  const int exponent = exact == 0 ? -126 : std::max(std::ilogb(exact), -126);
  return std::fabs(double(got) - exact) / std::ldexp(1.0, exponent - 23);
}

// Around these every float is tried, whatever the stride: zeros, denormals, infinities, NaN, +-1, ends of the
// ranges.
constexpr float kSpecial[] = {0.0f,  -0.0f,       1.1754944e-38f, -1.1754944e-38f, INFINITY, -INFINITY,
                              1.0f,  -1.0f,       88.72f,         -87.33f,         -103.97f, -104.0f,
                              89.0f, 0.70710677f, 1.41421356f,    0.55f,           -0.55f};
constexpr uint64_t kAround = 4096;

template <class Function>
void sweep(const char* name, uint64_t stride, Function function, double (*exact)(double),
           bool (*inside)(float)) {
  static float in[kBlock], out[kBlock];
  checksum = 0, worst = 0, worst_at = 0;
  const auto range = [&](uint64_t begin, uint64_t end, uint64_t step) {
    while (begin < end) {
      int n = 0;
      for (; n < kBlock && begin < end; begin += step) in[n++] = eagle::bits_float(uint32_t(begin));
      for (int i = 0; i < n; ++i) out[i] = function(in[i]);
      for (int i = 0; i < n; ++i)
        checksum = (checksum ^ bits(out[i])) * 0x9E3779B97F4A7C15u + (checksum >> 29);
      for (int i = 0; exact && i < n; ++i) {
        if (!inside(in[i])) continue;
        const double e = ulp_error(out[i], exact(double(in[i])));
        if (e > worst) worst = e, worst_at = eagle::float_bits(in[i]);
      }
    }
  };
  range(0, uint64_t{1} << 32, stride);
  for (float x : kSpecial) {
    const uint64_t u = eagle::float_bits(x);
    range(u > kAround ? u - kAround : 0, std::min(u + kAround, uint64_t{1} << 32), 1);
  }
  std::printf("%s %.4f %08x %016llx\n", name, worst, worst_at, static_cast<unsigned long long>(checksum));
}

void sweep_gumbel(uint64_t stride) {
  checksum = 0, worst = 0, worst_at = 0;
  float largest = -1e30f, smallest = 1e30f;
  for (uint64_t r = 0; r < (uint64_t{1} << 32);
       r += r < (1u << 20) || r > 0xfff00000u ? 1 + stride / 64 : stride) {
    const float g = eagle::gumbel_from_bits(uint32_t(r));
    checksum = (checksum ^ bits(g)) * 0x9E3779B97F4A7C15u + (checksum >> 29);
    double v = double(float(uint32_t(r))) * 0x1p-32 + 0x1p-33;
    v = float(v) > 0.99999994f ? double(0.99999994f) : double(float(v));
    const double exact = -std::log(-std::log1p(-v));
    const double e = std::isfinite(g) ? std::fabs(g - exact) : 1e9;  // absolute: g passes through zero
    if (e > worst) worst = e, worst_at = uint32_t(r);
    largest = std::fmax(largest, g), smallest = std::fmin(smallest, g);
  }
  std::printf("gumbel %.9f %08x %016llx\n", worst, worst_at, static_cast<unsigned long long>(checksum));
  std::printf("gumbel_range %.9f %08x %016x\n", double(largest), 0u, 0u);
  std::printf("gumbel_min %.9f %08x %016x\n", double(smallest), 0u, 0u);
}

template <class T>
void dump_conversions(uint64_t stride) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const float x = eagle::to_float(T{uint16_t(i)});
    std::fwrite(&x, 4, 1, stdout);
  }
  for (uint64_t u = 0; u < (uint64_t{1} << 32); u += stride) {
    const T x = eagle::from_float<T>(eagle::bits_float(uint32_t(u)));
    std::fwrite(&x.bits, 2, 1, stdout);
  }
}

// How often exp falls from one float to the next larger one, from -24 to -2^-30, beyond which it is 1.
uint64_t falls_of_exp() {
  static float out[kBlock + 1];
  const uint32_t last = eagle::float_bits(-24.0f);
  uint64_t falls = 0;
  for (uint32_t begin = eagle::float_bits(-0x1p-30f); begin < last; begin += kBlock) {
    for (int i = 0; i <= kBlock; ++i) out[i] = eagle::exp_f32(eagle::bits_float(begin + uint32_t(i)));
    for (int i = 0; i < kBlock; ++i) falls += out[i] < out[i + 1];
  }
  return falls;
}

// Every code to float; every STRIDE-th float to a code.
void dump_e4m3(uint64_t stride) {
  for (uint32_t i = 0; i < 256; ++i) {
    const float x = eagle::to_float(eagle::float8_t{uint8_t(i)});
    std::fwrite(&x, 4, 1, stdout);
  }
  for (uint64_t u = 0; u < (uint64_t{1} << 32); u += stride)
    std::putchar(eagle::from_float<eagle::float8_t>(eagle::bits_float(uint32_t(u))).bits);
}

bool any(float) { return true; }
// Below -87, exp(-x) overflows: sigmoid and silu go to zero where the exact results are below 1e-35.
bool body(float x) { return !(x < -87.0f); }
bool tail(float x) { return x < -87.0f && x > -INFINITY; }
float in(float y, float low, float high) { return y >= low && y <= high ? 0.0f : 1.0f; }

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1021;
  if (argc > 2 && !std::strcmp(argv[2], "order")) {
    std::printf("%llu\n", static_cast<unsigned long long>(falls_of_exp()));
    return 0;
  }
  if (argc > 2) {
    if (!std::strcmp(argv[2], "bf16")) dump_conversions<eagle::bf16_t>(stride);
    if (!std::strcmp(argv[2], "fp16")) dump_conversions<eagle::half_t>(stride);
    if (!std::strcmp(argv[2], "e4m3")) dump_e4m3(stride);
    return 0;
  }
  using Exact = double (*)(double);
  const Exact exp64 = [](double x) { return std::exp(x); }, log64 = [](double x) { return std::log(x); };
  const Exact log1p64 = [](double x) { return std::log1p(x); };
  const Exact rsqrt64 = [](double x) { return 1.0 / std::sqrt(x); };
  const Exact tanh64 = [](double x) { return std::tanh(x); };
  const Exact sigmoid64 = [](double x) { return 1.0 / (1.0 + std::exp(-x)); };
  const Exact silu64 = [](double x) { return x / (1.0 + std::exp(-x)); };
  sweep("exp", stride, [](float x) { return eagle::exp_f32(x); }, exp64, any);
  sweep("log", stride, [](float x) { return eagle::log_f32(x); }, log64, any);
  sweep("log1p", stride, [](float x) { return eagle::log1p_f32(x); }, log1p64, any);
  sweep("rsqrt", stride, [](float x) { return eagle::rsqrt_f32(x); }, rsqrt64, any);
  sweep("tanh", stride, [](float x) { return eagle::tanh_f32(x); }, tanh64, any);
  sweep("sigmoid", stride, [](float x) { return eagle::sigmoid_f32(x); }, sigmoid64, body);
  sweep("silu", stride, [](float x) { return eagle::silu_f32(x); }, silu64, body);
  const Exact zero = [](double) { return 0.0; };
  sweep("sigmoid_tail", stride, [](float x) { return in(eagle::sigmoid_f32(x), 0.0f, 2e-38f); }, zero, tail);
  sweep("silu_tail", stride, [](float x) { return in(eagle::silu_f32(x), -2e-36f, 0.0f); }, zero, tail);
  sweep(
      "bf16", stride, [](float x) { return eagle::to_float(eagle::from_float<eagle::bf16_t>(x)); }, nullptr,
      any);
  sweep(
      "fp16", stride, [](float x) { return eagle::to_float(eagle::from_float<eagle::half_t>(x)); }, nullptr,
      any);
  sweep_gumbel(stride);
  const eagle::Philox4 r = eagle::philox_4x32_10(0, 0, 0, 0, 0);
  std::printf("philox 0 %08x %08x%08x%08x%08x\n", 0u, r.lane[0], r.lane[1], r.lane[2], r.lane[3]);
}
