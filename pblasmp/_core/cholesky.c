/* SPDX-License-Identifier: Apache-2.0 */
/* Cholesky factorizations: in place on one rank, else on a copy of the matrix that the ranks share.
 *
 * Systems of equations are solved with such a copy, for a part of the right-hand sides on each rank of all nodes.
 *
 * Blocks of the diagonal are narrow: the solves beside them, in which a BLAS is slowest, are then a small part of the
 * work. If the matrix is large enough for several ranks, each solves for its part of the rows below a block of the
 * diagonal, and then updates its part of the triangle that is left. The first rank's part is smaller, since it also
 * factors the next block of the diagonal. The last columns it factors alone, all at once: LAPACK's own blocks are as fast.
 *
 * Each of several nodes has a copy of its own. Rows of a small matrix are so few that each node does all of it. Those of a
 * larger one are dealt out to the ranks of all nodes. All nodes have as many ranks work, so that they round alike.
 *
 * A matrix is meant as LAPACK sees it, in Fortran order: the lower triangle of one in C order is an upper triangle.
 */
#include "call.h"

#include <math.h>
#include <string.h>

enum { NOT_A_NUMBER = -1 }; /* a fault that is no error */

static const char *uplo_of(const call *c)
{
    return c->is_lower ? "L" : "U";
}

static const char *adjoint_of(const call *c)
{
    return c->letter < C ? "T" : "C";
}

/* -- events: 2 k, a rank has updated for block k; 2 k + 1, it has solved with it; the last one, of the first rank: all is
 * done. Flags are of ranks for events, and one more, an integer, says at which order there is a fault. */

static int64_t last_event(const call *c)
{
    return 2 * c->blocks_together + 1;
}

static void tell(const call *c, int64_t event)
{
    flag_raise(c->flags, (int)(event * c->workers_here + c->here));
}

static int hear(const call *c, int64_t event)
{
    for (int64_t rank = 0; rank < (event ? c->workers_here : 1); rank++)
        if (rank != c->here && await_flag(c, (int)(event * c->workers_here + rank)) != OK)
            return BROKEN;
    return OK;
}

static int64_t *fault_of(call *c)
{
    return is_single(c) ? &c->fault : (int64_t *)(void *)(c->flags + c->flag_count - 1);
}

/* -- who computes what */

static int64_t blocks_of_rows(const call *c)
{
    return (c->order + c->limits->width - 1) / c->limits->width;
}

/* Where block k begins: the first one is narrower than the others, since its rows are the least work. */
static int64_t block_at(const call *c, int64_t k)
{
    return k ? c->order - (blocks_of_rows(c) - k) * c->limits->width : 0;
}

/* How many of the last columns one rank factors alone.
 *
 * A block of w columns that has m columns to its right takes w m (m + w) / 2 multiplications, for its solve and its
 * update. Each of p ranks does a part of them, and they wait for each other twice: several are faster if
 * (1 - 1/p) w m (m + w) / 2 > 2 ``meeting``. */
static int64_t columns_alone(const call *c, int64_t n)
{
    const limits *l = c->limits;
    if (c->workers_here == 1)
        return n;
    double half = (double)l->width / 2, saved = (1 - 1 / (double)c->workers_here) * (double)l->width;
    return least(n, (int64_t)rint(sqrt(half * half + 4 * (double)l->meeting / saved) - half));
}

/* Where equal parts begin. */
static int64_t equal_part(const limits *l, int64_t extent, int64_t parts, int64_t part)
{
    int64_t step = ((extent + parts - 1) / parts + l->rows - 1) / l->rows * l->rows;
    return least(extent, part * step);
}

