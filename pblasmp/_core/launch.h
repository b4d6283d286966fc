/* SPDX-License-Identifier: Apache-2.0 */
/* A call that all ranks repeat on GPUs: one vote, and the graph that was recorded of it is queued again.
 *
 * CUDA's driver is not linked: its functions come as addresses.
 */
#ifndef PBLASMP_LAUNCH_H
#define PBLASMP_LAUNCH_H

#include "meet.h"

/* What is to be queued. */
typedef struct {
    int (*context_of)(void **context);          /* cuCtxGetCurrent */
    int (*captures)(void *stream, int *status); /* cuStreamIsCapturing */
    int (*queue)(void *graph, void *stream);    /* cuGraphLaunch */
    void *context;                              /* that must be the current one */
    void *graph;
} launch;

/* What came of it; the driver's errors follow FAILED. */
enum {
    QUEUED,
    UNFIT_NOW, /* another context is the current one, or the stream records: nothing has happened */
    LATE,      /* the vote is cast, and not over yet */
    UNLIKE,    /* it is over: not all have voted for this number, or one found a fault */
    UNREADY,   /* all have, but some have nothing recorded */
    FAILED = 1000,
};

/* Vote for the number in mine[1], telling that this rank is ready, and queue it if all are. Alone, a rank has no board. */
int launch_again(board *b, int yields, const launch *l, void *stream);

/* Queue it. */
int launch_now(const launch *l, void *stream);

#endif
