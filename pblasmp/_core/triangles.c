/* SPDX-License-Identifier: Apache-2.0 */
/* Triangular and symmetric matrices: products, and solves. */
#include "call.h"

#include <string.h>

static const int64_t FEW = 4;          /* columns of B, for so many times as many rows */
static const int64_t SMALL = 1 << 14;  /* elements of a result, up to which computing in place beats making a plan */
static const int64_t FEW_BLOCKS = 16;
/* In multiplications of a large product: how long it takes to bring an element from another node, and to call the BLAS. */
static const double CARRIED = 100, CALLED = 50000;
static const double WIDE = 64; /* columns, up to which a product takes as long for each element of its result */

static char mirrored(char uplo)
{
    return uplo == 'L' ? 'U' : 'L';
}

static char other_side(char side)
{
    return side == 'L' ? 'R' : 'L';
}

/* -- BLAS's trsm and trmm */

/* Find the side, the triangle and the op for a triangular matrix and another one in Fortran order, or not. */
static int find_words(call *c, int of_columns, int by_columns)
{
    char op = c->op_a == 'C' && c->letter < C ? 'T' : c->op_a;
    if (of_columns != by_columns) {
        REQUIRE(op != 'C'); /* BLAS conjugates only what it transposes */
        op = op == 'N' ? 'T' : 'N';
    }
    c->words.op = op;
    c->words.side = by_columns ? c->side : other_side(c->side);
    c->words.uplo = of_columns ? c->uplo : mirrored(c->uplo);
    return OK;
}

/* Replace b, of m x n in Fortran order, by the solution: many equations in double precision half by half. */
static void solve(const call *c, int64_t m, int64_t n, const scalar *factor, operand a, operand b)
{
    const words *w = &c->words;
    int from_left = w->side == 'L', is_lower = w->uplo == 'L', is_plain = w->op == 'N';
    int64_t order = from_left ? m : n, half = order / 16 * 8, rest = order - half;
    if (!c->small_kernels || order < c->limits->equations || c->letter == S || c->letter == C) {
        BLAS(c, 11, TRSM)
        (&w->side, &w->uplo, &w->op, &c->diag, INT(m), INT(n), factor, a.at, INT(a.ld), b.at, INT(b.ld));
        return;
    }
    int forwards = (is_lower == is_plain) == from_left;
    operand later = from(c, a, half, half), b_later = from(c, b, from_left ? half : 0, from_left ? 0 : half);
    operand corner = is_lower ? from(c, a, half, 0) : from(c, a, 0, half), known = forwards ? b : b_later;
    int64_t first = forwards ? half : rest, second = order - first;
    corner.by_columns = is_plain == from_left, corner.conjugated = w->op == 'C';
    solve(c, from_left ? first : m, from_left ? n : first, factor, forwards ? a : later, known);
    known.by_columns = !from_left;
    gemm(c, from_left ? second : m, from_left ? n : second, first, &c->less, from_left ? corner : known,
         from_left ? known : corner, factor, forwards ? b_later : b);
    solve(c, from_left ? second : m, from_left ? n : second, &c->one, forwards ? later : a, forwards ? b_later : b);
}

/* Replace b, of m x n, by the result. */
static void triangular(const call *c, int64_t m, int64_t n, operand a, operand unused, operand b)
{
    int solves = c->routine == TRSM;
    const words *w = &c->words;
    (void)unused;
    if (!b.by_columns) {
        int64_t rows = m;
        m = n, n = rows;
    }
    if (n == 1 && w->side == 'L' && is_one(c, &c->factor)) /* for one column the others are slow */
        (solves ? BLAS(c, 8, TRSV) : BLAS(c, 8, TRMV))(&w->uplo, &w->op, &c->diag, INT(m), a.at, INT(a.ld), b.at,
                                                       INT(1));
    else if (solves) {
        a.by_columns = b.by_columns = 1; /* as BLAS sees them */
        solve(c, m, n, &c->factor, a, b);
    } else
        BLAS(c, 11, TRMM)
        (&w->side, &w->uplo, &w->op, &c->diag, INT(m), INT(n), &c->factor, a.at, INT(a.ld), b.at, INT(b.ld));
}

