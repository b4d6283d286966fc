// SPDX-License-Identifier: Apache-2.0
// Before and after the solve that makes T of V^H V and tau: a reflector without a tau is the identity, whose row and
// column of T are zero.
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(512) reflector(T* inner, i64 ldi, T* t, i64 ldt, const T* tau, int n, int after) {
  int c = blockIdx.x;
  for (int r = threadIdx.x; r < n; r += blockDim.x) {
    T mine = tau[r], zero = number(0, 0), one = number(1, 0);
    bool none = is_zero(mine);
    if (after) { if (r == c) t[c * ldt + r] = mine; continue; }
    if (r == c) inner[c * ldi + r] = none ? one : over(one, mine);
    else if (none) inner[c * ldi + r] = zero;
    t[c * ldt + r] = r == c && !none ? one : zero;
  }
}
