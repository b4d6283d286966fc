/* SPDX-License-Identifier: Apache-2.0 */
#include "tiles.h"

#include "span.h"

#include <string.h>

enum { TURNED = 16 }; /* rows and columns that are transposed at a time */

scalar scalar_of(const double parts[2], int letter)
{
    scalar found = {.d = {parts[0], parts[1]}};
    if (letter == S || letter == C)
        found = (scalar){.s = {(float)parts[0], (float)parts[1]}};
    return found;
}

tile tile_at(char *at, int64_t ld, int by_columns, int64_t item)
{
    return by_columns ? (tile){at, item, ld * item} : (tile){at, ld * item, item};
}

tile tile_from(tile t, int64_t i, int64_t j)
{
    return (tile){t.at + i * t.down + j * t.across, t.down, t.across};
}

static tile turned(tile t)
{
    return (tile){t.at, t.across, t.down};
}

/* If one side is turned, a square of both stays in the nearest cache. */
#define SQUARE_BY_SQUARE                                                                                               \
    for (int64_t j0 = 0; j0 < n; j0 += TURNED)                                                                         \
        for (int64_t i0 = 0; i0 < m; i0 += TURNED)                                                                     \
            for (int64_t j = j0; j < least(n, j0 + TURNED); j++)                                                       \
                for (int64_t i = i0; i < least(m, i0 + TURNED); i++)

/* A function for each size, which the compiler then knows. */
#define ONE_BY_ONE(name, item)                                                                                         \
    static void name(tile to, tile of, int64_t m, int64_t n)                                                           \
    {                                                                                                                  \
        SQUARE_BY_SQUARE                                                                                               \
        memcpy(to.at + i * to.down + j * to.across, of.at + i * of.down + j * of.across, item);                        \
    }
ONE_BY_ONE(copy_4, 4)
ONE_BY_ONE(copy_8, 8)
ONE_BY_ONE(copy_16, 16)

void tile_copy(tile to, tile of, int64_t m, int64_t n, int64_t item)
{
    if (m <= 0 || n <= 0)
        return;
    if (to.down != item || m == 1) { /* so that columns are contiguous in the copy, or there is one */
        int64_t rows = m;
        to = turned(to), of = turned(of), m = n, n = rows;
    }
    if (to.down == item && of.down == item) {
        size_t bytes = (size_t)(m * item);
        if (n == 1 || (to.across == m * item && of.across == m * item)) {
            memcpy(to.at, of.at, bytes * (size_t)n);
            return;
        }
        if (m > 4) {
            for (int64_t j = 0; j < n; j++)
                memcpy(to.at + j * to.across, of.at + j * of.across, bytes);
            return;
        }
    }
    if (item == 8)
        copy_8(to, of, m, n);
    else if (item == 4)
        copy_4(to, of, m, n);
    else
        copy_16(to, of, m, n);
}

void tile_fill(tile to, int64_t m, int64_t n, int64_t item)
{
    if (to.down != item) {
        int64_t rows = m;
        to = turned(to), m = n, n = rows;
    }
    for (int64_t j = 0; j < n; j++)
        memset(to.at + j * to.across, 0, (size_t)(m * item));
}

/* -- arithmetic, for each type */

#define AT(real, t, i, j) ((real *)((t).at + (i) * (t).down + (j) * (t).across))
/* What is contiguous in all three apart, which the compiler makes several of at a time. */
#define SUM_OF_REALS(name, real)                                                                                       \
    static void name##_close(real *d, real a, const real *x, real b, const real *c, int64_t m)                         \
    {                                                                                                                  \
        if (b == 0)                                                                                                    \
            for (int64_t i = 0; i < m; i++)                                                                            \
                d[i] = a * x[i];                                                                                       \
        else                                                                                                           \
            for (int64_t i = 0; i < m; i++)                                                                            \
                d[i] = a * x[i] + b * c[i];                                                                            \
    }                                                                                                                  \
    static void name(tile d, real a, tile x, real b, tile c, int64_t m, int64_t n)                                     \
    {                                                                                                                  \
        SQUARE_BY_SQUARE                                                                                               \
        {                                                                                                              \
            real sum = a * *AT(real, x, i, j);                                                                         \
            *AT(real, d, i, j) = b == 0 ? sum : sum + b * *AT(real, c, i, j);                                          \
        }                                                                                                              \
    }
SUM_OF_REALS(sum_s, float)
SUM_OF_REALS(sum_d, double)

#define SUM_OF_COMPLEX(name, real)                                                                                     \
    static void name(tile d, const real a[2], tile x, const real b[2], tile c, int64_t m, int64_t n, real sign)        \
    {                                                                                                                  \
        int with_c = b[0] != 0 || b[1] != 0, plain_x = a[0] == 1 && a[1] == 0, plain_c = b[0] == 1 && b[1] == 0;       \
        SQUARE_BY_SQUARE                                                                                               \
        {                                                                                                              \
            real re = AT(real, x, i, j)[0], im = sign * AT(real, x, i, j)[1];                                          \
            real sum[2] = {plain_x ? re : a[0] * re - a[1] * im, plain_x ? im : a[0] * im + a[1] * re};                \
            if (with_c) {                                                                                              \
                re = AT(real, c, i, j)[0], im = AT(real, c, i, j)[1];                                                  \
                sum[0] += plain_c ? re : b[0] * re - b[1] * im;                                                        \
                sum[1] += plain_c ? im : b[0] * im + b[1] * re;                                                        \
            }                                                                                                          \
            AT(real, d, i, j)[0] = sum[0];                                                                             \
            AT(real, d, i, j)[1] = sum[1];                                                                             \
        }                                                                                                              \
    }
SUM_OF_COMPLEX(sum_c, float)
SUM_OF_COMPLEX(sum_z, double)

static const int64_t items[] = {4, 8, 8, 16};

void tile_conjugate(tile to, tile of, int64_t m, int64_t n, int letter)
{
    static const double one[2] = {1, 0}, zero[2] = {0, 0};
    tile_sum(to, one, of, zero, of, m, n, letter, 1);
}

void tile_sum(tile d, const double alpha[2], tile x, const double beta[2], tile c, int64_t m, int64_t n, int letter,
              int conjugated)
{
    int64_t item = items[letter];
    if (d.down != item) {
        int64_t rows = m;
        d = turned(d), x = turned(x), c = turned(c), m = n, n = rows;
    }
    scalar a = scalar_of(alpha, letter), b = scalar_of(beta, letter);
    int is_real = letter < C || (alpha[1] == 0 && beta[1] == 0 && !conjugated);
    if (is_real && d.down == item && x.down == item && c.down == item) {
        int64_t reals = letter < C ? m : 2 * m;
        for (int64_t j = 0; j < n; j++) {
            void *to = d.at + j * d.across, *of = x.at + j * x.across, *old = c.at + j * c.across;
            if (letter == S || letter == C)
                sum_s_close(to, a.s[0], of, b.s[0], old, reals);
            else
                sum_d_close(to, a.d[0], of, b.d[0], old, reals);
        }
    } else if (letter == S)
        sum_s(d, a.s[0], x, b.s[0], c, m, n);
    else if (letter == D)
        sum_d(d, a.d[0], x, b.d[0], c, m, n);
    else if (letter == C)
        sum_c(d, a.s, x, b.s, c, m, n, conjugated ? -1 : 1);
    else
        sum_z(d, a.d, x, b.d, c, m, n, conjugated ? -1 : 1);
}