/* -- BLAS's symm and hemm, on m x n elements of d; for one column its products with vectors, since the others are slow */

static void symmetric_product(const call *c, char side, int is_vector, int64_t m, int64_t n, operand x, operand y,
                              const scalar *beta, operand d)
{
    char uplo = x.by_columns ? c->uplo : mirrored(c->uplo), of_d = d.by_columns ? side : other_side(side);
    if (is_vector)
        BLAS(c, 10, HEMV)
        (&uplo, INT(m), &c->factor, x.at, INT(x.ld), y.at, INT(along(y)), beta, d.at, INT(along(d)));
    else
        (c->routine == HEMM ? BLAS(c, 12, HEMM) : BLAS(c, 12, SYMM))(&of_d, &uplo, INT(d.by_columns ? m : n),
                                                                    INT(d.by_columns ? n : m), &c->factor, x.at,
                                                                    INT(x.ld), y.at, INT(y.ld), beta, d.at, INT(d.ld));
}

/* -- columns of B (rows from the right) that no rank has all of are dealt out anew, in slabs */

static int compute_shares(call *c)
{
    int64_t row = c->side == 'L' ? 0 : c->rank, col = c->side == 'L' ? c->rank : 0;
    int64_t m = span_count(&c->start->rows, row), n = span_count(&c->start->cols, col);
    if (m && n)
        triangular(c, m, n, slab(c, c->left, 0, 0), slab(c, c->left, 0, 0), slab(c, c->start, row, col));
    return OK;
}

static int take_shares(call *c)
{
    take(c, c->start, &c->to);
    return OK;
}

static int prepare_shares(call *c)
{
    int by_columns = c->to.here.by_columns;
    c->y = view_of(&c->b, 0, 0);
    c->left = spaced(c, stage_half(c, &c->x, by_columns, NULL));
    c->start = stage_shares(c, &c->y, c->side == 'R', by_columns);
    const span *shares = c->side == 'L' ? &c->start->cols : &c->start->rows;
    c->left->readers.below = (shares->extent + shares->block - 1) / shares->block;
    c->compute = compute_shares, c->finish = take_shares, c->takes = c->to.active;
    return find_words(c, by_columns, by_columns);
}

/* -- products: what a rank lacks of its rows of the triangle, and of its columns of B, is in slabs. D's transpose is
 * computed if the triangle is to the right of B. */

static void multiply_tile_of_rows(call *c, const piece *p)
{
    if (!p->is_tile)
        return;
    operand a = from(c, slab(c, c->left, c->to.row, 0), p->i, p->j), d = from(c, c->to.here, p->i, 0);
    tile of = tile_from(elements(c, slab(c, c->right, c->to.col, 0)), 0, p->j);
    tile_copy(elements(c, d), (tile){of.at, of.across, of.down}, p->i1 - p->i, c->to.n, c->item);
    triangular(c, p->i1 - p->i, c->to.n, a, a, d);
}

static void add_rest_of_rows(call *c, const piece *p)
{
    if (!p->is_tile)
        gemm(c, p->i1 - p->i, c->to.n, p->j1 - p->j, &c->factor, from(c, slab(c, c->left, c->to.row, 0), p->i, p->j),
             from(c, slab(c, c->right, c->to.col, 0), 0, p->j), &c->one, from(c, c->to.here, p->i, 0));
}

static int multiply_rows_of_triangle(call *c)
{
    int64_t order = c->to.rows.extent;
    view rows = {.rows = c->to.rows, .cols = span_all(order), .row = c->to.row, .m = c->to.m, .n = order};
    if (!c->to.active)
        return OK;
    staircase(c, &rows, c->left->half == 'L', multiply_tile_of_rows);
    staircase(c, &rows, c->left->half == 'L', add_rest_of_rows);
    return OK;
}

