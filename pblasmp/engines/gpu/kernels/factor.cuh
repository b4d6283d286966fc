// SPDX-License-Identifier: Apache-2.0
#include "complex.cuh"
typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
__device__ __forceinline__ float re(float a) { return a; }
__device__ __forceinline__ double re(double a) { return a; }
__device__ __forceinline__ float re(c64 a) { return a.x; }
__device__ __forceinline__ double re(c128 a) { return a.x; }
__device__ __forceinline__ float im(float) { return 0; }
__device__ __forceinline__ double im(double) { return 0; }
__device__ __forceinline__ float im(c64 a) { return a.y; }
__device__ __forceinline__ double im(c128 a) { return a.y; }
__device__ __forceinline__ void set(float& a, float x, float) { a = x; }
__device__ __forceinline__ void set(double& a, double x, double) { a = x; }
__device__ __forceinline__ void set(c64& a, float x, float y) { a.x = x; a.y = y; }
__device__ __forceinline__ void set(c128& a, double x, double y) { a.x = x; a.y = y; }
#ifdef KIND
typedef KIND T; typedef REAL_KIND REAL;
__device__ __forceinline__ T number(REAL x, REAL y) { T a; set(a, x, y); return a; }
__device__ __forceinline__ T negative(T a) { return number(-re(a), -im(a)); }
__device__ __forceinline__ bool is_zero(T a) { return re(a) == 0 && im(a) == 0; }
#endif
__device__ __forceinline__ float size_of(float a) { return fabsf(a); }
__device__ __forceinline__ double size_of(double a) { return fabs(a); }
__device__ __forceinline__ float size_of(c64 a) { return fabsf(a.x) + fabsf(a.y); }
__device__ __forceinline__ double size_of(c128 a) { return fabs(a.x) + fabs(a.y); }
__device__ __forceinline__ void take(float& d, float a, float b) { d -= a * b; }
__device__ __forceinline__ void take(double& d, double a, double b) { d -= a * b; }
__device__ __forceinline__ void take(c64& d, c64 a, c64 b)
{ d.x -= a.x * b.x - a.y * b.y; d.y -= a.x * b.y + a.y * b.x; }
__device__ __forceinline__ void take(c128& d, c128 a, c128 b)
{ d.x -= a.x * b.x - a.y * b.y; d.y -= a.x * b.y + a.y * b.x; }
__device__ __forceinline__ float over(float a, float b) { return a / b; }
__device__ __forceinline__ double over(double a, double b) { return a / b; }
template<class C, class R> __device__ __forceinline__ C ratio(C a, C b) {  // Smith's, which does not overflow
  C q;
  R r, d;
  if (size_of(b.x) >= size_of(b.y)) {
    r = b.y / b.x; d = b.x + b.y * r; q.x = (a.x + a.y * r) / d; q.y = (a.y - a.x * r) / d;
  } else {
    r = b.x / b.y; d = b.x * r + b.y; q.x = (a.x * r + a.y) / d; q.y = (a.y * r - a.x) / d;
  }
  return q;
}
__device__ __forceinline__ c64 over(c64 a, c64 b) { return ratio<c64, float>(a, b); }
__device__ __forceinline__ c128 over(c128 a, c128 b) { return ratio<c128, double>(a, b); }
__device__ __forceinline__ void spoil(float& a) { a = __int_as_float(0x7fc00000); }
__device__ __forceinline__ void spoil(double& a) { a = __longlong_as_double(0x7ff8000000000000ll); }
__device__ __forceinline__ void spoil(c64& a) { spoil(a.x); spoil(a.y); }
__device__ __forceinline__ void spoil(c128& a) { spoil(a.x); spoil(a.y); }
