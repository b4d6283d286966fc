// SPDX-License-Identifier: Apache-2.0
__device__ __forceinline__ u32 acquire(const u32* p)
{ u32 v; asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void meet(u32* count, u32 target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(count, 1u);
    while ((int)(acquire(count) - target) < 0) {}
    __threadfence();
  }
  __syncthreads();
}
