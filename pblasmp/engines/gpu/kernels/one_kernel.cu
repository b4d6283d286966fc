// SPDX-License-Identifier: Apache-2.0
// A product and its communication in one persistent kernel: for Hopper (sm_90a), and with MMA for any GPU since sm_80.
//
// D = f(alpha X W^T + bias) in tiles of 128 x BN; X and W row-major, 16-bit or 8-bit floats, sums in float32. Each block has
// three warpgroups. Two multiply, 64 rows each, by WGMMA. In the third, every warp has a task of its own:
//   warp 0 loads tiles of X and W by TMA, several steps of k ahead;
//   warp 1 fetches what other ranks have computed of this rank's tiles;
//   warp 2 stores results, to D or to this rank's boxes, and raises a flag for each tile where it is needed;
//   warp 3 fetches other ranks' results from their boxes, and stores them to D.
// A finished tile is handed to warp 2 through shared memory ("the staging"), so the next tile is multiplied meanwhile.
//
// Blocks of a cluster multiply tiles one below the other, which need the same W: each loads a part of it, for all.
//
// With MMA there is neither WGMMA nor TMA, and parts and sums are only stored: each block has eight warps, all of which
// load and multiply, 16 rows each, and write results from registers to D. Their sums are in the same registers.
//
// Macros: RANKS, BN (columns of a tile), CLUSTER (blocks of a cluster), STAGES (steps of k in flight), SLOTS (stagings),
// MMA (1: as above),
// WGMMA(d, a, b, adds), which multiplies 32 bytes of k by WN columns, and the types: EIGHT (1: X and W have 8 bits),
// HALF (parts of sums travel in float16 if 1, in bfloat16 if 0), RESULT (D has that type if 0; 1: e4m3, 2: e5m2), FORM:
//   0 reduce-scatter   1 all-reduce   2 gathered output
// and PARTS, how other ranks' parts of a sum get to the one that adds them:
//   0 sent to its boxes by TMA   1 fetched from the boxes of the rank that has computed them
//   2 stored, from registers, into its inbox; 16-bit results, too   3 the same, and all ranks add all tiles
#define BM 128
#define LINE 128                       // bytes of k in a step
#define BK (LINE / (EIGHT ? 1 : 2))
#define CHUNK (BN % 64 == 0 ? 64 : BN % 32 == 0 ? 32 : 16)  // columns of a part of the staging
#define PULLS (PARTS == 1)
#define STORES (FORM < 2 && PARTS > 1)  // parts go to inboxes
#define ALL_ADD (FORM == 1 && PARTS == 3)
#define SUMS (FORM < 2 && !ALL_ADD)    // other ranks have parts of this rank's tiles
#define GIVES ((FORM == 1 || (MMA && FORM == 2)) && PARTS == 2 && !RESULT)  // so do results
#define COPIES (FORM > 0 && !ALL_ADD && !GIVES)  // other ranks' tiles are results of this rank, too, from their boxes
#define PARTS_IN_BOXES (SUMS && !STORES)
#define CALL 65536  // more than there are blocks
#define PIECE 8192  // bytes of another rank's part that are fetched at once, two pieces at a time
#define PART (BM * CHUNK * 2)  // bytes of a part of the staging
#define DONE (PART / (RESULT ? 2 : 1))  // of one that is a result
#define BOX_ROWS (CHUNK == 64 ? 64 : BM)  // of a part that TMA stores at once: 8 KiB at most
#define BOX (DONE / (BM / BOX_ROWS))   // bytes of them, of a result
#define BOXES (BN / CHUNK * (BM / BOX_ROWS))  // of a tile

#define FIRST_THREAD (MMA ? 0 : 128)  // of 256 that multiply

typedef unsigned char u8; typedef unsigned int u32; typedef unsigned long long u64;

#if MMA
struct alignas(64) Map { u8* at; u64 ld; int rows, cols; u64 unused[13]; };  // ld in bytes
#else
struct alignas(64) Map { u64 words[16]; };  // a CUtensorMap
#endif

// Tiles are numbered by row blocks. Boxes hold images of the staging.
struct alignas(64) Job {
  Map x, w, d[RANKS];         // d: where this rank's tiles belong, and other ranks' results
  u64* control;               // this rank's: the number of calls before this one, times CALL, and of blocks that have ended
  u32* flags[RANKS];          // every rank's, at its address here: [parity][kind][source][tile]
  u8* boxes[2][RANKS];        // by parity, likewise: [source][tile], or [tile] if no parts travel in them
  u8* inboxes[2][RANKS];      // by parity, likewise: parts [source][tile], behind them results, if they are stored
  const void* bias;           // one entry for each column
  const float *scale_x, *scale_w, *scale_d;  // of 8-bit matrices; null: 1
  float* amax;                // null, or raised to the largest absolute value of the results, before scale_d
  int starts[RANKS + 1];      // of the shares of the rows
  int row_blocks, col_blocks, steps, rank, cols, capacity, tiles, activation, bias_type;
  float alpha;
};

