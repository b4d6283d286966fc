/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles: rectangles of elements in memory, copied, summed and scaled. */
#ifndef PBLASMP_TILES_H
#define PBLASMP_TILES_H

#include <stdint.h>

/* The types of BLAS, in this order; pivots are integers of 32 or 64 bits. */
enum { S, D, C, Z, LETTERS, OTHER = LETTERS };

/* Where elements are: bytes from one to the next in its column, and in its row. */
typedef struct {
    char *at;
    int64_t down, across;
} tile;

typedef union {
    float s[2];
    double d[2];
} scalar; /* a number of a type as BLAS takes it; a complex one begins with its real part */

scalar scalar_of(const double parts[2], int letter);

tile tile_at(char *at, int64_t ld, int by_columns, int64_t item);
tile tile_from(tile t, int64_t i, int64_t j);

/* Copy elements of ``item`` bytes. Conjugate those of types C and Z. */
void tile_copy(tile to, tile of, int64_t m, int64_t n, int64_t item);
void tile_conjugate(tile to, tile of, int64_t m, int64_t n, int letter);
void tile_fill(tile to, int64_t m, int64_t n, int64_t item); /* with zeros */

/* d = alpha x + beta c; with a beta of 0 c is not read. With ``conjugated`` x's conjugate is meant. */
void tile_sum(tile d, const double alpha[2], tile x, const double beta[2], tile c, int64_t m, int64_t n, int letter,
              int conjugated);

#endif
