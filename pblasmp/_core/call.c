/* SPDX-License-Identifier: Apache-2.0 */
#include "call.h"

#include <string.h>

enum { ALONE, VOTING, VOTING_FOR_ROOM, WRITING, SENDING, LAST }; /* what a call waits for */

enum { CHUNK = 256 }; /* runs of rows that are looked up at a time */

enum { PLANNED = 8 }; /* times as many elements are copied sooner than a plan is made */

/* -- sub-matrices */

view view_of(const part *p, int turned, int conjugated)
{
    const matrix *of = p->of;
    places down = places_of(&of->rows, p->i, p->m), right = places_of(&of->cols, p->j, p->n);
    span rows = span_of(&of->rows, p->i, p->m), cols = span_of(&of->cols, p->j, p->n);
    int64_t first = of->by_columns ? down.first + right.first * of->ld : down.first * of->ld + right.first;
    view v = {
        .here = {(char *)of->address + first * of->item, of->ld, 0, conjugated && of->letter >= C},
        .of = of, .transposed = turned != (p->transposed != 0),
    };
    v.here.by_columns = (of->by_columns != 0) != v.transposed;
    if (v.transposed) {
        v.rows = cols, v.cols = rows, v.m = right.count, v.n = down.count;
        v.row = of->cols.mine, v.col = of->rows.mine;
    } else {
        v.rows = rows, v.cols = cols, v.m = down.count, v.n = right.count;
        v.row = of->rows.mine, v.col = of->cols.mine;
    }
    v.active = v.row >= 0 && v.m > 0 && v.n > 0;
    return v;
}

tile tile_of(const view *v)
{
    return tile_at(v->here.at, v->here.ld, v->here.by_columns, v->of->item);
}

tile elements(const call *c, operand x)
{
    return tile_at(x.at, x.ld, x.by_columns, c->item);
}

operand from(const call *c, operand x, int64_t i, int64_t j)
{
    x.at = tile_from(elements(c, x), i, j).at;
    return x;
}

int64_t rank_of(const view *v, int64_t row, int64_t col)
{
    const matrix *of = v->of;
    int64_t p = v->transposed ? col : row, q = v->transposed ? row : col;
    return of->numbering == 2 || of->npcol == 1 ? q * of->nprow + p : p * of->npcol + q;
}

int same_elements(const part *x, const part *y)
{
    return x->of->address == y->of->address && x->of->ld == y->of->ld && x->of->digest == y->of->digest &&
           x->i == y->i && x->j == y->j && x->m == y->m && x->n == y->n && x->transposed == y->transposed;
}

int same_places(const view *x, const view *y)
{
    const matrix *a = x->of, *b = y->of;
    return span_equal(&x->rows, &y->rows) && span_equal(&x->cols, &y->cols) && a->nprow == b->nprow &&
           a->npcol == b->npcol && a->numbering == b->numbering &&
           (x->transposed == y->transposed || a->nprow * a->npcol == 1);
}

static int on_one_rank(const view *v)
{
    return span_whole(&v->rows) && span_whole(&v->cols);
}

int same_rank(const view *x, const view *y)
{
    return on_one_rank(x) && on_one_rank(y) &&
           rank_of(x, x->rows.source, x->cols.source) == rank_of(y, y->rows.source, y->cols.source);
}

int apart_but(const call *c, const part *in_place)
{
    const part *d = &c->d, *operands[] = {&c->a, &c->b, &c->c};
    const matrix *of = d->of;
    for (int k = 0; k < 3; k++) {
        const part *x = operands[k];
        if (x->of == NULL || (x == in_place && same_elements(x, d)))
            continue;
        if (x->of->end <= of->address || of->end <= x->of->address)
            continue;
        if (x->of->address != of->address || x->of->ld != of->ld || x->of->digest != of->digest)
            return 0;
        if (x->i < d->i + d->m && d->i < x->i + x->m && x->j < d->j + d->n && d->j < x->j + x->n)
            return 0;
    }
    return 1;
}

int find_old(call *c)
{
    c->has_old = c->c.of != NULL && (c->beta[0] != 0 || c->beta[1] != 0) && !same_elements(&c->c, &c->d);
    if (c->has_old) {
        c->old = view_of(&c->c, c->to.transposed != (c->d.transposed != 0), 0);
        REQUIRE(same_places(&c->old, &c->to));
    }
    return OK;
}