static_assert(sizeof(Job) == JOB_BYTES, "what Python packs");

// -- instructions

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(u32 barrier, int count)
{ asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" :: "r"(barrier), "r"(count)); }
__device__ __forceinline__ void arrive(u32 barrier)
{ asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" :: "r"(barrier) : "memory"); }
__device__ __forceinline__ void arrive_at(u32 barrier, int block) {  // of another block of the cluster, or this one
#if CLUSTER > 1
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(there) : "r"(barrier), "r"(block));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _,[%0];" :: "r"(there) : "memory");
#else
  arrive(barrier);
#endif
}
__device__ __forceinline__ void meet() {  // all threads of the cluster
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}
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
__device__ __forceinline__ void load(u32 to, const Map* of, int col, int row, u32 barrier, u32 blocks) {  // of the cluster
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1,{%2,%3}],[%4],%5;"
               :: "r"(to), "l"(of), "r"(col), "r"(row), "r"(barrier), "h"((unsigned short)blocks) : "memory");
}
__device__ __forceinline__ void load(u32 to, const u8* of, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               :: "r"(to), "l"(of), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void prefetch(const Map* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }
__device__ __forceinline__ void store(const Map* to, u32 of, int col, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0,{%1,%2}],[%3];"
               :: "l"(to), "r"(col), "r"(row), "r"(of) : "memory");
}
__device__ __forceinline__ void store(u8* to, u32 of, u32 bytes)
{ asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" :: "l"(to), "r"(of), "r"(bytes) : "memory"); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void store(u8* to, u32 a, u32 b, u32 c, u32 d)
{ asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" :: "l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory"); }
__device__ __forceinline__ void load(const u8* of, u32* v) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(of) : "memory");
}
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

__device__ __forceinline__ float of_half(u32 v)
{ float f; asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,l;}" : "=f"(f) : "r"(v)); return f; }
template <int N> __device__ __forceinline__ void multiplied()  // by all but the last N groups of WGMMA
{ asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
template <int COLUMNS> __device__ __forceinline__ void used(float* sum) {  // from here on by others than WGMMA
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(sum[i]) :: "memory");
}
template <int COLUMNS> __device__ __forceinline__ void add_columns(float* sum, const float* part) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) sum[i] += part[i];
}

#if HALF
__device__ __forceinline__ u32 pack(float a, float b)
{ u32 r; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
__device__ __forceinline__ float low(u32 v) { return of_half(v); }
__device__ __forceinline__ float high(u32 v) { return of_half(v >> 16); }
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

// 8 row blocks at a time, column by column. The number of row blocks is a multiple of CLUSTER.
__device__ __forceinline__ Tile tile(const Job& job, int owner, int u) {
  const int group = 8 * job.col_blocks, first = u / group * 8, high = min(job.row_blocks - first, 8), v = u % group;
  return {owner, first + v % high, v / high};
}

// The tile at a position: a first round for the other ranks; then, in turn, one of this rank's and one for each of them.
// Every block goes through its positions in order. A tile that waits for another rank's has a later position than that
// one, on all ranks: so, as all blocks run at once, one of them can always go on. Positions of a cluster follow one
// another.
__device__ __forceinline__ Tile tile_at(const Job& job, int position) {
#if SUMS
  const int others = RANKS - 1, tiles = job.tiles / CLUSTER, lead = min(max((int)gridDim.x / CLUSTER / others, 1), tiles);
  const int s = position / CLUSTER, q = s - lead * others, turn = q / RANKS, which = q % RANKS;
  const bool mixed = q >= 0 && turn < tiles - lead, own = q >= 0 && !(mixed && which);
  const int u = q < 0 ? s : !own ? (lead + turn) * others + which - 1 : mixed ? turn : q - (tiles - lead) * others;
  return tile(job, own ? job.rank : (job.rank + 1 + u % others) % RANKS, (own ? u : u / others) * CLUSTER + position % CLUSTER);
#else
  return tile(job, job.rank, position);
#endif
}

// The result of another rank that is fetched at a position, likewise.
__device__ __forceinline__ Tile result_at(const Job& job, int position)
{ return tile(job, (job.rank + 1 + position % (RANKS - 1)) % RANKS, position / (RANKS - 1)); }

__device__ __forceinline__ float bias_of(const Job& job, int col) {  // of type 0: bfloat16, 1: float16, 2: float32
  if (!job.bias || col >= job.cols) return 0.0f;
  if (job.bias_type == 2) return ((const float*)job.bias)[col];
  const u32 v = ((const unsigned short*)job.bias)[col];
  return job.bias_type ? of_half(v) : __uint_as_float(v << 16);
}

// The address, from that of the staging, of 8 columns of a row. Swizzled as TMA does: no two rows of 8 share a bank.
__device__ __forceinline__ u32 place(int row, int col8) {
  int part = col8 / (CHUNK / 8), u = col8 % (CHUNK / 8), key = row / (64 / CHUNK) & (CHUNK / 8 - 1);
  return part * PART + row * (CHUNK * 2) + ((u ^ key) << 4);
}

#if RESULT
// Where an 8-bit result of a row is, likewise: no two rows of 8 share a bank.
__device__ __forceinline__ u32 narrow_place(u32 staging, int row, int col) {
  const int u = col % CHUNK / 16, key = row / (128 / CHUNK) & (CHUNK / 16 - 1);
  return staging + col / CHUNK * DONE + row * CHUNK + ((u ^ key) << 4) + col % 16;
}
__device__ __forceinline__ unsigned short narrow(float a, float b) {  // the largest value instead of larger ones
  unsigned short r;
#if RESULT == 1
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(r) : "f"(b), "f"(a));
#else
  asm("cvt.rn.satfinite.e5m2x2.f32 %0,%1,%2;" : "=h"(r) : "f"(b), "f"(a));
#endif
  return r;
}
__device__ __forceinline__ void put(u32 to, unsigned short v)
{ asm volatile("st.shared.u16 [%0],%1;" :: "r"(to), "h"(v) : "memory"); }
#endif

