// SPDX-License-Identifier: Apache-2.0
// Householder reflectors of a narrow panel, as LU. For a column every block shows its dot products with all columns, of
// its rows below the diagonal; their sums give the norm, the products with the reflector, and a column of T.
// Elements of the column are divided by the largest of the block meanwhile: squares neither overflow nor underflow.
#include "factor.cuh"
#include "meeting.cuh"

__device__ __forceinline__ T times(T a, T b) { T d = number(0, 0); take(d, negative(a), b); return d; }
__device__ __forceinline__ T scaled(T a, REAL s) { return number(re(a) * s, im(a) * s); }
__device__ __forceinline__ T other(T a, int lane)
{ REAL x = __shfl_xor_sync(~0u, re(a), lane), y = __shfl_xor_sync(~0u, im(a), lane); return number(x, y); }

extern "C" __global__ void __launch_bounds__(512) qr(
    T* a, i64 ld, int m, int w, int rows, T* v, i64 ldv, T* block_factor, T* tau, T* shown, REAL* sizes, u32* count) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* x = (T*)memory;
  T* y = x + (i64)w * rows;  // the column, conjugated and scaled
  __shared__ REAL size_[16];
  __shared__ T part[16][WIDEST], line[WIDEST], dot[WIDEST], use[WIDEST], t_[WIDEST][WIDEST], factors[4];
  __shared__ REAL shrinks;
  const REAL LEAST = sizeof(REAL) == 4 ? (REAL)1.1754943508222875e-38 : (REAL)2.2250738585072014e-308;  // no denormal
  const int t = threadIdx.x, block = blockIdx.x, blocks = gridDim.x, warps = blockDim.x / 32;
  const int base = block * rows, mine = min(rows, m - base), lane = t % 32, warp = t / 32;
  for (int c = 0; c < w; ++c)
    for (int r = t; r < mine; r += blockDim.x) x[c * rows + r] = a[c * ld + base + r];
  __syncthreads();
  for (int j = 0; j < w; ++j) {
    int side = j & 1;
    T* show = shown + (i64)side * (blocks + 1) * WIDEST;  // the last row is row j
    REAL top = 0;
    for (int r = t; r < mine; r += blockDim.x)
      if (base + r > j) top = fmax(top, size_of(x[j * rows + r]));
    for (int k = 16; k; k >>= 1) top = fmax(top, __shfl_xor_sync(~0u, top, k));
    if (lane == 0) size_[warp] = top;
    __syncthreads();
    for (int i = 0; i < warps; ++i) top = fmax(top, size_[i]);
    REAL by = top > 0 ? top : (REAL)1;
    for (int r = t; r < mine; r += blockDim.x) {
      T each = conjugate(x[j * rows + r]);
      y[r] = base + r > j ? number(re(each) / by, im(each) / by) : number(0, 0);
    }
    if (t == 0) sizes[side * blocks + block] = top;
    __syncthreads();
    for (int c = warp; c < w; c += 2 * warps) {  // two columns at a time hide each other's latency
      int d = min(c + warps, w - 1);
      const T *of = c == j ? y : x + c * rows, *beside = d == j ? y : x + d * rows;  // with itself: scaled twice
      const REAL sign = c == j ? -1 : 1, besides = d == j ? -1 : 1;
      T sum = number(0, 0), more = sum;
      #pragma unroll 4
      for (int r = lane; r < mine; r += 32) {
        T each = y[r];
        sum = plus(sum, times(each, number(re(of[r]), sign * im(of[r]))));
        more = plus(more, times(each, number(re(beside[r]), besides * im(beside[r]))));
      }
      for (int k = 16; k; k >>= 1) { sum = plus(sum, other(sum, k)); more = plus(more, other(more, k)); }
      if (lane == 0) {
        show[block * WIDEST + c] = sum;
        if (c + warps < w) show[block * WIDEST + d] = more;
      }
    }
    if (t < w && j >= base && j < base + mine) show[blocks * WIDEST + t] = x[t * rows + j - base];
    meet(count, (u32)(j + 1) * blocks);
    REAL most = 0;
    for (int b = lane; b < blocks; b += 32) most = fmax(most, sizes[side * blocks + b]);
    for (int k = 16; k; k >>= 1) most = fmax(most, __shfl_xor_sync(~0u, most, k));
    if (!(most > 0)) most = 1;
    T sum = number(0, 0);
    if (lane < w)
      for (int b = warp; b < blocks; b += warps) {
        REAL size = sizes[side * blocks + b], share = size > 0 ? size / most : (REAL)0;
        sum = plus(sum, scaled(show[b * WIDEST + lane], lane == j ? share * share : share));
      }
    if (lane < w) part[warp][lane] = sum;
    if (t < w) line[t] = show[blocks * WIDEST + t];
    __syncthreads();
    if (t < w) {
      sum = part[0][t];
      for (int i = 1; i < warps; ++i) sum = plus(sum, part[i][t]);
      dot[t] = sum;  // times ``most``; of the column itself, its squares over most^2
    }
    __syncthreads();
    if (t == 0) {
      T alpha = line[j], factor = number(0, 0), scale = factor, by_most = factor;
      REAL below = re(dot[j]), tiny = 0;
      if (!(below == 0 && im(alpha) == 0)) {  // all in units of the largest number: denormal ones have few digits
        REAL big = fmax(below == 0 ? (REAL)0 : most, fmax(fabs(re(alpha)), fabs(im(alpha))));
        REAL p = re(alpha) / big, q = im(alpha) / big, s = below == 0 ? (REAL)0 : most / big;
        REAL norm = sqrt(p * p + q * q + s * below * s), beta = p >= 0 ? -norm : norm;
        T unit = over(number(1, 0), number(p - beta, q));
        factor = number((beta - p) / beta, -q / beta);
        by_most = scaled(unit, s);
        if (big < LEAST) { tiny = big; scale = unit; }  // 1 / big may be infinite
        else scale = over(number(1, 0), number(re(alpha) - beta * big, im(alpha)));
        alpha = number(beta * big, 0);
      }
      factors[0] = factor; factors[1] = scale; factors[2] = alpha; factors[3] = by_most; shrinks = tiny;
      if (block == 0) tau[j] = factor;
    }
    __syncthreads();
    const T factor = factors[0], scale = factors[1], diagonal = factors[2], by_most = factors[3];
    const REAL tiny = shrinks;
    const bool acts = !is_zero(factor);
    if (t < w && acts) {
      if (t > j) use[t] = times(conjugate(factor), plus(line[t], times(conjugate(by_most), dot[t])));
      if (t < j) use[t] = plus(conjugate(line[t]), times(by_most, conjugate(dot[t])));
    }
    __syncthreads();
    if (acts)
      for (int r = t; r < mine; r += blockDim.x) {
        if (base + r < j) continue;
        T e = number(1, 0);
        if (base + r > j) {
          e = x[j * rows + r];
          if (tiny > 0) e = number(re(e) / tiny, im(e) / tiny);
          x[j * rows + r] = e = times(e, scale);
        } else x[j * rows + r] = diagonal;
        for (int c = j + 1; c < w; ++c) take(x[c * rows + r], e, use[c]);
      }
    if (block == 0)
      for (int i = warp; i < w; i += warps) {  // element i of column j of T, by a warp
        sum = lane >= i && lane < j && acts ? times(t_[i][lane], use[lane]) : number(0, 0);
        for (int k = 16; k; k >>= 1) sum = plus(sum, other(sum, k));
        if (lane == 0) t_[i][j] = i == j ? factor : times(number(-re(factor), -im(factor)), sum);
      }
    __syncthreads();
  }
  for (int c = 0; c < w; ++c)
    for (int r = t; r < mine; r += blockDim.x) {
      T e = x[c * rows + r];
      a[c * ld + base + r] = e;
      v[c * ldv + base + r] = base + r > c ? e : number(base + r == c, 0);
    }
  if (block == 0)
    for (int i = t; i < w * w; i += blockDim.x) block_factor[i] = t_[i % w][i / w];
  if (t == 0 && atomicAdd(count, 1u) == (u32)(w + 1) * blocks - 1) *count = 0;
}
