// SPDX-License-Identifier: Apache-2.0
// A narrow panel in the registers of all blocks: each thread has ROWS rows, of which the first COLUMNS - j elements are
// left at column j; after each column they move up by one. What is done is in shared memory. For a column every block
// shows its largest element and that row; every block takes the largest of all. Rows stay where they are: only their
// places are exchanged, and at the end they are written there. While blocks learn of a column's largest element, they
// subtract what the pivot before contributes to all columns but this one. 1 / pivot comes with its row, or 0 if that is
// not exact enough.
// What is shown goes in words of 16 bytes, half data, half a tag that no other column has: a reader waits until it finds
// the tag, which takes no fence and no counter. Slots of odd and even columns alternate: a block that shows column
// j + 2 has seen all others at column j + 1, and they had read column j by then.
#include "factor.cuh"
#include "meeting.cuh"

struct __align__(16) Several { T of[16 / sizeof(T)]; };
constexpr int PARTS = sizeof(T) / sizeof(REAL), TOGETHER = 16 / sizeof(T), CHUNK = COLUMNS < 16 ? COLUMNS : 16;
constexpr int WORDS = (COLUMNS * (int)sizeof(T) + 7) / 8, SLOT = 4 + WORDS, WARPS = THREADS / 32;
typedef REAL Rows[ROWS][COLUMNS * PARTS];  // of numbers, not of complex ones: these would not be in registers
__device__ __forceinline__ T element(const Rows& x, int i, int c)
{ return number(x[i][c * PARTS], x[i][c * PARTS + PARTS - 1]); }
__device__ __forceinline__ void put(Rows& x, int i, int c, T a)
{ x[i][c * PARTS] = re(a); if (PARTS == 2) x[i][c * PARTS + PARTS - 1] = im(a); }
__device__ __forceinline__ void show(uint4* to, u64 word, u32 tag)
{ asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%3,%2};"
               :: "l"(to), "r"((u32)word), "r"(tag), "r"((u32)(word >> 32)) : "memory"); }
__device__ __forceinline__ bool got(const uint4* of, u32 tag, u64& word) {
  u32 low, first, high, second;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(low), "=r"(first), "=r"(high), "=r"(second) : "l"(of) : "memory");
  word = (u64)high << 32 | low;
  return first == tag && second == tag;
}
__device__ __forceinline__ u32 most(u32 x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, x);
#else
  for (int lane = 16; lane; lane >>= 1) x = max(x, __shfl_xor_sync(~0u, x, lane));
  return x;