/* Where parts of the rows of a triangle begin: all take as long, with a block in the first. */
static int64_t triangular_part(const limits *l, int64_t extent, int64_t parts, int64_t part)
{
    if (part == 0 || part == parts)
        return part ? extent : 0;
    double ahead = (double)l->factoring / (double)l->width; /* elements of the update */
    double share = ((double)extent * (double)extent / 2 + ahead) / (double)parts;
    double rest = (double)part * share - ahead, end = sqrt(rest > 0 ? 2 * rest : 0);
    int64_t rows = (int64_t)rint(end / (double)l->rows) * l->rows;
    return least(extent, rows > l->width ? rows : l->width);
}

/* -- steps */

static char *place(const call *c, int64_t i, int64_t j)
{
    return c->array.at + c->item * (c->is_lower ? i + j * c->array.ld : j + i * c->array.ld);
}

/* Factor a block of the diagonal. */
static void factor(call *c, int64_t start, int64_t width)
{
    int32_t info = 0;
    if (width <= 0)
        return;
    BLAS(c, 5, POTRF)(uplo_of(c), INT(width), place(c, start, start), INT(c->array.ld), &info);
    if (info > 0) { /* libraries differ in whether NaN is a fault */
        int64_t i = start + info - 1;
        c->failed = start;
        *fault_of(c) = is_nan(c, (tile){place(c, i, i), 0, 0}, 0, 0) ? NOT_A_NUMBER : i + 1;
    }
}

/* Solve with a block of the diagonal for rows i to i1 of its columns. */
static void solve(const call *c, int64_t start, int64_t width, int64_t i, int64_t i1)
{
    if (i < i1)
        BLAS(c, 11, TRSM)
        (c->is_lower ? "R" : "L", uplo_of(c), adjoint_of(c), "N", INT(c->is_lower ? i1 - i : width),
         INT(c->is_lower ? width : i1 - i), &c->one, place(c, start, start), INT(c->array.ld), place(c, i, start),
         INT(c->array.ld));
}

/* Update columns j to j1 of rows i to i1, left of the diagonal, by columns from ``start`` on. */
static void update_left(const call *c, int64_t start, int64_t width, int64_t j, int64_t j1, int64_t i, int64_t i1)
{
    const char *of = c->is_lower ? "N" : adjoint_of(c), *other = c->is_lower ? adjoint_of(c) : "N";
    int64_t m = i1 - i, n = j1 - j;
    char *rows = place(c, i, start), *cols = place(c, j, start);
    if (m > 0 && n > 0)
        BLAS(c, 13, GEMM)
        (of, other, INT(c->is_lower ? m : n), INT(c->is_lower ? n : m), INT(width), &c->less, c->is_lower ? rows : cols,
         INT(c->array.ld), c->is_lower ? cols : rows, INT(c->array.ld), &c->one, place(c, i, j), INT(c->array.ld));
}

/* Update block i to i1 of the diagonal by columns from ``start`` on. */
static void update_diagonal(const call *c, int64_t start, int64_t width, int64_t i, int64_t i1)
{
    if (i < i1 && width)
        BLAS(c, 10, HERK)
        (uplo_of(c), c->is_lower ? "N" : adjoint_of(c), INT(i1 - i), INT(width), &c->less, place(c, i, start),
         INT(c->array.ld), &c->one, place(c, i, i), INT(c->array.ld));
}

/* Block k of the diagonal; all that is left, after the blocks that several ranks share. */
static void factor_next(call *c, int64_t k)
{
    int64_t start = k * c->limits->width, rest = c->order - start;
    factor(c, start, k < c->blocks_together ? least(c->limits->width, rest) : rest);
}

