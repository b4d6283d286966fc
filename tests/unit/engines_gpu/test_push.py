# SPDX-License-Identifier: Apache-2.0
"""Pushed products on pretended GPUs: results on every layout, the order of signals (plan.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.engines.gpu.push import plan as sections
from pblasmp.engines.gpu.push.plan import PushPlan
from pblasmp.engines.gpu.push.pushed_product import Pushed, conjugated_first
from tests.helpers.fakepeers import Peers, is_missed
from tests.helpers.layouts import random_product
from tests.helpers.slow import draws, in_turn

OPS = {"N": lambda x: x, "T": np.transpose, "C": lambda x: x.conj().T}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Small products have several chunks."""
    monkeypatch.setattr(sections, "_TILE", (4, 4))
    monkeypatch.setattr(sections, "_SIDE", 4)
    monkeypatch.setattr(sections, "_LINE", 1)


class Case:
    """A product of whole numbers on every rank's GPU."""

    def __init__(self, peers: Peers, p: pb.MatmulProblem, *, beta: complex = 0, seed: int = 0) -> None:
        self.peers, self.p, self.beta = peers, p, beta
        rng = np.random.default_rng(seed)
        self.a, self.b, self.c = (self._numbers(rng, x) for x in (p.a, p.b, p.d))
        self.plan = PushPlan(p, peers.size)
        self.pushed = [Pushed(gpu, self.plan, p, partial(self._multiply, gpu)) for gpu in peers.gpus]
        self.arrays = [self._arrays(rank) for rank in range(peers.size)]

    @staticmethod
    def _multiply(gpu: Any, stream: str, *views: Any, **how: Any) -> None:
        gpu.products.multiply(gpu.stream(stream).ptr, *views, **how)

    @staticmethod
    def _numbers(rng: np.random.Generator, x: pb.MatrixDescriptor) -> np.ndarray:
        values = rng.integers(-3, 4, x.shape).astype(float)
        return values + 1j * rng.integers(-3, 4, x.shape) if x.dtype.kind == "c" else values

    def _local(self, rank: int, x: pb.MatrixDescriptor, values: np.ndarray) -> Any:
        if rank >= x.grid.size:
            return self.peers.array(rank, np.zeros((0, 0), x.dtype))
        rows, cols = x.global_indices(rank)
        local = values[np.ix_(rows, cols)].astype(x.dtype)
        local = local if x.order == "C" else np.ascontiguousarray(local.T)
        return self.peers.array(rank, local, ld=local.shape[1] + 3)

    def _arrays(self, rank: int) -> list[Any]:
        p = self.p
        values = [
            x.conj() if conjugated_first(p, self.plan, which) else x
            for which, x in enumerate((self.a, self.b))
        ]
        return [
            self._local(rank, p.a, values[0]), self._local(rank, p.b, values[1]),
            self._local(rank, p.d, np.full(p.d.shape, np.nan)), self._local(rank, p.d, self.c),
        ]  # fmt: skip

    def run(self, rank: int) -> None:
        a, b, d, c = (View.of(x) for x in self.arrays[rank])
        self.pushed[rank].run(
            a, b, d, c if self.beta else None, turned=self.p.d.order == "F", alpha=2, beta=self.beta
        )
        self.peers.gpus[rank].use(*self.arrays[rank])

    def check(self) -> None:
        expected = 2 * OPS[self.p.op_a](self.a) @ OPS[self.p.op_b](self.b) + self.beta * self.c
        for rank in range(self.p.d.grid.size):
            rows, cols = self.p.d.global_indices(rank)
            got = self.arrays[rank][2].values
            got = got if self.p.d.order == "C" else got.T
            part = expected[np.ix_(rows, cols)]
            assert np.array_equal(got, part), f"rank {rank}"


def run_all(cases: list[Case], seed: int | None, times: int = 1) -> None:
    peers = cases[0].peers
    for rank in range(peers.size):
        for _ in range(times):
            for case in cases:
                case.run(rank)
    peers.run(seed)
    for case in cases:
        case.check()


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(draws(6, long=12)))
def test_any_layout(monkeypatch, size, seed, dtype):
    if seed % 2:  # large matrices come in more blocks
        monkeypatch.setattr(sections, "_FEW", 2)
    rng = np.random.default_rng([seed, size])
    p, _ = random_product(rng, size, 24, dtype=dtype)
    run_all([Case(Peers(size), p, beta=seed % 3 - 1, seed=seed)], seed)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_what_is_pushed_arrives(size):
    rng = np.random.default_rng(size)
    for _ in range(8):
        p, _ = random_product(rng, size, 24, dtype="float32")
        case = Case(Peers(size), p)
        received = sum(
            part.shape[0] * part.shape[1] * 4
            for slab in case.plan.slabs
            for rank in range(size)
            for part in slab.parts(rank)
            if part.source != rank
        )
        assert sum(each.sent_bytes for each in case.pushed) == received


