/* SPDX-License-Identifier: Apache-2.0 */
/* Messages over sockets, for ranks of several nodes that have no MPI: what post.h calls in the place of MPI's functions.
 *
 * Python connects the sockets: see ``comm/links.py``. Between two ranks at most one message is under way in each
 * direction. A number goes before each: how many bytes it has.
 */
#ifndef PBLASMP_WIRE_H
#define PBLASMP_WIRE_H

#include <stdint.h>

/* What stands for MPI's request. */
typedef struct {
    int64_t under_way, socket, receives;
    int64_t done;   /* bytes, those of the number before the message among them */
    int64_t nbytes; /* of the message, once that is known */
    int64_t most;   /* that there is room for */
    char *data;
} transfer;

/* As MPI's functions, but ``comm`` is where the ranks' sockets are, as int64_t; they return a number of errno.h. None
 * waits: a message that is not through goes on when it is tested. Of a message that fails nothing is under way any more. */
int wire_isend(const void *data, int count, intptr_t type, int rank, int tag, intptr_t comm, void *request);
int wire_irecv(void *data, int count, intptr_t type, int rank, int tag, intptr_t comm, void *request);
int wire_test(void *request, int *done, void *status);

#endif