/* On one node, or on each. */
static int factor_here(call *c)
{
    int64_t n = c->order, rank = c->here, share = c->workers_here, together = c->blocks_together;
    const limits *l = c->limits;
    if (rank >= share)
        return OK;
    if (rank == 0)
        factor_next(c, 0);
    for (int64_t k = 0; k < together; k++) {
        if (rank == 0)
            tell(c, 2 * k);
        if (hear(c, 2 * k) != OK)
            return BROKEN;
        if (*fault_of(c))
            return OK;
        int64_t start = k * l->width, w = least(l->width, n - start), below = start + w, rest = n - below;
        solve(c, start, w, below + equal_part(l, rest, share, rank), below + equal_part(l, rest, share, rank + 1));
        tell(c, 2 * k + 1);
        if (hear(c, 2 * k + 1) != OK)
            return BROKEN;
        int64_t i = below + triangular_part(l, rest, share, rank), i1 = below + triangular_part(l, rest, share, rank + 1);
        update_left(c, start, w, below, i, i, i1);
        update_diagonal(c, start, w, i, i1);
        if (rank)
            tell(c, 2 * k + 2);
        else if (k + 1 == together && hear(c, 2 * together) != OK)
            return BROKEN;
        if (rank == 0)
            factor_next(c, k + 1);
    }
    return OK;
}

/* -- rows that are dealt out to the ranks of all nodes: each solves for its own, updates them, and sends the other nodes what
 * it has solved. With that goes the next block of the diagonal, to which the first rank of each node subtracts the last
 * contribution and factors it. While messages are under way, the ranks update what is needed later. */

/* Whether a rank has block k. The last ones, which are the longest, come first, to and fro. */
static int has_block(const call *c, int64_t node, int64_t here, int64_t k)
{
    int64_t all = c->nodes * c->workers_here, turn = (blocks_of_rows(c) - 1 - k) % (2 * all);
    int64_t to = turn < all ? turn : 2 * all - 1 - turn;
    return to % c->nodes == node && to / c->nodes == here;
}

/* Whether a node reads those of a matrix's rows that are block k when they are dealt out. */
static int node_has_block(const call *c, int64_t node, int64_t k)
{
    int64_t here = 0;
    while (here < c->workers_here && !has_block(c, node, here, k))
        here++;
    return k == 0 || here < c->workers_here;
}

static void carry_tile(const call *c, char *message, int unpacks, int64_t i, int64_t i1, int64_t j, int64_t j1, int64_t *nbytes)
{
    int64_t m = c->is_lower ? i1 - i : j1 - j, n = c->is_lower ? j1 - j : i1 - i;
    tile there = tile_at(place(c, i, j), c->array.ld, 1, c->item);
    tile in = tile_at(message + *nbytes, m, 1, c->item);
    if (message != NULL)
        tile_copy(unpacks ? there : in, unpacks ? in : there, m, n, c->item);
    *nbytes += m * n * c->item;
}

/* All nodes get the same: what a rank has solved, and the next block of the diagonal. */
static int64_t carry_rows(const call *c, int64_t rank, int64_t node, char *message, int unpacks)
{
    int64_t k = c->step, start = block_at(c, k), below = block_at(c, k + 1), nbytes = 0;
    int64_t here = place_on_node(c, rank);
    (void)node;
    for (int64_t b = k + 1; b < blocks_of_rows(c) && here < c->workers_here; b++)
        if (has_block(c, c->node_of[rank], here, b)) {
            carry_tile(c, message, unpacks, block_at(c, b), block_at(c, b + 1), start, below, &nbytes);
            if (b == k + 1)
                carry_tile(c, message, unpacks, below, block_at(c, b + 1), below, block_at(c, b + 1), &nbytes);
        }
    return nbytes;
}

/* Update what this rank has of blocks from k on, by the columns of block ``by``: those columns that the next step reads, or
 * all others. */
static void update_dealt(const call *c, int64_t by, int64_t k, int is_next)
{
    int64_t start = block_at(c, by), width = block_at(c, by + 1) - start, next = block_at(c, k + 1);
    for (int64_t b = k + 1; b < blocks_of_rows(c); b++) {
        int64_t i = block_at(c, b), i1 = block_at(c, b + 1);
        if (!has_block(c, c->node, c->here, b))
            continue;
        update_left(c, start, width, is_next ? block_at(c, k) : next, is_next ? next : i, i, i1);
        if ((b == k + 1) == is_next)
            update_diagonal(c, start, width, i, i1);
        if (!is_next)
            board_received(c->votes); /* messages make progress */
    }
}