static int64_t count_of(uint64_t set)
{
    int64_t found = 0;
    for (; set; set &= set - 1)
        found++;
    return found;
}

/* How many elements less come so from other nodes, for each rank of the first node, if operands lie as D does. */
static double less_comes(const call *c, const view *to, double triangle, double columns)
{
    uint64_t rows = 0, cols = 0;
    double here = 0, there = (double)(c->nodes - 1) / (double)c->nodes;
    for (int64_t rank = 0; rank < c->ranks; rank++) {
        int64_t row, col;
        if (c->node_of[rank] != c->node_of[0])
            continue;
        here++;
        if (find_process(to, rank, &row, &col))
            rows |= UINT64_C(1) << row, cols |= UINT64_C(1) << col;
    }
    double down = (double)count_of(rows) / (double)to->rows.nprocs, across = (double)count_of(cols) / (double)to->cols.nprocs;
    double by_rows = down * (1 - across) * triangle + across * (1 - down) * columns;
    return (there * (triangle + 2 * columns / (double)c->nodes) - by_rows) / here;
}

/* Whether that takes less time than if each rank gets the whole triangle and columns of B, and sends what comes of them
 * back: less comes from other nodes, and the ranks meet once less; but later rows have more to multiply, and products are
 * of ever wider pieces, from a block's width on, which all together lose an eighth even if none is narrow. */
static int is_by_rows(const call *c, const view *to)
{
    double order = (double)to->rows.extent, width = (double)to->cols.extent;
    double down = (double)to->rows.nprocs, across = (double)to->cols.nprocs, block = (double)to->rows.block;
    double each = order * width / (down * across);
    double more = each * ((down - 1) * block / 2 + order / 16) + 2 * CALLED * order / (down * block);
    for (double narrow = block; narrow < WIDE; narrow *= 2)
        more += each * WIDE;
    double less = is_on_one_node(c) ? 0 : less_comes(c, to, order * order / 2, order * width);
    return more <= (double)c->limits->meeting + CARRIED * less;
}

static int prepare_rows(call *c, const view *to)
{
    c->to = *to;
    int from_right = c->side == 'R', turned = from_right == (c->op_a == 'N');
    c->x = view_of(&c->a, turned, c->op_a == 'C'), c->y = view_of(&c->b, !from_right, 0);
    span order = span_all(c->to.rows.extent);
    c->left = stage(c, &c->x, c->to.rows, order, c->x.here.by_columns, (whose){&c->to, ROW, ANY, 0});
    c->left->half = turned ? mirrored(c->uplo) : c->uplo;
    c->right = stage(c, &c->y, c->to.cols, order, c->y.here.by_columns, (whose){&c->to, COL, ANY, 0});
    int of_columns = c->left->by_columns, by_columns = c->to.here.by_columns;
    c->words = (words){by_columns ? 'L' : 'R', of_columns ? c->left->half : mirrored(c->left->half),
                       of_columns == by_columns ? 'N' : 'T'};
    c->compute = multiply_rows_of_triangle;
    return OK;
}

/* -- the triangle stays where it is: columns and partial sums move
 *
 * If only the rows or only the columns of a symmetric matrix are dealt out, both products have the same columns and sums,
 * each as long as the matrix. */

static int64_t place_in(const call *c, const span *s, int64_t process, int64_t place)
{
    return c->together ? span_at_place(s, process, place) : place;
}

