/* SPDX-License-Identifier: Apache-2.0 */
/* Rank-k and rank-2k updates: BLAS's for triangles of D that a rank has, products for the rest. */
#include "call.h"

enum { FEW = 32 }; /* rows of an update that is computed as a product */

/* -- what a rank has of a triangle: tiles on the diagonal, and what is below or above each of them */

int has_tiles(const view *x)
{
    return span_whole(&x->rows) || span_whole(&x->cols) || (x->rows.block == x->cols.block && x->rows.lead == x->cols.lead);
}

static void visit_if_any(call *c, visit *see, int64_t i, int64_t i1, int64_t j, int64_t j1, int is_tile)
{
    piece p = {i, i1, j, j1, is_tile};
    if (i < i1 && j < j1)
        see(c, &p);
}

/* What a rank has of a triangle, along one dimension, and what it has there of the other one. */
typedef struct {
    call *c;
    visit *see;
    const span *along, *across;
    int64_t process, other;
    int by_rows, is_lower;
} stairs;

static void visit_step(const stairs *s, int64_t i, int64_t i1, int64_t j, int64_t j1, int is_tile)
{
    if (s->by_rows)
        visit_if_any(s->c, s->see, j, j1, i, i1, is_tile);
    else
        visit_if_any(s->c, s->see, i, i1, j, j1, is_tile);
}

/* Places j to j1 along it, and across it all between the diagonal and ``end``. What half of these blocks have beyond the
 * other half is one piece, unless pieces are to be blocks: a product over many narrow ones would copy more than it
 * multiplies. */
static void climb(const stairs *s, int64_t j, int64_t j1, int64_t end)
{
    int64_t start = span_at_place(s->along, s->process, j), stop = span_at_place(s->along, s->process, j1 - 1) + 1;
    int rises = s->by_rows == s->is_lower; /* to index 0 */
    if (stop - start == j1 - j) {
        int64_t i = span_below(s->across, start, s->other), i1 = span_below(s->across, stop, s->other);
        visit_step(s, i, i1, j, j1, 1);
        visit_step(s, rises ? end : i1, rises ? i : end, j, j1, 0);
        return;
    }
    int64_t middle = (j + j1) / 2, block = s->along->block;
    int64_t past = (s->along->lead + span_at_place(s->along, s->process, middle)) % block;
    middle += middle - past > j ? -past : block - past;
    start = span_at_place(s->along, s->process, middle), stop = span_at_place(s->along, s->process, middle - 1) + 1;
    int64_t corner = s->c->together ? end : span_below(s->across, rises ? start : stop, s->other);
    if (rises)
        visit_step(s, end, corner, middle, j1, 0);
    else
        visit_step(s, corner, end, j, middle, 0);
    climb(s, j, middle, rises ? end : corner);
    climb(s, middle, j1, rises ? corner : end);
}

void staircase(call *c, const view *x, int is_lower, visit *see)
{
    if (span_equal(&x->rows, &x->cols) && x->row == x->col) {
        visit_if_any(c, see, 0, x->m, 0, x->n, 1);
        return;
    }
    int by_rows = span_whole(&x->cols);
    int64_t count = by_rows ? x->m : x->n, across = by_rows ? x->n : x->m;
    stairs s = {c, see, by_rows ? &x->rows : &x->cols, by_rows ? &x->cols : &x->rows, by_rows ? x->row : x->col,
                by_rows ? x->col : x->row, by_rows, is_lower};
    if (count)
        climb(&s, 0, count, by_rows == is_lower ? 0 : across);
}

/* -- BLAS's updates of a triangle in Fortran order: d = alpha x x^T + beta d, or x y^T + y x^T */

static int find_update(call *c, int by_columns)
{
    int is_hermitian = c->adjoint, of_d = c->to.here.by_columns;
    /* BLAS conjugates only what it transposes */
    REQUIRE(!is_hermitian || ((c->op_a != 'N') != of_d) == by_columns);
    double alpha[2] = {c->alpha[0], is_hermitian && !of_d ? -c->alpha[1] : c->alpha[1]};
    c->factor = scalar_of(alpha, c->letter);
    /* BLAS's level 2 has no symmetric updates of complex matrices, and conjugates nothing of a Hermitian one's. */
    int fit = c->letter < C || (is_hermitian && of_d && by_columns);
    c->is_vector = c->x.cols.extent == 1 && is_one(c, &c->other) && fit;
    c->words.uplo = (c->uplo == 'L') == of_d ? 'L' : 'U';
    c->words.op = by_columns ? 'N' : is_hermitian ? 'C' : 'T';
    return OK;
}

/* Few elements of a real d by a product with all of them, which is faster than BLAS's update: it has better kernels. */
static void update_few(const call *c, int64_t n, operand x, operand d)
{
    static const double one[2] = {1, 0};
    double room[FEW * FEW];
    operand all = {(char *)room, n, 1, 0};
    gemm(c, n, n, c->x.cols.extent, &c->factor, x, x, &c->zero, all);
    for (int64_t j = 0; j < n; j++) {
        int64_t i = c->uplo == 'L' ? j : 0, count = c->uplo == 'L' ? n - j : j + 1;
        tile to = tile_from(elements(c, d), i, j);
        tile_sum(to, one, tile_from(elements(c, all), i, j), c->beta, to, count, 1, c->letter, 0);
    }
}

