/* SPDX-License-Identifier: Apache-2.0 */
#include "post.h"

#include "meet.h"

#include <stddef.h>
#include <string.h>

_Static_assert(HEAD == VALUES + 1, "a head has the values, and a number of bytes");
_Static_assert(sizeof(post) - offsetof(post, parcel) == 8 * 10, "Python lays it out like this");

enum { HEAD_BYTES = 8 * HEAD, STATUS = 16 }; /* integers, more than any MPI's status has */

static char *body(const sheet *s)
{
    return (char *)(s->head + HEAD);
}

static void begun(post *p, sheet *s, int error)
{
    s->awaited = !error, s->begun += !error;
    if (error && !p->error)
        p->error = error;
}

static void receive(post *p, sheet *box, char *to, int64_t nbytes)
{
    begun(p, box, p->irecv(to, (int)nbytes, p->byte, (int)box->rank, (int)p->tag, p->comm, box->request));
}

static void send(post *p, sheet *letter, const char *from, int64_t nbytes)
{
    p->sent_bytes += nbytes;
    begun(p, letter, p->isend(from, (int)nbytes, p->byte, (int)letter->rank, (int)p->tag, p->comm, letter->request));
}

static void take_parcel(post *p)
{
    p->carried = p->parcel;
    p->parcel.of = NULL;
}

void post_send(post *p, const int64_t *values)
{
    take_parcel(p);
    const parcel *with = &p->carried;
    p->is_vote = 1, p->number = values[1], p->meetings++;
    for (int64_t i = 0; i < p->receives; i++)
        receive(p, p->boxes + i, (char *)p->boxes[i].head, HEAD_BYTES + p->most);
    for (sheet *to = p->letters; to < p->letters + p->sends; to++) {
        int64_t nbytes = with->of == NULL ? 0 : with->pack(with->of, to->node, body(to));
        memcpy(to->head, values, sizeof(int64_t) * VALUES);
        to->head[VALUES] = nbytes;
        send(p, to, (const char *)to->head, HEAD_BYTES + nbytes);
    }
}

void post_exchange(post *p)
{
    take_parcel(p);
    const parcel *with = &p->carried;
    p->is_vote = 0, p->exchanges++;
    for (sheet *from = p->boxes; from < p->boxes + p->receives; from++) {
        int64_t nbytes = with->unpack(with->of, from->rank, NULL);
        if (nbytes)
            receive(p, from, body(from), nbytes);
    }
    const sheet *last = NULL;
    int64_t nbytes = 0;
    for (sheet *to = p->letters; to < p->letters + p->sends; to++) {
        if (last == NULL || !with->is_for_all)
            nbytes = with->pack(with->of, to->node, body(to)), last = to;
        if (nbytes)
            send(p, to, body(last), nbytes);
    }
}

static int has_ended(post *p, sheet *s)
{
    int64_t status[STATUS];
    int done = 0, error = p->test(s->request, &done, status);
    if (error && !p->error)
        p->error = error;
    if (!done || error)
        return 0;
    s->awaited = 0;
    return 1;
}

int post_is_over(post *p, deliver *deliver, void *to)
{
    int over = 1;
    const parcel *with = &p->carried;
    for (sheet *from = p->boxes; from < p->boxes + p->receives; from++) {
        if (!from->awaited)
            continue;
        if (!has_ended(p, from)) {
            over = 0;
            continue;
        }
        if (with->of != NULL && (!p->is_vote || (from->head[1] == p->number && !from->head[2])))
            with->unpack(with->of, from->rank, body(from));
        if (p->is_vote)
            deliver(to, (int)from->rank, from->head);
    }
    for (sheet *at = p->letters; at < p->letters + p->sends; at++)
        over &= !at->awaited || has_ended(p, at);
    return over && !p->error;
}
