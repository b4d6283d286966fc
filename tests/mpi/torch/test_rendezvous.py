# SPDX-License-Identifier: Apache-2.0
"""Where ranks of MPI meet for PyTorch's process group: at one address, which only they need to reach, or not at all."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.torch import meshes
from tests.helpers.cases import refuses
from tests.helpers.mpi import on_ranks, run_on_one_node
from tests.helpers.torch_ranks import host

NODES = "pblasmp.torch.meshes.machines_of"


def listening() -> set[str]:
    """The addresses, in hexadecimal digits, at which this process listens."""
    links = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.add(str(each.readlink())[8:-1])
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        if Path(f"/proc/net/{name}").exists()
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {words[1] for words in lines if words[3] == "0A" and words[9] in links}


def place_of_store() -> tuple[str, int]:
    store: Any = dist.distributed_c10d._get_default_store()
    while not isinstance(store, dist.TCPStore):
        store = store.underlying_store
    return store.host, store.port


def reached(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), 5):
        return True
    return False


def works(comm: Any) -> bool:
    total = torch.ones(3)
    dist.all_reduce(total)
    return bool((total == comm.size).all())


@on_ranks(2, runner=run_on_one_node)
def test_the_store_listens_at_one_address(comm: Any) -> None:
    before = listening()
    with host(comm) as ctx:
        pt.ColumnParallelLinear(8, 8, ctx=ctx)
        address, port = place_of_store()
        mine = listening() - before
        assert address == "127.0.0.1", "one node: its address"
        assert not opened(mine), "one node: nothing is open"
        others = [reached(each, port) for each in ("127.0.0.1", "127.0.0.2", *meshes.interfaces())]
        assert others[:2] == [True, False]
        assert sum(others) <= 2
        assert works(comm), "one node: it works"
    with patch(NODES, lambda _: [(rank,) for rank in range(comm.size)]):
        pt.init_process_group(comm)
        address, port = place_of_store()
        far = [each for each in meshes.interfaces() if not each.startswith("127.")]
        assert address in (far or ["127.0.0.1"]), "nodes: its address"
        assert not opened(listening() - before), "nodes: nothing is open"
        others = [reached("127.0.0.2", port), reached("127.0.0.1", port)]
        assert others == [False, not far], "nodes: no other address"
        known = os.environ.pop("GLOO_SOCKET_IFNAME")
        assert known == meshes.interfaces()[address], "nodes: gloo"
        assert works(comm), "nodes: it works"
        dist.destroy_process_group()
    alone = comm.Split(comm.rank)
    pt.init_process_group(alone)
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.HashStore), f"one rank: its store: {type(store).__name__}"
    assert not opened(listening() - before), "one rank"
    assert works(alone), "one rank"
    dist.destroy_process_group()


def opened(addresses: set[str]) -> str | None:
    found = [each for each in addresses if not each.split(":")[0].strip("0")]
    return f"open to all: {found}" if found else None


@on_ranks(2)
def test_what_one_rank_cannot_do_all_ranks_raise(comm: Any) -> None:
    """What goes wrong on one rank is raised by both, and nothing is half made."""
    last = comm.rank == 1

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("the network is down")

    store = dist.TCPStore
    cases = {
        "no address": (OSError, ["the network is down"], {"pblasmp.torch.meshes.listening": fails}),
        "not reached": (
            pb.UnsupportedError, ["not every rank reaches rank 0", "MASTER_ADDR"],
            {"socket.create_connection": fails},
        ),
        "no store": (OSError, ["the network is down"], {"torch.distributed.TCPStore": fails if last else store}),
        "no server": (OSError, ["the network is down"], {"torch.distributed.TCPStore": store if last else fails}),
        "no interface": (pb.ArgumentError, ["GLOO_SOCKET_IFNAME: gloo cannot use 'nowhere'", "on rank 1"], {}),
        "a group": (
            pb.UnsupportedError, ["PyTorch has a default process group", "on rank 1"],
            {"torch.distributed.is_initialized": lambda: last},
        ),
    }  # fmt: skip
    with host(comm) as ctx:
        for nodes in ([(0, 1)], [(0,), (1,)]):
            for name, (kind, words, changed) in cases.items():
                with patch(NODES, lambda _, nodes=nodes: nodes), patch.dict(os.environ):
                    if name == "no interface" and last:
                        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
                    with ExitStack() as stack:
                        for where, what in changed.items():
                            stack.enter_context(patch(where, what))
                        refuses(ctx, kind, words, pt.init_process_group, comm)
                assert not dist.is_initialized(), f"{name}, {len(nodes)} nodes"
    with host(comm) as ctx:
        pt.RowParallelLinear(8, 8, ctx=ctx)
        assert works(comm), "later"