/* Update n x n elements of d. */
static void update(const call *c, int64_t m, int64_t n, operand x, operand y, operand d)
{
    const words *w = &c->words;
    int64_t k = c->x.cols.extent;
    (void)m;
    if (c->b.of == NULL) {
        if (c->is_vector)
            BLAS(c, 7, HER)(&w->uplo, INT(n), &c->factor, x.at, INT(along(x)), d.at, INT(d.ld));
        else if (c->small_kernels && c->letter < C && n <= FEW && k >= 2 * n)
            update_few(c, n, x, d);
        else
            (c->adjoint ? BLAS(c, 10, HERK) : BLAS(c, 10, SYRK))(&w->uplo, &w->op, INT(n), INT(k), &c->factor, x.at,
                                                                INT(x.ld), &c->other, d.at, INT(d.ld));
    } else if (c->is_vector)
        BLAS(c, 9, HER2)
        (&w->uplo, INT(n), &c->factor, x.at, INT(along(x)), y.at, INT(along(y)), d.at, INT(d.ld));
    else
        (c->adjoint ? BLAS(c, 12, HER2K) : BLAS(c, 12, SYR2K))(&w->uplo, &w->op, INT(n), INT(k), &c->factor, x.at,
                                                              INT(x.ld), y.at, INT(y.ld), &c->other, d.at, INT(d.ld));
}

/* -- what this rank has of a triangle: A, and B if there is one, in its rows and in its columns are in slabs */

static operand of_rows(const call *c, const slabs *s)
{
    return slab(c, s, c->to.row, 0);
}

static operand of_cols(const call *c, const slabs *s)
{
    const view *d = &c->to;
    int64_t n = d->rows.nprocs, col = d->col;
    if (c->aligned) /* rows and columns begin with different processes, perhaps */
        col = (col - d->cols.source + d->rows.source + n) % n;
    return slab(c, s, col, 0);
}

static void add_products(const call *c, const piece *p, operand d)
{
    int64_t m = p->i1 - p->i, n = p->j1 - p->j, k = c->x.cols.extent;
    const slabs *x = c->left, *y = c->right == NULL ? c->left : c->right;
    const slabs *x_across = c->aligned ? x : c->across[0], *y_across = c->aligned ? y : c->across[c->right != NULL];
    gemm(c, m, n, k, &c->factor, from(c, of_rows(c, x), p->i, 0), from(c, of_cols(c, y_across), p->j, 0), &c->other,
         d);
    if (c->right != NULL)
        gemm(c, m, n, k, &c->factor, from(c, of_rows(c, y), p->i, 0), from(c, of_cols(c, x_across), p->j, 0),
             &c->one, d);
}

static void update_piece(call *c, const piece *p)
{
    operand d = from(c, c->to.here, p->i, p->j);
    if (!p->is_tile) {
        add_products(c, p, d);
        return;
    }
    operand x = from(c, of_rows(c, c->left), p->i, 0);
    operand y = c->right == NULL ? x : from(c, of_rows(c, c->right), p->i, 0);
    update(c, p->i1 - p->i, p->i1 - p->i, x, y, d);
}

static int update_stairs(call *c)
{
    const view *d = &c->to;
    if (!d->active)
        return OK;
    copy_old(c);
    staircase(c, d, c->uplo == 'L', update_piece);
    return OK;
}

int prepare_updated(call *c)
{
    int is_hermitian = (c->routine == HERK || c->routine == HER2K) && c->letter >= C, two = c->b.of != NULL;
    c->adjoint = is_hermitian;
    REQUIRE(apart_but(c, &c->c));
    REQUIRE(c->letter < C || c->op_a != (is_hermitian ? 'T' : 'C')); /* BLAS knows only the other op */
    c->to = view_of(&c->d, 0, 0);
    /* Outside the triangle D keeps its values, a new one gets those of C. */
    if (c->c.of != NULL && !same_elements(&c->c, &c->d) && (c->is_new || c->beta[0] != 0 || c->beta[1] != 0)) {
        REQUIRE(c->is_new);
        c->old = view_of(&c->c, c->to.transposed != (c->d.transposed != 0), 0), c->has_old = 1;
        REQUIRE(same_places(&c->old, &c->to));
    }
    c->x = view_of(&c->a, c->op_a != 'N', 0), c->y = two ? view_of(&c->b, c->op_a != 'N', 0) : c->x;
    view *x = &c->x, *y = &c->y, *to = &c->to;
    int64_t n = to->rows.extent, k = x->cols.extent;
    int by_columns = to->here.by_columns;
    c->kernel = update;
    if (is_single(c) || (same_rank(x, to) && same_rank(y, to))) {
        REQUIRE(x->here.by_columns == y->here.by_columns);
        c->compute = compute_here;
        return find_update(c, x->here.by_columns);
    }
    int can_divide = c->letter < C && has_tiles(to);
    if (is_tiny(c, n, n, k, can_divide)) {
        by_columns = by_columns != (is_hermitian && c->op_a != 'N'); /* BLAS conjugates only what it transposes */
        c->left = stage_all(c, x, by_columns, to), c->right = two ? stage_all(c, y, by_columns, to) : NULL;
        c->compute = compute_everywhere;
        return find_update(c, by_columns);
    }
    REQUIRE(can_divide);
    c->aligned = span_aligned(&to->rows, &to->cols);
    whose of_rows = {to, c->aligned ? ROW | ACROSS : ROW, ANY, 0}, of_cols = {to, COL, ANY, 0};
    c->left = stage(c, x, to->rows, span_all(k), by_columns, of_rows);
    c->right = two ? stage(c, y, to->rows, span_all(k), by_columns, of_rows) : NULL;
    if (!c->aligned) {
        c->across[0] = stage(c, x, to->cols, span_all(k), by_columns, of_cols);
        c->across[1] = two ? stage(c, y, to->cols, span_all(k), by_columns, of_cols) : c->across[0];
    }
    c->compute = update_stairs;
    return find_update(c, by_columns);
}
