# SPDX-License-Identifier: Apache-2.0
"""What ``pblasmp doctor`` says of where ranks sit, from what the ranks have found there."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pblasmp.cli.seats import Seat, _together, faults_of_seats, lines_of_seats

GIB = 1 << 30
SEAT = Seat(
    rank=0, host="one", boot="a", cores=(0, 1), threads=0, together=(), memory_bytes=8 * GIB, free_bytes=6 * GIB,
    shared_bytes=GIB, locked_bytes=-1, networks={"eth0": "10.0.0.1"}, adapters=(), no_interface="", gpus=(), deaf=(),
    gpus_there=0, shown=None, versions="Python 3.12", variables={},
)  # fmt: skip
FIRST, SECOND = ("bus0",), ("bus1",)
BOTH = FIRST + SECOND


def seats(*changes, **common):
    """Two ranks of one node, two of another, each with its cores, but for what is given."""
    made = [
        replace(
            SEAT, rank=rank, host=("one", "two")[rank // 2], boot="ab"[rank // 2],
            cores=(2 * (rank % 2), 2 * (rank % 2) + 1), **common,
        )
        for rank in range(4)
    ]  # fmt: skip
    for rank, change in changes:
        made[rank] = replace(made[rank], **change)
    return made


FAULTS = {
    "nothing": (seats(), "", ""),
    "threads": (seats(threads=4), "OMP_NUM_THREADS gives 2 ranks 8 threads on 4 cores", "to 2;"),
    "as many threads as cores": (seats(threads=2), "", ""),
    "bound alike": (seats((3, {"cores": (0, 1)}), (2, {"cores": (1,)})), "two: ranks 2-3 are bound", "--cpu-bind"),
    "bound to all": (seats((0, {"cores": (0, 1, 2, 3)}), (1, {"cores": (0, 1, 2, 3)})), "", ""),
    "MPI apart": (seats((2, {"together": (2,)})), "two: MPI sends from rank 2", "MPIR_CVAR_NOLOCAL"),
    "MPI together": (seats((2, {"together": (2, 3)}), (3, {"together": (2, 3)})), "", ""),
    "memory": (seats(memory_bytes=GIB), "one and 1 more: each rank has 0.5 GiB", "--mem=0"),
    "/dev/shm": (seats((1, {"shared_bytes": 31 << 20})), "has 31 MiB free for 2 ranks, which need 32", "--shm-"),
    "no /dev/shm": (seats(shared_bytes=-1), "", ""),
    "pinned": (seats(adapters=("mlx5_0:1",), locked_bytes=65536), "pin 64 KiB for mlx5_0:1", "ulimit -l"),
    "pinned without adapters": (seats(locked_bytes=65536), "", ""),
    "hidden GPUs": (
        seats((3, {"gpus": ()}), gpus=BOTH, gpus_there=2, shown=""),
        "two: rank 3 sees none of 2 GPUs (CUDA_VISIBLE_DEVICES=)", "unset CUDA_VISIBLE_DEVICES",
    ),
    "one GPU for two": (
        seats(gpus=FIRST, gpus_there=2, shown="0"), "2 ranks see 1 of 2 GPUs", "CUDA_VISIBLE_DEVICES=0 hides GPUs",
    ),
    "a GPU each": (seats((1, {"gpus": SECOND}), (3, {"gpus": SECOND}), gpus=FIRST, gpus_there=2), "", ""),
    "peers": (seats((0, {"deaf": ((0, 1),)}), gpus=BOTH), "one: GPU 0 cannot reach GPU 1", "topo -p2p"),
    "interface": (
        seats((2, {"no_interface": "NCCL_SOCKET_IFNAME=ib leaves NCCL no network interface"})),
        "two: NCCL_SOCKET_IFNAME=ib", "unset NCCL_SOCKET_IFNAME",
    ),
    "one machine": (seats((2, {"boot": "a"}), (3, {"boot": "a"})), "one and two are one machine", "container"),
    "bound alike, not the first": (
        seats((2, {"cores": (0,), "host": "one", "boot": "a"}), (0, {"cores": (4,)}), (1, {"cores": (0,)})),
        "one: ranks 1-2 are bound to few cores, which they share", "--cpu-bind",
    ),
    "variables": (
        seats((1, {"variables": {"NCCL_NET": "ib0"}}), (3, {"variables": {}}), variables={"NCCL_NET": "ib1"}),
        "NCCL_NET is ib1 on ranks 0, 2, ib0 on rank 1, not set on rank 3", "srun --export=ALL",
    ),
    "versions": (seats((3, {"versions": "Python 3.10"})), "rank 3 has Python 3.10", "one environment"),
    "GPUs on one node": (seats((0, {"gpus": BOTH}), (1, {"gpus": BOTH})), "two: no GPUs", "--exclude"),
    "adapters on one node": (
        seats((0, {"adapters": ("mlx5_0:1",)})), "two: no active InfiniBand", "--exclude",
    ),
    "no network": (seats(networks={}), "one and 1 more: no network interface", "--exclude"),
    "one node without a network": (seats(networks={})[:2], "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_what_does_not_fit_is_said_with_what_to_change(case):
    ranks, what, cure = FAULTS[case]
    found = list(faults_of_seats(ranks))
    assert len(found) == bool(what), found
    for fault, remedy in found:
        assert what in fault
        assert cure in remedy


def test_who_is_where():
    there = list(lines_of_seats(seats(gpus=FIRST, gpus_there=8, adapters=("ib0:1",))))
    assert there[0] == (
        "one: ranks 0-1, 4 cores, 2 each, 1 of 8 GPUs, 6.0 GiB of 8.0 GiB free, /dev/shm 1.0 GiB, eth0 10.0.0.1, ib0:1"
    )
    assert len(there) == 2
    many = [replace(SEAT, rank=rank, host=f"n{rank}", boot=f"{rank}") for rank in range(20)]
    *shown, last = lines_of_seats(many)
    assert (len(shown), last) == (16, "and 4 nodes more, with ranks 16-19")
    dealt = [replace(SEAT, rank=rank, host=f"n{rank % 2}", boot="a") for rank in range(5)]
    assert [line.partition(", 2 cores")[0] for line in lines_of_seats(dealt)] == [
        "n0: ranks 0, 2, 4",
        "n1: ranks 1, 3",
    ]


def test_ranks_that_mpi_does_not_carry_are_not_asked_of_mpi(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert _together(SimpleNamespace(size=2, rank=0)) == ()
