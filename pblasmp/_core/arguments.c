/* SPDX-License-Identifier: Apache-2.0 */
#include "arguments.h"

#include <string.h>

enum { CONTIGUOUS = 1, WRITEABLE = 0x400 }; /* flags of NumPy's arrays */

static python py;

void arguments_know(const python *p)
{
    py = *p;
}

static object slot_in(object x, int64_t at)
{
    object found;
    memcpy(&found, (const char *)x + at, sizeof found);
    return found;
}

static object type_of(object x)
{
    return slot_in(x, py.head - (int64_t)sizeof x);
}

static int is_a(object x, object type)
{
    return type_of(x) == type;
}

static const char *text_of(object x)
{
    intptr_t length = 0;
    return py.as_text(x, &length);
}

/* Of a call's name: others have other numbers. */
static int64_t name_number(const char *call)
{
    uint64_t h = 0;
    for (; *call; call++)
        h = mixed(h, (uint64_t)*call);
    return (int64_t)h;
}

static object given(const arguments *r, int64_t i)
{
    return py.item(r->given, (intptr_t)i);
}

static int integer(object x, int64_t *value)
{
    int overflow = 0;
    REQUIRE(is_a(x, py.integer));
    *value = py.as_integer(x, &overflow);
    return overflow ? UNFIT : OK;
}

static int scalar_in(object x, int real, double value[2])
{
    int64_t whole;
    value[1] = 0;
    if (is_a(x, py.real))
        value[0] = py.as_real(x);
    else if (is_a(x, py.complex))
        value[0] = py.real_part(x), value[1] = py.imaginary_part(x);
    else if (integer(x, &whole) == OK)
        value[0] = (double)whole;
    else
        return UNFIT;
    return real && value[1] != 0 ? UNFIT : OK; /* NaN is none */
}

/* The letter of an option, as a capital, which it perhaps must be; 0 if it is none of these. */
static char letter_in(object x, const char letters[4], int must_be)
{
    intptr_t length = 0;
    const char *text = is_a(x, py.text) ? py.as_text(x, &length) : "";
    if (text == NULL)
        py.forget_error();
    if (text == NULL || length != 1)
        return 0;
    char found = *text >= 'a' && *text <= 'z' ? (char)(*text - 'a' + 'A') : *text;
    return memchr(letters, found, 4) && (found == *text || !must_be) ? found : 0;
}

static const void *fields(object x)
{
    return (const char *)x + py.head;
}

static const array_fields *array_in(object x)
{
    return is_a(x, py.array) ? fields(x) : NULL;
}

static int has_elements(const array_fields *x, object element)
{
    const dtype_fields *of = fields(x->dtype);
    return of->element == element && of->byteorder == '=';
}

/* The bytes of an element if an array has integers, else 0. */
static int64_t integers_of(const array_fields *x)
{
    for (int k = 0; k < 3; k++)
        if (has_elements(x, py.integers[k]))
            return k ? sizeof(int64_t) : sizeof(int32_t);
    return 0;
}

/* Where a local array is, with its descriptor. */
static int place_in(place *p, object array, object desc, int64_t letter, int written)
{
    const array_fields *x = array_in(array), *d = array_in(desc);
    REQUIRE(x != NULL && has_elements(x, py.elements[letter]) && (x->nd == 1 || x->nd == 2));
    REQUIRE(!written || x->flags & WRITEABLE);
    REQUIRE(d != NULL && d->nd == 1 && d->flags & CONTIGUOUS && d->shape[0] <= ENTRIES);
    int64_t item = integers_of(d);
    REQUIRE(item);
    memset(p, 0, sizeof *p);
    p->address = (int64_t)(intptr_t)x->data, p->count = d->shape[0], p->letter = letter;
    for (int k = 0; k < x->nd; k++)
        p->shape[k] = x->shape[k], p->strides[k] = x->strides[k];
    if (x->nd == 1)
        p->shape[1] = -1;
    for (int64_t k = 0; k < p->count; k++)
        p->entries[k] = item == 8 ? ((const int64_t *)(const void *)d->data)[k] : ((const int32_t *)(const void *)d->data)[k];
    return OK;
}