#endif
}
// Sizes in the order of numbers: 0 for nothing, 1 for NaN, which is taken only if there is nothing else.
__device__ __forceinline__ u64 rank_of(float a) { return a == a ? (u64)__float_as_uint(a) + 2 : 1; }
__device__ __forceinline__ u64 rank_of(double a) { return a == a ? (u64)__double_as_longlong(a) + 2 : 1; }
// Whether this lane has the largest key of its warp, of several the one whose place is the first.
__device__ __forceinline__ bool leads(u64 key, u32 place) {
  u32 high = (u32)(key >> 32), low = (u32)key;
  bool may = true;
  if (sizeof(REAL) == 8) may = high == most(high);
  const u32 largest = most(may ? low : 0u);
  may = may && low == largest;
  const u32 earliest = most(may ? ~place : 0u);  // all lanes take part in each
  return may && ~place == earliest;
}
__device__ __forceinline__ T inverse(T a) {
  const REAL size = size_of(a), least = sizeof(REAL) == 4 ? (REAL)7.888609052210118e-31 : (REAL)9.332636185032189e-302;
  return size > least && size < 1 / least ? over(number(1, 0), a) : T{};  // far from denormal numbers
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) lu(
    T* a, i64 ld, int m, int w, int rows, int* pivots, int first, int* info, uint4* shown, u32* count) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* done = (T*)memory;  // element (r, c) is done[c * rows + r]
  __shared__ Several pivots_[2][COLUMNS / TOGETHER + 2], line[COLUMNS / TOGETHER + 2];  // behind 1 / pivot
  __shared__ u64 keys[WARPS];
  __shared__ int places[WARPS], owners[WARPS], chosen_place, chosen_block;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, block = blockIdx.x, blocks = gridDim.x;
  const int base = block * rows, mine = min(rows, m - base), steps = min(m, w);
  const u32 before = acquire(count + 1);  // tags of earlier panels
  Rows x;
  T factor[ROWS];
  int place[ROWS];  // where a row is by now; once it has been a pivot, less 1 << 30
  bool zero = true;
  #pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int r = t + i * THREADS;
    place[i] = r < mine ? base + r : -1;
    const T* from = a + base + r;
    #pragma unroll
    for (int c = 0; c < COLUMNS; ++c, from += ld) {
      T value = {};
      if (r < mine && c < w) value = *from;
      put(x, i, c, value);
    }
  }
  for (int j = 0; j < steps; ++j) {
    const u32 tag = before + j + 1;
    const int live = 16 + (w - j) * (int)sizeof(T);  // bytes of a row that are shown
    uint4* slots = shown + (i64)(j & 1) * blocks * SLOT;
    Several* pivot_ = pivots_[j & 1];
    u64 key = 0;
    int at = 0, own = 0;
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const u64 each = place[i] >= 0 ? rank_of(size_of(element(x, i, 0))) : 0;
      if (each > key || (each == key && each && place[i] < at)) { key = each; at = place[i]; own = i; }
    }
    if (leads(key, at)) { keys[warp] = key; places[warp] = at; owners[warp] = t + own * THREADS; }
    __syncthreads();
    key = lane < WARPS ? keys[lane] : 0;
    at = lane < WARPS ? places[lane] : 0;
    const int from = __ffs(__ballot_sync(~0u, leads(key, at))) - 1, owner = owners[from];
    const bool candidate = warp == owner % THREADS / 32;  // of this block
    key = __shfl_sync(~0u, key, from);
    at = __shfl_sync(~0u, at, from);
    uint4* slot = slots + block * SLOT;
    if (candidate && lane < 2) show(slot + lane, lane ? (u64)at : key, tag);
    if (j > 0) {
      const Several* last = pivots_[(j - 1) & 1] + 1;
      #pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if (place[i] < 0) continue;
        #pragma unroll
        for (int from = 0; from < COLUMNS; from += CHUNK)
          if (from <= w - j)
            #pragma unroll
            for (int c = from; c < from + CHUNK; c += TOGETHER) {
              const Several some = last[c / TOGETHER];
              #pragma unroll
              for (int k = 0; k < TOGETHER; ++k)
                if (c + k > 1 && c + k < COLUMNS) {
                  T next = element(x, i, c + k);
                  if (!zero) take(next, factor[i], some.of[k]);
                  put(x, i, c + k - 1, next);
                }
            }
      }
    }
    if (candidate) {
      #pragma unroll
      for (int i = 0; i < ROWS; ++i)
        if (t + i * THREADS == owner) {
          line[0].of[0] = inverse(element(x, i, 0));
          #pragma unroll
          for (int c = 0; c < COLUMNS; ++c) line[1 + c / TOGETHER].of[c % TOGETHER] = element(x, i, c);
        }
      __syncwarp();
      for (int e = lane; e * 8 < live; e += 32) show(slot + 2 + e, ((u64*)line)[e], tag);
    }
    if (warp == 0) {
      u64 best = 0;
      u32 row = 0;
      int which = 0;
      bool waits;
      do {
        waits = false;
        #pragma unroll
        for (int b = 0; b < POLLS * 32; b += 64) {
          if (b >= blocks) break;
          const int one = min(b + lane, blocks - 1), two = min(b + lane + 32, blocks - 1);  // perhaps one twice
          const uint4 *of_one = slots + one * SLOT, *of_two = slots + two * SLOT;
          u64 of[4];
          waits |= !(got(of_one, tag, of[0]) & got(of_one + 1, tag, of[1]) & got(of_two, tag, of[2])
                     & got(of_two + 1, tag, of[3]));
          if (of[0] > best || (of[0] == best && (u32)of[1] < row)) { best = of[0]; row = (u32)of[1]; which = one; }
          if (of[2] > best || (of[2] == best && (u32)of[3] < row)) { best = of[2]; row = (u32)of[3]; which = two; }
        }
        if (waits) best = 0;
      } while (waits);
      const int winner = __ffs(__ballot_sync(~0u, leads(best, row))) - 1;
      which = __shfl_sync(~0u, which, winner);
      row = __shfl_sync(~0u, row, winner);
      if (lane == 0) { chosen_place = (int)row; chosen_block = which; }
      for (int e = lane; e * 8 < live; e += 32) {
        u64 part;
        while (!got(slots + which * SLOT + 2 + e, tag, part)) {}
        ((u64*)pivot_)[e] = part;
      }
    }
    __syncthreads();
    const int chosen = chosen_place;
    const T inverted = pivot_[0].of[0], diagonal = pivot_[1].of[0], beside = pivot_[1 + 1 / TOGETHER].of[1 % TOGETHER];
    zero = is_zero(diagonal);
    if (block == 0 && t == 0) {
      pivots[j] = first + chosen + 1;
      if (zero && *info == 0) *info = first + j + 1;
    }
    if (block == chosen_block)
      for (int c = t; c < w - j; c += THREADS) done[(j + c) * rows + owner] = ((T*)(pivot_ + 1))[c];
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (place[i] < 0) continue;
      if (place[i] == chosen) { place[i] = j - (1 << 30); continue; }
      if (place[i] == j) place[i] = chosen;
      T each = element(x, i, 0);
      if (!zero && is_zero(inverted)) each = over(each, diagonal);
      else if (!zero) { const T old = each; each = T{}; take(each, negative(old), inverted); }
      factor[i] = each;
      done[j * rows + t + i * THREADS] = each;
      if (COLUMNS > 1) {
        T next = element(x, i, COLUMNS > 1);
        if (!zero) take(next, each, beside);
        put(x, i, 0, next);
      }
    }
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int r = t + i * THREADS;
    if (r < mine) {
      const int to = place[i] < 0 ? place[i] + (1 << 30) : place[i];
      for (int c = 0; c < w; ++c) a[c * ld + to] = done[c * rows + r];
    }
  }
  if (t == 0 && atomicAdd(count, 1u) == blocks - 1u) {
    *count = 0;
    count[1] = before + steps;
  }
}
