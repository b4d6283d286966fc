// SPDX-License-Identifier: Apache-2.0
// Exchanges one after another, row i with row pivots[i] - 1 - first, become moves: pairs[2 i] is where a row goes,
// pairs[2 i + 1] where it comes from. The first count are the top rows, the others the rows that they meet below. This
// thread finds those of row t.
__device__ void moves(int t, const int* pivots, int count, int first, int back, int* other, int* pairs) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) other[i] = pivots[i] - 1 - first;
  __syncthreads();
  if (t < count) {
    const int p = other[t];
    int top = t, below = p;
    bool single = p < 0 || p >= count;
    #pragma unroll 8
    for (int i = count - 1; i >= 0; --i) {  // from where rows are at the end back to where they were
      const int q = other[i];
      if (q == p && i < t) single = false;
      top = top == i ? q : top == q ? i : top;
      below = below == i ? q : below == q ? i : below;
    }
    int to[2] = {t, single ? p : 0}, of[2] = {top, single ? below : 0};
    for (int i = 0; i < 2; ++i) {
      pairs[2 * (t + i * count)] = back ? of[i] : to[i];
      pairs[2 * (t + i * count) + 1] = back ? to[i] : of[i];
    }
  }
}
