# SPDX-License-Identifier: Apache-2.0
"""PyTorch's process groups as communicators: ranks started by torchrun, without MPI."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import _core, launch
from pblasmp.comm import machines_of, wrap
from pblasmp.testing import RanksFailedError
from tests.helpers import inside
from tests.helpers.factor_cases import panels_of
from tests.helpers.mpi import ROOT, on_ranks, run_torch, starts_ranks

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pblasmp[torch]'")
pytestmark = starts_ranks


def communicators(group: Any) -> Any:
    """Everything that is asked of a communicator; several times over, since groups come and go."""
    import torch.distributed as dist

    evens_and_odds = [list(range(group.size())[::2]), list(range(group.size())[1::2])]
    for turn in range(3):
        comm = wrap(None if turn == 0 else group)
        rank, size = comm.rank, comm.size
        assert (rank, size) == (group.rank(), group.size()), f"{turn}: ranks: {rank} of {size}"
        out = np.empty(2, np.int64)
        request = comm.imax(np.array([rank, -rank]), out)
        comm.wait(request)
        assert request.Test(), f"{turn}: imax"
        assert out.tolist() == [size - 1, 0], f"{turn}: imax"
        everyone = comm.allgather("x" * rank)
        assert everyone == ["x" * r for r in range(size)], f"{turn}: allgather"
        heard = [comm.bcast({"rank": complex(rank)}, root)["rank"] for root in range(size)]
        assert heard == list(range(size)), f"{turn}: bcast"
        for dtype in ("float32", "complex128"):
            values = np.full((3, 2), rank + 1, dtype, order="F")
            comm.sum_into(values)
            assert (values == size * (size + 1) / 2).all(), f"{turn}: sum {dtype}"
        values = np.full(5, rank, pb.dtypes.as_dtype("bfloat16"))
        comm.bcast_into(values, size - 1)
        assert (values == size - 1).all(), f"{turn}: bcast_into"
        assert machines_of(comm.locations()) == [tuple(range(size))], f"{turn}: nodes"
        part = comm.split(evens_and_odds[: min(2, size)])
        members = part.allgather(rank)
        assert members == evens_and_odds[rank % 2], f"{turn}: split"
        check_messages(comm)
        comm.barrier()
        part.free()
        comm.free()
    subgroups = [dist.new_group(ranks[::-1]) for ranks in evens_and_odds if ranks]
    comm = wrap(subgroups[group.rank() % 2])  # ranks are numbered as the group has them
    assert comm.allgather(group.rank()) == evens_and_odds[group.rank() % 2], "subgroup: wrong ranks"
    comm.free()
    first = dist.new_group([0])
    try:
        wrap(first).free()
        error = None if group.rank() == 0 else "nothing was raised"
    except pb.ArgumentError as caught:
        error = (
            None if group.rank() and "a process group that this rank is in" in str(caught) else str(caught)
        )
    assert not error, "a group without this rank"


class Store(dict[str, Any]):
    """A rendezvous store in this process."""

    set, get = dict.__setitem__, dict.__getitem__

    def add(self, name: str, number: int) -> int:
        self[name] = dict.get(self, name, 0) + number
        return int(self[name])

    def check(self, names: list[str]) -> bool:
        return all(name in self for name in names)


def test_notes_to_one_rank_and_to_all() -> None:
    from pblasmp.comm.process_group import StoreNotes

    store = Store()
    notes = [StoreNotes(store, rank, 3) for rank in range(3)]
    notes[0].send(b"to one", 2)
    notes[1].send(b"to all")
    assert [each.arrived() for each in notes] == [[b"to all"], [], [b"to one", b"to all"]]


def check_messages(comm: Any) -> None:
    """Every rank sends to all, in the order in which nobody waits for it; they are reported as they arrive."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    boxes = {rank: np.zeros((2, 3), order="F") for rank in others}
    requests = [comm.irecv(boxes[rank], rank)[0] for rank in others]
    fixed = np.full((2, 3), comm.rank, float)
    fixed.flags.writeable = False
    sent = [request for rank in reversed(others) for request in comm.isend(fixed, rank)]
    while requests:
        for i in reversed(comm.wait_some(requests)):
            requests.pop(i)
    for request in sent:
        comm.wait(request)
    assert comm.test_some(sent) == list(range(len(sent)))  # what is done is reported
    threads, many = threading.active_count(), 32
    lines = {rank: np.zeros(many) for rank in others}
    requests = [comm.irecv(lines[rank][i : i + 1], rank)[0] for i in range(many) for rank in others]
    assert threading.active_count() <= threads + len(others)  # one waits for all messages of a rank
    comm.barrier()
    requests += [comm.isend(np.array([float(i)]), rank)[0] for i in range(many) for rank in others]
    for request in requests:
        comm.wait(request)
    for rank in others:
        assert (lines[rank] == np.arange(many)).all(), f"messages from {rank} are mixed up"
        assert (boxes[rank] == rank).all(), f"wrong messages from {rank}"