void copy_old(const call *c)
{
    if (c->has_old)
        tile_copy(tile_of(&c->to), tile_of(&c->old), c->to.m, c->to.n, c->item);
}

int is_tiny(const call *c, int64_t m, int64_t n, int64_t k, int can_divide)
{
    int64_t most = can_divide ? c->limits->tiny : PLANNED * c->limits->tiny;
    return !is_single(c) && c->alike && m * n + n * k + m * k <= most;
}

/* -- slabs */

slabs *room_for(call *c, span rows, span cols, int by_columns)
{
    slabs *s = &c->room[c->rooms++];
    *s = (slabs){.rows = rows, .cols = cols, .start = c->nbytes, .by_columns = by_columns, .item = c->item};
    c->nbytes += (rows.extent * cols.extent * c->item + 63) / 64 * 64;
    return s;
}

slabs *stage(call *c, const view *x, span rows, span cols, int by_columns, whose readers)
{
    slabs *s = room_for(c, rows, cols, by_columns);
    c->nbytes += (x->of->item - c->item) * rows.extent * cols.extent; /* pivots are of another type */
    s->item = x->of->item;
    s->staged = x, s->readers = readers;
    return s;
}

slabs *stage_dealt(call *c, const view *x, span rows, whose readers, char **places)
{
    slabs *s = stage(c, x, rows, x->cols, x->here.by_columns, readers);
    if (c->meets == NULL && span_equal(&x->rows, &rows) && !x->here.conjugated)
        s->places = places;
    return s;
}

slabs *stage_all(call *c, const view *x, int by_columns, const view *readers)
{
    whose all = {readers, ANY, ANY, 0};
    return stage(c, x, span_all(x->rows.extent), span_all(x->cols.extent), by_columns, all);
}

slabs *spaced(call *c, slabs *s)
{
    enum { WAY = 1024, CACHE_LINE = 64 };
    if (s->rows.extent * s->item % WAY == 0) {
        s->gap = CACHE_LINE / s->item;
        c->nbytes += s->gap * s->cols.extent * s->item;
    }
    return s;
}

void give_home(slabs *s, whose writers, const view *home, span across)
{
    s->writers = writers, s->home = home, s->across = across;
}

slabs *stage_shares(call *c, const view *x, int of_rows, int by_columns)
{
    int64_t count = (of_rows ? &x->rows : &x->cols)->extent;
    span shares = {count, (count + c->ranks - 1) / c->ranks, 0, c->ranks, 0};
    whose ranks = {NULL, NUMBER, NUMBER, 0};
    slabs *s = stage(c, x, of_rows ? shares : span_all(x->rows.extent), of_rows ? span_all(x->cols.extent) : shares,
                     by_columns, ranks);
    give_home(s, ranks, &c->to, s->cols);
    return s;
}

slabs *stage_half(call *c, const view *x, int by_columns, const view *readers)
{
    slabs *s = stage_all(c, x, by_columns, readers);
    s->half = c->uplo;
    return s;
}

slabs *own_room(call *c, int64_t m, int64_t n, int by_columns)
{
    slabs *s = &c->room[c->rooms++];
    *s = (slabs){.rows = span_all(m), .cols = span_all(n), .start = c->owned, .by_columns = by_columns, .own = 1, .item = c->item};
    c->owned += (m * n * c->item + 63) / 64 * 64;
    return s;
}

/* Slabs lie side by side, those of a column of processes first. */
static operand slab_of(const call *c, const slabs *s, int64_t above, int64_t m, int64_t left, int64_t n)
{
    char *at = (s->own ? c->scratch : c->memory) + s->start + s->item * (left * s->rows.extent + above * n);
    int64_t ld = (s->by_columns ? m : n) + s->gap;
    return (operand){at, ld ? ld : 1, s->by_columns, 0};
}

operand slab(const call *c, const slabs *s, int64_t row, int64_t col)
{
    return slab_of(c, s, span_before(&s->rows, row), span_count(&s->rows, row), span_before(&s->cols, col),
                   span_count(&s->cols, col));
}

operand dealt(const call *c, const slabs *s, int64_t row, int64_t col)
{
    const view *x = s->staged;
    operand found = slab(c, s, row, col);
    if (s->places == NULL)
        return found;
    if (x->row == row && x->col == col)
        return x->here;
    found.at = s->places[col];
    return found;
}

