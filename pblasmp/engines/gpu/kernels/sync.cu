// SPDX-License-Identifier: Apache-2.0
#include "words.cuh"

struct Peers { u32* p[RANKS]; };
__device__ __forceinline__ u32 acquire(const u32* p)
{ u32 v; asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void release(u32* p, u32 v)
{ asm volatile("st.release.sys.global.u32 [%0],%1;" :: "l"(p), "r"(v) : "memory"); }

// Words of a rank: for every kind of barrier, one from each rank; then how often this rank arrived and waited.
__device__ void arrive_(Peers peers, int size, int rank, int kind, int kinds) {
  u32* mine = peers.p[rank];
  u32* count = mine + kinds * size + 2 * kind;
  __shared__ u32 epoch;
  if (threadIdx.x == 0) { epoch = *count + 1; *count = epoch; }
  __syncthreads();
  __threadfence_system();
  if (threadIdx.x < size) release(peers.p[threadIdx.x] + kind * size + rank, epoch);
}
__device__ void await_(Peers peers, int size, int rank, int kind, int kinds) {
  u32* mine = peers.p[rank];
  u32* count = mine + kinds * size + 2 * kind + 1;
  __shared__ u32 epoch;
  if (threadIdx.x == 0) { epoch = *count + 1; *count = epoch; }
  __syncthreads();
  if (threadIdx.x < size) while ((int)(acquire(mine + kind * size + threadIdx.x) - epoch) < 0) {}
  __syncthreads();
  __threadfence_system();
}
extern "C" __global__ void arrive(Peers peers, int size, int rank, int kind, int kinds)
{ arrive_(peers, size, rank, kind, kinds); }
extern "C" __global__ void await(Peers peers, int size, int rank, int kind, int kinds)
{ await_(peers, size, rank, kind, kinds); }
extern "C" __global__ void meet(Peers peers, int size, int rank, int kind, int kinds)
{ arrive_(peers, size, rank, kind, kinds); await_(peers, size, rank, kind, kinds); }

struct Words { u32* p[WAITS]; };
extern "C" __global__ void raise_flags(Words flags, int count) {
  __threadfence_system();
  if (threadIdx.x < count) release(flags.p[threadIdx.x], 1);
}
extern "C" __global__ void await_flags(Words flags, int count) {
  if (threadIdx.x < count) {
    u32* flag = flags.p[threadIdx.x];
    while (!acquire(flag)) {}
    *flag = 0;
  }
  __syncthreads();
  __threadfence_system();
}
