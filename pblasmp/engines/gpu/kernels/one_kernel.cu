// SPDX-License-Identifier: Apache-2.0
// A product and its communication in one persistent kernel, for Hopper (sm_90a).
//
// D = f(alpha X W^T + bias) in tiles of 128 x BN; X and W row-major, 16-bit floats, sums in float32. Each block has three
// warpgroups. Two multiply, 64 rows each, by WGMMA. In the third, every warp has a task of its own:
//   warp 0 loads tiles of X and W by TMA, several steps of k ahead;
//   warp 1 loads what other ranks have computed of this rank's tiles;
//   warp 2 stores results: to D, or to other ranks, and raises a flag there for each tile;
//   warp 3 copies other ranks' results to D, and is joined by the multiplying warps when these have no tile left.
// A finished tile is handed to warp 2 through shared memory ("the staging"), so the next tile is multiplied meanwhile.
//
// Macros: RANKS, BN (columns of a tile), STAGES (steps of k in flight), SLOTS (stagings), HALF (1: float16, 0: bfloat16),
// WGMMA(d, a, b, adds), and FORM:
//   0 reduce-scatter   1 all-reduce   2 gathered output
#define BM 128
#define BK 64
#define CHUNK (BN % 64 == 0 ? 64 : 32)  // columns of a part of the staging, one box of TMA
#define SUMS (FORM < 2)    // other ranks have parts of this rank's tiles
#define COPIES (FORM > 0)  // other ranks' tiles are results of this rank, too
#define PIECE 8192  // bytes in flight to other ranks: with more, loads of X and W wait behind them
#define STRIP 16  // rows that a warp copies at once

typedef unsigned char u8; typedef unsigned int u32; typedef unsigned long long u64;

struct alignas(64) Map { u64 words[16]; };  // a CUtensorMap

// Tiles are numbered by row blocks; other ranks' parts and results are in boxes, as images of the staging.
struct alignas(64) Job {
  Map x, w, d;                // d: this rank's tiles of D
  u32* control;               // this rank's: the number of calls before this one; blocks that have ended
  u32* flags[RANKS];          // every rank's, at its address here: [parity][kind][source][tile]
  u8* boxes[2][RANKS];        // by parity, likewise: [kind][source][tile]
  u8* copy_to[RANKS];         // where warp 3 writes a rank's results
  const void* bias;           // one entry for each column
  int copy_rows[RANKS], copy_cols[RANKS];
  int starts[RANKS + 1];      // of the shares of the rows
  int row_blocks, col_blocks, steps, rank, cols, copy_ld, capacity, tiles, activation, bias_is_float;
  float alpha;
};

static_assert(sizeof(Job) == JOB_BYTES, "what Python packs");