def products(group: Any) -> Any:
    """Scatter, redistribution and products on the host engine, within a node and, as if, between nodes."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(-3, 4, (37, 29)).astype(float), rng.integers(-3, 4, (29, 41)).astype(float)
    for per_node in ("", "1", "2"):
        os.environ["PBLASMP_RANKS_PER_NODE"] = per_node
        with pb.Context(group, engine="host") as ctx:
            grid = pb.Grid.squarest(ctx.size)
            a = ctx.scatter(x, pb.MatrixDescriptor(x.shape, (5, 4), grid))
            b = ctx.scatter(y, pb.MatrixDescriptor(y.shape, (4, 3), grid, order="F"))
            for algo in ("auto", "gathered", "panels"):
                d = pb.matmul(a, b, algo=algo)
                assert np.array_equal(d.allgather(), x @ y), f"{per_node} {algo}: wrong product"
            turned = a.redistribute(pb.MatrixDescriptor(x.shape, (40, 2), pb.Grid(1, ctx.size), order="F"))
            assert np.array_equal(turned.allgather(), x), f"{per_node} moved: wrong matrix"
            with panels_of(ctx, 4):
                square = ctx.scatter(x[:29] + 20 * np.eye(29), pb.MatrixDescriptor((29, 29), (3, 4), grid))
                solved = pb.matmul(square, pb.linalg.solve(square, b)).allgather()
            assert np.allclose(solved, y), f"{per_node} solved: wrong solution"
            try:
                ctx.zeros(pb.MatrixDescriptor((4, 4), (2, 2) if ctx.rank else (1, 2), grid))
                error = "" if ctx.size == 1 else "nothing was raised"
            except pb.RankMismatchError:
                error = ""
            assert not error, f"{per_node} agreement"


@on_ranks(1, 4, runner=run_torch)
def test_communicators_and_products(group: Any) -> None:
    communicators(group)
    products(group)


@on_ranks(3, runner=run_torch)
def test_a_rank_that_waits_leaves_the_cores_to_gloo(group: Any) -> None:
    """A rank that waits for one that comes late sleeps."""
    with pb.Context(group, engine="host") as ctx:
        if ctx.rank == 1:
            time.sleep(1)
        start = time.process_time()
        with ctx.agreement("a call"):
            pass
        ctx.comm.barrier()
        assert time.process_time() - start < 0.2


@on_ranks(3, runner=run_torch)
def test_a_rank_that_catches_an_exception_inside_a_call_breaks_the_context(group: Any) -> None:
    """One rank gets an exception in the middle of a move and catches it."""
    import pblasmp.comm.exchange as exchange

    with pb.Context(group, engine="host") as ctx:
        d = pb.MatrixDescriptor((300, 300), (7, 20), pb.Grid(ctx.size, 1), dtype="float16")  # BLAS lacks it
        a = ctx.from_function(lambda i, j: i + j, d)
        original, calls = exchange.copy, []

        def failing(*args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if ctx.rank == 1 and len(calls) == 3:
                raise MemoryError("no room")
            original(*args, **kwargs)

        exchange.copy = failing
        try:
            a.redistribute(block=(20, 7), grid=(1, ctx.size))
            first = ""
        except (MemoryError, pb.ClosedError) as error:
            first = str(error)
        exchange.copy = original
        assert ctx.rank != 1 or first == "no room"
        why = "no collective call is possible any more: rank 1 left redistribute with MemoryError: no room$"
        with pytest.raises(pb.ClosedError, match=f"^this context is broken, {why}"):
            a.gather()


class Intruder:
    """What makes ``pickle.loads`` end the process."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@on_ranks(3, runner=run_torch)
