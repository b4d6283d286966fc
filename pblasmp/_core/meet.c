/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "meet.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Processes can share an atomic only if it needs no lock. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics have locks");
_Static_assert(sizeof(line) == 64 && sizeof(flag) == 8, "Python lays them out like this");

/* Of a wait that keeps the core, and of one for messages; and between two looks at the clock. */
enum { MOMENT_NS = 40000, LONG_MOMENT_NS = 200000, POLLS = 32 };

/* -- futexes */

static void sleep_while(const void *word, int32_t value, int microseconds)
{
    struct timespec most = {microseconds / 1000000, microseconds % 1000000 * 1000L};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &most, NULL, 0);
}

static void wake_all(const void *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* The 32 bits of a count that change each time. */
static const void *low_word(const _Atomic int64_t *count)
{
    return (const char *)count + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 4 : 0);
}

/* -- a moment */

typedef struct {
    int64_t most; /* nanoseconds */
    int yields, polls;
    int64_t end;
} moment;

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Pass some time; return whether the moment goes on. */
static int goes_on(moment *m)
{
    if (m->yields) {
        sched_yield();
        return m->polls++ < m->yields;
    }
    if (m->polls++ % POLLS == 0) {
        int64_t t = now();
        if (m->end == 0)
            m->end = t + m->most;
        if (t > m->end)
            return 0;
    }
    relax();
    return 1;
}

/* -- meetings */

static line *set_of(const board *b, int64_t count)
{
    return b->lines + (count & 1) * (b->size + 1);
}

static int has_come(const line *l, int64_t count)
{
    return atomic_load_explicit(&l->count, memory_order_acquire) == count;
}

static int comes(const line *l, int64_t count, moment *m)
{
    while (!has_come(l, count))
        if (!goes_on(m))
            return 0;
    return 1;
}

/* The order of these two, and of the two in board_sleep, is the same for all: either this rank sees that others sleep, or
 * they see that it has come. */
static void note_coming(board *b, int64_t rank)
{
    line *set = set_of(b, b->count), *of = set + rank;
    atomic_store_explicit(&of->count, b->count, memory_order_seq_cst);
    if (atomic_load_explicit(&set[b->size].count, memory_order_seq_cst) == b->count)
        wake_all(low_word(&of->count));
}

static void come(board *b)
{
    b->count++;
    note_coming(b, b->rank);
}

void board_arrive(board *b)
{
    come(b);
}

void board_bring(board *b, int values)
{
    if (b->post != NULL)
        post_send(b->post, b->mine);
    line *mine = set_of(b, b->count + 1) + b->rank;
    memcpy(mine->values, b->mine, sizeof(int64_t) * (size_t)values);
    come(b);
}

/* A rank of another node has come to the meeting that this rank has come to last: one rank of each node writes its line. */
static void bring_for(void *to, int rank, const int64_t *values)
{
    board *b = to;
    memcpy(set_of(b, b->count)[rank].values, values, sizeof(int64_t) * VALUES);
    note_coming(b, rank);
}

int board_received(board *b)
{
    return b->post == NULL || post_is_over(b->post, bring_for, b);
}

static int is_received(board *b, moment *m)
{
    while (!board_received(b))
        if (b->post->error || !goes_on(m))
            return 0;
    return 1;
}

int board_receive(board *b, int yields)
{
    moment m = {LONG_MOMENT_NS, yields, 0, 0};
    return is_received(b, &m);
}

int board_meet(board *b, int yields)
{
    moment m = {MOMENT_NS, yields, 0, 0};
    come(b);
    const line *set = set_of(b, b->count);
    for (int64_t i = 0; i < b->size; i++)
        if (!comes(set + i, b->count, &m))
            return 0;
    return 1;
}

/* Read each line once, as soon as its rank has come; none is waited for without a moment. */
static int read_votes(board *b, int64_t count, int told, moment *m)
{
    const line *set = set_of(b, count);
    int64_t number = set[b->rank].values[1], *found = b->found;
    int alike = 1;
    for (int64_t i = 0; i < b->size; i++) {
        if (m != NULL && !comes(set + i, count, m))
            return ABSENT;
        const int64_t *values = set[i].values;
        alike &= values[1] == number && !values[2];
        for (int k = 0; k < told; k++)
            *found++ = values[VOTE + k];
    }
    return alike;
}

int board_vote(board *b, int told, int yields)
{
    moment m = {b->moment, yields, 0, 0};
    b->mine[0] = ~b->mine[1];
    b->mine[2] = 0;
    board_bring(b, VOTE + told);
    if (!is_received(b, &m))
        return ABSENT;
    return read_votes(b, b->count, told, &m);
}

int board_voted(board *b, int64_t count, int told)
{
    return read_votes(b, count, told, NULL);
}

int board_absent(const board *b, int64_t count, int rank)
{
    const line *set = set_of(b, count);
    while (rank < b->size && has_come(set + rank, count))
        rank++;
    return rank;
}

void board_largest(board *b, int64_t count, int values)
{
    const line *set = set_of(b, count);
    for (int k = 0; k < values; k++) {
        int64_t most = set[0].values[k];
        for (int64_t i = 1; i < b->size; i++)
            most = set[i].values[k] > most ? set[i].values[k] : most;
        b->found[k] = most;
    }
}

void board_gather(board *b, int64_t count, int values)
{
    const line *set = set_of(b, count);
    for (int64_t i = 0; i < b->size; i++)
        memcpy(b->found + i * values, set[i].values, sizeof(int64_t) * (size_t)values);
}

void board_sleep(board *b, int64_t count, int rank, int microseconds)
{
    line *set = set_of(b, count);
    atomic_store_explicit(&set[b->size].count, count, memory_order_seq_cst);
    int64_t last = atomic_load_explicit(&set[rank].count, memory_order_seq_cst);
    if (last != count)
        sleep_while(low_word(&set[rank].count), (int32_t)last, microseconds);
}

/* -- flags: the same order as above */

void flag_raise(flag *flags, int i)
{
    atomic_store_explicit(&flags[i].ready, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&flags[i].awaited, memory_order_seq_cst))
        wake_all(&flags[i].ready);
}

int flag_is_up(const flag *flags, int i)
{
    return atomic_load_explicit(&flags[i].ready, memory_order_acquire);
}

int flag_await(flag *flags, int i, int yields)
{
    moment m = {MOMENT_NS, yields, 0, 0};
    while (!flag_is_up(flags, i))
        if (!goes_on(&m))
            return 0;
    return 1;
}

void flag_sleep(flag *flags, int i, int microseconds)
{
    atomic_store_explicit(&flags[i].awaited, 1, memory_order_seq_cst);
    if (!atomic_load_explicit(&flags[i].ready, memory_order_seq_cst))
        sleep_while(&flags[i].ready, 0, microseconds);
}

#ifndef CORE_SOURCES
#define CORE_SOURCES ""
#endif

const char *core_sources(void)
{
    return CORE_SOURCES;
}
