// SPDX-License-Identifier: Apache-2.0
// A complex number in a word, and its conjugate: the upper half with the other sign.
struct alignas(16) quad { u32 v[4]; };
__device__ __forceinline__ u64 flipped(u64 x) { return x ^ 0x8000000000000000ull; }
__device__ __forceinline__ quad flipped(quad x) { x.v[3] ^= 0x80000000u; return x; }