static int factor_dealt(call *c)
{
    int64_t count = blocks_of_rows(c);
    for (int64_t k = c->step = 0; c->here < c->workers_here; k = ++c->step) {
        int64_t start = block_at(c, k), below = block_at(c, k + 1), before = k ? block_at(c, k - 1) : 0;
        int goes_on = !*fault_of(c); /* if not, messages do, as the other nodes expect */
        if (c->here == 0) {
            if (goes_on) {
                update_diagonal(c, before, start - before, start, below);
                factor(c, start, below - start);
            }
            tell(c, 2 * k);
        }
        if (k && goes_on)
            update_dealt(c, k - 1, k, 1);
        if (c->here && await_flag(c, (int)(2 * k * c->workers_here)) != OK)
            return BROKEN;
        if (k + 1 == count)
            return OK;
        for (int64_t b = k + 1; b < count && !*fault_of(c); b++)
            if (has_block(c, c->node, c->here, b))
                solve(c, start, below - start, block_at(c, b), block_at(c, b + 1));
        begin_exchange(c, carry_rows, 1);
        if (k && goes_on)
            update_dealt(c, k - 1, k, 0);
        if (end_exchange(c) != OK)
            return BROKEN;
        tell(c, 2 * k + 1);
        if (hear(c, 2 * k + 1) != OK)
            return BROKEN;
    }
    return OK;
}

/* Factor the array; the ranks meet before and after it. */
static int factor_blocks(call *c)
{
    if (is_single(c))
        c->fault = 0;
    int found = c->is_dealt ? factor_dealt(c) : factor_here(c);
    if (c->here == 0 && found == OK && *fault_of(c) == NOT_A_NUMBER)
        fill_triangle(c, (tile){place(c, c->failed, c->failed), c->item, c->array.ld * c->item}, c->order - c->failed,
                      c->is_lower, NAN);
    return found;
}

static void note_fault(call *c)
{
    c->factor_at = c->array.at, c->factor_ld = c->array.ld;
    int64_t fault = *fault_of(c);
    uint64_t sum = 0, word = 0;
    c->info = (int32_t)(fault > 0 ? fault : 0);
    for (int64_t i = 0; i < c->order && !is_on_one_node(c); i++) {
        memcpy(&word, place(c, i, i), (size_t)least(c->item, sizeof word));
        sum = mixed(sum, word);
    }
    c->checksum = (int64_t)(sum >> 32);
}

/* Have an array of this order factored by the first ranks. */
static void prepare_blocks(call *c, int64_t n, int is_lower)
{
    int64_t most = least(c->workers, c->ranks), parts = n / c->limits->part;
    c->order = n, c->is_lower = is_lower;
    c->workers_here = parts < 1 ? 1 : least(most, parts);
    c->is_dealt = parts > c->nodes && !is_on_one_node(c);
    c->blocks_together = c->is_dealt ? blocks_of_rows(c) : (n - columns_alone(c, n) + c->limits->width - 1) / c->limits->width;
    if (c->is_dealt) /* what the other nodes solve for comes when they have */
        c->left->part = c->limits->width, c->left->reads = node_has_block;
    if (!is_single(c))
        have_flags(c, (last_event(c) + 1) * c->workers_here + 1);
}

/* -- potrf: D becomes A's factor in a triangle; outside it a new D is zero, another keeps its values */

static int factor_alone(call *c)
{
    if (!c->to.active)
        return OK;
    if (!same_elements(&c->a, &c->d))
        take_triangle(c, tile_of(&c->x), &c->to, c->uplo == 'L');
    c->array = c->to.here;
    factor_blocks(c);
    note_fault(c);
    return OK;
}

static int factor_together(call *c)
{
    c->array = slab(c, c->left, 0, 0);
    return factor_blocks(c);
}

