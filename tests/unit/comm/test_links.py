# SPDX-License-Identifier: Apache-2.0
"""Sockets between nodes: who is let in, and the messages that the compiled core sends by them."""

from __future__ import annotations

import ctypes
import errno
import socket
import time
from contextlib import suppress

import numpy as np
import pytest

from pblasmp import _core
from pblasmp.comm import links
from pblasmp.errors import ClosedError
from tests.helpers.threads import on_ranks

pytestmark = pytest.mark.skipif(_core.load() is None, reason="there is no core")

LARGE = 3 << 20  # more than a socket takes at once


class End:
    """One of two ranks: rank 0 has the link to rank 1, and the reverse."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.core, self.peer = _core.load(), 1 - rank
        self.links = links.Links(self.core, 2, {self.peer: link})
        *_, self.ranks, _ = self.links.for_core()

    def begin(self, function, data):
        request = self.links.request()
        begin = getattr(self.core, function)
        kinds = (
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        given = data.ctypes.data, data.nbytes, 0, self.peer, 0, self.ranks, request.address
        return request, begin(*(kind(each) for kind, each in zip(kinds, given, strict=True)))

    def send(self, data):
        return self.begin("wire_isend", data)

    def receive(self, room):
        return self.begin("wire_irecv", room)


@pytest.fixture
def ends():
    pair = [End(rank, link) for rank, link in enumerate(socket.socketpair())]
    yield pair
    for each in pair:
        each.links.close()


def numbers(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def test_messages_arrive_whole_and_in_order_whatever_a_socket_takes_at_once(ends):
    sizes = [1, 64, 0, LARGE, 7, LARGE + 1]
    for turn, size in enumerate(sizes):
        messages = [numbers(size, turn), numbers(size // 2, turn + 50)]
        rooms = [np.zeros(size + 9, np.uint8) for _ in ends]
        requests = [each.receive(room) for each, room in zip(ends, rooms, strict=True)]
        requests += [each.send(message) for each, message in zip(ends, messages, strict=True)]
        assert [code for _, code in requests] == [0] * 4
        left = [request for request, _ in requests]
        if size >= LARGE:
            assert all(left), "none of them fits into a socket"
        while left:
            left = [request for request in left if not request.Test()]
        for room, message in zip(rooms, messages[::-1], strict=True):
            assert np.array_equal(room[: message.size], message)
            assert not room[message.size :].any(), "more was written than has come"


def test_a_message_that_has_not_come_is_not_waited_for(ends):
    request, _ = ends[0].receive(np.zeros(4, np.uint8))
    assert not request.Test()
    assert request
    request.Cancel()
    assert not request


def test_a_message_without_room_is_an_error(ends):
    room = np.zeros(8, np.uint8)
    request, _ = ends[1].receive(room[:4])
    ends[0].send(numbers(5))
    with pytest.raises(ClosedError, match="Message too long"):
        request.Test()
    assert not request, "nothing is under way any more"
    assert not room.any()


@pytest.mark.parametrize("written", [0, 3, 8, 10])  # nothing, a part of its size, its size, a part of it
def test_a_rank_that_ends_is_an_error(written):
    link, other = socket.socketpair()
    mine = End(0, link)
    request, _ = mine.receive(np.zeros(16, np.uint8))
    other.sendall((b"\x05" + bytes(12))[:written])
    assert not request.Test()
    other.close()
    with pytest.raises(ClosedError, match="a rank of another node does not answer: Connection reset"):
        request.Test()
    _, code = mine.send(numbers(5))
    assert code == errno.EPIPE
    mine.links.close()


def test_closed_links_send_nothing(ends):
    ends[0].links.close()
    assert ends[0].send(numbers(5))[1] == errno.EBADF


def partners(comm):
    return {rank for rank in range(comm.size) if rank != comm.rank}


def test_all_pairs_are_connected_and_nothing_listens_any_more(monkeypatch):
    monkeypatch.setattr(links, "addresses_of_host", lambda: ["127.0.0.2", "127.0.0.1"])
    made = []
    listening = links.listening
    monkeypatch.setattr(links, "listening", lambda *given: made.append(listening(*given)) or made[-1])

    def work(comm):
        found = links.connect(comm, partners(comm))
        for rank, link in found.items():
            link.sendall(bytes([comm.rank, rank]))
        heard = {rank: tuple(link.recv(2)) for rank, link in found.items()}
        for link in found.values():
            link.close()
        return heard == {rank: (rank, comm.rank) for rank in partners(comm)}

    assert on_ranks(4, work) == [True] * 4
    assert [len(each) for each in made] == [2] * 4
    assert all(each.fileno() < 0 for sockets in made for each in sockets)


def test_ranks_that_need_no_links_get_none():
    assert on_ranks(2, lambda comm: links.connect(comm, set())) == [{}, {}]


def test_the_next_place_is_tried_if_nobody_or_another_one_is_at_the_first():
    def work(comm):
        with (
            socket.create_server(("127.0.0.1", 0)) as nobody,
            socket.create_server(("127.0.0.1", 0)) as other,
        ):
            gone, places = nobody.getsockname(), comm.allgather(other.getsockname())
            nobody.close()
            if comm.rank == 0:
                hello, link = links._let_in([other], [b"x" * 32], time.monotonic() + 5)
                with link:
                    return hello == b"x" * 32
            with socket.create_server(("127.0.0.1", 0)) as mute:
                mute.settimeout(0)
                candidates = [gone, mute.getsockname(), places[0]]
                monkey = time.monotonic() + 5

                def answers() -> None:
                    with suppress(OSError):
                        mute.settimeout(5)
                        link, _ = mute.accept()
                        link.recv(32)
                        link.sendall(b"y" * 32)
                        link.close()

                import threading

                thread = threading.Thread(target=answers)
                thread.start()
                with links._reached(candidates, b"x" * 32, monkey) as link:
                    thread.join()
                    return link.getpeername() == places[0]

    assert on_ranks(2, work) == [True, True]


def test_who_does_not_know_the_key_is_not_let_in():
    with socket.create_server(("127.0.0.1", 0)) as door:
        strangers = [socket.create_connection(door.getsockname()) for _ in range(3)]
        for each, shown in zip(strangers, (b"z" * 32, b"x" * 31 + b"y", b"x" * 32), strict=True):
            each.sendall(shown)
        hello, link = links._let_in([door], [b"x" * 32], time.monotonic() + 5)
        assert hello == b"x" * 32
        assert link.getpeername() == strangers[2].getsockname()
        assert [each.recv(32) for each in strangers] == [b"", b"", b"x" * 32]
        for each in (link, *strangers):
            each.close()


@pytest.mark.parametrize("fault", ["no address", "not reached"])
def test_one_rank_that_cannot_connect_leaves_none_connected(monkeypatch, fault):
    monkeypatch.setattr(links, "_CONNECT_SECONDS", 0.5)

    def refuses(*_):
        raise OSError("the network is down")

    monkeypatch.setattr(
        links, *{"no address": ("listening", refuses), "not reached": ("_reached", refuses)}[fault]
    )
    opened = []
    create = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda *given: opened.append(create(*given)) or opened[-1]
    )
    assert on_ranks(3, lambda comm: links.connect(comm, partners(comm))) == [None] * 3
    assert all(each.fileno() < 0 for each in opened)


def test_addresses_that_other_hosts_reach(monkeypatch):
    """A host's own name is often resolved to a loopback address, or not at all."""
    known = {"a-host": "127.0.1.1", "told": "10.0.0.7", "local": "127.0.0.1"}

    def getaddrinfo(name, *_, **__):
        if name not in known:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (known[name], 0))]

    interfaces = {"127.0.0.1": "lo", "169.254.3.4": "usb0", "192.168.3.4": "eth0", "10.1.1.1": "ib0"}
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(links, "interfaces", lambda: interfaces)
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    own = ["192.168.3.4", "10.1.1.1"]
    for told, expected in {"": own, "told": ["10.0.0.7", *own], "local": own, "unknown": own}.items():
        monkeypatch.setenv("MASTER_ADDR", told)
        assert links.addresses_of_host() == [*expected, "127.0.0.1"], told
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1,ib0")
    assert links.addresses_of_host() == [*own[::-1], "127.0.0.1"]
    monkeypatch.setattr(links, "interfaces", dict)  # not Linux
    known["a-host"] = "192.168.3.9"
    assert links.addresses_of_host() == ["192.168.3.9", "127.0.0.1"]
    sockets = links.listening(["203.0.113.9", "127.0.0.1"], 2)  # the first one is another host's
    assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1"]
    for each in sockets:
        each.close()
