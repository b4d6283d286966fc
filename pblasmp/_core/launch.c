/* SPDX-License-Identifier: Apache-2.0 */
#include "launch.h"

#include <string.h>

int launch_now(const launch *l, void *stream)
{
    int error = l->queue(l->graph, stream);
    return error ? FAILED + error : QUEUED;
}

int launch_again(board *b, int yields, const launch *l, void *stream)
{
    void *context;
    int status = 0;
    if (l->context_of(&context) || context != l->context || l->captures(stream, &status) || status)
        return UNFIT_NOW;
    if (b != NULL) {
        const double ready = 1.0;
        memcpy(&b->mine[VOTE], &ready, sizeof ready);
        int alike = board_vote(b, 1, yields);
        if (alike != 1)
            return alike == ABSENT ? LATE : UNLIKE;
        for (int64_t i = 0; i < b->size; i++)
            if (b->found[i] == 0)
                return UNREADY;
    }
    return launch_now(l, stream);
}