// The row whose address a thread gives to ldmatrix and stmatrix.
__device__ __forceinline__ int matrix_row(int first_row, int lane) { return first_row - lane / 4 + (lane & 15); }

#define IMAGE (BM * BN * 2)
__device__ __forceinline__ u32* flag_at(const Job& job, int rank, u32 parity, int kind, int source, int number)
{ return job.flags[rank] + (u64)((parity * 2 + kind) * RANKS + source) * job.capacity + number; }
__device__ __forceinline__ u8* box_at(const Job& job, int rank, u32 parity, int source, int number)
{ return job.boxes[parity][rank] + ((u64)(PARTS_IN_BOXES ? source : 0) * job.tiles + number) * IMAGE; }

// -- parts that go from registers to those of the same thread of another rank
//
// They need no flag and no fence: a word of an inbox is 0 until it has come, and its reader makes it 0 again. The next to
// write there is the call after the next, as in boxes.

#define VECTORS (BN / 16)  // of a thread's part of a tile: 4 words, 8 entries
#define INBOX(at, j) ((at) + (j) * 4096 + (threadIdx.x - FIRST_THREAD) * 16)

__device__ __forceinline__ u8* inbox_at(const Job& job, int rank, u32 parity, int source, int number)
{ return job.inboxes[parity][rank] + ((u64)source * job.tiles + number) * IMAGE; }
__device__ __forceinline__ u8* result_inbox_at(const Job& job, int rank, u32 parity, int source, int number)
{ return inbox_at(job, rank, parity, (STORES ? RANKS : 0) + source, number); }

__device__ __forceinline__ void to_words(const float* sum, u32* words) {
#pragma unroll
  for (int j = 0; j < 4 * VECTORS; j++) {
    words[j] = pack(sum[2 * j], sum[2 * j + 1]);
    if (!words[j]) words[j] = 0x80000000u;  // of two zeros, one is negative
  }
}

__device__ __forceinline__ void put(u8* inbox, const u32* words) {
#pragma unroll
  for (int j = 0; j < VECTORS; j++) store(INBOX(inbox, j), words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
}

// Takes COUNT vectors out, from that of number FIRST on.
template <int FIRST, int COUNT> __device__ __forceinline__ void take(u8* inbox, u32* v) {
  constexpr int last = COUNT - 1;
  do load(INBOX(inbox, FIRST + last), v + 4 * last);  // probably comes last
  while (!(v[4 * last] && v[4 * last + 1] && v[4 * last + 2] && v[4 * last + 3]));
  bool all;
  do {
    all = true;
#pragma unroll
    for (int j = 0; j < last; j++) load(INBOX(inbox, FIRST + j), v + 4 * j);
#pragma unroll
    for (int j = 0; j < 4 * last; j++) all = all && v[j];
  } while (!all);
#pragma unroll
  for (int j = 0; j < COUNT; j++) store(INBOX(inbox, FIRST + j), 0, 0, 0, 0);
  __syncwarp();
}

__device__ __forceinline__ void zero(float* sum) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sum[i] = 0.0f;
}

