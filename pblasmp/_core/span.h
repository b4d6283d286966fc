/* SPDX-License-Identifier: Apache-2.0 */
/* Dealt-out ranges: how the indices of one dimension of a sub-matrix are dealt out to processes, as a few integers.
 *
 * ``Axis`` of layout/axis.py is the same in Python; see there for what each function returns.
 */
#ifndef PBLASMP_SPAN_H
#define PBLASMP_SPAN_H

#include <stdint.h>

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* One dimension of a layout, and this rank's process there: -1 outside the grid. */
typedef struct {
    int64_t block, nprocs, source, lead, mine;
} axes;

/* The simplest form: two are equal if, and only if, each index is on the same process at the same place. */
typedef struct {
    int64_t extent, block, source, nprocs, lead;
} span;

span span_of(const axes *a, int64_t start, int64_t extent);
span span_all(int64_t extent); /* not dealt out */
span span_side_by_side(int64_t width, int64_t parts);

int span_whole(const span *s); /* one process has all */
int span_equal(const span *a, const span *b);
int span_aligned(const span *a, const span *b);
int64_t span_below(const span *s, int64_t stop, int64_t process);
int64_t span_count(const span *s, int64_t process);
int64_t span_before(const span *s, int64_t process); /* indices of the processes that come before it, from source on */
int64_t span_at_place(const span *s, int64_t process, int64_t place);
int64_t span_process(const span *s, int64_t index);

/* The places of a range of a layout on this rank: the first, and how many there are. */
typedef struct {
    int64_t first, count;
} places;

places places_of(const axes *a, int64_t start, int64_t extent);

/* The blocks of a process, one after the other. */
typedef struct {
    const span *of;
    int64_t next;                /* where a block begins, perhaps before the first index */
    int64_t start, stop, place;  /* the present one: its indices, and the first one's place */
} blocks;

blocks blocks_of(const span *s, int64_t process);
int blocks_next(blocks *b);

/* Indices of a process that lie side by side in another distribution, too. */
typedef struct {
    int64_t from, to, count; /* places in both */
    int64_t process;         /* in the other */
    int64_t before, held;    /* there: see span_before and span_count */
} run;

typedef struct {
    blocks at;
    const span *to;
    int64_t process, index; /* of the first; which comes next */
    int one;                /* all of them are one run */
} runs;

runs runs_of(const span *of, int64_t process, const span *to);
int runs_next(runs *r, run *found);

#endif