static void add_rectangle(const call *c, const stored_product *t, const piece *p)
{
    const view *x = &c->x;
    operand of = from(c, x->here, p->i, p->j), right = slab(c, t->right, 0, t->col), sums = slab(c, t->sums, t->row, t->col);
    int64_t down = place_in(c, &x->rows, x->row, p->i), across = place_in(c, &x->cols, x->col, p->j);
    int64_t m = p->i1 - p->i, n = p->j1 - p->j;
    if (t->turned) {
        int64_t rows = m, at = down;
        m = n, n = rows, down = across, across = at;
        of.by_columns = !of.by_columns, of.conjugated = c->adjoint;
    }
    right.at += across * c->item, sums.at += down * c->item;
    gemm(c, m, t->right->rows.extent, n, &c->factor, of, right, &c->one, sums);
}

static void multiply_portions(const call *c, const piece *p)
{
    int64_t m = p->i1 - p->i, n = p->j1 - p->j, by_rows = m >= n;
    int64_t step = !c->is_symmetric || m * n <= c->limits->portion ? (by_rows ? m : n) : c->limits->portion / (by_rows ? n : m);
    step = step ? step : 1;
    for (int64_t at = 0; at < (by_rows ? m : n); at += step) {
        piece portion = *p;
        if (by_rows)
            portion.i = p->i + at, portion.i1 = portion.i + step < p->i1 ? portion.i + step : p->i1;
        else
            portion.j = p->j + at, portion.j1 = portion.j + step < p->j1 ? portion.j + step : p->j1;
        for (int k = 0; k < c->terms; k++)
            add_rectangle(c, &c->term[k], &portion);
    }
}

/* A tile on the diagonal of a triangular matrix: nothing has been added to its sums yet. */
static void multiply_triangle(const call *c, const stored_product *t, const piece *p)
{
    int64_t i = t->turned ? p->j : p->i, i1 = t->turned ? p->j1 : p->i1, j = t->turned ? p->i : p->j;
    int64_t width = t->right->rows.extent;
    operand right = slab(c, t->right, 0, t->col), sums = slab(c, t->sums, t->row, t->col);
    sums.at += i * c->item;
    tile of = {right.at + j * c->item, c->item, right.ld * c->item};
    tile_copy(elements(c, sums), of, i1 - i, width, c->item);
    operand a = from(c, c->x.here, p->i, p->j);
    triangular(c, i1 - i, width, a, a, sums);
}

static void multiply_symmetric(const call *c, const stored_product *t, const piece *p)
{
    const view *x = &c->x;
    operand right = slab(c, t->right, 0, t->col), sums = slab(c, t->sums, t->row, t->col);
    int64_t width = t->right->rows.extent;
    sums.at += place_in(c, &x->rows, x->row, p->i) * c->item;
    right.at += place_in(c, &x->cols, x->col, p->j) * c->item, right.by_columns = 1; /* its columns are B's rows */
    int is_vector = width == 1 && (c->adjoint || c->letter < C);
    symmetric_product(c, 'L', is_vector, p->i1 - p->i, width, from(c, x->here, p->i, p->j), right, &c->one, sums);
}

static void multiply_tile(call *c, const piece *p)
{
    if (!p->is_tile)
        return;
    if (c->is_symmetric)
        multiply_symmetric(c, &c->term[0], p);
    else
        multiply_triangle(c, &c->term[0], p);
}

static void multiply_rest(call *c, const piece *p)
{
    if (!p->is_tile)
        multiply_portions(c, p);
}

static int multiply_stored(call *c)
{
    const view *x = &c->x;
    if (!x->active)
        return OK;
    for (int k = 0; k < (c->together ? 1 : c->terms); k++) {
        const stored_product *t = &c->term[k];
        operand sums = slab(c, t->sums, t->row, t->col);
        int64_t m = span_count(&t->sums->rows, t->row), width = t->right->rows.extent;
        tile_fill(elements(c, sums), m, width, c->item);
    }
    staircase(c, x, c->uplo == 'L', multiply_tile);
    staircase(c, x, c->uplo == 'L', multiply_rest);
    return OK;
}

