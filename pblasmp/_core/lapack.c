/* SPDX-License-Identifier: Apache-2.0 */
/* Small factorizations, solves, least squares, inverses and products with Q: every rank runs LAPACK on its own copy of the operands.
 *
 * The ranks meet once, as in tiny calls. All of them compute, since each needs INFO. In their next call they compare
 * checksums of their results. A single rank factors larger matrices, too, and solves with them, where they are.
 */
#include "call.h"

#include <math.h>

enum { BLOCK = 32 };  /* columns of getri's workspace */
enum { IN_PLACE = 256 }; /* columns of a QR factorization: larger ones are faster in panels */

static double *double_at(tile t, int64_t i, int64_t j)
{
    return (double *)(t.at + i * t.down + j * t.across);
}

int is_nan(const call *c, tile t, int64_t i, int64_t j)
{
    if (c->letter == D || c->letter == Z)
        return isnan(double_at(t, i, j)[0]) || (c->letter == Z && isnan(double_at(t, i, j)[1]));
    const float *x = (const float *)double_at(t, i, j);
    return isnan(x[0]) || (c->letter == C && isnan(x[1]));
}

static void set(const call *c, tile t, int64_t i, int64_t j, double value)
{
    const double parts[2] = {value, 0};
    scalar x = scalar_of(parts, c->letter);
    tile of = {(char *)&x, 0, 0};
    tile_copy(tile_from(t, i, j), of, 1, 1, c->item);
}

void fill_triangle(const call *c, tile t, int64_t n, int is_lower, double value)
{
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = is_lower ? j : 0; i < (is_lower ? n : j + 1); i++)
            set(c, t, i, j, value);
}

/* -- a triangle of a matrix, as this rank has it, and of ``whole``, which has all of it */

static int64_t clipped(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

void copy_triangle(const call *c, tile whole, const view *x, int is_lower, int64_t diagonal, int back)
{
    if (!x->active)
        return;
    tile local = tile_of(x);
    blocks col = blocks_of(&x->cols, x->col);
    while (blocks_next(&col))
        for (int64_t j = col.start; j < col.stop; j++) {
            blocks row = blocks_of(&x->rows, x->row);
            while (blocks_next(&row)) {
                int64_t i = is_lower ? clipped(j - diagonal, row.start, row.stop) : row.start;
                int64_t i1 = is_lower ? row.stop : clipped(j + 1 - diagonal, row.start, row.stop);
                tile of = tile_from(whole, i, j), to = tile_from(local, row.place + i - row.start, col.place + j - col.start);
                tile_copy(back ? to : of, back ? of : to, i1 - i, 1, c->item);
            }
        }
}

void take_triangle(const call *c, tile whole, const view *to, int is_lower)
{
    if (c->is_new && to->active)
        tile_fill(tile_of(to), to->m, to->n, c->item);
    int64_t inward = c->diag == 'U';
    copy_triangle(c, whole, to, is_lower, is_lower ? -inward : inward, 1);
}

/* -- LAPACK */

/* Take the pivots from all of IPIV, whose columns are alike; return whether they are rows of A. */
static int take_pivots(call *c, tile ipiv, int64_t m, int64_t n, int64_t item)
{
    c->count = m;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            char *at = tile_from(ipiv, i, j).at;
            int64_t row = (item == 4 ? *(int32_t *)at : *(int64_t *)at) - c->a.i;
            if (row < 1 || row > m || (j && row != c->pivots[i]))
                return 0;
            c->pivots[i] = (int32_t)row;
        }
    return 1;
}

/* Take the factors of reflectors from TAU, whose rows are alike. */
static void take_taus(call *c, tile tau, int64_t n)
{
    tile to = {(char *)c->tau, 0, c->item};
    c->count = n;
    tile_copy(to, tau, 1, n, c->item);
}

/* What is outside the triangle of an inverse: its adjoint, or zeros. */
static void fill_outside(const call *c, tile a, int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < n; i++) {
            if (c->uplo == 'L' ? i >= j : i <= j)
                continue;
            if (c->routine == TRTRI_LASET)
                set(c, a, i, j, 0);
            else if (c->letter < C)
                tile_copy(tile_from(a, i, j), tile_from(a, j, i), 1, 1, c->item);
            else
                tile_conjugate(tile_from(a, i, j), tile_from(a, j, i), 1, 1, c->letter);
        }
        if (c->diag == 'U')
            set(c, a, j, j, 1);
    }
}

