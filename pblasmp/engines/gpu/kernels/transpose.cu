// SPDX-License-Identifier: Apache-2.0
// Tiles of 32 x 32, through shared memory: read along the columns, written along the rows. Both dimensions are runs at
// equal distances. Every entry is one word; FLIP changes the sign of its upper half.
#include "words.cuh"
#include "flipped.cuh"

struct Steps { u64 row_run, row, col_run, col; };
__device__ __forceinline__ u64 at(Steps s, u32 r, u32 c, u32 rows_run, u32 cols_run)
{ return r / rows_run * s.row_run + r % rows_run * s.row + c / cols_run * s.col_run + c % cols_run * s.col; }
extern "C" __global__ void __launch_bounds__(256) transpose(
    char* to, Steps there, const char* from, Steps here, u32 rows, u32 rows_run, u32 cols, u32 cols_run) {
  __shared__ T tile[32][33];
  u32 x = threadIdx.x % 32, y = threadIdx.x / 32, across = (cols + 31) / 32;
  u64 tiles = (u64)((rows + 31) / 32) * across;
  for (u64 i = blockIdx.x; i < tiles; i += gridDim.x) {
    u32 r = i / across * 32, c = i % across * 32;
    for (u32 j = y; j < 32; j += 8)
      if (r + j < rows && c + x < cols) tile[j][x] = *(const T*)(from + at(here, r + j, c + x, rows_run, cols_run));
    __syncthreads();
    for (u32 j = y; j < 32; j += 8)
      if (r + x < rows && c + j < cols) *(T*)(to + at(there, r + x, c + j, rows_run, cols_run)) = FLIP(tile[x][j]);
    __syncthreads();
  }
}
