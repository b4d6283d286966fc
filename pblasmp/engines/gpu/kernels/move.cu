// SPDX-License-Identifier: Apache-2.0
// Copies in four dimensions, the last a run of bytes. Consecutive copies take consecutive blocks of threads. T is as
// wide as every address and stride allows. Of short runs (EACH is 0) a thread copies a word; of long ones a warp
// copies EACH words per thread, so that narrow words also reach the speed of memory. With FLIP every word is a complex
// number, whose conjugate is written.
#include "words.cuh"
#include "flipped.cuh"

struct Strides { u64 a, b, c; };
struct Move { char* to; const char* from; Strides there, here; u64 nb, nc, run, total, first; };
struct Moves { Move m[MOVES]; };
extern "C" __global__ void __launch_bounds__(512) move(const __grid_constant__ Moves moves, int count) {
  u32 group = EACH ? 32 : 1, lane = threadIdx.x % group, words = EACH ? 32 * EACH : 1, each = blockDim.x / group;
  for (int number = 0; number < count; ++number) {
    const Move& m = moves.m[number];
    INDEX pieces = (m.run + words - 1) / words;
    u64 block = (blockIdx.x + gridDim.x - (u32)m.first) % gridDim.x;
    for (u64 at = block * each + threadIdx.x / group; at < m.total; at += (u64)gridDim.x * each) {
      INDEX i = at, x = i % pieces; i /= pieces;
      INDEX c = i % (INDEX)m.nc; i /= (INDEX)m.nc;
      INDEX b = i % (INDEX)m.nb, a = i / (INDEX)m.nb;
      T* to = (T*)(m.to + a * m.there.a + b * m.there.b + c * m.there.c) + (u64)x * words + lane;
      const T* from = (const T*)(m.from + a * m.here.a + b * m.here.b + c * m.here.c) + (u64)x * words + lane;
#if EACH
      long long left = (long long)m.run - (long long)x * words - lane;
      T word[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) if (32 * j < left) word[j] = from[32 * j];
#pragma unroll
      for (int j = 0; j < EACH; ++j) if (32 * j < left) to[32 * j] = FLIP(word[j]);
#else
      *to = FLIP(*from);
#endif
    }
  }
}