static int add_terms(call *c)
{
    static const double one[2] = {1, 0};
    copy_old(c);
    for (int k = 0; k < (c->together ? 1 : c->terms); k++)
        collect(c, &c->to, c->term[k].sums, &c->term[k].parts, k ? one : c->beta);
    return OK;
}

static int can_stay(call *c)
{
    const view *x = &c->x;
    c->is_symmetric = c->routine == SYMM || c->routine == HEMM;
    c->adjoint = c->letter >= C && (c->routine == HEMM || c->op_a == 'C');
    return has_tiles(x) && (c->side == 'L' || (c->is_symmetric && !c->adjoint)) &&
           (!c->adjoint || x->here.by_columns) && /* BLAS conjugates only what it transposes */
           (c->is_symmetric || find_words(c, x->here.by_columns, 1) == OK);
}

static int prepare_stored(call *c)
{
    const view *x = &c->x;
    int from_right = c->side == 'R'; /* A is symmetric, and D's transpose is A times B's */
    if (from_right)
        c->to = view_of(&c->d, 1, 0);
    REQUIRE(find_old(c) == OK);
    c->y = view_of(&c->b, !from_right, 0);
    c->together = c->is_symmetric && (span_whole(&x->rows) || span_whole(&x->cols));
    span width = span_all(c->y.rows.extent);
    for (int turned = 0; turned < 2; turned++) {
        if (!c->is_symmetric && turned != (c->op_a != 'N'))
            continue;
        stored_product *t = &c->term[c->terms++];
        if (c->together && turned) {
            *t = c->term[0], t->turned = 1;
            continue;
        }
        span along = turned ? x->rows : x->cols, across = turned ? x->cols : x->rows;
        *t = (stored_product){.turned = turned, .row = turned ? x->col : x->row, .col = turned ? x->row : x->col};
        t->parts = along;
        if (c->together) {
            int by_rows = span_whole(&x->rows);
            t->parts = by_rows ? x->cols : x->rows;
            t->row = 0, t->col = by_rows ? x->col : x->row;
            along = across = span_all(x->rows.extent);
        }
        int of_row = turned ? COL : ROW, of_col = turned ? ROW : COL;
        if (c->together)
            of_row = ANY, of_col = span_whole(&x->rows) ? COL : ROW;
        t->right = stage(c, &c->y, width, along, 0, (whose){x, ANY, of_col, 0});
        t->sums = room_for(c, across, span_side_by_side(width.extent, t->parts.nprocs), 1);
        give_home(t->sums, (whose){x, of_row, of_col, 0}, &c->to, width);
    }
    c->compute = multiply_stored, c->finish = add_terms, c->takes = c->to.active;
    return OK;
}

/* -- trsm of one column: the matrix stays where it is; the solution and partial sums move
 *
 * Block after block of the diagonal, the rank that has it subtracts what the ranks of its process row have summed up, and
 * solves. The ranks of its process column then multiply their parts of these columns, and begin with the rows of the next
 * blocks. Each says by a flag when others of its node can go on. */

typedef struct {
    int64_t start, stop, row, col; /* of the matrix, and the process that has their square */
} diagonal;

static const span *blocks_along(const view *a)
{
    return span_whole(&a->rows) ? &a->cols : &a->rows;
}

/* Block k in the order in which they are solved. */
static diagonal block_at(const call *c, int64_t k)
{
    const view *a = &c->x;
    const span *s = blocks_along(a);
    int64_t start = (c->upwards ? c->blocks - 1 - k : k) * s->block - s->lead, stop = start + s->block;
    start = start > 0 ? start : 0, stop = stop < s->extent ? stop : s->extent;
    return (diagonal){start, stop, span_process(&a->rows, start), span_process(&a->cols, start)};
}

/* Flags: a block is solved; the sums of a process column are complete for its rows. */
static int solved(const call *c, int64_t k)
{
    return (int)(k * (1 + c->x.cols.nprocs));
}

static int summed(const call *c, int64_t k, int64_t col)
{
    return solved(c, k) + 1 + (int)col;
}