/* The slot of a place, or a free one. */
static place *slot_of(const arguments *r, const place *p)
{
    uint64_t h = mixed(mixed((uint64_t)p->address, (uint64_t)p->entries[1]), (uint64_t)p->entries[2]);
    while (1) {
        place *slot = r->places + h++ % SLOTS;
        if (slot->held == NULL || !memcmp(slot, p, offsetof(place, rows)))
            return slot;
    }
}

void arguments_learn(arguments *r, const matrix *held, int64_t rows, int64_t cols)
{
    place p;
    if (place_in(&p, given(r, 0), given(r, 1), held->letter, 0) == OK)
        p.rows = rows, p.cols = cols, p.held = held, *slot_of(r, &p) = p;
}

/* A sub-matrix of m x n; a vector is a row if its increment says so. */
static int part_in(const arguments *r, const matrix_form *at, const place *p, int64_t m, int64_t n, part *found)
{
    int64_t i, j, increment = 1;
    int is_row = 0;
    REQUIRE(integer(given(r, at->at + 1), &i) == OK && integer(given(r, at->at + 2), &j) == OK);
    if (at->increment >= 0) {
        REQUIRE(integer(given(r, at->increment), &increment) == OK);
        REQUIRE(m != 1 || p->rows != 1); /* a row of one element looks like a column */
        is_row = increment == p->rows;
        REQUIRE(is_row || increment == 1);
        n = is_row ? m : 1, m = is_row ? 1 : m;
    }
    REQUIRE(i >= 1 && j >= 1 && m <= p->rows && n <= p->cols && i <= p->rows - m + 1 && j <= p->cols - n + 1);
    *found = (part){p->held, i - 1, j - 1, m, n, is_row};
    return OK;
}

/* IPIV, of rows of the whole matrix, as a matrix with a column for each process column; TAU, of columns, as one with a row
 * for each process row. */
static int beside_in(arguments *r, const part *a, int64_t rows)
{
    const form *f = r->form;
    const array_fields *x = array_in(given(r, f->beside));
    int64_t item, count = a->m, here;
    REQUIRE(x != NULL && x->nd == 1 && x->flags & CONTIGUOUS && x->flags & WRITEABLE);
    matrix *of = &r->call->held_beside;
    *of = *a->of, of->by_columns = 1, of->address = (int64_t)(intptr_t)x->data;
    if (f->axis) {
        REQUIRE(has_elements(x, py.elements[f->letter]));
        count = a->m < a->n ? a->m : a->n;
        if (f->k >= 0)
            REQUIRE(integer(given(r, f->k), &count) == OK);
        REQUIRE(count <= a->n);
        item = of->item;
        places used = places_of(&of->cols, a->j, count);
        here = used.first + used.count;
        of->rows = (axes){1, of->nprow, 0, 0, of->rows.mine}, of->ld = 1;
        r->call->beside = (part){of, 0, a->j, of->nprow, count, 0};
    } else {
        item = integers_of(x);
        REQUIRE(item);
        places used = places_of(&of->rows, 0, rows);
        here = used.first + used.count;
        of->cols = (axes){1, of->npcol, 0, 0, of->cols.mine}, of->ld = here ? here : 1;
        of->letter = LETTERS, of->item = item;
        r->call->beside = (part){of, a->i, 0, count, of->npcol, 0};
    }
    of->end = of->address + here * item;
    if (f->makes)
        r->call->beside = (part){0};
    return x->shape[0] < here ? UNFIT : OK;
}

/* A sub-matrix: its ``Held``, and its place there in a tuple, from an item on. */
static int held_part(object held, int64_t slot, object place, intptr_t first, part *p)
{
    int64_t numbers[5];
    int overflow = 0;
    p->of = (const matrix *)(intptr_t)py.as_integer(slot_in(held, slot), &overflow);
    for (int k = 0; k < 5; k++)
        numbers[k] = py.as_integer(py.item(place, first + k), &overflow);
    p->i = numbers[0], p->j = numbers[1], p->m = numbers[2], p->n = numbers[3], p->transposed = numbers[4];
    return p->of == NULL ? UNKNOWN : OK;
}

