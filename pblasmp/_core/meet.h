/* SPDX-License-Identifier: Apache-2.0 */
/* Meetings of ranks that share memory: reductions, votes and flags.
 *
 * Each rank writes its own line and reads all lines. A count in the line says how many meetings the rank has come to; it
 * is stored with release after everything else and loaded with acquire, so whoever sees it also sees what the rank wrote
 * before, in its line and anywhere else. Lines are in two sets, taken in turns: a rank may be one meeting ahead of ranks
 * that still read the lines of the previous one.
 *
 * A wait is a moment here: it returns whether what it waits for came. Longer waits are the caller's, which also listens
 * for ranks that have failed.
 */
#ifndef PBLASMP_MEET_H
#define PBLASMP_MEET_H

#include "post.h"

#include <stdatomic.h>
#include <stdint.h>

enum {
    VALUES = 7,    /* that a rank may bring to a meeting */
    VOTE = 3,      /* of these make a vote: ~number, number, and whether it found a fault; the others are told with it */
    ABSENT = -1,   /* returned by a vote: some ranks have not come yet */
};

/* A cache line, which only one rank writes. The last line of a set is nobody's: its count says at which meeting ranks
 * sleep. */
typedef struct {
    _Alignas(64) _Atomic int64_t count;
    int64_t values[VALUES];
} line;

/* What one rank knows; in its own memory. */
typedef struct {
    line *lines;          /* two sets of size + 1 lines */
    int64_t *found;       /* room for VALUES values of each rank */
    int64_t count;        /* meetings that this rank has come to */
    int64_t size, rank;
    int64_t mine[VALUES]; /* what this rank brings next */
    post *post;           /* sends it to other nodes; NULL if there are none. Lines of ranks there are their messages */
    int64_t moment;       /* nanoseconds that a vote keeps the core */
} board;

/* One rank says that something is ready, others wait for it. */
typedef struct {
    _Atomic int32_t ready;
    _Atomic int32_t awaited; /* by ranks that sleep */
} flag;

/* Come to the next meeting: without values, or with the first ones of ``mine``. Who does not wait for the others may come
 * to the one after it only when they are known, by another board, to be through this one. */
void board_arrive(board *b);
void board_bring(board *b, int values);

/* Of ranks of other nodes: write the lines of those whose messages have arrived. Return whether no more are to come, and
 * all of this rank's have been sent; what goes with them has been taken, if they vote for the same as this rank. */
int board_received(board *b);

/* Receive what post_exchange has begun to, for a moment: return whether that is done, else board_received says when. */
int board_receive(board *b, int yields);

/* Come to the next meeting and wait for a moment: yield the core so many times or, if that is 0, poll for some 40
 * microseconds. Return whether all have come. */
int board_meet(board *b, int yields);

/* The same with a vote for mine[1], which tells so many of the values from mine[3] on. Return 1 if all vote for this
 * number and none found a fault; ``found`` then has what each rank tells. 0 if not, ABSENT if that is not known yet. */
int board_vote(board *b, int told, int yields);

/* Of a meeting that this rank has come to: the first rank, from ``rank`` on, that has not; their number if all have. */
int board_absent(const board *b, int64_t count, int rank);

/* Of a meeting to which all have come, until this rank comes to the next one: what board_vote returns; the largest of
 * each of so many values; all these values, rank by rank. The latter two go to ``found``. */
int board_voted(board *b, int64_t count, int told);
void board_largest(board *b, int64_t count, int values);
void board_gather(board *b, int64_t count, int values);

/* Sleep until this rank comes to the meeting, for at most so long. May return for no reason. */
void board_sleep(board *b, int64_t count, int rank, int microseconds);

/* Say that a thing is ready; wait for one, as board_meet does; look whether one is; sleep until one is. */
void flag_raise(flag *flags, int i);
int flag_await(flag *flags, int i, int yields);
int flag_is_up(const flag *flags, int i);
void flag_sleep(flag *flags, int i, int microseconds);

/* A digest of the sources that this was compiled from. */
const char *core_sources(void);

#endif
