# SPDX-License-Identifier: Apache-2.0
"""Grids of a ScaLAPACK program: which of pblasmp's they share, and when these are closed (serve.py)."""

import ctypes
from types import SimpleNamespace
from unittest import mock

from pblasmp.preload import serve


def serving(calls, ranks):
    """A server of a program whose contexts have 2 x 1 processes, and what it calls."""
    server = object.__new__(serve.Server)
    server.grids, server._shared, server._known, server._closed = {}, {}, {}, set()
    server._frozen = False
    server.engine = "host"
    undefined = -32766
    server.mpi = SimpleNamespace(
        Comm=SimpleNamespace(f2py=lambda handle: handle), UNDEFINED=undefined, Is_initialized=lambda: False
    )

    def shape(_, nprow, npcol, *place):
        for room, value in zip((nprow, npcol, *place), (2, 1, 0, 0), strict=True):
            ctypes.cast(room, ctypes.POINTER(ctypes.c_int))[0] = value

    server.program = SimpleNamespace(
        Cblacs_gridinfo=shape, blacs_get_=lambda *_: None, pblasmp_preload_grid=lambda _: None
    )
    numbers = iter(range(100, 200))

    def gridinit(*_, **__):
        number = next(numbers)
        calls.append(("make", number))
        return number

    pblas = SimpleNamespace(gridinit=gridinit, gridexit=lambda number: calls.append(("close", number)))
    collector = SimpleNamespace(freeze=lambda: calls.append("freeze"))
    return server, mock.patch.multiple(serve, pblas=pblas, world_ranks=lambda _: ranks, gc=collector)


def test_grids_that_are_made_again_and_again_are_kept():
    calls = []
    server, patched = serving(calls, (0, 1))
    with patched:
        for context in (1, 2, 3, 4):  # the program frees each before it makes the next
            server._grid_of(context)
            server.forget(context)
        assert calls == [("make", 100), "freeze", ("close", 100), ("make", 101)]
        server._grid_of(5)
        server._grid_of(6)
        server.forget(5)
        assert server.grids == {6: 101}
        server.forget(-1)
        assert calls[4:] == [("close", 101)]


def test_grids_whose_processes_are_unknown_are_closed():
    calls = []
    server, patched = serving(calls, (0, -32766))
    with patched:
        for _ in range(3):  # BLACS gives the number again, perhaps to other processes
            server._grid_of(7)
            server.forget(7)
    assert calls.pop(1) == "freeze"  # what is there then for good, and nothing that a later grid leaves
    assert [what for what, _ in calls] == ["make", "close"] * 3