/* A matrix, whose sizes are those that others have had, too; -1: none has. */
static int handle_in(const arguments *r, const matrix_form *at, int64_t *rows, int64_t *cols, part *p)
{
    const handle_form *h = &r->form->handle;
    object x = given(r, at->at), first = given(r, r->form->matrices[0].at);
    *p = (part){0};
    if (x == py.none)
        return OK;
    REQUIRE(type_of(x) == type_of(first) && slot_in(x, h->context) == slot_in(first, h->context));
    object whole = slot_in(x, h->view_of);
    whole = whole == py.none ? x : whole;
    if (at->written) {
        const array_fields *array = array_in(slot_in(whole, h->array));
        REQUIRE(array == NULL || array->flags & WRITEABLE); /* those of GPUs always are */
    }
    object held = slot_in(whole, h->held);
    if (!is_a(held, h->type) || held_part(held, r->held, slot_in(x, h->at), 0, p) == UNKNOWN)
        return UNKNOWN;
    int64_t m = p->transposed ? p->n : p->m, n = p->transposed ? p->m : p->n;
    *rows = *rows < 0 ? m : *rows;
    *cols = *cols < 0 ? n : *cols; /* perhaps the same size */
    REQUIRE(m && n && m == *rows && n == *cols);
    return OK;
}

static int read(arguments *r)
{
    call *c = r->call;
    const form *f = r->form;
    char *words[OPTIONS] = {&c->side, &c->uplo, &c->op_a, &c->op_b, &c->diag};
    int64_t sizes[SIZES] = {-1, -1, -1, -1}, grid = 0, letter = f->letter;
    int empty = 0, of_handles = f->handle.type != NULL;
    part parts[MATRICES];
    for (int k = 0; k < OPTIONS; k++) {
        *words[k] = f->options[k] < 0 ? f->words[k] : letter_in(given(r, f->options[k]), f->letters[k], of_handles);
        REQUIRE(*words[k]);
    }
    for (int k = 0; k < SIZES && f->sizes[k] >= 0; k++) {
        REQUIRE(integer(given(r, f->sizes[k]), &sizes[k]) == OK && sizes[k] >= 0);
        empty |= !sizes[k];
    }
    for (int k = 0; k < MATRICES && f->matrices[k].at >= 0; k++) {
        const matrix_form *at = &f->matrices[k];
        int turned = at->chosen_by == BY_LENGTH && sizes[at->rows[0]] < sizes[at->rows[1]];
        if (at->chosen_by >= 0)
            turned = *words[at->chosen_by] != 'N' && *words[at->chosen_by] != 'L';
        int64_t *rows = &sizes[at->rows[turned]], *cols = &sizes[at->cols[turned]];
        if (of_handles) {
            int found = handle_in(r, at, rows, cols, &parts[k]);
            if (found != OK)
                return found;
            const matrix *of = parts[k].of;
            REQUIRE(of == NULL ? k == f->handle.optional : !k || of->letter == letter);
            letter = k ? letter : of->letter;
            continue;
        }
        place p;
        REQUIRE(place_in(&p, given(r, at->at), given(r, at->at + 3), f->letter, (int)at->written) == OK);
        const place *known = slot_of(r, &p);
        if (known->held == NULL)
            return UNKNOWN;
        REQUIRE(!k || known->entries[1] == grid);
        grid = known->entries[1];
        int found = part_in(r, at, known, *rows, *cols, &parts[k]);
        REQUIRE(found == OK);
        if (k == f->passes[0] && f->beside >= 0)
            REQUIRE(beside_in(r, &parts[k], known->rows) == OK);
    }
    int is_real = letter != C && letter != Z;
    c->alpha[0] = 1, c->beta[0] = f->no_beta, c->alpha[1] = c->beta[1] = 0;
    if (f->alpha >= 0)
        REQUIRE(scalar_in(given(r, f->alpha), is_real || f->real_alpha, c->alpha) == OK);
    REQUIRE(c->alpha[0] != 0 || c->alpha[1] != 0);
    if (f->beta >= 0)
        REQUIRE(scalar_in(given(r, f->beta), is_real || f->real_beta, c->beta) == OK);
    part *passed[] = {&c->a, &c->b, &c->c, &c->d};
    for (int k = 0; k < 4; k++)
        *passed[k] = f->passes[k] < 0 ? (part){0} : parts[f->passes[k]];
    if (f->beside < 0)
        c->beside = (part){0};
    REQUIRE(!of_handles || c->c.of != NULL || (c->beta[0] == 0 && c->beta[1] == 0));
    REQUIRE(!empty || !(f->tells || (c->d.m && c->d.n))); /* of nothing: D may be scaled */
    c->routine = f->routine, c->name = name_number(f->call), c->is_new = c->count = 0;
    return OK;
}