template <int COUNT> __device__ __forceinline__ void add(float* sum, const u32* v) {
#pragma unroll
  for (int j = 0; j < 4 * COUNT; j++) { sum[2 * j] += low(v[j]); sum[2 * j + 1] += high(v[j]); }
}

template <int FIRST> __device__ __forceinline__ void add_part(u8* inbox, float* sum) {
  constexpr int most = ALL_ADD && RANKS > 2 ? 4 : 8, count = VECTORS - FIRST < most ? VECTORS - FIRST : most;
  u32 v[4 * count];
  take<FIRST, count>(inbox, v);
  add<count>(sum + 8 * FIRST, v);
  if constexpr (FIRST + count < VECTORS) add_part<FIRST + count>(inbox, sum);
}

// -- the tasks

struct Pieces {  // fetched from another rank, two at a time: with more, loads of X and W wait behind them
  u32 barriers, count;
  __device__ __forceinline__ void wait_for(u32 i) { wait(barriers + 8 * (i & 1), (i / 2) & 1); }
  __device__ __forceinline__ void load_next(u32 to, const u8* of, u32 bytes) {
    expect(barriers + 8 * (count & 1), bytes);
    load(to, of, bytes, barriers + 8 * (count & 1));
    count++;
  }
};

// Stores a box of a result of 16 or 8 bits to D.
__device__ __forceinline__ void store_box(const Job& job, const Tile& t, int box, u32 of) {
  constexpr int high = BM / BOX_ROWS;
  store(&job.d[t.owner], of, t.col_block * BN + box / high * CHUNK, t.row_block * BM + box % high * BOX_ROWS);
}

__device__ void fetch_results(const Job& job, u32 buffers, Pieces pieces, u32 epoch) {
  for (int s = blockIdx.x; s < (RANKS - 1) * job.tiles; s += gridDim.x) {
    const Tile t = result_at(job, s);
    const int number = t.row_block * job.col_blocks + t.col_block;
    await_flag(flag_at(job, job.rank, epoch & 1, 1, t.owner, number), epoch);
    fence_proxies();
    const u8* of = box_at(job, t.owner, epoch & 1, t.owner, number);
    for (int c = 0; c <= BOXES; c++) {
      if (c < BOXES) {
        stores_read();
        pieces.load_next(buffers + (pieces.count & 1) * PIECE, of + c * BOX, BOX);
      }
      if (c == 0) continue;
      const u32 i = pieces.count - (c < BOXES ? 2 : 1);
      pieces.wait_for(i);
      fence_proxies();
      store_box(job, t, c - 1, buffers + (i & 1) * PIECE);
      commit();
    }
  }
  stored<0>();
}

// The largest absolute value of a tile's results; below the last row there may be others.
__device__ __forceinline__ void raise_amax(const Job& job, const Tile& t, const float* sum, int row, int lane) {
  const int rows = (SUMS ? job.starts[t.owner + 1] - job.starts[t.owner] : job.starts[1]) - t.row_block * BM;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < BN / 2; i++) if (row + (i & 2) * 4 < rows) largest = fmaxf(largest, fabsf(sum[i]));
  for (int i = 16; i; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
  if (lane == 0) atomicMax((int*)job.amax, __float_as_int(largest));
}

// Makes results of a thread's sums of a tile.
__device__ __forceinline__ void finish(const Job& job, const Tile& t, float* sum, int first_row, int lane) {
  if (job.bias || job.activation) {
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const float b = bias_of(job, t.col_block * BN + 8 * j + 2 * (lane & 3) + q);
        sum[4 * j + q] = activate(sum[4 * j + q] + b, job.activation);
        sum[4 * j + q + 2] = activate(sum[4 * j + q + 2] + b, job.activation);
      }
    }
  }
  if (EIGHT && job.amax) raise_amax(job, t, sum, first_row, lane);
}