def test_what_others_write_into_the_store_is_ignored(group: Any) -> None:
    """Whoever reaches the store can write where the ranks' notes lie."""
    with pb.Context(group, engine="host") as ctx:
        if ctx.rank == 0:
            for note in (pickle.dumps(Intruder()), b"", b"[0]", pickle.dumps((0, "broken", 1, ("x", None)))):
                inside.notes(ctx).send(note)
        time.sleep(0.1)  # notes are looked for every 50 ms
        a = ctx.eye((4, 4), grid=pb.Grid(1, ctx.size), block=2)
        for _ in range(3):
            a @ a
            time.sleep(0.05)
        ctx.control.channel.look()
        assert inside.notes_read(ctx) == (0 if ctx.rank == 0 else 4)  # who wrote gets none


def leaves(group: Any) -> None:
    with pb.Context(group, engine="host") as ctx:
        if ctx.rank == 1:
            raise OSError("the disk of this rank is full")
        ctx.zeros(pb.MatrixDescriptor((4, 4), (2, 2), pb.Grid(1, ctx.size)))


def test_what_one_rank_raises_is_raised_by_all():
    with pytest.raises(RanksFailedError) as failed:
        run_torch(leaves, 3)
    assert str(failed.value).count("OSError: the disk of this rank is full") >= 3


def aborts(group: Any) -> None:
    with pb.Context(group, engine="host") as ctx:
        if ctx.rank == 1:
            raise OSError("the disk of this rank is full")
        ctx.comm.wait(ctx.comm.irecv(np.zeros(1), 1)[0])  # a message that never comes


def test_a_rank_that_leaves_ends_the_others():
    with pytest.raises(RanksFailedError, match="rank 1 did not finish") as failed:
        run_torch(aborts, 2, timeout=90, launch=True)
    assert "ended with status 1" in str(failed.value)


@on_ranks(1, runner=run_torch, launch=True)
def test_under_torchrun_a_process_group_is_needed(group: Any) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    with pytest.raises(pb.UnsupportedError, match=r"call .*init_process_group first"):
        pb.Context(engine="host")
    assert "mpi4py" not in sys.modules


WITHOUT_LAUNCHER = """
import os
import threading
import signal
import sys

import torch.distributed as dist

import pblasmp as pb


def run(rank):
    signal.alarm(60)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    ctx = pb.Context(engine="host")
    assert ctx.control.board is not None or sys.argv[2] == "messages"
    a = ctx.zeros((4, 4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        a @ a
    except RuntimeError as error:
        print("noticed:", error, flush=True)
        return 3


pids = []
for rank in range(2):
    pids.append(os.fork())
    if pids[rank] == 0:
        status = 1
        try:
            status = run(rank)
        finally:
            os._exit(status)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
"""


@pytest.mark.parametrize("votes", ["board", "sockets", "messages"])
def test_a_killed_rank_is_noticed_without_a_launcher(votes, tmp_path):
    """Nobody waits for the process that ends: it stays as a zombie meanwhile."""
    if _core.load() is None:
        votes = "messages"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PBLASMP_RANKS_PER_NODE": "" if votes == "board" else "1",
        "PBLASMP_CORE": "0" if votes == "messages" else "1",
    }
    done = subprocess.run(
        [*launch.interpreter(), "-c", WITHOUT_LAUNCHER, str(tmp_path / "store"), votes],
        env=environ, stdout=subprocess.PIPE, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout.startswith("noticed:")
    assert ("rank 1 has ended" in done.stdout) == (votes == "board")
    assert ("a rank of another node does not answer" in done.stdout) == (votes == "sockets")
