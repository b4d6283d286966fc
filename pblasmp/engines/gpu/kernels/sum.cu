// SPDX-License-Identifier: Apache-2.0
// D = alpha X + beta C in some tiles, a row of blocks of threads each; of a triangle only what is in it.
#include "numbers.cuh"

typedef ELEMENT E;
struct Tile { E* d; const E* x; const E* c; u32 rows, cols, i, j; };
struct Tiles { Tile t[TILES]; };
struct Deal { u32 block, nprocs, turn, lead, skipped, unused; };
__device__ __forceinline__ u64 index_of(Deal d, u32 place) {
  u32 at = place + d.skipped, block = at / d.block;
  return ((u64)block * d.nprocs + d.turn) * d.block + at % d.block - d.lead;
}
__device__ __forceinline__ float real(float a) { return a; }
__device__ __forceinline__ double real(double a) { return a; }
__device__ __forceinline__ c64 real(c64 a) { return c64{a.x, 0}; }
__device__ __forceinline__ c128 real(c128 a) { return c128{a.x, 0}; }
extern "C" __global__ void __launch_bounds__(256) sum(
    const __grid_constant__ Tiles tiles, u64 ld, u64 x_down, u64 x_across, u64 c_down, u64 c_across,
    E alpha, E beta, Deal down, Deal across) {
  const Tile& t = tiles.t[blockIdx.y];
  u64 total = (u64)t.rows * t.cols;
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
    u64 col = at / t.rows, row = at - col * t.rows;
#if TRIANGLE
    u64 r = index_of(down, t.i + (u32)row), c = index_of(across, t.j + (u32)col);
    if (TRIANGLE == 1 ? r < c : r > c) continue;
    bool diagonal = REAL && r == c;
#else
    const bool diagonal = false;
#endif
    E x = t.x[row * x_down + col * x_across];
    if (CONJUGATE) x = conjugate(x);
    E sum = times(alpha, diagonal ? real(x) : x);
    if (KEEPS) {
      E old = t.c[row * c_down + col * c_across];
      sum = plus(sum, times(beta, diagonal ? real(old) : old));
    }
    t.d[row + col * ld] = diagonal ? real(sum) : sum;
  }
}
