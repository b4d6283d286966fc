# SPDX-License-Identifier: Apache-2.0
"""PyTorch's default process group of ranks that MPI has started: where they meet, and at which address."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Agreement, Communicator, Running, interfaces, machines_of
from ..errors import ArgumentError, UnsupportedError

_LOOPBACK = "127.0.0.1"
_REACH_SECONDS = 3.0  # of an attempt to connect: a firewall may drop it without an answer

Place = tuple[str, int]


def start(comm: Communicator, call: str) -> None:
    """Make PyTorch's default process group of the ranks of ``comm``. Collective over it.

    Raises:
        UnsupportedError: the ranks do not reach rank 0; raised on every rank.
        ArgumentError: GLOO_SOCKET_IFNAME names no interface; raised on every rank.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    with Running(comm, call):
        store = dist.HashStore() if comm.size == 1 else _store(comm, call)
        with Agreement(comm, call):
            _check_interfaces()
        with Agreement(comm, call, blocks=True):
            dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)


def _store(comm: Communicator, call: str) -> Any:
    """Return a store that listens at one address only, which every rank reaches. Collective over ``comm``."""
    one_node = len(machines_of(comm.locations())) == 1
    with Agreement(comm, call):
        sockets = [] if comm.rank else _listening([_LOOPBACK] if one_node else _addresses(), comm.size)
    try:
        places: list[Place] = comm.bcast([each.getsockname()[:2] for each in sockets])
        number, mine = _reached(comm, places)
        with Agreement(comm, call):
            if number is None:
                tried = ", ".join(host for host, _ in places)
                raise UnsupportedError(
                    f"{call}: not every rank reaches rank 0 at {tried}: set MASTER_ADDR to an address of its host, or "
                    "make PyTorch's process group yourself, by torch.distributed.init_process_group"
                )
            if not one_node:
                _show_to_gloo(mine)
        assert number is not None
        host, port = places[number]
        store = None
        for turn in (True, False):  # rank 0 first: the others wait for it
            with Agreement(comm, call):
                if turn is (comm.rank == 0):
                    how = {"master_listen_fd": sockets[number].detach()} if turn else {}
                    store = dist.TCPStore(host, port, comm.size, turn, wait_for_workers=False, **how)
        return store
    finally:
        for each in sockets:
            each.close()


def _reached(comm: Communicator, places: list[Place]) -> tuple[int | None, str]:
    """Return which of rank 0's places every rank reaches first, and from which of its addresses this rank does.

    Collective over ``comm``.
    """
    for number, place in enumerate(places):
        mine = place[0] if comm.rank == 0 else ""
        if comm.rank:
            with suppress(OSError), socket.create_connection(place, _REACH_SECONDS) as link:
                mine = link.getsockname()[0]
        if all(comm.allgather(mine)):
            return number, mine
    return None, ""


def _listening(addresses: list[str], ranks: int) -> list[socket.socket]:
    """Return sockets that listen at those of the addresses that this host has. Local.

    Raises:
        OSError: it has none of them.
    """
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


def _addresses() -> list[str]:
    """Return addresses at which others may reach this host, the most likely first. Local."""
    # Many hosts resolve their own name to a loopback address, or wait long for someone who knows it.
    own = list(interfaces()) or _resolved(socket.gethostname())
    found = [*_resolved(os.environ.get("MASTER_ADDR", "")), *own]
    far = [each for each in found if not (ip_address(each).is_loopback or ip_address(each).is_link_local)]
    return [*dict.fromkeys(far), _LOOPBACK]  # hosts may be parts of one machine without a network


def _resolved(name: str) -> list[str]:
    """Return the addresses of a host; none if nobody knows it. Local."""
    with suppress(OSError, UnicodeError):
        if name:
            return [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []


def _check_interfaces() -> None:
    """Raise ArgumentError unless gloo can use what GLOO_SOCKET_IFNAME names, if anything. Local."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        for name in filter(None, given.split(",")):
            dist.ProcessGroupGloo.create_device(interface=name)
    except RuntimeError as error:
        raise ArgumentError(f"GLOO_SOCKET_IFNAME: gloo cannot use {given!r}: {error}") from None


def _show_to_gloo(mine: str) -> None:
    """Let gloo use the interface of an address that is known to work, unless the user has chosen one. Local.

    By itself it tells the other ranks the address of the host's own name.
    """
    name = interfaces().get(mine)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