static int needs(const call *c, int64_t first, int64_t second)
{
    return c->routine == first || c->routine == second;
}

/* Factor A, if that is asked for; return whether it is fine. */
static int factor(call *c, operand a, int64_t m, int64_t n)
{
    int32_t *info = &c->info;
    if (needs(c, GETRF, GESV) || c->routine == GETRF_GETRI) {
        BLAS(c, 6, GETRF)(INT(m), INT(n), a.at, INT(a.ld), c->pivots, info);
        c->count = m < n ? m : n;
        for (int64_t i = 0; i < c->count; i++) /* a BLAS may find no largest element among NaN */
            c->pivots[i] = (int32_t)clipped(c->pivots[i], 1, m);
    } else if (c->routine == POTRF_POTRI) {
        BLAS(c, 5, POTRF)(&c->uplo, INT(n), a.at, INT(a.ld), info);
        if (*info > 0 && is_nan(c, elements(c, a), *info - 1, *info - 1)) { /* libraries differ in whether NaN is a fault */
            for (int is_lower = 0; is_lower < 2; is_lower++)
                fill_triangle(c, elements(c, a), n, is_lower, NAN);
            *info = 0;
        }
    }
    return *info == 0;
}

static void run_reflectors(call *c, operand a, int64_t m, int64_t n, operand b, int64_t width)
{
    char *work = c->scratch + SCRATCH;
    int64_t size = WORK / c->item;
    if (c->routine == GELS)
        BLAS(c, 11, GELS)
        (&c->op_a, INT(m), INT(n), INT(width), a.at, INT(a.ld), b.at, INT(b.ld), work, INT(size), &c->info);
    else if (c->routine == GEQRF) {
        c->count = m < n ? m : n;
        BLAS(c, 8, GEQRF)(INT(m), INT(n), a.at, INT(a.ld), c->tau, work, INT(size), &c->info);
    } else if (c->routine == ORGQR)
        BLAS(c, 9, ORGQR)(INT(m), INT(n), INT(c->count), a.at, INT(a.ld), c->tau, work, INT(size), &c->info);
    else
        BLAS(c, 13, ORMQR)
        (&c->side, c->op_a == 'C' && c->letter < C ? "T" : &c->op_a, INT(c->y.rows.extent), INT(c->y.cols.extent), INT(n), a.at, INT(a.ld), c->tau, b.at,
         INT(b.ld), work, INT(size), &c->info);
}

static void run_lapack(call *c, operand a, int64_t m, int64_t n, operand b, int64_t width)
{
    int32_t *info = &c->info;
    if (c->routine >= GELS) {
        run_reflectors(c, a, m, n, b, width);
        return;
    }
    if (!factor(c, a, m, n))
        return;
    if (needs(c, GETRS, GESV))
        BLAS(c, 9, GETRS)(&c->op_a, INT(n), INT(width), a.at, INT(a.ld), c->pivots, b.at, INT(b.ld), info);
    else if (c->routine == POTRS)
        BLAS(c, 8, POTRS)(&c->uplo, INT(n), INT(width), a.at, INT(a.ld), b.at, INT(b.ld), info);
    else if (c->routine == TRTRS)
        BLAS(c, 10, TRTRS)
        (&c->uplo, &c->op_a, &c->diag, INT(n), INT(width), a.at, INT(a.ld), b.at, INT(b.ld), info);
    else if (needs(c, GETRI, GETRF_GETRI))
        BLAS(c, 7, GETRI)(INT(n), a.at, INT(a.ld), c->pivots, c->scratch + SCRATCH, INT(BLOCK * n), info);
    else if (needs(c, POTRI, POTRF_POTRI))
        BLAS(c, 5, POTRI)(&c->uplo, INT(n), a.at, INT(a.ld), info);
    else if (needs(c, TRTRI, TRTRI_LASET))
        BLAS(c, 6, TRTRI)(&c->uplo, &c->diag, INT(n), a.at, INT(a.ld), info);
    if (*info == 0 && needs(c, POTRF_POTRI, TRTRI_LASET))
        fill_outside(c, elements(c, a), n);
}

