// SPDX-License-Identifier: Apache-2.0
// The client: `client ADDRESS PYTHON ARGUMENT...` runs `PYTHON ARGUMENT...` as a fork of the server. In C, since a
// Python that only waits takes 20 ms to start.

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST = 250 };  // files
static const int FORWARDED[] = {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM};
enum { SIGNALS = sizeof FORWARDED / sizeof *FORWARDED };
static int server;

static void pass_on(int number)
{
    const int before = errno;
    const char byte = (char)number;
    send(server, &byte, 1, MSG_NOSIGNAL);
    errno = before;
}

// The files that a new program would inherit.
static int inherited(int *files)
{
    int count = 0;
    DIR *all = opendir("/proc/self/fd");
    for (struct dirent *each; all && (each = readdir(all)) && count < MOST;) {
        const int fd = atoi(each->d_name);
        const int flags = each->d_name[0] == '.' || fd == dirfd(all) ? -1 : fcntl(fd, F_GETFD);
        if (flags >= 0 && !(flags & FD_CLOEXEC)) files[count++] = fd;
    }
    if (all) closedir(all);
    return count;
}

// Tell the server what makes the process; return whether it has forked.
static int ask(const char *address, char **argv, const int *files, int count)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    strncpy(name.sun_path, address, sizeof name.sun_path - 1);
    server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (server < 0 || connect(server, (struct sockaddr *)&name, sizeof name)) return 0;

    char *text, *directory = get_current_dir_name();
    size_t length;
    FILE *order = open_memstream(&text, &length);
    int arguments = 0;
    while (argv[arguments]) arguments++;
    fprintf(order, "%d", arguments);
    for (int i = 0; i < count; i++) fprintf(order, " %d", files[i]);
    fprintf(order, "%c%s", 0, directory ? directory : "/");
    for (char **each = argv; *each; each++) fprintf(order, "%c%s", 0, *each);
    for (char **each = environ; *each; each++) fprintf(order, "%c%s", 0, *each);
    fclose(order);

    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(MOST * sizeof(int))];
    } rights = {.header = {CMSG_LEN(count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    memcpy(CMSG_DATA(&rights.header), files, count * sizeof(int));
    struct iovec data = {text, length};
    const struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1,
        .msg_control = count ? &rights : NULL, .msg_controllen = count ? CMSG_SPACE(count * sizeof(int)) : 0};
    char answer;
    return sendmsg(server, &message, MSG_NOSIGNAL) >= 0 && recv(server, &answer, 1, 0) == 1 && answer == 'f';
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    sigset_t forwarded;
    sigemptyset(&forwarded);
    for (int i = 0; i < SIGNALS; i++) sigaddset(&forwarded, FORWARDED[i]);
    sigprocmask(SIG_BLOCK, &forwarded, NULL);  // until there is somebody to pass them on to
    int files[MOST];
    const int count = inherited(files);
    if (!ask(argv[1], argv + 3, files, count)) {
        sigprocmask(SIG_UNBLOCK, &forwarded, NULL);
        execv(argv[2], argv + 2);
        return 127;
    }
    for (int i = 0; i < SIGNALS; i++) {
        struct sigaction action;
        sigaction(FORWARDED[i], NULL, &action);
        if (action.sa_handler == SIG_IGN) continue;
        action = (struct sigaction){.sa_handler = pass_on, .sa_flags = SA_RESTART};
        sigaction(FORWARDED[i], &action, NULL);
    }
    sigprocmask(SIG_UNBLOCK, &forwarded, NULL);
    for (int i = 0; i < count; i++) close(files[i]);
    int status;
    if (recv(server, &status, sizeof status, 0) != sizeof status) status = 1;  // the server is gone, its forks with it
    if (status < 0) {
        signal(-status, SIG_DFL);
        kill(getpid(), -status);
    }
    _exit(status);
}
