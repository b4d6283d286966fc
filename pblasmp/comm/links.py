# SPDX-License-Identifier: Apache-2.0
"""Connections between hosts: where a host is reached, and sockets by which the compiled core sends messages.

PyTorch's process groups have them between nodes. gloo wakes threads for each message, and cannot be polled: a vote by
it takes ten times as long as one by these. See ``_core/wire.h``.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import select
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from typing import Any

import numpy as np

from .. import _core
from ..errors import ClosedError
from .communicator import Communicator
from .locations import interfaces

Place = tuple[str, int]

LOOPBACK = "127.0.0.1"
REACH_SECONDS = 3.0  # of an attempt to connect: a firewall may drop it without an answer
_KEY_BYTES = 16
_HELLO_BYTES = _KEY_BYTES + 16
_CONNECT_SECONDS = 10.0  # until all ranks are connected
GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"


def addresses_of_host() -> list[str]:
    """Return addresses at which others may reach this host, the most likely first. Local."""
    # Many hosts resolve their own name to a loopback address, or wait long for someone who knows it.
    there, named = interfaces(), os.environ.get(GLOO_INTERFACES, "").split(",")
    own = sorted(there, key=lambda each: there[each] not in named) or _resolved(socket.gethostname())
    found = [*_resolved(os.environ.get("MASTER_ADDR", "")), *own]
    far = [each for each in found if not (ip_address(each).is_loopback or ip_address(each).is_link_local)]
    return [*dict.fromkeys(far), LOOPBACK]  # hosts may be parts of one machine without a network


def _resolved(name: str) -> list[str]:
    """Return the addresses of a host; none if nobody knows it. Local."""
    with suppress(OSError, UnicodeError):
        if name:
            return [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []


def listening(addresses: Iterable[str], ranks: int) -> list[socket.socket]:
    """Return sockets that listen at those of the addresses that this host has; OSError if it has none. Local."""
    found = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            found.append(socket.create_server((address, 0), family=family, backlog=max(128, ranks)))
        except OSError as error:  # MASTER_ADDR may be another host's
            fault = error
    if not found:
        raise fault
    return found


class Links:
    """Sockets to ranks of other nodes, by rank, connected. Local."""

    def __init__(self, core: _core.Core, size: int, sockets: dict[int, socket.socket]) -> None:
        self._core, self._sockets = core, sockets
        self._numbers = np.full(size, -1, np.int64)
        for rank, each in sockets.items():
            each.setblocking(False)
            self._numbers[rank] = each.fileno()

    def for_core(self) -> tuple[int | None, ...]:
        """Return what the core sends messages by: three functions, and what they take for a type, ranks and a tag."""
        functions: tuple[Any, ...] = self._core.wire_isend, self._core.wire_irecv, self._core.wire_test
        return (
            *(ctypes.cast(each, ctypes.c_void_p).value for each in functions),
            0,
            self._numbers.ctypes.data,
            0,
        )

    def request(self) -> SocketMessage:
        """Return a request of no message yet."""
        return SocketMessage(self._core, self)

    def close(self) -> None:
        """Close the sockets; messages fail from now on."""
        self._numbers[:] = -1
        for each in self._sockets.values():
            each.close()

    def __del__(self) -> None:
        self.close()  # of a context that broke, or was dropped


class SocketMessage:
    """A message of the core, with the interface of mpi4py's requests. Local."""

    def __init__(self, core: _core.Core, links: Links) -> None:
        self._core, self._links = core, links  # which stay open as long as it may be under way
        self._state, self._done = _core.TransferState(), ctypes.c_int()
        self.address = ctypes.addressof(self._state)

    def __bool__(self) -> bool:
        return bool(self._state.under_way)

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether it is done."""
        code = self._core.wire_test(ctypes.c_void_p(self.address), ctypes.byref(self._done), None)
        if code:
            raise failure(code)
        return bool(self._done)

    def Cancel(self) -> None:  # noqa: N802
        """Receive nothing any more."""
        self._state.under_way = 0


def failure(code: int) -> ClosedError:
    """Return the error that a number of errno.h stands for. Local."""
    return ClosedError(f"a rank of another node does not answer: {os.strerror(code)}")


def connect(comm: Communicator, peers: Collection[int]) -> dict[int, socket.socket] | None:
    """Return sockets to these ranks, which connect to this one, too; None if a rank cannot. Collective over ``comm``.

    Who connects shows a key that only the ranks know, and nobody else is let in. Nothing listens afterwards.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    sockets: list[socket.socket] = []
    with suppress(OSError):
        sockets = listening(addresses_of_host(), comm.size)
    places: list[list[Place]] = comm.allgather([each.getsockname()[:2] for each in sockets])
    key = comm.bcast(secrets.token_bytes(_KEY_BYTES))
    found: dict[int, socket.socket] = {}
    with suppress(OSError):  # whoever cannot go on tells so below
        for rank in sorted(peers):
            if rank < comm.rank:
                found[rank] = _reached(places[rank], _hello(key, comm.rank, rank), deadline)
        waiting = {_hello(key, rank, comm.rank): rank for rank in peers if rank > comm.rank}
        while waiting:
            hello, link = _let_in(sockets, waiting, deadline)
            found[waiting.pop(hello)] = link
        for each in found.values():
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for each in sockets:
        each.close()
    if not all(comm.allgather(len(found) == len(peers))):
        for each in found.values():
            each.close()
        return None
    return found


def _hello(key: bytes, of: int, to: int) -> bytes:
    """Return what a rank shows another one, which repeats it."""
    return key + of.to_bytes(8, "big") + to.to_bytes(8, "big")


def _left(deadline: float) -> float:
    """Return how many seconds are left; raise TimeoutError if none are."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("the other ranks do not connect")
    return left


def _reached(places: Sequence[Place], hello: bytes, deadline: float) -> socket.socket:
    """Return a connection to the rank at one of these places, or raise OSError. Local."""
    for place in places:
        with suppress(OSError), ExitStack() as closing:
            link = socket.create_connection(place, min(REACH_SECONDS, _left(deadline)))
            closing.callback(link.close)
            link.settimeout(_left(deadline))
            link.sendall(hello)
            if link.recv(len(hello), socket.MSG_WAITALL) == hello:  # another rank may have this address, too
                closing.pop_all()
                return link
    raise ConnectionError("a rank of another node is not reached")


def _let_in(
    sockets: Sequence[socket.socket], expected: Collection[bytes], deadline: float
) -> tuple[bytes, socket.socket]:
    """Return what an expected rank has shown, and the connection to it; OSError if nobody has come in time. Local."""
    while True:
        for each in select.select(sockets, [], [], _left(deadline))[0]:
            with suppress(OSError), ExitStack() as closing:
                link, _ = each.accept()
                closing.callback(link.close)
                link.settimeout(min(REACH_SECONDS, _left(deadline)))
                shown = link.recv(_HELLO_BYTES, socket.MSG_WAITALL)
                for hello in expected:
                    if hmac.compare_digest(shown, hello):
                        link.sendall(hello)
                        closing.pop_all()
                        return hello, link
