#pragma once
// The vector types that kernels use, for machines without the CUDA toolkit. Sizes and alignments are CUDA's.
#include <cstdint>

struct char2 {
  signed char x, y;
} __attribute__((aligned(2)));
struct char4 {
  signed char x, y, z, w;
} __attribute__((aligned(4)));
struct uchar2 {
  unsigned char x, y;
} __attribute__((aligned(2)));
struct uchar4 {
  unsigned char x, y, z, w;
} __attribute__((aligned(4)));
struct short2 {
  short x, y;
} __attribute__((aligned(4)));
struct short4 {
  short x, y, z, w;
} __attribute__((aligned(8)));
struct ushort2 {
  unsigned short x, y;
} __attribute__((aligned(4)));
struct ushort4 {
  unsigned short x, y, z, w;
} __attribute__((aligned(8)));
struct int2 {
  int x, y;
} __attribute__((aligned(8)));
struct int3 {
  int x, y, z;
};
struct int4 {
  int x, y, z, w;
} __attribute__((aligned(16)));
struct uint2 {
  unsigned x, y;
} __attribute__((aligned(8)));
struct uint3 {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
} __attribute__((aligned(16)));
struct longlong2 {
  long long x, y;
} __attribute__((aligned(16)));
struct ulonglong2 {
  unsigned long long x, y;
} __attribute__((aligned(16)));
struct float2 {
  float x, y;
} __attribute__((aligned(8)));
struct float3 {
  float x, y, z;
};
struct float4 {
  float x, y, z, w;
} __attribute__((aligned(16)));
struct double2 {
  double x, y;
} __attribute__((aligned(16)));

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