/* This rank's own copy of an operand. */
static operand copy_of(call *c, const view *x, const slabs *staged)
{
    slabs *own = own_room(c, x->rows.extent, x->cols.extent, 1);
    operand copy = slab(c, own, 0, 0);
    if (staged == NULL)
        give(c, own, x);
    else
        tile_copy(elements(c, copy), elements(c, slab(c, staged, 0, 0)), x->rows.extent, x->cols.extent, c->item);
    return copy;
}

static void note_checksum(call *c, operand x, int64_t m, int64_t n)
{
    uint64_t sum = 0;
    int64_t words = m * n * c->item / 4; /* a matrix of its own is contiguous */
    for (int64_t k = 0; k < words; k++)
        sum = mixed(sum, ((const uint32_t *)(void *)x.at)[k]);
    c->checksum = (int64_t)(mixed_beside(c, sum) >> 32);
}

static int compute_by_lapack(call *c)
{
    const view *x = &c->x, *y = &c->y;
    int two = c->b.of != NULL, in_triangle = needs(c, POTRI, TRTRI), legal = 1;
    operand a, b;
    if (c->in_place)
        b = y->here, a = x->here;
    else
        a = copy_of(c, x, c->left), b = two ? copy_of(c, y, c->right) : a;
    if (c->beside.of != NULL) {
        const view *p = &c->old;
        tile told = tile_of(p);
        if (c->across[0] != NULL) {
            operand all = slab(c, c->across[0], 0, 0);
            told = tile_at(all.at, all.ld, 1, p->of->item);
        }
        if (has_tau(c))
            take_taus(c, told, p->cols.extent);
        else
            legal = take_pivots(c, told, p->rows.extent, p->cols.extent, p->of->item);
    }
    c->info = legal ? 0 : -1;
    c->factor_at = a.at, c->factor_ld = a.ld;
    if (legal)
        run_lapack(c, a, x->rows.extent, x->cols.extent, b, y->cols.extent);
    if (!is_single(c))
        note_checksum(c, b, y->rows.extent, y->cols.extent);
    if (c->routine == GELS) /* A's factors */
        take(c, &c->room[c->rooms - 2], x);
    if (c->in_place || (c->info && c->routine != GETRF))
        return OK;
    if (in_triangle)
        take_triangle(c, elements(c, b), &c->to, c->uplo == 'L');
    else
        take(c, &c->room[c->rooms - 1], &c->to);
    return OK;
}

int prepare_lapack(call *c)
{
    int two = c->b.of != NULL;
    REQUIRE(apart_but(c, two ? &c->b : &c->a));
    c->x = view_of(&c->a, 0, 0), c->y = two ? view_of(&c->b, 0, 0) : c->x, c->to = view_of(&c->d, 0, 0);
    int64_t m = c->x.rows.extent, n = c->x.cols.extent, least = m < n ? m : n;
    int64_t width = !two ? 0 : c->side == 'R' ? c->y.rows.extent : c->y.cols.extent;
    /* larger calls are worth a plan, in which the ranks share the work */
    REQUIRE(is_single(c) || c->alike);
    int64_t held = m * n + (two ? c->y.rows.extent * c->y.cols.extent : 0);
    int may_stay = needs(c, GETRS, POTRS) || needs(c, TRTRS, GETRF) || (c->routine == GEQRF && n <= IN_PLACE);
    c->in_place = is_single(c) && may_stay && same_elements(two ? &c->b : &c->a, &c->d) && c->x.here.by_columns &&
                  c->to.here.by_columns && c->limits->lapack;
    REQUIRE(c->in_place || (m * n * (least + width) <= c->limits->lapack && held * c->item <= SCRATCH - 64));
    REQUIRE(least <= PIVOTS);
    REQUIRE(c->routine < GELS || (least + (n > width ? n : width)) * c->item <= WORK);
    REQUIRE(c->routine <= GEQRF || m >= n);
    if (!is_single(c)) {
        c->left = stage_all(c, &c->x, 1, NULL);
        c->right = two ? stage_all(c, &c->y, 1, NULL) : NULL;
    }
    if (c->beside.of != NULL) {
        c->old = view_of(&c->beside, 0, 0);
        REQUIRE((has_tau(c) ? c->old.cols.extent : c->old.rows.extent) <= (has_tau(c) ? n : PIVOTS));
        c->across[0] = is_single(c) ? NULL : stage_all(c, &c->old, 1, NULL);
    }
    c->compute = compute_by_lapack;
    return OK;
}
