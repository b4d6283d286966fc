/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between nodes: each rank sends one to each other node, what it brings to a meeting and what goes with that.
 *
 * Who receives it writes its line on the board that the ranks of the node share. So a vote takes one exchange, whatever
 * travels with it. Which rank sends to which, and the room for messages, are Python's: see ``comm/post.py``.
 *
 * MPI is not linked: its functions come as addresses. Its handles are integers or pointers; either fits into one that is
 * passed in a register. A request stays in the object that mpi4py has for it, so that Python can wait for it, too.
 */
#ifndef PBLASMP_POST_H
#define PBLASMP_POST_H

#include <stdint.h>

/* Room for what goes to a rank or comes from it: a head, and what goes with that. */
typedef struct {
    int64_t rank, node;
    int64_t *head;    /* HEAD integers: the values, and how many bytes follow */
    void *request;    /* where MPI's handle is */
    int64_t awaited;  /* the message is under way */
    int64_t begun;    /* messages that have begun: Python counts them, and begins at 0 again */
} sheet;

/* What goes with a message. All ranks know, without being told, what each of them sends. */
typedef struct {
    void *of; /* NULL: nothing */
    int64_t (*pack)(const void *of, int64_t node, char *to);     /* for a node; NULL: only count the bytes */
    int64_t (*unpack)(void *of, int64_t rank, char *from);       /* what a rank has sent to this node; likewise */
    int is_for_all; /* all nodes get the same */
} parcel;

typedef struct post {
    int (*isend)(const void *data, int count, intptr_t type, int rank, int tag, intptr_t comm, void *request);
    int (*irecv)(void *data, int count, intptr_t type, int rank, int tag, intptr_t comm, void *request);
    int (*test)(void *request, int *done, void *status);
    intptr_t byte, comm;
    int64_t tag, most; /* bytes of a message, at most */
    sheet *letters, *boxes;
    int64_t sends, receives; /* how many of each */
    int64_t error;     /* of MPI; 0: none */
    int64_t meetings, exchanges, sent_bytes; /* since Python set them to 0 */
    /* The rest is not Python's. */
    parcel parcel;     /* goes with what is sent next */
    parcel carried;    /* goes with what is under way */
    int64_t number;    /* that this rank votes for */
    int is_vote;
} post;

enum { HEAD = 8 };

/* Send other nodes the values that this rank brings to a meeting, VALUES of them, with ``parcel``. */
void post_send(post *p, const int64_t *values);

/* Send and receive what ``parcel`` says, and nothing else. */
void post_exchange(post *p);

/* Take what has arrived: what ranks bring goes to ``deliver``; what goes with it is unpacked if they vote for the same as
 * this rank. Return whether everything has been received and sent. */
typedef void deliver(void *to, int rank, const int64_t *values);
int post_is_over(post *p, deliver *deliver, void *to);

#endif
