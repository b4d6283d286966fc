// SPDX-License-Identifier: Apache-2.0
// V adjacent entries per thread, added in the order of the parts: the same bits wherever the same parts are added. There
// may be none.
#include "numbers.cuh"

__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
template<class T> struct alignas(least(16, V * sizeof(T))) Line { T v[V]; };
struct Parts { const PART* p[P ? P : 1]; };
struct Outs { OUT* p[OUTS]; };
extern "C" __global__ void __launch_bounds__(512) add(
    Parts parts, u64 ld_parts, Outs outs, u64 ld_first, u64 ld_rest, u64 rows, u64 lines,
    const CTYPE* c, u64 ld_c, SUM beta, const BIAS* bias, int activation, const float* scale, float* amax) {
  float largest = 0;
  float by = scale ? *scale : 1.0f;
  INDEX n = rows * lines, step = (INDEX)gridDim.x * blockDim.x;
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += step) {
    INDEX i = at, row = i / (INDEX)lines;
    u64 col = (u64)(i - row * (INDEX)lines) * V;
    SUM sum[V];
#if P
    Line<PART> in[P];
    #pragma unroll
    for (int p = 0; p < P; p++) in[p] = *(const Line<PART>*)(parts.p[p] + row * ld_parts + col);
    #pragma unroll
    for (int j = 0; j < V; j++) sum[j] = wide(in[0].v[j]);
    #pragma unroll
    for (int p = 1; p < P; p++)
      #pragma unroll
      for (int j = 0; j < V; j++) sum[j] = plus(sum[j], wide(in[p].v[j]));
#else
    #pragma unroll
    for (int j = 0; j < V; j++) sum[j] = SUM{};
#endif
    if (c) {
      Line<CTYPE> old = *(const Line<CTYPE>*)(c + row * ld_c + col);
      #pragma unroll
      for (int j = 0; j < V; j++) sum[j] = plus(sum[j], times(beta, wide(old.v[j])));
    }
    if (bias) {
      #pragma unroll
      for (int j = 0; j < V; j++) sum[j] = plus(sum[j], wide(bias[col + j]));
    }
    Line<OUT> out;
    #pragma unroll
    for (int j = 0; j < V; j++) {
      SUM y = activate(sum[j], activation);
      if (amax) largest = fmaxf(largest, size_of(y));
      narrow(scale ? scaled(y, by) : y, out.v[j]);
    }
    #pragma unroll
    for (int q = 0; q < OUTS; q++) *(Line<OUT>*)(outs.p[q] + row * (q ? ld_rest : ld_first) + col) = out;
  }
  if (amax) {
    for (int lane = 16; lane; lane >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
    if (threadIdx.x % 32 == 0) atomicMax((int*)amax, __float_as_int(largest));
  }
}