static tile place_of(const slabs *s, operand there, int64_t i, int64_t j)
{
    return tile_from(tile_at(there.at, there.ld, there.by_columns, s->item), i, j);
}

/* -- several nodes: who reads and writes slabs */

typedef struct {
    uint64_t rows, cols; /* a bit for each process */
} processes;

static const processes every = {~UINT64_C(0), ~UINT64_C(0)};

static int has(uint64_t set, int64_t process)
{
    return process >= PROCESSES || (set >> process & 1);
}

int find_process(const view *v, int64_t rank, int64_t *row, int64_t *col)
{
    const matrix *of = v->of;
    if (rank >= of->nprow * of->npcol)
        return 0;
    int by_columns = of->numbering == 2 || of->npcol == 1;
    int64_t p = by_columns ? rank % of->nprow : rank / of->npcol, q = by_columns ? rank / of->nprow : rank % of->npcol;
    *row = v->transposed ? q : p, *col = v->transposed ? p : q;
    return span_count(&v->rows, *row) && span_count(&v->cols, *col);
}

static uint64_t along_one(const span *s, int which, const view *v, int64_t rank, int64_t row, int64_t col)
{
    uint64_t found = 0;
    if (which == ANY || s->nprocs == 1)
        return ~found;
    if (which & ROW)
        found |= UINT64_C(1) << row;
    if (which & COL)
        found |= UINT64_C(1) << col;
    if (which & ACROSS) {
        int64_t n = v->rows.nprocs;
        found |= UINT64_C(1) << (col - v->cols.source + v->rows.source + n) % n;
    }
    if (which & NUMBER)
        found |= UINT64_C(1) << rank;
    return found;
}

/* The slabs that are a rank's: none if it has no part of the view. */
static processes slabs_of(const slabs *s, const whose *w, int64_t rank)
{
    int64_t row = 0, col = 0;
    if ((w->below && rank >= w->below) || (w->in != NULL && !find_process(w->in, rank, &row, &col)))
        return (processes){0, 0};
    return (processes){along_one(&s->rows, w->row, w->in, rank, row, col), along_one(&s->cols, w->col, w->in, rank, row, col)};
}

/* Those that any rank of a node reads, and perhaps a few more. */
static processes read_at(const call *c, const slabs *s, const whose *w, int64_t node)
{
    processes found = {0, 0};
    for (int64_t rank = 0; rank < c->ranks; rank++)
        if (c->node_of[rank] == node) {
            processes of = slabs_of(s, w, rank);
            found.rows |= of.rows, found.cols |= of.cols;
        }
    return found;
}

static void begin_at(run *r, int64_t place)
{
    int64_t skipped = place > r->to ? place - r->to : 0;
    r->from += skipped, r->to += skipped, r->count -= skipped;
}

static void stop_at(run *r, int64_t place)
{
    if (r->to + r->count > place)
        r->count = place - r->to;
}

/* Cut rows and columns of a block down to what a half has of them; return whether that is anything. Columns of a half are
 * not dealt out. */
static int cut(const slabs *s, run *row, run *col)
{
    const span *rows = &s->rows;
    if (s->half == 'L')
        begin_at(row, span_below(rows, col->to, row->process));
    if (s->half == 'U')
        stop_at(row, span_below(rows, col->to + col->count, row->process));
    if (s->half == 'L' && row->count > 0)
        stop_at(col, span_at_place(rows, row->process, row->to + row->count - 1) + 1);
    if (s->half == 'U' && row->count > 0)
        begin_at(col, span_at_place(rows, row->process, row->to));
    return row->count > 0 && col->count > 0;
}

/* Copy what slabs have in common with this rank's part of a matrix of their shape: into those of some processes, or
 * ``back``. */
static void spread(const call *c, const slabs *s, const view *x, int back, processes some)
{
    run rows[CHUNK], col;
    runs down = runs_of(&x->rows, x->row, &s->rows);
    tile local = tile_of(x);
    for (int count = CHUNK; count == CHUNK;) {
        for (count = 0; count < CHUNK && runs_next(&down, rows + count); count++)
            ;
        runs across = runs_of(&x->cols, x->col, &s->cols);
        while (runs_next(&across, &col))
            for (int64_t i = 0; i < count; i++) {
                run row = rows[i], these = col;
                if (!has(some.rows, row.process) || !has(some.cols, these.process) || !cut(s, &row, &these))
                    continue;
                operand there = slab_of(c, s, row.before, row.held, these.before, these.held);
                tile in = place_of(s, there, row.to, these.to);
                tile of = tile_from(local, row.from, these.from);
                if (back)
                    tile_copy(of, in, row.count, these.count, s->item);
                else if (x->here.conjugated)
                    tile_conjugate(in, of, row.count, these.count, c->letter);
                else
                    tile_copy(in, of, row.count, these.count, s->item);
            }
    }
}