// -- instructions

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(u32 barrier, int count)
{ asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" :: "r"(barrier), "r"(count)); }
__device__ __forceinline__ void arrive(u32 barrier)
{ asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" :: "r"(barrier) : "memory"); }
__device__ __forceinline__ void expect(u32 barrier, u32 bytes)
{ asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" :: "r"(barrier), "r"(bytes) : "memory"); }
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@p bra done;\nbra again;\ndone:\n}"
               :: "r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const Map* of, int col, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3}],[%4];"
               :: "r"(to), "l"(of), "r"(col), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void load(u32 to, const u8* of, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               :: "r"(to), "l"(of), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store(const Map* to, u32 of, int col, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0,{%1,%2}],[%3];"
               :: "l"(to), "r"(col), "r"(row), "r"(of) : "memory");
}
__device__ __forceinline__ void store(u8* to, u32 of, u32 bytes)
{ asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" :: "l"(to), "r"(of), "r"(bytes) : "memory"); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void stored()  // all but the last N groups have arrived
{ asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void fence_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void await_flag(const u32* flag, u32 value) {
  u32 v;
  do { asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(flag) : "memory"); } while ((int)(v - value) < 0);
}
__device__ __forceinline__ void release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }  // once for all flags
__device__ __forceinline__ void raise_flag(u32* flag, u32 value)
{ asm volatile("st.relaxed.sys.global.u32 [%0],%1;" :: "l"(flag), "r"(value) : "memory"); }
__device__ __forceinline__ u64 matrix(u32 at)  // a WGMMA descriptor: k contiguous, swizzled by 128 bytes, 8 rows in 1 KiB
{ return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }

#if HALF
__device__ __forceinline__ u32 pack(float a, float b)
{ u32 r; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
__device__ __forceinline__ float low(u32 v)
{ float f; asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,l;}" : "=f"(f) : "r"(v)); return f; }
__device__ __forceinline__ float high(u32 v)
{ float f; asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,h;}" : "=f"(f) : "r"(v)); return f; }
#else
__device__ __forceinline__ u32 pack(float a, float b)
{ u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
#endif
__device__ __forceinline__ float activate(float v, int which) {
  if (which == 1) return v < 0.0f ? 0.0f : v;
  if (which == 2) return 0.5f * v * (1.0f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
  return v;
}

// -- which tile, and where

struct Tile { int owner, row_block, col_block; };

__device__ __forceinline__ Tile tile(const Job& job, int owner, int u) {  // 8 row blocks at a time, column by column
  int group = 8 * job.col_blocks, g = u / group, high = min(job.row_blocks - 8 * g, 8), v = u % group;
  return {owner, 8 * g + v % high, v / high};
}

// The tile at a position. Every block goes through its positions in order. A tile that waits for another rank's has a
// later position than that one, on all ranks: so, as all blocks run at once, one of them can always go on.
__device__ __forceinline__ Tile tile_at(const Job& job, int s) {
#if FORM == 0 && RANKS == 2
  // A first round for the other rank, then both in turn: less is on its way at the same time.
  int lead = min((int)gridDim.x, job.tiles), q = s - lead, mixed = 2 * (job.tiles - lead);
  bool own = q >= 0 && (q >= mixed || q % 2 == 0);
  int u = q < 0 ? s : q < mixed ? q / 2 + (own ? 0 : lead) : q - (job.tiles - lead);
  return tile(job, own ? job.rank : 1 - job.rank, u);
#elif SUMS
  // Other ranks' tiles, one of each in turn, then this rank's.
  int others = (RANKS - 1) * job.tiles;
  if (s < others) return tile(job, (job.rank + 1 + s % (RANKS - 1)) % RANKS, s / (RANKS - 1));
  return tile(job, job.rank, s - others);
#else
  return tile(job, job.rank, s);
#endif
}

// The address, from that of the staging, of 8 columns of a row. Swizzled as TMA does: no two rows of 8 share a bank.
__device__ __forceinline__ u32 place(int row, int col8) {
  int part = col8 / (CHUNK / 8), u = col8 % (CHUNK / 8), key = CHUNK == 64 ? row & 7 : (row >> 1) & 3;
  return part * (BM * CHUNK * 2) + row * (CHUNK * 2) + ((u ^ key) << 4);
}

#define IMAGE (BM * BN * 2)
__device__ __forceinline__ u32* flag_at(const Job& job, int rank, u32 parity, int kind, int source, int number)
{ return job.flags[rank] + (u64)((parity * 2 + kind) * RANKS + source) * job.capacity + number; }
__device__ __forceinline__ u8* box_at(const Job& job, int rank, u32 parity, int kind, int source, int number)
{ return job.boxes[parity][rank] + ((u64)(kind * RANKS + source) * job.tiles + number) * IMAGE; }

// -- the tasks

__device__ void copy_results(const Job& job, u32* next, u32 epoch, int lane) {
  for (;;) {
    int item = 0;
    if (lane == 0) item = atomicAdd(next, 1);
    item = __shfl_sync(0xffffffffu, item, 0);
    int s = blockIdx.x + item / (BM / STRIP) * gridDim.x;
    if (s >= (RANKS - 1) * job.tiles) return;
    Tile t = tile(job, (job.rank + 1 + s % (RANKS - 1)) % RANKS, s / (RANKS - 1));
    int number = t.row_block * job.col_blocks + t.col_block, strip = item % (BM / STRIP) * STRIP;
    int row = t.row_block * BM + strip, col = t.col_block * BN;
    await_flag(flag_at(job, job.rank, epoch & 1, 1, t.owner, number), epoch);
    const u8* of = box_at(job, job.rank, epoch & 1, 1, t.owner, number);
    u8* to = job.copy_to[t.owner];
    int cols = min(job.copy_cols[t.owner] - col, BN), units = (cols + 7) / 8;
    int count = min(job.copy_rows[t.owner] - row, STRIP) * units;
    for (int i = lane; i < count; i += 32 * 4) {
      uint4 v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int x = i + 32 * j;
        if (x < count) v[j] = __ldcg((const uint4*)(of + place(strip + x / units, x % units)));
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int x = i + 32 * j, c = x % units * 8;
        if (x >= count) continue;
        u8* at = to + ((u64)(row + x / units) * job.copy_ld + col + c) * 2;
        if (c + 8 <= cols) *(uint4*)at = v[j];
        else for (int k = 0; k < cols - c; k++) ((unsigned short*)at)[k] = ((const unsigned short*)&v[j])[k];
      }
    }
  }
}

__device__ __forceinline__ void send(u8* to, u32 of) {
  for (u32 i = 0; i < IMAGE; i += PIECE) {
    store(to + i, of + i, min((u32)PIECE, IMAGE - i));
    commit();
    stored<0>();
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) one_kernel(const __grid_constant__ Job job) {
  extern __shared__ u8 memory[];
  __shared__ u32 epoch_, next;
  const u32 X_BYTES = BM * BK * 2, STAGE = X_BYTES + BN * BK * 2;
  const u32 base = (shared(memory) + 1023) & ~1023u, stagings = base + STAGES * STAGE, barriers = stagings + SLOTS * IMAGE;
  const u32 full = barriers, empty = full + 8 * STAGES;                      // a step's operands are there; are read
  const u32 came = empty + 8 * STAGES, taken = came + 8 * SLOTS;             // another rank's part is in a slot; is added
  const u32 ready = taken + 8 * SLOTS, vacant = ready + 8 * SLOTS;           // a result is in a slot; has left it
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    epoch_ = *(volatile u32*)job.control + 1;
    next = 0;
    for (int i = 0; i < STAGES; i++) { init(full + 8 * i, 1); init(empty + 8 * i, 2); }
    for (int i = 0; i < SLOTS; i++) { init(came + 8 * i, 1); init(taken + 8 * i, 2); init(ready + 8 * i, 2); init(vacant + 8 * i, 1); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_proxies();
  }
  __syncthreads();
  const u32 epoch = epoch_, parity = epoch & 1;
  const int positions = (SUMS ? RANKS : 1) * job.tiles;

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 0 && lane == 0) {  // operands
      int stage = 0;
      u32 phase = 1;
      for (int s = blockIdx.x; s < positions; s += gridDim.x) {
        const Tile t = tile_at(job, s);
        const int row = t.row_block * BM + (SUMS ? job.starts[t.owner] : 0), col = t.col_block * BN;
        for (int k = 0; k < job.steps; k++) {
          wait(empty + 8 * stage, phase);
          expect(full + 8 * stage, STAGE);
          load(base + stage * STAGE, &job.x, k * BK, row, full + 8 * stage);
          load(base + stage * STAGE + X_BYTES, &job.w, k * BK, col, full + 8 * stage);
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      }
    }
#if SUMS
    if (warp == 1 && lane == 0) {  // other ranks' parts
      int n = 0;
      u32 phases = 0;
      for (int s = blockIdx.x; s < positions; s += gridDim.x, n++) {
        const int slot = n % SLOTS;
        if (n >= SLOTS) wait(vacant + 8 * slot, (n / SLOTS - 1) & 1);  // each in turn: a parity cannot tell every other one
        const Tile t = tile_at(job, s);
        if (t.owner != job.rank) continue;
        const int number = t.row_block * job.col_blocks + t.col_block;
        for (int i = 1; i < RANKS; i++) {
          const int source = (job.rank + i) % RANKS;
          await_flag(flag_at(job, job.rank, parity, 0, source, number), epoch);
          fence_proxies();
          expect(came + 8 * slot, IMAGE);
          load(stagings + slot * IMAGE, box_at(job, job.rank, parity, 0, source, number), IMAGE, came + 8 * slot);
          if (i + 1 == RANKS) break;  // nobody says that the last part is added: "vacant" does
          wait(taken + 8 * slot, (phases >> slot) & 1);
          phases ^= 1 << slot;
        }
      }
    }
#endif
    if (warp == 2 && lane == 0) {  // results
      int n = 0;
      for (int s = blockIdx.x; s < positions; s += gridDim.x, n++) {
        const int slot = n % SLOTS;
        const u32 staging = stagings + slot * IMAGE;
        const Tile t = tile_at(job, s);
        const int number = t.row_block * job.col_blocks + t.col_block;
        const bool own = !SUMS || t.owner == job.rank;
        wait(ready + 8 * slot, (n / SLOTS) & 1);
        if (own) {
          for (int c = 0; c < BN / CHUNK; c++)
            store(&job.d, staging + c * (BM * CHUNK * 2), t.col_block * BN + c * CHUNK, t.row_block * BM);
          commit();
        }
        if (SUMS && !own) send(box_at(job, t.owner, parity, 0, job.rank, number), staging);
        if (COPIES && own)
          for (int i = 1; i < RANKS; i++) send(box_at(job, (job.rank + i) % RANKS, parity, 1, job.rank, number), staging);
        stores_read();
        arrive(vacant + 8 * slot);
        if (FORM == 0 && own) continue;
        stored<0>();
        fence_proxies();
        release();
        if (SUMS && !own) raise_flag(flag_at(job, t.owner, parity, 0, job.rank, number), epoch);
        else for (int i = 1; i < RANKS; i++) raise_flag(flag_at(job, (job.rank + i) % RANKS, parity, 1, job.rank, number), epoch);
      }
      stored<0>();
    }
    if (COPIES && warp == 3) copy_results(job, &next, epoch, lane);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int half = threadIdx.x / 128 - 1, row = half * 64 + (warp & 3) * 16 + ((lane >> 3) & 1) * 8 + (lane & 7), col8 = lane >> 4;
    const bool speaks = threadIdx.x % 128 == 0;
    int stage = 0, n = 0;
    u32 phase = 0, phases = 0;
    float sum[BN / 2];
    for (int s = blockIdx.x; s < positions; s += gridDim.x, n++) {
      const Tile t = tile_at(job, s);
      const bool own = !SUMS || t.owner == job.rank;
      const int slot = n % SLOTS;
      const u32 staging = stagings + slot * IMAGE;
      int previous = -1;
      for (int k = 0; k < job.steps; k++) {
        wait(full + 8 * stage, phase);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u64 x = matrix(base + stage * STAGE + half * (64 * BK * 2)), w = matrix(base + stage * STAGE + X_BYTES);
#pragma unroll
        for (int i = 0; i < BK / 16; i++) { WGMMA(sum, x + 2 * i, w + 2 * i, (k | i) != 0) }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (previous >= 0) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (speaks) arrive(empty + 8 * previous);
        }
        previous = stage;
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(sum[i]) :: "memory");
      if (speaks) arrive(empty + 8 * previous);
      if (job.alpha != 1.0f) {
#pragma unroll
        for (int i = 0; i < BN / 2; i++) sum[i] *= job.alpha;
      }
      if (SUMS && own) {
        for (int i = 1; i < RANKS; i++) {
          wait(came + 8 * slot, (phases >> slot) & 1);
          phases ^= 1 << slot;
#pragma unroll
          for (int j = 0; j < BN / 16; j++) {
            u32 r[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(staging + place(row, 2 * j + col8)) : "memory");
#pragma unroll
            for (int q = 0; q < 4; q++) { sum[8 * j + 2 * q] += low(r[q]); sum[8 * j + 2 * q + 1] += high(r[q]); }
          }
          if (i + 1 < RANKS) {
            fence_proxies();
            asm volatile("bar.sync %0,128;" :: "r"(half + 1) : "memory");
            if (speaks) arrive(taken + 8 * slot);
          }
        }
      } else if (n >= SLOTS) {
        wait(vacant + 8 * slot, (n / SLOTS - 1) & 1);
      }
      if (own && (job.bias || job.activation)) {
#pragma unroll
        for (int j = 0; j < BN / 8; j++) {
#pragma unroll
          for (int q = 0; q < 2; q++) {
            const int col = t.col_block * BN + 8 * j + 2 * (lane & 3) + q;
            float b = 0.0f;
            if (job.bias && col < job.cols)
              b = job.bias_is_float ? ((const float*)job.bias)[col] : low(((const unsigned short*)job.bias)[col]);
            sum[4 * j + q] = activate(sum[4 * j + q] + b, job.activation);
            sum[4 * j + q + 2] = activate(sum[4 * j + q + 2] + b, job.activation);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < BN / 16; j++) {
        u32 r[4];
#pragma unroll
        for (int q = 0; q < 4; q++) r[q] = pack(sum[8 * j + 2 * q], sum[8 * j + 2 * q + 1]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" :: "r"(staging + place(row, 2 * j + col8)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
      }
      fence_proxies();
      asm volatile("bar.sync %0,128;" :: "r"(half + 1) : "memory");
      if (speaks) arrive(ready + 8 * slot);
    }
    if (COPIES) copy_results(job, &next, epoch, lane);
  }

  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(job.control + 1, 1) == gridDim.x - 1) {  // the last block
      job.control[1] = 0;
      *job.control = epoch;
      __threadfence();
    }
  }
}
