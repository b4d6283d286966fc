// SPDX-License-Identifier: Apache-2.0
struct alignas(8) c64 { float x, y; }; struct alignas(16) c128 { double x, y; };
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ double plus(double a, double b) { return a + b; }
__device__ __forceinline__ c64 plus(c64 a, c64 b) { return c64{a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ c128 plus(c128 a, c128 b) { return c128{a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float conjugate(float a) { return a; }
__device__ __forceinline__ double conjugate(double a) { return a; }
__device__ __forceinline__ c64 conjugate(c64 a) { return c64{a.x, -a.y}; }
__device__ __forceinline__ c128 conjugate(c128 a) { return c128{a.x, -a.y}; }