void give(const call *c, const slabs *s, const view *x)
{
    if (x->active)
        spread(c, s, x, 0, every);
}

void take(const call *c, const slabs *s, const view *to)
{
    if (to->active)
        spread(c, s, to, 1, every);
}

static void write_slabs(call *c)
{
    for (const slabs *s = c->room; s < c->room + c->rooms; s++) {
        if (s->staged != NULL && s->staged->active && s->places == NULL)
            spread(c, s, s->staged, 0, is_on_one_node(c) ? every : read_at(c, s, &s->readers, c->node));
        operand all = slab(c, s, 0, 0);
        if (s->triangle != NULL)
            copy_triangle(c, elements(c, all), s->triangle, c->uplo == 'L', 0, 0);
    }
    c->flags = (flag *)(void *)(c->memory + c->flags_at);
    if (c->here == 0)
        memset(c->flags, 0, sizeof(flag) * (size_t)c->flag_count);
}

void have_flags(call *c, int64_t count)
{
    c->flags_at = c->nbytes, c->flag_count = count;
    c->nbytes += ((int64_t)sizeof(flag) * count + 63) / 64 * 64;
}

int await_flag(const call *c, int i)
{
    return flag_await(c->flags, i, (int)c->yields) || c->waits((int64_t)(intptr_t)(c->flags + i)) == COME ? OK : BROKEN;
}

void collect(const call *c, const view *d, const slabs *sums, const span *parts, const double beta[2])
{
    static const double one[2] = {1, 0};
    span whole = span_all(d->cols.extent);
    run row, col;
    runs down = runs_of(&d->rows, d->row, &sums->rows);
    while (runs_next(&down, &row)) {
        runs across = runs_of(&d->cols, d->col, &whole);
        while (runs_next(&across, &col)) {
            tile to = tile_from(tile_of(d), row.from, col.from);
            const double *factor = beta;
            for (int64_t q = 0; q < parts->nprocs; q++) {
                if (!span_count(parts, q))
                    continue;
                operand there = slab(c, sums, row.process, parts->nprocs > 1 ? q : 0);
                tile of = place_of(sums, there, row.to, col.to);
                tile_sum(to, one, of, factor, to, row.count, col.count, c->letter, 0);
                factor = one;
            }
        }
    }
}

/* -- ways to compute by a kernel */

int compute_here(call *c)
{
    const view *to = &c->to;
    if (!to->active)
        return OK;
    copy_old(c);
    if (c->start != NULL)
        take(c, c->start, to);
    operand x = c->left == NULL ? c->x.here : slab(c, c->left, to->row, 0);
    c->kernel(c, to->m, to->n, x, c->right == NULL ? c->y.here : slab(c, c->right, to->col, 0), to->here);
    return OK;
}

int compute_everywhere(call *c)
{
    const view *to = &c->to;
    if (!to->active)
        return OK;
    int64_t m = to->rows.extent, n = to->cols.extent;
    slabs *result = own_room(c, m, n, to->here.by_columns);
    operand d = slab(c, result, 0, 0), x = slab(c, c->left, 0, 0);
    if (c->start != NULL)
        tile_copy(elements(c, d), elements(c, slab(c, c->start, 0, 0)), m, n, c->item);
    else /* outside a triangle it keeps its values */
        give(c, result, c->has_old ? &c->old : to);
    c->kernel(c, m, n, x, c->right == NULL ? x : slab(c, c->right, 0, 0), d);
    take(c, result, to);
    return OK;
}

void part_copy(const part *p, char *memory, int back, int half, int64_t diagonal)
{
    call c = {.memory = memory, .item = p->of->item};
    view x = view_of(p, 0, 0);
    if (half) {
        int64_t rows = x.rows.extent;
        copy_triangle(&c, tile_at(memory, rows ? rows : 1, 1, c.item), &x, half == 'L', diagonal, back);
        return;
    }
    slabs s = {.rows = span_all(x.rows.extent), .cols = span_all(x.cols.extent), .by_columns = 1, .item = p->of->item};
    if (x.active)
        spread(&c, &s, &x, back, every);
}

