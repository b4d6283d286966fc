/* SPDX-License-Identifier: Apache-2.0 */
/* Products and sums. */
#include "call.h"

static const int64_t LARGER = 2; /* see stationary.py: when it is better to move results than operands */
static const int64_t NARROW = 64; /* rows or columns, up to which a result is computed in pieces */

/* -- the BLAS, which sees every matrix in Fortran order: one in C order is the transpose */

static const char *op_of(operand x)
{
    return x.by_columns ? "N" : x.conjugated ? "C" : "T";
}

/* The same for a y of one row: BLAS's gemm is slow there. */
static void gemv(const call *c, int64_t m, int64_t k, const scalar *alpha, operand x, operand y, const scalar *beta,
                 const char *at, int64_t step)
{
    int64_t rows = x.by_columns ? m : k, cols = x.by_columns ? k : m;
    BLAS(c, 11, GEMV)
    (op_of(x), INT(rows), INT(cols), alpha, x.at, INT(x.ld), y.at, INT(y.by_columns ? y.ld : 1), beta, at, INT(step));
}

/* How many rows, or columns, of a real result to compute at a time: a narrow one in pieces for which nothing is copied. A
 * few rows of x by columns would lie far apart. */
static int64_t piece_of(const limits *l, int64_t m, int64_t n, int64_t k, operand x, operand y)
{
    int64_t longer = m >= n ? m : n, narrow = m >= n ? n : m;
    if (narrow > NARROW)
        return longer;
    int64_t step = l->uncopied / (narrow * k), most = l->transposed / narrow;
    step = (!x.by_columns && !y.by_columns && most < step ? most : step) / l->rows * l->rows;
    return step < (m >= n && x.by_columns ? l->strip : (narrow + 1) / 2) ? longer : step;
}

void gemm(const call *c, int64_t m, int64_t n, int64_t k, const scalar *alpha, operand x, operand y,
          const scalar *beta, operand d)
{
    if (!d.by_columns) { /* compute its transpose */
        operand of = x;
        int64_t rows = m;
        x = y, y = of, m = n, n = rows, d.by_columns = 1;
    }
    if (k && n == 1 && !y.conjugated)
        gemv(c, m, k, alpha, x, y, beta, d.at, 1);
    else if (k && m == 1 && !x.conjugated && !y.conjugated)
        gemv(c, n, k, alpha, y, x, beta, d.at, d.ld);
    else if (k == 1 && !x.conjugated && is_one(c, beta))
        (y.conjugated ? BLAS(c, 9, GERC) : BLAS(c, 9, GER))(INT(m), INT(n), alpha, x.at, INT(along(x)), y.at,
                                                            INT(along(y)), d.at, INT(d.ld));
    else {
        const char *of_y = !y.by_columns ? "N" : y.conjugated ? "C" : "T";
        int tall = m >= n;
        int64_t longer = tall ? m : n, step = longer;
        if (c->small_kernels && c->letter < C && m && n && k)
            step = piece_of(c->limits, m, n, k, x, y);
        for (int64_t at = 0; at < longer; at += step) {
            int64_t count = longer - at < step ? longer - at : step, i = tall ? at : 0, j = tall ? 0 : at;
            BLAS(c, 13, GEMM)
            (op_of(x), of_y, INT(tall ? count : m), INT(tall ? n : count), INT(k), alpha, from(c, x, i, 0).at, INT(x.ld),
             from(c, y, j, 0).at, INT(y.ld), beta, from(c, d, i, j).at, INT(d.ld));
        }
    }
}

/* -- products: what a rank lacks of its rows of op(A) and its columns of op(B) is in slabs */

/* Whether each rank that multiplies a slab of x, of rows x k, has it: all of k and the rows that it has of D.
 * ``across`` is the dimension of D that x does not share; if x is ``flipped``, its rows are D's columns. */
static int stays(const view *x, const view *d, const span *across, int flipped)
{
    const span *rows = flipped ? &d->cols : &d->rows;
    if (!span_whole(&x->cols) || !span_whole(across) || !span_equal(&x->rows, rows))
        return 0;
    for (int64_t p = 0; p < rows->nprocs; p++) {
        int64_t of_d = flipped ? rank_of(d, across->source, p) : rank_of(d, p, across->source);
        if (rank_of(x, p, x->cols.source) != of_d)
            return 0;
    }
    return 1;
}

static void multiply(const call *c, int64_t m, int64_t n, operand x, operand y, operand d)
{
    gemm(c, m, n, c->x.cols.extent, &c->factor, x, y, &c->other, d);
}

/* If k is dealt out alike in both, what each process has of it is a product of its own. */
static int multiply_parts(call *c)
{
    const view *to = &c->to;
    const span *of_x = &c->x.cols, *of_y = &c->y.cols;
    const scalar *other = &c->other;
    if (!to->active)
        return OK;
    copy_old(c);
    for (int64_t turn = 0, n = of_x->nprocs; turn < n; turn++) {
        int64_t p = (of_x->source + turn) % n, q = (of_y->source + turn) % n, k = span_count(of_x, p);
        if (!k)
            continue;
        gemm(c, to->m, to->n, k, &c->factor, dealt(c, c->left, to->row, p), dealt(c, c->right, to->col, q), other, to->here);
        other = &c->one;
    }
    return OK;
}

