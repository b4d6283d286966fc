/* SPDX-License-Identifier: Apache-2.0 */
#include "span.h"

/* How far a process is from the first one that has indices. */
static int64_t turn_of(const span *s, int64_t process)
{
    int64_t turn = (process - s->source) % s->nprocs;
    return turn < 0 ? turn + s->nprocs : turn;
}

span span_all(int64_t extent)
{
    return (span){extent, extent ? extent : 1, 0, 1, 0};
}

span span_side_by_side(int64_t width, int64_t parts)
{
    return parts > 1 ? (span){width * parts, width, 0, parts, 0} : span_all(width);
}

span span_of(const axes *a, int64_t start, int64_t extent)
{
    if (a->nprocs == 1)
        return span_all(extent);
    int64_t lead = (a->lead + start) % a->block;
    int64_t source = (a->source + (a->lead + start) / a->block) % a->nprocs;
    if (lead + extent <= a->block)
        return (span){extent, extent ? extent : 1, source, a->nprocs, 0};
    return (span){extent, a->block, source, a->nprocs, lead};
}

int span_whole(const span *s)
{
    return s->nprocs == 1 || s->lead + s->extent <= s->block;
}

int span_aligned(const span *a, const span *b)
{
    return a->extent == b->extent && a->block == b->block && a->nprocs == b->nprocs && a->lead == b->lead;
}

int span_equal(const span *a, const span *b)
{
    return span_aligned(a, b) && a->source == b->source;
}

int64_t span_below(const span *s, int64_t stop, int64_t process)
{
    if (s->nprocs == 1)
        return stop;
    int64_t turn = turn_of(s, process), full = (s->lead + stop) / s->block, rest = (s->lead + stop) % s->block;
    int64_t extra = full % s->nprocs;
    int64_t owned = full / s->nprocs * s->block + (turn < extra ? s->block : turn == extra ? rest : 0);
    return turn ? owned : owned - least(s->lead, owned);
}

int64_t span_count(const span *s, int64_t process)
{
    return span_below(s, s->extent, process);
}

int64_t span_before(const span *s, int64_t process)
{
    int64_t turn = s->nprocs == 1 ? 0 : turn_of(s, process);
    if (turn == 0)
        return 0;
    int64_t full = (s->lead + s->extent) / s->block, rest = (s->lead + s->extent) % s->block;
    int64_t extra = full % s->nprocs;
    int64_t blocks = full / s->nprocs * turn + least(turn, extra);
    int64_t owned = blocks * s->block + (turn > extra ? rest : 0);
    return owned - s->lead; /* the first one has lead and the first index, if there are any */
}

int64_t span_at_place(const span *s, int64_t process, int64_t place)
{
    if (s->nprocs == 1)
        return place;
    int64_t turn = turn_of(s, process), at = place + (turn ? 0 : s->lead);
    return (at / s->block * s->nprocs + turn) * s->block + at % s->block - s->lead;
}

int64_t span_process(const span *s, int64_t index)
{
    return s->nprocs == 1 ? 0 : (s->source + (s->lead + index) / s->block) % s->nprocs;
}

places places_of(const axes *a, int64_t start, int64_t extent)
{
    if (a->mine < 0)
        return (places){0, 0};
    if (a->nprocs == 1)
        return (places){start, extent};
    span whole = {start + extent, a->block, a->source, a->nprocs, a->lead};
    int64_t first = span_below(&whole, start, a->mine);
    return (places){first, span_count(&whole, a->mine) - first};
}

blocks blocks_of(const span *s, int64_t process)
{
    return (blocks){s, s->nprocs == 1 ? 0 : turn_of(s, process) * s->block - s->lead, 0, 0, 0};
}

int blocks_next(blocks *b)
{
    const span *s = b->of;
    if (b->next >= s->extent)
        return 0;
    b->place += b->stop - b->start;
    b->start = b->next > 0 ? b->next : 0;
    b->stop = s->nprocs == 1 ? s->extent : least(b->next + s->block, s->extent);
    b->next = s->nprocs == 1 ? s->extent : b->next + s->block * s->nprocs;
    return 1;
}

runs runs_of(const span *of, int64_t process, const span *to)
{
    return (runs){blocks_of(of, process), to, process, 0, span_aligned(of, to)};
}

/* The run that begins at an index of the present block. */
static run begin(const runs *r)
{
    const span *to = r->to;
    int64_t i = r->index, q = span_process(to, i);
    int64_t end = to->nprocs == 1 ? to->extent : ((to->lead + i) / to->block + 1) * to->block - to->lead;
    int64_t from = r->at.place + i - r->at.start;
    return (run){from, span_below(to, i, q), least(r->at.stop, end) - i, q, 0, 0};
}

/* Go to the next index; return whether there is one. */
static int more(runs *r)
{
    if (r->index < r->at.stop)
        return 1;
    if (!blocks_next(&r->at))
        return 0;
    r->index = r->at.start;
    return 1;
}

static run placed(const span *to, run r)
{
    r.before = span_before(to, r.process);
    r.held = span_count(to, r.process);
    return r;
}

int runs_next(runs *r, run *found)
{
    const span *of = r->at.of, *to = r->to;
    if (r->one) { /* perhaps beginning with different processes */
        int64_t count = span_count(of, r->process), target = 0;
        if (of->nprocs > 1)
            target = (r->process - of->source + to->source + of->nprocs) % of->nprocs;
        if (r->index || !count)
            return 0;
        r->index = 1;
        *found = placed(to, (run){0, 0, count, target, 0, 0});
        return 1;
    }
    if (!more(r))
        return 0;
    run one = begin(r);
    r->index += one.count;
    while (more(r)) { /* what lies beside it in both is the same run */
        run next = begin(r);
        if (next.process != one.process || next.to != one.to + one.count)
            break;
        one.count += next.count;
        r->index += next.count;
    }
    *found = placed(to, one);
    return 1;
}