static int is_in_column(const part *p)
{
    const axes *of = p->transposed ? &p->of->rows : &p->of->cols;
    return of->mine == (p->transposed ? span_of(of, p->i, p->m) : span_of(of, p->j, p->n)).source;
}

static int start(call *c)
{
    void *state = py.let_others_run();
    int found = call_start(c);
    py.go_on(state);
    return found;
}

static int read_asked(arguments *r, int64_t routine, int64_t count)
{
    call *c = r->call;
    part *parts[] = {&c->a, &c->b, &c->c, &c->d, &c->beside};
    char *words[OPTIONS] = {&c->side, &c->uplo, &c->op_a, &c->op_b, &c->diag};
    int overflow = 0;
    for (int k = 0; k < 5; k++) {
        object x = given(r, k < 4 ? 2 + k : 15);
        *parts[k] = (part){0};
        if (x != py.none && held_part(py.item(x, 0), r->held, x, 1, parts[k]) != OK)
            return UNKNOWN;
    }
    c->routine = routine, c->count = count, c->name = name_number(text_of(given(r, 0)));
    c->is_new = py.as_integer(given(r, 6), &overflow);
    for (int k = 0; k < OPTIONS; k++) {
        object x = given(r, 7 + k);
        REQUIRE(is_a(x, py.text)); /* or what only says that it is equal to one */
        *words[k] = *text_of(x);
    }
    return scalar_in(given(r, 12), 0, c->alpha) == OK ? scalar_in(given(r, 13), 0, c->beta) : UNFIT;
}

int asked_start(arguments *r, int routine, int count)
{
    int found = read_asked(r, routine, count);
    return found == OK ? start(r->call) : found;
}

int arguments_start(arguments *r)
{
    call *c = r->call;
    int found = read(r);
    if (found != OK)
        return found;
    if (r->form->tells) {
        r->in_column = is_in_column(&c->a) || (c->b.of != NULL && is_in_column(&c->b));
        r->start = (c->a.transposed ? c->a.j : c->a.i) + 1;
    }
    return start(c);
}

/* Where this rank has its part of an operand, and how that is dealt out. */
static void look_at(look *l, int k, const part *p)
{
    const matrix *of = p->of;
    span rows = span_of(&of->rows, p->i, p->m), cols = span_of(&of->cols, p->j, p->n);
    int64_t down = places_of(&of->rows, p->i, p->m).first, right = places_of(&of->cols, p->j, p->n).first;
    int64_t offset = (of->by_columns ? down + right * of->ld : down * of->ld + right) * of->item;
    int64_t beyond = (of->address + offset) % ALIGNED;
    l->offsets[k] = offset, l->bases[k] = of->address + offset - beyond;
    const int64_t words[OPERAND] = { /* the digest tells the blocks and the grid */
        (int64_t)of->digest, of->ld, rows.extent, rows.source, rows.lead, cols.extent, cols.source, cols.lead,
        p->transposed, beyond,
    };
    memcpy(l->pattern + PATTERN - (4 - k) * OPERAND, words, sizeof words);
}

int asked_look(look *l)
{
    call c;
    arguments r = {.call = &c, .form = l->form, .given = l->given, .held = l->held};
    int found = l->form == NULL ? read_asked(&r, l->routine, 0) : read(&r);
    if (found != OK)
        return found;
    const part *parts[] = {&c.a, &c.b, &c.c, &c.d};
    REQUIRE(apart_but(&c, c.routine == TRSM || c.routine == TRMM ? &c.b : &c.c));
    memset(l->offsets, 0, sizeof *l - offsetof(look, offsets));
    for (int k = 0; k < 4; k++) {
        int same = k < 3 && parts[k]->of != NULL && same_elements(parts[k], &c.d);
        l->offsets[k] = -1;
        if (same)
            l->pattern[PATTERN - (4 - k) * OPERAND] = 1;
        else if (parts[k]->of != NULL)
            look_at(l, k, parts[k]);
    }
    const char words[8] = {c.side, c.uplo, c.op_a, c.op_b, c.diag, (char)c.is_new};
    l->pattern[0] = c.routine;
    memcpy(l->pattern + 1, words, sizeof words);
    memcpy(l->pattern + 2, c.alpha, sizeof c.alpha), memcpy(l->pattern + 4, c.beta, sizeof c.beta);
    l->number = number_of(&c);
    return OK;
}