// Puts a thread's sums of a tile into the staging, as D has them if they are results.
__device__ __forceinline__ void put_into(u32 staging, const Job& job, const float* sum, bool results, int first_row, int lane) {
#if RESULT
  if (results) {
    const float scale = job.scale_d ? *job.scale_d : 1.0f;
#pragma unroll
    for (int i = 0; i < BN / 4; i++)
      put(narrow_place(staging, first_row + (i & 1) * 8, 4 * (i & ~1) + 2 * (lane & 3)), narrow(scale * sum[2 * i], scale * sum[2 * i + 1]));
    return;
  }
#endif
  const int row = matrix_row(first_row, lane);
#pragma unroll
  for (int j = 0; j < VECTORS; j++) {
    u32 r[4];
#pragma unroll
    for (int q = 0; q < 4; q++) r[q] = pack(sum[8 * j + 2 * q], sum[8 * j + 2 * q + 1]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" :: "r"(staging + place(row, 2 * j + (lane >> 4))), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
}

#if MMA
// -- products by mma.sync, operands by cp.async

#define STEP ((BM + BN) * LINE)  // bytes

template <int N> __device__ __forceinline__ void loaded()  // all but the last N steps
{ asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// The address of 16 bytes of a row of a step. No two rows of 8 share a bank.
__device__ __forceinline__ u32 unit_at(u32 step, int row, int unit) { return step + row * LINE + ((unit ^ (row & 7)) << 4); }

// Loads 128 bytes of k of some rows; what lies beyond the matrix is 0.
template <int ROWS> __device__ __forceinline__ void load_rows(u32 to, const Map& of, int row, int step) {
  const int unit = threadIdx.x % 8, col = step * BK + unit * 8, left = min(max((of.cols - col) * 2, 0), 16);
#pragma unroll
  for (int r = 0; r < ROWS; r += 32) {
    const int here = r + threadIdx.x / 8, bytes = row + here < of.rows ? left : 0;
    const u8* from = of.at + (bytes ? (u64)(row + here) * of.ld + col * 2 : 0);
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" :: "r"(unit_at(to, here, unit)), "l"(from), "r"(bytes) : "memory");
  }
}

struct Loads {  // of steps of k, tile after tile
  const Job& job;
  u32 base;
  int positions, position, step = 0, stage = 0, row = 0, col = 0;
  __device__ __forceinline__ void next() {
    if (position < positions) {
      if (step == 0) {
        const Tile t = tile_at(job, position);
        row = t.row_block * BM + (SUMS ? job.starts[t.owner] : 0);
        col = t.col_block * BN;
      }
      load_rows<BM>(base + stage * STEP, job.x, row, step);
      load_rows<BN>(base + stage * STEP + BM * LINE, job.w, col, step);
      if (++stage == STAGES) stage = 0;
      if (++step == job.steps) { step = 0; position += gridDim.x; }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
};

__device__ __forceinline__ void load_matrices(u32 at, u32* v) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}

// Loads 16 rows of X and BN of W, 16 of a step's k each.
__device__ __forceinline__ void load_operands(u32 x, u32 w, int first_row, int k, int lane, u32* a, u32* b) {
  load_matrices(unit_at(x, matrix_row(first_row, lane), 2 * k + (lane >> 4)), a);
#pragma unroll
  for (int n = 0; n < BN; n += 16) load_matrices(unit_at(w, n + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)), b + n / 4);
}

__device__ __forceinline__ void add_product(float* sum, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void add_step(u32 x, int first_row, int lane, float* sum) {
  u32 a[2][4], b[2][BN / 4];
  load_operands(x, x + BM * LINE, first_row, 0, lane, a[0], b[0]);
#pragma unroll
  for (int k = 0; k < BK / 16; k++) {
    if (k + 1 < BK / 16) load_operands(x, x + BM * LINE, first_row, k + 1, lane, a[(k + 1) & 1], b[(k + 1) & 1]);
#pragma unroll
    for (int n = 0; n < BN / 8; n++) add_product(sum + 4 * n, a[k & 1], b[k & 1] + 2 * n);
  }
}

// Writes a thread's sums of a tile to D.
__device__ __forceinline__ void write(const Map& d, const Tile& t, const float* sum, int first_row, int lane) {
#pragma unroll
  for (int i = 0; i < BN / 4; i++) {
    const int row = t.row_block * BM + first_row + (i & 1) * 8, col = t.col_block * BN + 4 * (i & ~1) + 2 * (lane & 3);
    const u32 two = pack(sum[2 * i], sum[2 * i + 1]);
    u8* to = d.at + row * d.ld + col * 2;
    if (row < d.rows && col + 1 < d.cols) *(u32*)to = two;
    else if (row < d.rows && col < d.cols) *(unsigned short*)to = two;
  }
}
#endif

extern "C" __global__ void
#if !MMA
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(FIRST_THREAD + 256, 1) one_kernel(const __grid_constant__ Job job) {
  extern __shared__ u8 memory[];
  const u32 X_BYTES = BM * LINE, STAGE = X_BYTES + BN * LINE, base = (shared(memory) + 1023) & ~1023u;
#if !MMA
  const u32 stagings = base + STAGES * STAGE, buffers = stagings + SLOTS * IMAGE;
  const u32 barriers = buffers + (COPIES ? 2 * PIECE : 0);
  const u32 full = barriers, empty = full + 8 * STAGES;           // a step's operands are there; are read
  const u32 came = empty + 8 * STAGES, taken = came + 8 * SLOTS;  // another rank's part is in a slot; is added
  const u32 ready = taken + 8 * SLOTS, vacant = ready + 8 * SLOTS;  // a result is in a slot; has left it
  const u32 fetched = vacant + 8 * SLOTS;                         // a piece is there: two of warp 1's, two of warp 3's
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 epoch = (u32)(*(volatile u64*)job.control / CALL) + 1, parity = epoch & 1;  // arrives while the barriers are made
#if !MMA
  if (threadIdx.x == 0) {
    prefetch(&job.x);
    prefetch(&job.w);
    for (int i = 0; i < STAGES; i++) { init(full + 8 * i, 1); init(empty + 8 * i, 2 * CLUSTER); }
    for (int i = 0; i < 4; i++) init(fetched + 8 * i, 1);
    for (int i = 0; i < SLOTS; i++) { init(came + 8 * i, 1); init(taken + 8 * i, 2); init(ready + 8 * i, 2); init(vacant + 8 * i, 1); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_proxies();
  }
#endif
  meet();
  const int positions = (SUMS ? RANKS : 1) * job.tiles;

#if !MMA
  if (threadIdx.x < FIRST_THREAD) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 0 && lane == 0) {  // operands
      const int part = blockIdx.x % CLUSTER * (BN / CLUSTER);
      int stage = 0;
      u32 phase = 1;
      for (int s = blockIdx.x; s < positions; s += gridDim.x) {
        const Tile t = tile_at(job, s);
        const int row = t.row_block * BM + (SUMS ? job.starts[t.owner] : 0), col = t.col_block * BN;
        for (int k = 0; k < job.steps; k++) {
          wait(empty + 8 * stage, phase);
          expect(full + 8 * stage, STAGE);
          const u32 x = base + stage * STAGE, w = x + X_BYTES + part * LINE;
          load(x, &job.x, k * BK, row, full + 8 * stage);
          if (CLUSTER == 1) load(w, &job.w, k * BK, col, full + 8 * stage);
          else load(w, &job.w, k * BK, col + part, full + 8 * stage, (1 << CLUSTER) - 1);
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      }
    }
#if PARTS_IN_BOXES
    if (warp == 1 && lane == 0) {  // other ranks' parts
      int n = 0;
      u32 phases = 0;
      Pieces pieces = {fetched, 0};
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
          const u8* of = box_at(job, PULLS ? source : job.rank, parity, PULLS ? job.rank : source, number);
          const u32 to = stagings + slot * IMAGE;
          if (PULLS) {
            const u32 first = pieces.count, all = (IMAGE + PIECE - 1) / PIECE;
            for (u32 k = 0; k < all + 2; k++) {
              if (k > 1) pieces.wait_for(first + k - 2);
              if (k < all) pieces.load_next(to + k * PIECE, of + k * PIECE, min((u32)PIECE, IMAGE - k * PIECE));
            }
            fence_proxies();  // who adds waits for this warp, not for the barrier of these copies
            arrive(came + 8 * slot);
          } else {
            expect(came + 8 * slot, IMAGE);
            load(to, of, IMAGE, came + 8 * slot);
          }
          if (i + 1 == RANKS) break;  // nobody says that the last part is added: "vacant" does
          wait(taken + 8 * slot, (phases >> slot) & 1);
          phases ^= 1 << slot;
        }
      }
    }
#endif
    if (warp == 2 && lane == 0) {  // results
      int n = 0;
      for (int given = 0; given <= GIVES; given++) for (int s = blockIdx.x; s < positions; s += gridDim.x) {
        const Tile t = tile_at(job, s);
        const int number = t.row_block * job.col_blocks + t.col_block;
        const bool own = !SUMS || t.owner == job.rank;
        if (STORES && own == given) continue;
        const int slot = n % SLOTS;
        const u32 staging = stagings + slot * IMAGE;
        wait(ready + 8 * slot, (n / SLOTS) & 1);
        n++;
        if (!own && !PULLS && !STORES) {
          u8* to = box_at(job, t.owner, parity, job.rank, number);
          for (u32 i = 0; i < IMAGE; i += PIECE) {  // one at a time: loads of X and W wait behind them, too
            store(to + i, staging + i, min((u32)PIECE, IMAGE - i));
            commit();
            stored<0>();
          }
        } else if ((!own && !STORES) || COPIES) {
          store(box_at(job, job.rank, parity, t.owner, number), staging, own ? BOXES * BOX : IMAGE);
          commit();
        }
        if (own || given) {
          for (int c = 0; c < BOXES; c++) store_box(job, t, c, staging + c * BOX);
          commit();
        }
        stores_read();
        arrive(vacant + 8 * slot);
        if ((own && !COPIES) || given) continue;
        if (own) stored<1>(); else stored<0>();
        fence_proxies();
        release();
        if (!own) raise_flag(flag_at(job, t.owner, parity, 0, job.rank, number), epoch);
        else for (int i = 1; i < RANKS; i++) raise_flag(flag_at(job, (job.rank + i) % RANKS, parity, 1, job.rank, number), epoch);
      }
      stored<0>();
    }
    if (COPIES && warp == 3 && lane == 0) fetch_results(job, buffers, {fetched + 16, 0}, epoch);
  } else
#endif
  {
    const int first_row = (warp - FIRST_THREAD / 32) * 16 + lane / 4;  // of a thread's sums [0] and [1]; [2] and [3] are 8 rows below
    float sum[BN / 2];
#if MMA
    Loads loads = {job, base, positions, (int)blockIdx.x};
    int stage = 0;
    for (int i = 1; i < STAGES; i++) loads.next();
    auto await_slot = [] {};
    auto hand_over = [&](const Tile& t, float* sum, bool finishes, bool) {
      if (finishes) finish(job, t, sum, first_row, lane);
      write(job.d[t.owner], t, sum, first_row, lane);
    };
#else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int half = threadIdx.x / 128 - 1;
    const bool speaks = threadIdx.x % 128 == 0;
    const int hears = lane == 0 && (warp & 3) < CLUSTER ? warp & 3 : -1;  // the block that this thread tells what was read
    int stage = 0, staged = 0;  // staged: tiles that were handed to warp 2
    u32 phase = 0;
    auto next_stage = [&] { if (++stage == STAGES) { stage = 0; phase ^= 1; } };
    auto free_stage = [&](int which) { if (hears >= 0) arrive_at(empty + 8 * which, hears); };
    auto multiply = [&](float* d, int column, bool first = true) {  // a step, by the columns from that one on
      const u64 x = matrix(base + stage * STAGE + half * (64 * LINE)), w = matrix(base + stage * STAGE + X_BYTES + column * LINE);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < LINE / 32; i++) { WGMMA(d, x + 2 * i, w + 2 * i, !(first && i == 0)) }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };
    auto await_slot = [&] { if (staged >= SLOTS) wait(vacant + 8 * (staged % SLOTS), (staged / SLOTS - 1) & 1); };
    auto hand_over = [&](const Tile& t, float* sum, bool finishes, bool results) {
      const int slot = staged++ % SLOTS;
      if (finishes) finish(job, t, sum, first_row, lane);
      put_into(stagings + slot * IMAGE, job, sum, results, first_row, lane);
      fence_proxies();
      asm volatile("bar.sync %0,128;" :: "r"(half + 1) : "memory");
      if (speaks) arrive(ready + 8 * slot);
    };
#if PARTS_IN_BOXES
    u32 phases = 0;  // of "came", for each slot
#endif
#endif
    float factor = job.alpha;
#if EIGHT
    if (job.scale_x) factor *= *job.scale_x;
    if (job.scale_w) factor *= *job.scale_w;
#endif
#if ALL_ADD
    Tile before;  // it is added when the next one has been multiplied
    u32 kept[4 * VECTORS];  // this rank's part of it, rounded as the others are
    auto add_all = [&] {
      float total[BN / 2];
      zero(total);
      for (int source = 0; source < RANKS; source++) {  // the same order on all ranks
        if (source == job.rank) add<VECTORS>(total, kept);
        else add_part<0>(inbox_at(job, job.rank, parity, source, before.row_block * job.col_blocks + before.col_block), total);
      }
      await_slot();
      hand_over(before, total, true, true);
    };
#endif
    for (int s = blockIdx.x; s < positions; s += gridDim.x) {
      const Tile t = tile_at(job, s);
#if MMA
      zero(sum);
      for (int k = 0; k < job.steps; k++) {
        loaded<STAGES - 2>();
        __syncthreads();  // all have the step, and have read the one before, over which the next one is loaded
        loads.next();
        add_step(base + stage * STAGE, first_row, lane, sum);
        if (++stage == STAGES) stage = 0;
      }
#elif EIGHT
      // The tensor cores add products of 8-bit floats in fewer bits than float32 has: not more than those of a step.
      zero(sum);
#if BN > WN  // a part of the columns at a time
      for (int k = 0; k < job.steps; k++) {
        wait(full + 8 * stage, phase);
#pragma unroll
        for (int n = 0; n < BN; n += WN) {
          float part[WN / 2];
          multiply(part, n);
          multiplied<0>();
          used<WN>(part);
          if (n + WN == BN) free_stage(stage);
          add_columns<WN>(sum + n / 2, part);
        }
        next_stage();
      }
#else  // two steps at a time: one is added while the other is multiplied
      for (int k = 0; k < job.steps; k += 2) {
        float part[2][WN / 2];
        const int first = stage;
        wait(full + 8 * stage, phase);
        multiply(part[0], 0);
        next_stage();
        wait(full + 8 * stage, phase);
        multiply(part[1], 0);
        multiplied<1>();
        used<WN>(part[0]);
        free_stage(first);
        add_columns<WN>(sum, part[0]);
        multiplied<0>();
        used<WN>(part[1]);
        free_stage(stage);
        add_columns<WN>(sum, part[1]);
        next_stage();
      }
#endif
#else
      int previous = -1;
      for (int k = 0; k < job.steps; k++) {
        wait(full + 8 * stage, phase);
        multiply(sum, 0, k == 0);
        if (previous >= 0) {
          multiplied<1>();
          free_stage(previous);
        }
        previous = stage;
        next_stage();
      }
      multiplied<0>();
      used<BN>(sum);
      free_stage(previous);
#endif
      if (factor != 1.0f) {
#pragma unroll
        for (int i = 0; i < BN / 2; i++) sum[i] *= factor;
      }
#if STORES || GIVES
      const int number = t.row_block * job.col_blocks + t.col_block;
#endif
#if ALL_ADD
      u32 words[4 * VECTORS];
      to_words(sum, words);
      for (int i = 1; i < RANKS; i++) put(inbox_at(job, (job.rank + i) % RANKS, parity, job.rank, number), words);
      if (s >= gridDim.x) add_all();
#pragma unroll
      for (int j = 0; j < 4 * VECTORS; j++) kept[j] = words[j];
      before = t;
    }
    if (blockIdx.x < positions) add_all();
#else
      const bool own = !SUMS || t.owner == job.rank;
#if STORES
      if (!own) {
        u32 words[4 * VECTORS];
        to_words(sum, words);
        put(inbox_at(job, t.owner, parity, job.rank, number), words);
        continue;
      }
      for (int i = 1; i < RANKS; i++) add_part<0>(inbox_at(job, job.rank, parity, (job.rank + i) % RANKS, number), sum);
#endif
#if GIVES
      finish(job, t, sum, first_row, lane);
      u32 words[4 * VECTORS];
      to_words(sum, words);
      for (int i = 1; i < RANKS; i++) put(result_inbox_at(job, (job.rank + i) % RANKS, parity, job.rank, number), words);
      zero(sum);
      add<VECTORS>(sum, words);  // the same bits as on other ranks: the sign of a zero is lost
      await_slot();
      hand_over(t, sum, false, true);
      continue;
#elif PARTS_IN_BOXES
      if (own) {
        const int slot = staged % SLOTS;
        for (int i = 1; i < RANKS; i++) {
          wait(came + 8 * slot, (phases >> slot) & 1);
          phases ^= 1 << slot;
#pragma unroll
          for (int j = 0; j < VECTORS; j++) {
            u32 r[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(stagings + slot * IMAGE + place(matrix_row(first_row, lane), 2 * j + (lane >> 4))) : "memory");
            add<1>(sum + 8 * j, r);
          }
          if (i + 1 < RANKS) {
            fence_proxies();
            asm volatile("bar.sync %0,128;" :: "r"(half + 1) : "memory");
            if (speaks) arrive(taken + 8 * slot);
          }
        }
        // a narrow result overwrites what others of the block's threads may still read of the last part
        if (RESULT) asm volatile("bar.sync 3,256;" ::: "memory");
      } else {
        await_slot();
      }
#else
      await_slot();
#endif
      hand_over(t, sum, own, own);
    }
#if GIVES
    for (int s = blockIdx.x; s < (SUMS ? 1 : RANKS - 1) * positions; s += gridDim.x) {
      const Tile t = SUMS ? tile_at(job, s) : result_at(job, s);
      if (t.owner == job.rank) continue;
      u8* inbox = result_inbox_at(job, job.rank, parity, t.owner, t.row_block * job.col_blocks + t.col_block);
      zero(sum);
      add_part<0>(inbox, sum);
      await_slot();
      hand_over(t, sum, false, true);
    }
#endif
#endif
  }

  meet();  // no block ends while another may write to its memory
  if (threadIdx.x == 0) atomicAdd(job.control, blockIdx.x ? 1 : CALL - (gridDim.x - 1));  // CALL in all, once all have ended
}