/* How many blocks come before the next one of the same process column. */
static int64_t period(const view *a)
{
    return span_whole(&a->cols) ? 1 : a->cols.nprocs;
}

/* Whether a process column has had a block before block k. */
static int has_sums(const call *c, int64_t k, int64_t col)
{
    const view *a = &c->x;
    int64_t n = a->cols.nprocs, first = block_at(c, 0).col;
    int64_t since = span_whole(&a->cols) ? (col != first) * k : (c->upwards ? first - col + n : col - first + n) % n;
    return since < k;
}

static operand solution_of(const call *c, const diagonal *b)
{
    return from(c, slab(c, c->right, 0, 0), b->start, 0);
}

/* What a process column has summed up for the rows of a block. */
static operand sums_of(const call *c, const diagonal *b, int64_t col)
{
    return from(c, slab(c, c->left, b->row, col), span_below(&c->x.rows, b->start, b->row), 0);
}

static int subtract(call *c, int64_t k, int64_t col, operand x, const diagonal *b)
{
    if (col != c->x.col && await_flag(c, summed(c, k, col)) != OK)
        return BROKEN;
    operand found = sums_of(c, b, col);
    BLAS(c, 6, AXPY)(INT(b->stop - b->start), &c->less, found.at, INT(1), x.at, INT(1));
    return OK;
}

static int solve_block(call *c, int64_t k, const diagonal *b)
{
    const view *a = &c->x;
    operand x = solution_of(c, b);
    for (int64_t turn = 0; turn < a->cols.nprocs; turn++) {
        int64_t col = turn == 0 ? a->col : turn - (turn <= a->col); /* this rank's own first */
        if (has_sums(c, k, col) && subtract(c, k, col, x, b) != OK)
            return BROKEN;
    }
    int64_t i = span_below(&a->rows, b->start, a->row), j = span_below(&a->cols, b->start, a->col);
    triangular(c, b->stop - b->start, 1, from(c, a->here, i, j), x, x);
    flag_raise(c->flags, solved(c, k));
    return OK;
}

/* Multiply the columns of a block in the rows of blocks first to last, if this rank has any, which it returns. */
static int64_t multiply_rows(call *c, const diagonal *b, int64_t first, int64_t last, int really)
{
    const view *a = &c->x;
    if (first > last)
        return 0;
    diagonal low = block_at(c, c->upwards ? last : first), high = block_at(c, c->upwards ? first : last);
    int64_t i = span_below(&a->rows, low.start, a->row), i1 = span_below(&a->rows, high.stop, a->row);
    if (i < i1 && really) {
        operand x = solution_of(c, b), sums = slab(c, c->left, a->row, a->col);
        x.by_columns = 0, x.ld = 1;
        gemm(c, i1 - i, 1, b->stop - b->start, &c->one, from(c, a->here, i, span_below(&a->cols, b->start, a->col)), x,
             &c->one, from(c, sums, i, 0));
    }
    return i1 - i;
}

static void tell_sums(call *c, int64_t first, int64_t last)
{
    for (int64_t t = first; t <= last; t++) {
        diagonal b = block_at(c, t);
        if (b.row == c->x.row && b.col != c->x.col)
            flag_raise(c->flags, summed(c, t, c->x.col));
    }
}

/* -- between nodes: at step 2 k the solution of block k goes to all nodes, at step 2 k - 1 sums for its rows to the node of
 * the rank that solves it. Who receives either raises the flag for its node. All ranks take the steps in one order. */

