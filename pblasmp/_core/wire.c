/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { NUMBER = sizeof(int64_t), FLAGS = MSG_DONTWAIT | MSG_NOSIGNAL };

/* Send or receive what the socket takes or has now of the next part: the number, and when sending what follows it. */
static ssize_t some(transfer *t)
{
    char *number = (char *)&t->nbytes;
    int64_t sent = t->done - NUMBER;
    struct iovec parts[2] = {{number + t->done, (size_t)-sent}, {t->data, (size_t)t->nbytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = t->receives ? 1 : 2};
    if (sent >= 0) {
        parts[0] = (struct iovec){t->data + sent, (size_t)(t->nbytes - sent)};
        message.msg_iovlen = 1;
    }
    return t->receives ? recvmsg((int)t->socket, &message, FLAGS) : sendmsg((int)t->socket, &message, FLAGS);
}

static int failed(transfer *t, int error)
{
    t->under_way = 0;
    return error;
}

static int go_on(transfer *t)
{
    while (t->under_way) {
        ssize_t moved = some(t);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : failed(t, errno);
        if (moved == 0)
            return failed(t, ECONNRESET);
        t->done += moved;
        if (t->done < NUMBER)
            continue;
        if (t->nbytes < 0 || t->nbytes > t->most)
            return failed(t, EMSGSIZE);
        t->under_way = t->done < NUMBER + t->nbytes;
    }
    return 0;
}

static int64_t socket_of(intptr_t comm, int rank)
{
    return ((const int64_t *)comm)[rank];
}

int wire_isend(const void *data, int count, intptr_t type, int rank, int tag, intptr_t comm, void *request)
{
    transfer *t = request;
    (void)type, (void)tag;
    *t = (transfer){1, socket_of(comm, rank), 0, 0, count, count, (char *)data};
    return go_on(t);
}

int wire_irecv(void *data, int count, intptr_t type, int rank, int tag, intptr_t comm, void *request)
{
    transfer *t = request;
    (void)type, (void)tag;
    *t = (transfer){1, socket_of(comm, rank), 1, 0, 0, count, data};
    return 0;
}

int wire_test(void *request, int *done, void *status)
{
    transfer *t = request;
    (void)status;
    int error = go_on(t);
    *done = !t->under_way;
    return error;
}