/* x stays where it is: only y and partial sums are moved. Each rank multiplies what it has of x. After one more meeting
 * the ranks that have D add the partial sums up, in the order of x's columns of processes. */
static int multiply_in_place(call *c)
{
    const view *x = &c->x;
    if (x->active)
        gemm(c, x->m, c->y.rows.extent, x->n, &c->factor, x->here, slab(c, c->right, 0, x->col), &c->zero,
             slab(c, c->left, x->row, x->col));
    return OK;
}

static int add_up(call *c)
{
    copy_old(c);
    collect(c, &c->into, c->left, &c->x.cols, c->beta);
    return OK;
}

static int prepare_in_place(call *c, int flipped)
{
    c->into = c->to;
    if (flipped) {
        view x = c->x;
        c->x = c->y, c->y = x;
        c->into = view_of(&c->d, 1, 0);
    }
    /* BLAS conjugates only what it transposes; slabs are conjugated when they are written. */
    int by_columns = !c->x.here.by_columns;
    int64_t width = c->y.rows.extent;
    c->right = stage(c, &c->y, span_all(width), c->x.cols, c->y.here.by_columns, (whose){&c->x, ANY, COL, 0});
    c->left = room_for(c, c->x.rows, span_side_by_side(width, c->x.cols.nprocs), by_columns);
    give_home(c->left, (whose){&c->x, ROW, COL, 0}, &c->into, span_all(width));
    c->compute = multiply_in_place, c->finish = add_up, c->takes = c->to.active;
    return OK;
}

int prepare_product(call *c)
{
    REQUIRE(apart_but(c, &c->c));
    c->x = view_of(&c->a, c->op_a != 'N', c->op_a == 'C'), c->y = view_of(&c->b, c->op_b == 'N', c->op_b == 'C');
    c->to = view_of(&c->d, 0, 0);
    REQUIRE(find_old(c) == OK);
    view *x = &c->x, *y = &c->y, *to = &c->to;
    if (!is_single(c)) {
        int64_t m = to->rows.extent, n = to->cols.extent, k = x->cols.extent, least = m < n ? m : n;
        int x_stays = stays(x, to, &to->cols, 0), y_stays = stays(y, to, &to->rows, 1);
        int64_t moved = (x_stays ? 0 : m * k) + (y_stays ? 0 : n * k);
        int64_t here = m * n * (m >= n ? x : y)->cols.nprocs + least * k;
        int of_vector = least == 1 && !is_tiny(c, m, n, k, 1);
        if (of_vector ? moved > here : moved >= LARGER * here && moved >= c->limits->stay)
            return prepare_in_place(c, n > m);
        if (!is_on_one_node(c) && !x_stays && !y_stays && span_aligned(&x->cols, &y->cols) && !span_whole(&x->cols) &&
            k >= c->limits->dealt * x->cols.nprocs) {
            c->left = stage_dealt(c, x, to->rows, (whose){to, ROW, ANY, 0}, c->places[0]);
            c->right = stage_dealt(c, y, to->cols, (whose){to, COL, ANY, 0}, c->places[1]);
            c->compute = multiply_parts;
            return OK;
        }
        if (!x_stays)
            c->left = stage(c, x, to->rows, span_all(k), x->here.by_columns, (whose){to, ROW, ANY, 0});
        if (!y_stays)
            c->right = stage(c, y, to->cols, span_all(k), y->here.by_columns, (whose){to, COL, ANY, 0});
    }
    REQUIRE(c->left != NULL || !x->here.conjugated || x->here.by_columns != to->here.by_columns);
    REQUIRE(c->right != NULL || !y->here.conjugated || y->here.by_columns == to->here.by_columns);
    c->compute = compute_here, c->kernel = multiply;
    return OK;
}

/* -- sums: op(A) is read in place, or moved to where D is */

static int add(call *c)
{
    const view *to = &c->to;
    if (!to->active)
        return OK;
    operand x = c->left == NULL ? c->x.here : slab(c, c->left, to->row, to->col);
    int conjugated = c->left == NULL && x.conjugated;
    if (to->cols.extent == 1 && !c->has_old && !conjugated && is_one(c, &c->other)) {
        BLAS(c, 6, AXPY)(INT(to->m), &c->factor, x.at, INT(along(x)), to->here.at, INT(along(to->here)));
        return OK;
    }
    tile d = tile_of(to);
    tile_sum(d, c->alpha, elements(c, x), c->beta, c->has_old ? tile_of(&c->old) : d, to->m, to->n, c->letter, conjugated);
    return OK;
}

int prepare_sum(call *c)
{
    REQUIRE(apart_but(c, &c->c));
    const view *to = &c->to;
    c->x = view_of(&c->a, c->op_a != 'N', c->op_a == 'C'), c->to = view_of(&c->d, 0, 0);
    REQUIRE(find_old(c) == OK);
    if (!is_single(c) && !same_places(&c->x, &c->to))
        c->left = stage(c, &c->x, c->to.rows, c->to.cols, c->to.here.by_columns, (whose){to, ROW, COL, 0});
    c->compute = add;
    return OK;
}
