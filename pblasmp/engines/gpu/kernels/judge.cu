// SPDX-License-Identifier: Apache-2.0
// One block, after cuSOLVER: what it found becomes INFO, unless NaN comes first: then all is NaN. cuSOLVER leaves NaN
// where the pivot is negative, so that the factor does not tell.
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(512) judge(
    T* a, i64 ld, int rows, int cols, int* found, int* info, int first) {
  int at = found[0], nan = found[1] && at > cols - found[1], t = threadIdx.x;
  __syncthreads();
  if (at > 0 && nan)
    for (int c = 0; c < cols; ++c)
      for (int r = t; r < rows; r += blockDim.x) spoil(a[c * ld + r]);
  if (t == 0) {
    *info = at > 0 && !nan ? first + at : 0;
    found[0] = found[1] = 0;
  }
}
