// SPDX-License-Identifier: Apache-2.0
// Numbers as they are stored, and as they are summed.
#include "words.cuh"
#include "complex.cuh"

struct bf16 { u16 v; }; struct fp16 { u16 v; }; struct e4m3 { u8 v; }; struct e5m2 { u8 v; };
__device__ __forceinline__ float wide(bf16 a) { return __uint_as_float((u32)a.v << 16); }
__device__ __forceinline__ float wide(fp16 a)
{ float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(a.v)); return f; }
__device__ __forceinline__ float wide(float a) { return a; }
__device__ __forceinline__ double wide(double a) { return a; }
__device__ __forceinline__ c64 wide(c64 a) { return a; }
__device__ __forceinline__ c128 wide(c128 a) { return a; }
__device__ __forceinline__ void narrow(float f, bf16& a) {
  u32 u = __float_as_uint(f);
  a.v = f != f ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
__device__ __forceinline__ void narrow(float f, fp16& a) { asm("cvt.rn.f16.f32 %0,%1;" : "=h"(a.v) : "f"(f)); }
__device__ __forceinline__ void narrow(float f, float& a) { a = f; }
__device__ __forceinline__ void narrow(double f, double& a) { a = f; }
__device__ __forceinline__ void narrow(c64 f, c64& a) { a = f; }
__device__ __forceinline__ void narrow(c128 f, c128& a) { a = f; }
#ifdef FLOAT8
__device__ __forceinline__ void narrow(float f, e4m3& a)
{ u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(r) : "f"(0.0f), "f"(f)); a.v = r; }
__device__ __forceinline__ void narrow(float f, e5m2& a)
{ u16 r; asm("cvt.rn.satfinite.e5m2x2.f32 %0,%1,%2;" : "=h"(r) : "f"(0.0f), "f"(f)); a.v = r; }
#endif
__device__ __forceinline__ float times(float a, float b) { return a * b; }
__device__ __forceinline__ double times(double a, double b) { return a * b; }
__device__ __forceinline__ c64 times(c64 a, c64 b) { return c64{a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
__device__ __forceinline__ c128 times(c128 a, c128 b) { return c128{a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
template<class T> __device__ __forceinline__ T gelu(T x)
{ return T(0.5) * x * (T(1) + tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x))); }
template<class T> __device__ __forceinline__ T activate(T x, int f)
{ return f == 1 ? (x < T(0) ? T(0) : x) : f == 2 ? gelu(x) : x; }
template<> __device__ __forceinline__ c64 activate(c64 x, int) { return x; }
template<> __device__ __forceinline__ c128 activate(c128 x, int) { return x; }
__device__ __forceinline__ float size_of(float x) { return fabsf(x); }
__device__ __forceinline__ float size_of(double x) { return (float)fabs(x); }
__device__ __forceinline__ float size_of(c64) { return 0; }
__device__ __forceinline__ float size_of(c128) { return 0; }
__device__ __forceinline__ float scaled(float x, float s) { return x * s; }
__device__ __forceinline__ double scaled(double x, float s) { return x * s; }
__device__ __forceinline__ c64 scaled(c64 x, float) { return x; }
__device__ __forceinline__ c128 scaled(c128 x, float) { return x; }