PLAIN = pb.MatmulProblem.gemm(18, 20, 24, pb.Grid(2, 2), 4, dtype="float32", order="C")
UNLIKE = pb.MatmulProblem(  # packed, unpacked, other grids
    pb.MatrixDescriptor((18, 24), (5, 1), pb.Grid(1, 3), dtype="float32"),
    pb.MatrixDescriptor((24, 20), (3, 2), pb.Grid(3, 1), dtype="float32"),
    pb.MatrixDescriptor((18, 20), (4, 4), pb.Grid(2, 2), dtype="float32"),
)


TURNS = pb.MatmulProblem.gemm(30, 20, 24, pb.Grid(1, 4), 4, op_a="T", dtype="float32", order="C")  # batches


@pytest.mark.parametrize("p", [PLAIN, UNLIKE, TURNS], ids=["plain", "unlike", "in turns"])
@pytest.mark.parametrize("seed", range(draws(2, long=4)))
def test_one_after_another_in_any_order_of_events(p, seed):
    peers = Peers(4)
    run_all([Case(peers, p, seed=1), Case(peers, PLAIN, seed=2)], seed, times=3)


@pytest.mark.parametrize("p", [PLAIN, UNLIKE, TURNS], ids=["plain", "unlike", "in turns"])
def test_every_signal_is_needed(p):
    def attempt(skip: tuple[int, int] | None, seed: int) -> Case:
        case = Case(Peers(4, skip), p)
        run_all([case], seed, times=3)
        return case

    case, unneeded = attempt(None, 0), []
    for rank in in_turn((0, 3), keep=2, first=int(p is UNLIKE)):
        names = case.peers.gpus[rank].names
        middle = range(len(names) // 3, 2 * len(names) // 3)  # products before and behind it
        for number in middle[rank % 2 :: draws(2, long=1)]:
            if names[number] == "await all" and not case.pushed[rank].sent_bytes:
                continue  # who sends nothing overwrites nothing
            if not is_missed(attempt, (rank, number), range(16), (AttributeError, IndexError, TypeError)):
                unneeded.append((rank, number, names[number]))
    assert not unneeded


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("grid", "ops"), [((1, 2), "NN"), ((2, 1), "NN"), ((1, 3), "TT")])
def test_equal_blocks_are_pushed_by_one_command(monkeypatch, grid, ops, order):
    monkeypatch.setattr(sections, "_FEW", 2)
    p = pb.MatmulProblem.gemm(12, 12, 24, pb.Grid(*grid), 2, op_a=ops[0], op_b=ops[1], order=order)
    peers, counts = Peers(p.d.grid.size), []
    for gpu in peers.gpus:
        gpu.push = lambda *args, push=gpu.push: (counts.append(args[3] if args[3:] else 1), push(*args))
    case, blocks = Case(peers, p), 24 // 2 // p.d.grid.size
    run_all([case], 1, times=2)
    assert blocks in counts


@pytest.mark.parametrize("order", ["C", "F"])
def test_blocks_of_rows_whose_ld_is_no_multiple_of_a_block_take_many_commands(monkeypatch, order):
    monkeypatch.setattr(sections, "_FEW", 2)
    p = pb.MatmulProblem.gemm(12, 12, 24, pb.Grid(1, 2), 2, order=order)
    many = [Case(Peers(2), p).pushed[0].takes_many_commands(0, 12 + more) for more in (0, 1, 2)]
    assert many == [False, order == "C", False]


@pytest.mark.parametrize(("grid", "ops"), [((1, 2), "NT"), ((2, 1), "TN")])
def test_what_need_not_be_packed_travels_first(grid, ops):
    """Every rank has one range of k of one operand; of the other one, every other block is packed."""
    p = pb.MatmulProblem.gemm(
        20, 24, 16, pb.Grid(*grid), 4, op_a=ops[0], op_b=ops[1], dtype="float32", order="C"
    )
    peers, second = Peers(2), int(grid == (1, 2))
    case = Case(peers, p)
    case.run(0)
    names = [op.name for op in peers.program[0]]
    assert not any(part.packed for part in case.plan.slabs[1 - second].parts(1))
    assert any(part.packed for part in case.plan.slabs[second].parts(1))
    assert names.index("copy") < names.index("move")
