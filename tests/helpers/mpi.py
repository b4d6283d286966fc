# SPDX-License-Identifier: Apache-2.0
"""What tests on ranks import: the runner of ranks, and a mark for tests that start ranks whatever this process is."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname
from typing import Any
from unittest import mock

import pytest

import pblasmp as pb
from pblasmp import testing
from pblasmp.launch import Launcher, surroundings
from pblasmp.testing import Torchrun
from tests.helpers.nodes import Nodes, ranks_of_nodes
from tests.helpers.ranks import pool as pools
from tests.helpers.slow import is_long

ROOT = Path(__file__).parents[2]

_SECONDS = 300.0 if is_long() else 60.0
NODES = os.environ.get("PBLASMP_TEST_NODES", "")
"""On which nodes the ranks of all tests are to be: see ``launcher_on``."""


def launcher_on(nodes: str, nranks: int) -> Launcher | None:
    """Return what starts ranks on simulated nodes, None for ranks of this machine. Local.

    Args:
        nodes: "blocks:2" or "interleaved:2", say; or "" for this machine.
        nranks: how many ranks; with fewer than nodes they stay on this machine.
    """
    made = Nodes.of(nodes) if nodes and surroundings() is None else None
    return made if made and nranks >= made.nodes else None


def run_mpi(
    function: Any,
    nranks: int,
    *,
    on_nodes: str = NODES,
    timeout: float = _SECONDS,
    launch: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Do what ``pblasmp.testing.run_mpi`` does, on kept ranks, and on simulated nodes if asked to: see ``launcher_on``.

    Local. With ``launch`` the ranks are new.
    """
    __tracebackhide__ = True
    if surroundings():
        return testing.run_mpi(function, nranks, **kwargs)
    launcher = launcher_on(on_nodes, nranks)
    return pools.run(launcher, function, nranks, kwargs, timeout=timeout, launch=launch)


def run_torch(
    function: Any, nranks: int, *, timeout: float = 60.0, launch: bool = False, **kwargs: Any
) -> list[Any]:
    """Do what ``pblasmp.testing.run_torch`` does, on kept ranks. Local."""
    __tracebackhide__ = True
    return pools.run(Torchrun(), function, nranks, kwargs, timeout=timeout, launch=launch)


def run_on_one_node(function: Any, nranks: int, **how: Any) -> list[Any]:
    """Do so for tests of what only ranks of one node do, or Debian's ScaLAPACK: between nodes some calls never return.

    Under a launcher whose ranks have several hosts the test is skipped.
    """
    __tracebackhide__ = True
    if surroundings():
        from mpi4py import MPI

        if len(set(MPI.COMM_WORLD.allgather(gethostname()))) > 1:
            pytest.skip("for ranks of one node")
    return run_mpi(function, nranks, on_nodes="", **how)


def on_ranks(
    *sizes: int | tuple[int, str | int], runner: Callable[..., Any] = run_mpi, **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a function on ranks a test, once for each of some numbers of ranks: ``@on_ranks(1, *only_long(2), 4)``.

    Its first argument is the communicator; ``ctx``, the first or a later one, is an open context of the host engine on
    it. The others are parameters or fixtures, of values that JSON can hold, such as ``directory``; what has a default,
    or is given here, is none. ``nodes`` are the ranks that each of the simulated nodes has.

    Args:
        sizes: numbers of ranks; each may be with a form of simulated nodes, as in ``(4, "interleaved:2")``, or with
            PBLASMP_RANKS_PER_NODE, as in ``(4, 2)``, which is ``per_node``, if the function asks for it.
        runner: one of the functions above.
        how: other arguments of the runner, or of the function.
    """

    def test_of(function: Callable[..., Any]) -> Callable[..., None]:
        asked = inspect.signature(function).parameters
        first, *others = asked.values()

        @functools.wraps(function)
        def on_rank(comm: Any, **given: Any) -> Any:
            before = () if first.name == "ctx" else (comm,)
            if "ctx" not in asked:
                return function(*before, **given)
            with pb.Context(comm, engine="host") as ctx:
                return function(*before, ctx=ctx, **given)

        def test(nranks: int | tuple[int, str | int], **given: Any) -> None:
            __tracebackhide__ = True
            nranks, where = nranks if isinstance(nranks, tuple) else (nranks, None)
            environ = {"PBLASMP_RANKS_PER_NODE": f"{where}"} if isinstance(where, int) else {}
            given |= {"on_nodes": where} if isinstance(where, str) else {}
            given |= {"nodes": ranks_of_nodes((how | given)["on_nodes"], nranks)} if "nodes" in asked else {}
            given |= {"per_node": where} if "per_node" in asked else {}
            with mock.patch.dict(os.environ, environ):
                found = runner(on_rank, nranks, **how, **given)
            why = f"{function.__name__} returns {found}, at which nobody looks: assert"
            assert all(each is None for each in found), why

        known = {"ctx", "nodes", "per_node", *how}
        names = ["nranks", *(x.name for x in others if x.default is x.empty and x.name not in known)]
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in names]
        )  # type: ignore[attr-defined]
        for name in ("__module__", "__name__", "__doc__"):
            setattr(test, name, getattr(function, name))
        on_rank.__qualname__ += ".on_rank"  # there the ranks find it
        test.on_rank, test.place_as = on_rank, function  # type: ignore[attr-defined]
        ids = [f"{size[0]}-{size[1]}" if isinstance(size, tuple) else str(size) for size in sizes]
        return pytest.mark.parametrize("nranks", sizes, ids=ids)(test)

    return test_of


needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="PyTorch is not installed: pip install 'pblasmp[torch]'"
)
starts_ranks = pytest.mark.skipif(surroundings() is not None, reason="starts its own ranks: not under mpirun")