static int64_t carry_link(const call *c, int64_t rank, int64_t node, char *message, int unpacks)
{
    int64_t k = (c->step + 1) / 2, sums = c->step % 2, col = 0;
    diagonal b = block_at(c, k);
    int64_t solver = rank_of(&c->x, b.row, b.col), nbytes = (b.stop - b.start) * c->item;
    while (sums && col < c->x.cols.nprocs && rank_of(&c->x, b.row, col) != rank)
        col++;
    if (sums ? col == c->x.cols.nprocs || col == b.col || !has_sums(c, k, col) || c->node_of[solver] != node : rank != solver)
        return 0;
    operand at = sums ? sums_of(c, &b, col) : solution_of(c, &b);
    if (message != NULL)
        memcpy(unpacks ? at.at : message, unpacks ? message : at.at, (size_t)nbytes);
    if (message != NULL && unpacks)
        flag_raise(c->flags, sums ? summed(c, k, col) : solved(c, k));
    return nbytes;
}

static int exchange_links(call *c, int64_t step)
{
    c->step = step;
    begin_exchange(c, carry_link, 0);
    return end_exchange(c);
}

static int solve_blocks(call *c)
{
    const view *a = &c->x;
    int between = !is_on_one_node(c);
    int64_t last = c->blocks - 1, soon = between ? 1 : period(a);
    for (int64_t k = 0; k <= last; k++) {
        diagonal b = block_at(c, k);
        int mine = a->active && b.col == a->col, here = mine && multiply_rows(c, &b, k + 1, last, 0);
        int64_t next = least(k + soon, last); /* what comes after these blocks is not urgent */
        if ((mine && b.row == a->row && solve_block(c, k, &b) != OK) || (between && exchange_links(c, 2 * k) != OK))
            return BROKEN;
        if (here && b.row != a->row && await_flag(c, solved(c, k)) != OK)
            return BROKEN;
        if (here)
            multiply_rows(c, &b, k + 1, next, 1);
        if (mine || (between && a->active))
            tell_sums(c, k + 1, next);
        if (between && k < last && exchange_links(c, 2 * k + 1) != OK)
            return BROKEN;
        if (here)
            multiply_rows(c, &b, next + 1, last, 1);
    }
    return OK;
}

static int solve_chain(call *c)
{
    const view *a = &c->x;
    if (a->active) {
        operand sums = slab(c, c->left, a->row, a->col);
        tile_fill(elements(c, sums), a->m, 1, c->item);
    }
    if (solve_blocks(c) != OK)
        return BROKEN;
    if (!c->to.active)
        return OK;
    for (int64_t k = is_on_one_node(c) ? c->blocks - 1 : 0; k < c->blocks; k++) /* several ranks receive for a node */
        if (await_flag(c, solved(c, k)) != OK)
            return BROKEN;
    take(c, c->right, &c->to);
    return OK;
}

/* UNFIT if it takes longer than to copy the matrix, or BLAS has no such mixture of memory orders. */
static int prepare_chain(call *c)
{
    int turned = c->op_a != 'N';
    view a = view_of(&c->a, turned, c->op_a == 'C');
    const span *s = blocks_along(&a);
    int64_t n = a.rows.extent, count = (s->lead + n + s->block - 1) / s->block;
    REQUIRE(has_tiles(&a));
    REQUIRE(is_one(c, &c->factor) && !(a.here.conjugated && a.here.by_columns));
    REQUIRE(count <= n * n / c->limits->handoff || (is_on_one_node(c) && count <= FEW_BLOCKS));
    REQUIRE(find_words(c, a.here.by_columns != turned, 1) == OK);
    c->x = a, c->y = view_of(&c->b, 0, 0);
    c->blocks = count, c->upwards = (c->uplo == 'L') == turned;
    c->right = stage_all(c, &c->y, 1, NULL);
    c->left = room_for(c, c->x.rows, span_side_by_side(1, c->x.cols.nprocs), 1);
    have_flags(c, count * (1 + c->x.cols.nprocs));
    c->compute = solve_chain;
    return OK;
}