/* -- messages between nodes */

typedef struct {
    char *at;      /* what comes next in the message; NULL: it is only counted */
    int unpacks;
    int64_t nbytes;
} content;

/* Pack, or unpack, a piece that is at ``there`` in slabs; it is read at ``here``. */
static void carry_piece(const call *c, content *p, const slabs *s, tile here, tile there, int64_t m, int64_t n, int conjugated)
{
    int64_t nbytes = m * n * s->item;
    if (p->at != NULL) {
        tile in = tile_at(p->at, s->by_columns ? m : n, s->by_columns, s->item);
        if (!p->unpacks && conjugated)
            tile_conjugate(in, here, m, n, c->letter);
        else if (!p->unpacks)
            tile_copy(in, here, m, n, s->item);
        else if (there.at != NULL)
            tile_copy(there, in, m, n, s->item);
        p->at += nbytes;
    }
    p->nbytes += nbytes;
}

/* A block of what is staged, for a node. */
static void carry_block(const call *c, content *p, const slabs *s, int64_t node, run row, run col)
{
    const view *x = s->staged;
    run later = s->half == 'U' ? col : row;
    int64_t end = later.to + later.count, extent = x->rows.extent, step = s->part ? s->part : extent;
    int64_t parts = (extent + step - 1) / step;
    for (int64_t k = parts - (extent - later.to + step - 1) / step, next; later.to < end; later.to = next, k++) {
        next = extent - (parts - 1 - k) * step;
        run i = row, j = col;
        begin_at(s->half == 'U' ? &j : &i, later.to), stop_at(s->half == 'U' ? &j : &i, next);
        if ((s->part && !s->reads(c, node, k)) || !cut(s, &i, &j))
            continue;
        tile there = place_of(s, slab_of(c, s, i.before, i.held, j.before, j.held), i.to, j.to);
        if (s->places != NULL && p->unpacks && p->at != NULL)
            s->places[j.process] = p->at, there.at = NULL; /* it stays in the message */
        carry_piece(c, p, s, tile_from(tile_of(x), i.from, j.from), there, i.count, j.count, x->here.conjugated);
    }
}

static void carry_staged(const call *c, content *p, const slabs *s, int64_t rank, int64_t node)
{
    const view *x = s->staged;
    int64_t at_row, at_col;
    processes readers = read_at(c, s, &s->readers, node);
    if (!readers.rows || !readers.cols || !find_process(x, rank, &at_row, &at_col))
        return;
    run row, col;
    runs down = runs_of(&x->rows, at_row, &s->rows);
    while (runs_next(&down, &row)) {
        runs right = runs_of(&x->cols, at_col, &s->cols);
        while (has(readers.rows, row.process) && runs_next(&right, &col))
            if (has(readers.cols, col.process))
                carry_block(c, p, s, node, row, col);
    }
}

static int64_t only(uint64_t set)
{
    int64_t found = 0;
    while (!(set >> found & 1))
        found++;
    return found;
}

/* What a rank has computed in its slab. */
static void carry_home(const call *c, content *p, const slabs *s, int64_t rank, int64_t node)
{
    const view *home = s->home;
    processes mine = slabs_of(s, &s->writers, rank), readers = {0, 0};
    if (!mine.rows || !mine.cols)
        return;
    for (int64_t reader = 0; reader < c->ranks; reader++) {
        int64_t r = 0, q = 0;
        if (c->node_of[reader] == node && find_process(home, reader, &r, &q))
            readers.rows |= UINT64_C(1) << (home->rows.nprocs > 1 ? r : 0), readers.cols |= UINT64_C(1) << (home->cols.nprocs > 1 ? q : 0);
    }
    int64_t at_row = s->rows.nprocs == 1 ? 0 : only(mine.rows), at_col = s->cols.nprocs == 1 ? 0 : only(mine.cols);
    operand whole = slab(c, s, at_row, at_col);
    run row, col;
    runs down = runs_of(&s->rows, at_row, &home->rows);
    while (runs_next(&down, &row)) {
        runs right = runs_of(&s->across, s->across.nprocs == 1 ? 0 : at_col, &home->cols);
        while (has(readers.rows, row.process) && runs_next(&right, &col))
            if (has(readers.cols, col.process)) {
                tile at = place_of(s, whole, row.from, col.from);
                carry_piece(c, p, s, at, at, row.count, col.count, 0);
            }
    }
}

