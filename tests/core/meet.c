/* SPDX-License-Identifier: Apache-2.0 */
/* The meetings of pblasmp/_core/meet.c: ranks are threads, for sanitizers, or processes. Usage: meet RANKS TURNS [fork]
 *
 * In each turn every rank writes into memory that the others read after a vote or a flag. Whether they see it depends on
 * the order of memory alone: the thread sanitizer reports a race if acquire or release is missing. */
#define _GNU_SOURCE
#include "../../pblasmp/_core/meet.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 16, YIELDS = 3, NAP = 1000000, LONG = 60 };

static int ranks, turns;
/* Shared by the ranks, the latter two for turns of both parities: */
static line *lines[2]; /* of a board to vote and one to meet, as in the library */
static flag *flags;    /* of each rank */
static struct { int64_t value[8]; } *written; /* by each rank */

static void expect(int right, const char *what, int64_t rank, int turn)
{
    if (!right) {
        fprintf(stderr, "rank %d, turn %d: %s\n", (int)rank, turn, what);
        exit(1);
    }
}

static void all_come(board *b, int sleeps)
{
    for (int from = 0; (from = board_absent(b, b->count, from)) < ranks;)
        if (sleeps)
            board_sleep(b, b->count, from, NAP);
        else
            sched_yield();
}

/* What a rank brings to a vote: one rank has another number, or found a fault, in some turns. */
static int unlike(int turn) { return turn % 5 == 3; }
static int faulty(int turn) { return turn % 5 == 4; }

static void vote(board *b, int turn)
{
    int last = b->rank == ranks - 1, agreed;
    int64_t number = INT64_MIN + turn;
    for (int k = 0; k < 4; k++)
        b->mine[VOTE + k] = 1000 * turn + 10 * b->rank + k;
    b->mine[1] = number + (last && unlike(turn));
    if (last && faulty(turn)) { /* as an agreement votes that looked closer */
        b->mine[0] = ~number;
        b->mine[2] = 1;
        board_bring(b, VOTE);
        agreed = ABSENT;
    } else {
        agreed = board_vote(b, 4, turn % 2 ? YIELDS : 0);
    }
    if (agreed == ABSENT) {
        all_come(b, turn % 3);
        agreed = board_voted(b, b->count, 4);
    }
    expect(agreed == !(unlike(turn) || faulty(turn)), "the vote", b->rank, turn);
    for (int i = 0; agreed && i < 4 * ranks; i++)
        expect(b->found[i] == 1000 * turn + 10 * (i / 4) + i % 4, "what is told", b->rank, turn);
    if (faulty(turn)) {
        board_largest(b, b->count, VOTE);
        expect(b->found[0] == ~number && b->found[1] == number && b->found[2] == 1, "a fault", b->rank, turn);
    }
}

static void meet(board *b, int turn)
{
    if (turn % 2) {
        if (!board_meet(b, YIELDS))
            all_come(b, 1);
        return;
    }
    for (int k = 0; k < VALUES; k++)
        b->mine[k] = k % 2 ? turn - b->rank : b->rank - turn;
    board_bring(b, VALUES);
    all_come(b, turn % 3);
    if (turn % 4) {
        board_largest(b, b->count, VALUES);
        for (int k = 0; k < VALUES; k++)
            expect(b->found[k] == (k % 2 ? turn : ranks - 1 - turn), "the largest", b->rank, turn);
    } else {
        board_gather(b, b->count, 2);
        for (int i = 0; i < ranks; i++)
            expect(b->found[2 * i] == i - turn && b->found[2 * i + 1] == turn - i, "each one's", b->rank, turn);
    }
}

/* Wait for the previous rank's flag, then raise one's own: what all before have written is visible along the chain. */
static void chain(board *b, int turn)
{
    flag *set = flags + turn % 2 * MOST;
    if (b->rank) {
        int before = (int)b->rank - 1;
        if (!flag_await(set, before, turn % 3 ? YIELDS : 0))
            while (!flag_is_up(set, before))
                flag_sleep(set, before, NAP);
        for (int i = 0; i < b->rank; i++)
            expect(written[i].value[4 + turn % 2] == turn + i, "written before a flag", b->rank, turn);
    }
    written[b->rank].value[4 + turn % 2] = turn + b->rank;
    flag_raise(set, (int)b->rank);
}

static void *run(void *argument)
{
    int64_t found[VALUES * MOST];
    board b = {.lines = lines[0], .found = found, .size = ranks, .rank = (int64_t)(intptr_t)argument, .moment = 40000};
    board other = b;
    other.lines = lines[1];
    for (int turn = 0; turn < turns; turn++) {
        written[b.rank].value[turn % 2] = turn * b.rank;
        memset(flags + turn % 2 * MOST + b.rank, 0, sizeof(flag)); /* nobody looks before the vote */
        vote(&b, turn);
        for (int i = 0; i < ranks; i++)
            expect(written[i].value[turn % 2] == turn * i, "written before a vote", b.rank, turn);
        if (turn % 7 == 0)
            chain(&b, turn);
        if (turn % 3 == 0)
            meet(&other, turn);
        else if (turn % 3 == 1 && b.rank % 2) /* it needs nothing that the others have written */
            board_arrive(&other);
        else if (turn % 3 == 1 && !board_meet(&other, 0))
            all_come(&other, 1);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    ranks = count > 2 ? atoi(arguments[1]) : 0;
    turns = count > 2 ? atoi(arguments[2]) : 0;
    if (ranks < 1 || ranks > MOST || turns < 1)
        return fprintf(stderr, "usage: meet RANKS TURNS [fork]\n"), 2;
    alarm(LONG);
    size_t set = sizeof(line) * 2 * (MOST + 1), bytes = 2 * set, more = sizeof(*written) * MOST;
    size_t rest = sizeof(flag) * 2 * MOST;
    char *memory = mmap(NULL, bytes + more + rest, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return perror("mmap"), 2;
    lines[0] = (line *)memory;
    lines[1] = (line *)(memory + set);
    written = (void *)(memory + bytes);
    flags = (flag *)(memory + bytes + more);
    int bad = 0;
    if (count > 3) {
        for (intptr_t rank = 0; rank < ranks; rank++)
            if (fork() == 0) {
                run((void *)rank);
                _exit(0);
            }
        for (int status; wait(&status) > 0;)
            bad |= status;
    } else {
        pthread_t threads[MOST];
        for (intptr_t rank = 0; rank < ranks; rank++)
            pthread_create(&threads[rank], NULL, run, (void *)rank);
        for (int rank = 0; rank < ranks; rank++)
            pthread_join(threads[rank], NULL);
    }
    if (!bad)
        printf("%d ranks, %d turns\n", ranks, turns);
    return bad != 0;
}