int prepare_triangular(call *c)
{
    REQUIRE(apart_but(c, &c->b));
    c->x = view_of(&c->a, 0, 0), c->to = view_of(&c->d, 0, 0);
    view *x = &c->x, *to = &c->to;
    int64_t m = to->rows.extent, n = to->cols.extent;
    int tiny = is_tiny(c, x->rows.extent, m, n, 1);
    if (!is_single(c) && !tiny && !same_rank(x, to)) {
        if (c->routine == TRMM && (m == 1 || n == 1) && x->rows.extent > 1 && can_stay(c))
            return prepare_stored(c);
        if (c->routine == TRSM && n == 1 && c->side == 'L' && prepare_chain(c) == OK)
            return OK;
    }
    int spread = !is_single(c) && !span_whole(c->side == 'L' ? &to->rows : &to->cols); /* no rank has all of a column */
    if (spread && !tiny) {
        view turned = c->side == 'R' ? view_of(&c->d, 1, 0) : *to;
        return c->routine == TRMM && is_by_rows(c, &turned) ? prepare_rows(c, &turned) : prepare_shares(c);
    }
    c->kernel = triangular;
    c->old = view_of(&c->b, 0, 0);
    if (spread) {
        int by_columns = to->here.by_columns;
        c->left = stage_half(c, x, by_columns, to), c->start = stage_all(c, &c->old, by_columns, to);
        c->compute = compute_everywhere;
        return find_words(c, by_columns, by_columns);
    }
    /* A rank solves for, or multiplies, its columns of B (rows from the right): it has all of each. */
    if (!same_elements(&c->b, &c->d)) {
        c->has_old = same_places(&c->old, to);
        if (!c->has_old)
            c->start = stage(c, &c->old, to->rows, to->cols, to->here.by_columns, (whose){to, ROW, COL, 0});
    }
    int by_columns = c->op_a == 'C' && !is_single(c) ? to->here.by_columns : x->here.by_columns;
    if (!is_single(c) && (by_columns != x->here.by_columns || !same_rank(x, to)))
        c->left = stage_half(c, x, by_columns, to);
    c->compute = compute_here;
    return find_words(c, by_columns, to->here.by_columns);
}

/* -- symm and hemm */

static void symmetric(const call *c, int64_t m, int64_t n, operand x, operand y, operand d)
{
    int plain = x.by_columns && y.by_columns && d.by_columns;
    int is_vector = c->side == 'L' && n == 1 && (c->letter < C || (c->routine == HEMM && plain));
    symmetric_product(c, c->side, is_vector, m, n, x, y, &c->other, d);
}

int prepare_sided(call *c)
{
    REQUIRE(apart_but(c, &c->c));
    c->x = view_of(&c->a, 0, 0), c->y = view_of(&c->b, 0, 0), c->to = view_of(&c->d, 0, 0);
    view *x = &c->x, *y = &c->y, *to = &c->to;
    int64_t m = to->rows.extent, n = to->cols.extent;
    c->kernel = symmetric;
    if (!is_single(c) && !(same_rank(x, to) && same_rank(y, to))) {
        int64_t along = c->side == 'L' ? m : n, few = c->side == 'L' ? n : m;
        int can_divide = (FEW * few <= along || m * n <= SMALL) && can_stay(c);
        if (!is_tiny(c, x->rows.extent, m, n, can_divide)) {
            REQUIRE(can_divide);
            return prepare_stored(c);
        }
        REQUIRE(find_old(c) == OK);
        c->left = stage_half(c, x, to->here.by_columns, to);
        c->right = stage_all(c, y, to->here.by_columns, to);
        c->compute = compute_everywhere;
        return OK;
    }
    REQUIRE(find_old(c) == OK);
    int is_vector = c->side == 'L' && n == 1 && c->letter < C;
    int is_hermitian = c->routine == HEMM && c->letter >= C;
    /* BLAS takes no other mixture of memory orders. */
    REQUIRE(is_vector || y->here.by_columns == to->here.by_columns);
    REQUIRE(!is_hermitian || x->here.by_columns == to->here.by_columns);
    c->compute = compute_here;
    return OK;
}