static int64_t carry_all(const call *c, int64_t rank, int64_t node, char *message, int unpacks)
{
    content p = {message, unpacks, 0};
    for (const slabs *s = c->room; s < c->room + c->rooms; s++)
        if (c->state == VOTING && s->staged != NULL)
            carry_staged(c, &p, s, rank, node);
        else if (c->state == SENDING && s->home != NULL)
            carry_home(c, &p, s, rank, node);
    return p.nbytes;
}

/* See parcel. */
static int64_t pack(const void *of, int64_t node, char *to)
{
    const call *c = of;
    return c->carry(c, c->rank, node, to, 0);
}

static int64_t unpack(void *of, int64_t rank, char *from)
{
    const call *c = of;
    return c->carry(c, rank, c->node, from, 1);
}

static void goes_along(call *c, carry *with, int is_for_all)
{
    c->carry = with;
    c->votes->post->parcel = (parcel){c, pack, unpack, is_for_all};
}

void begin_exchange(call *c, carry *with, int is_for_all)
{
    goes_along(c, with, is_for_all);
    post_exchange(c->votes->post);
}

int end_exchange(const call *c)
{
    return board_receive(c->votes, (int)c->yields) || c->waits(0) == COME ? OK : BROKEN;
}

int64_t place_on_node(const call *c, int64_t rank)
{
    int64_t place = is_on_one_node(c) ? rank : 0;
    for (int64_t other = 0; other < rank && !is_on_one_node(c); other++)
        place += c->node_of[other] == c->node_of[rank];
    return place;
}

/* -- the number that ranks vote on */