static int take_factor(call *c)
{
    note_fault(c);
    take_triangle(c, elements(c, slab(c, c->left, 0, 0)), &c->to, c->uplo == 'L');
    return OK;
}

/* A copy of the triangle; between nodes with a little around it, which is not read. */
static slabs *stage_triangle(call *c, int by_columns)
{
    if (!is_on_one_node(c))
        return spaced(c, stage_half(c, &c->x, by_columns, NULL));
    int64_t n = c->x.rows.extent;
    slabs *s = spaced(c, room_for(c, span_all(n), span_all(n), by_columns));
    s->triangle = &c->x;
    return s;
}

int prepare_factored(call *c)
{
    REQUIRE(apart_but(c, &c->a) && (is_on_one_node(c) || c->alike));
    c->x = view_of(&c->a, 0, 0), c->to = view_of(&c->d, 0, 0);
    int64_t n = c->to.rows.extent;
    int by_columns = c->to.here.by_columns;
    REQUIRE(n <= c->limits->cholesky);
    if (is_single(c))
        c->compute = factor_alone;
    else {
        c->left = stage_triangle(c, by_columns);
        c->compute = factor_together, c->finish = take_factor, c->takes = 1;
    }
    prepare_blocks(c, n, (c->uplo == 'L') == by_columns);
    return OK;
}

/* -- posv on copies: D becomes the solution X of A X = B */

/* Solve for columns of right-hand sides, unless there is a fault. */
static int solve_columns(call *c, operand x, int64_t count)
{
    const char *ops[2] = {c->is_lower ? "N" : adjoint_of(c), c->is_lower ? adjoint_of(c) : "N"};
    for (int k = 0; k < 2 && count && *fault_of(c) <= 0; k++)
        BLAS(c, 11, TRSM)
        ("L", uplo_of(c), ops[k], "N", INT(c->order), INT(count), &c->one, c->array.at, INT(c->array.ld), x.at,
         INT(x.ld));
    return OK;
}

static int solve_alone(call *c)
{
    c->array = slab(c, c->left, 0, 0);
    copy_triangle(c, elements(c, c->array), &c->x, c->uplo == 'L', 0, 0);
    copy_old(c);
    factor_blocks(c);
    note_fault(c);
    return solve_columns(c, c->to.here, c->to.n);
}

static int solve_together(call *c)
{
    c->array = slab(c, c->left, 0, 0);
    int found = factor_blocks(c);
    if (found != OK)
        return found;
    if (c->here == 0)
        tell(c, last_event(c));
    else if (await_flag(c, (int)(last_event(c) * c->workers_here)) != OK)
        return BROKEN;
    return solve_columns(c, slab(c, c->right, 0, c->rank), span_count(&c->right->cols, c->rank));
}

static int take_solution(call *c)
{
    note_fault(c);
    if (c->info == 0)
        take(c, c->right, &c->to);
    return OK;
}

int prepare_solved(call *c)
{
    REQUIRE(apart_but(c, &c->b) && (is_on_one_node(c) || c->alike));
    c->x = view_of(&c->a, 0, 0), c->y = view_of(&c->b, 0, 0), c->to = view_of(&c->d, 0, 0);
    int64_t n = c->to.rows.extent;
    REQUIRE(n <= c->limits->cholesky);
    if (is_single(c)) {
        c->left = spaced(c, room_for(c, span_all(n), span_all(n), 1));
        REQUIRE(c->to.here.by_columns && same_places(&c->y, &c->to));
        c->old = c->y, c->has_old = !same_elements(&c->b, &c->d);
        c->compute = solve_alone;
    } else {
        c->left = stage_triangle(c, 1);
        c->right = stage_shares(c, &c->y, 0, 1);
        c->compute = solve_together, c->finish = take_solution, c->takes = 1;
    }
    prepare_blocks(c, n, c->uplo == 'L');
    return OK;
}
