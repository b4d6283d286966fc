# SPDX-License-Identifier: Apache-2.0
"""The client: ``python -I -S client.py ADDRESS ARGUMENT...`` runs ``python ARGUMENT...`` as a fork of the server.

It imports what is built in, and nothing else.
"""

import sys

FORKED, REFUSED = b"f", b"r"
LOST = (1).to_bytes(4, sys.byteorder)  # the status where the server is gone, and its forks with it
_FORWARDED = (1, 2, 3, 10, 12, 15)  # HUP, INT, QUIT, USR1, USR2, TERM


def main(address: str, argv: list[str]) -> None:
    import _signal
    import _socket
    import marshal
    import posix

    _signal.pthread_sigmask(_signal.SIG_BLOCK, _FORWARDED)  # until there is somebody to pass them on to
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        server.connect(address)
        files = [fd for fd in map(int, posix.listdir("/proc/self/fd")) if _inherited(posix, fd)]
        order = marshal.dumps((argv, posix.getcwd(), dict(posix.environ), files))
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in files)
        server.sendmsg([order], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        answer = server.recv(1)
    except OSError:
        answer = REFUSED
    if answer != FORKED:
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _FORWARDED)
        posix.execv(sys.executable, [sys.executable, *argv])
    for number in _FORWARDED:
        if _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, lambda number, frame: server.send(bytes([number])))
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _FORWARDED)
    for fd in files:
        posix.close(fd)
    status = int.from_bytes(server.recv(4) or LOST, sys.byteorder, signed=True)
    if status < 0:
        if -status in _FORWARDED:
            _signal.signal(-status, _signal.SIG_DFL)
        posix.kill(posix.getpid(), -status)
    posix._exit(status)


def _inherited(posix, fd: int) -> bool:
    try:
        return posix.get_inheritable(fd)
    except OSError:  # of the listing itself
        return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