uint64_t mixed(uint64_t h, uint64_t word)
{
    h = (h ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    h = (h ^ h >> 32) * UINT64_C(0xD6E8FEB86659FD93);
    return h ^ h >> 29;
}

uint64_t mixed_beside(const call *c, uint64_t h)
{
    int64_t words = has_tau(c) ? c->count * c->d.of->item / 4 : c->count;
    for (int64_t k = 0; k < words; k++)
        h = mixed(h, c->numbers[k]);
    return h;
}

static uint64_t mixed_double(uint64_t h, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return mixed(h, bits);
}

static uint64_t mixed_part(uint64_t h, const part *p)
{
    if (p->of == NULL)
        return mixed(h, 1);
    h = mixed(mixed(h, p->of->digest), (uint64_t)p->transposed);
    return mixed(mixed(mixed(mixed(h, (uint64_t)p->i), (uint64_t)p->j), (uint64_t)p->m), (uint64_t)p->n);
}

int64_t number_of(const call *c)
{
    uint64_t h = mixed(mixed((uint64_t)c->name, (uint64_t)c->routine), (uint64_t)c->is_new);
    const char options[] = {c->side, c->uplo, c->op_a, c->op_b, c->diag};
    for (int k = 0; k < 5; k++)
        h = mixed(h, (uint64_t)options[k]);
    for (int k = 0; k < 2; k++)
        h = mixed_double(mixed_double(h, c->alpha[k]), c->beta[k]);
    const part *parts[] = {&c->a, &c->b, &c->c, &c->d, &c->beside};
    for (int k = 0; k < 5; k++)
        h = mixed_part(h, parts[k]);
    return (int64_t)mixed_beside(c, h);
}

/* -- how a call goes on */

static int end(const call *c)
{
    return c->nbytes ? DONE_STAGED : DONE;
}

static int finish(call *c)
{
    int found = c->finish(c);
    return found == OK ? end(c) : found;
}

/* What the ranks have computed together is complete in each rank's memory, or has been received. */
static int meet(call *c)
{
    if (c->meets == NULL) /* alone on its node */
        return c->takes ? finish(c) : end(c);
    if (!c->takes) {
        board_arrive(c->meets);
        return end(c);
    }
    c->state = LAST;
    return board_meet(c->meets, (int)c->yields) ? finish(c) : AWAIT_OTHERS;
}

/* All ranks agree, and have written their slabs. */
static int compute(call *c)
{
    int found = c->compute == NULL ? OK : c->compute(c);
    if (found != OK || c->finish == NULL)
        return found == OK ? end(c) : found;
    if (!is_on_one_node(c)) {
        c->state = SENDING;
        begin_exchange(c, carry_all, 0);
        return board_receive(c->votes, (int)c->yields) ? meet(c) : AWAIT_SUMS;
    }
    return meet(c);
}

static int prepare(call *c)
{
    static phase *const routines[ROUTINES] = {
        [MATMUL] = prepare_product, [TRSM] = prepare_triangular, [TRMM] = prepare_triangular, [SYMM] = prepare_sided,
        [HEMM] = prepare_sided, [SYRK] = prepare_updated, [HERK] = prepare_updated, [SYR2K] = prepare_updated,
        [HER2K] = prepare_updated, [GEADD] = prepare_sum, [SCAL] = prepare_scaled, [SWAP] = prepare_exchanged,
        [DOT] = prepare_reduced, [DOTC] = prepare_reduced, [NRM2] = prepare_reduced, [ASUM] = prepare_reduced,
        [AMAX] = prepare_reduced, [POTRF] = prepare_factored, [POSV] = prepare_solved, [GETRF] = prepare_lapack,
        [GETRS] = prepare_lapack, [GESV] = prepare_lapack, [POTRS] = prepare_lapack, [TRTRS] = prepare_lapack,
        [GETRI] = prepare_lapack, [POTRI] = prepare_lapack, [TRTRI] = prepare_lapack, [GETRF_GETRI] = prepare_lapack,
        [POTRF_POTRI] = prepare_lapack, [TRTRI_LASET] = prepare_lapack, [GELS] = prepare_lapack,
        [GEQRF] = prepare_lapack, [ORGQR] = prepare_lapack, [ORMQR] = prepare_lapack,
    };
    static const double one[2] = {1, 0}, less[2] = {-1, 0}, zero[2] = {0, 0};
    c->letter = (int)c->d.of->letter, c->item = c->d.of->item;
    c->factor = scalar_of(c->alpha, c->letter), c->other = scalar_of(c->beta, c->letter);
    c->one = scalar_of(one, c->letter), c->less = scalar_of(less, c->letter), c->zero = scalar_of(zero, c->letter);
    c->compute = c->finish = NULL;
    c->left = c->right = c->start = NULL;
    c->rooms = c->has_old = c->takes = 0;
    c->nbytes = c->told = c->owned = c->flags_at = c->flag_count = 0;
    c->terms = c->info = c->together = 0;
    c->here = place_on_node(c, c->rank);
    c->across[0] = c->across[1] = NULL;
    if (!c->d.m || !c->d.n)
        return OK;
    return routines[c->routine](c);
}

size_t call_size(void)
{
    return sizeof(call);
}

int call_start(call *c)
{
    if (!is_single(c))
        c->number = number_of(c) ^ c->unlike;
    int found = prepare(c);
    if (found != OK)
        return found;
    REQUIRE(c->nbytes <= c->most);
    REQUIRE(is_on_one_node(c) || c->nbytes <= c->capacity);
    if (c->nbytes > c->touched)
        c->touched = c->nbytes;
    int fits = c->nbytes <= c->capacity;
    if (is_single(c)) {
        c->state = ALONE;
        return fits ? compute(c) : NEEDS_ROOM;
    }
    if (fits)
        write_slabs(c);
    c->state = fits ? VOTING : VOTING_FOR_ROOM;
    c->votes->mine[1] = c->number;
    memcpy(&c->votes->mine[VOTE], c->tells, sizeof(double) * (size_t)c->told);
    if (!is_on_one_node(c))
        goes_along(c, carry_all, 0);
    return board_vote(c->votes, (int)c->told, (int)c->yields) == 1 ? call_go_on(c) : AWAIT_VOTE;
}

int call_go_on(call *c)
{
    switch (c->state) {
    case VOTING_FOR_ROOM:
        c->state = WRITING;
        return NEEDS_ROOM;
    case WRITING:
        write_slabs(c);
        c->state = VOTING;
        return board_meet(c->meets, (int)c->yields) ? compute(c) : AWAIT_OTHERS;
    case ALONE:
    case VOTING:
        return compute(c);
    case SENDING:
        return meet(c);
    default:
        return finish(c);
    }
}
