# SPDX-License-Identifier: Apache-2.0
"""Direct calls on pretended GPUs: results on every layout, and the order of what is queued (gpu_direct.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp._core import load
from pblasmp.dtypes import DTYPES
from pblasmp.engines.direct import FAMILIES, Asked, Held, pattern_of
from pblasmp.engines.direct.asked import SlabSets
from pblasmp.engines.gpu.direct import GpuDirect, builder, computers, gpu_direct
from pblasmp.engines.gpu.direct.builder import Template
from pblasmp.engines.gpu.runtime.gpu import Gpu
from pblasmp.engines.gpu.runtime.nccl import Nccl
from pblasmp.engines.request import Options
from pblasmp.layout import ParallelProblem
from tests.helpers import fakepeers
from tests.helpers.calls import computed, legal_options, scalars, written
from tests.helpers.calls import drawn as calls_drawn
from tests.helpers.cases import pick, refuses
from tests.helpers.fakelt import FakeLt
from tests.helpers.fakepeers import Peers, is_missed
from tests.helpers.gpu_memory import Fault
from tests.helpers.inside import plans_kept
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import draws, only_long


@pytest.fixture
def _small(monkeypatch):
    """Small matrices have several strips, and several portions of tiles; every rank agrees."""
    monkeypatch.setattr(computers, "STRIP", 4)
    monkeypatch.setattr(computers, "SCRATCH", 150)
    monkeypatch.setattr(gpu_direct, "_LEAST", 1 << 13)
    monkeypatch.setattr(
        gpu_direct, "gather_on", lambda control, name, number, told: control.vote(number) or None
    )


class Control:
    """What a rank votes on: whether all voted alike is seen at the end."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.channel = SimpleNamespace(take_turn=lambda call: None, end_turn=lambda: None, runs=0)

    def vote(self, number: int) -> bool:
        self.numbers.append(number)
        return True


class Ranks:
    """Direct calls of all ranks of a machine, or of ``hosts``, and whole matrices beside them."""

    def __init__(self, size: int, *, reserves: bool = True, hosts: bool = False, **how: Any) -> None:
        self.peers = Peers(size, domains=[(rank,) for rank in range(size)] if hosts else (), **how)
        self.direct = [
            GpuDirect(gpu, each.cupy.cuda.get_current_stream, lambda: None, load())
            for gpu, each in zip(self.peers.gpus, self.peers.streams, strict=True)
        ]
        self.controls = [Control() for _ in range(size)]
        self.values: dict[Held, np.ndarray] = {}
        if (
            reserves and not hosts and size > 1
        ):  # ranks run one after the other: none can wait for others to reserve
            for gpu, each in zip(self.peers.gpus, self.direct, strict=True):
                each.sets.fit(1)
                assert gpu.symmetric_bytes("direct slabs") == 2 * each.sets.capacity

    def matrix(self, values: np.ndarray, d: pb.MatrixDescriptor, ld: int = 3) -> list[Held]:
        found = []
        for rank in range(self.peers.size):
            local = np.zeros((0, 0), d.dtype)
            if rank < d.grid.size:
                rows, cols = d.global_indices(rank)
                local = values[np.ix_(rows, cols)].astype(d.dtype)
            lines = local if d.order == "C" else local.T
            array = self.peers.array(rank, np.ascontiguousarray(lines), ld=lines.shape[1] + ld)
            at = array.data.ptr if local.size else 0  # as CuPy's
            pattern = pattern_of(d, rank, narrow=True)
            nbytes = len(lines) * (lines.shape[1] + ld) * d.dtype.itemsize * (local.size > 0)
            found.append(Held(pattern, array, at, lines.shape[1] + ld, nbytes))
            self.values[found[-1]] = array.values
        return found

    def whole(self, helds: list[Held], d: pb.MatrixDescriptor) -> np.ndarray:
        found = np.zeros(d.shape, d.dtype)
        for rank in range(d.grid.size):
            rows, cols = d.global_indices(rank)
            values = self.values[helds[rank]]
            found[np.ix_(rows, cols)] = values if d.order == "C" else values.T
        return found

    def run(self, parts: dict[str, Any], **how: Any) -> Any:
        """Queue a call on every rank; return what they all returned."""
        found = set()
        for rank in range(self.peers.size):
            mine = {name: None if x is None else (x[0][rank], *x[1:]) for name, x in parts.items()}
            asked = Asked(
                how["routine"], b=mine.get("b"), c=mine.get("c"), a=mine["a"], d=mine["d"], new=False, **how
            )
            found.add(self.direct[rank].run(self.controls[rank], asked))
        assert len(found) == 1
        return found.pop()

    def finish(self, seed: int | None = None) -> None:
        self.peers.run(seed)
        assert len({tuple(control.numbers) for control in self.controls}) == 1


def placed(
    rng: np.random.Generator, ranks: Ranks, values: dict[str, np.ndarray], *, alike: bool, most: int
) -> dict[str, Any]:
    """Return matrices with room around these parts: what ranks hold, the layout, all values, and where the part is."""
    found = {}
    nprow = int(rng.choice([p for p in range(1, ranks.peers.size + 1) if ranks.peers.size % p == 0]))
    grid, block, order = (
        pb.Grid(nprow, ranks.peers.size // nprow),
        int(rng.integers(1, most)),
        rng.choice(list("CF")),
    )
    whole_blocks = rng.integers(3) == 0
    for name, x in values.items():
        i, j = (int(start) for start in rng.integers(0, 6, 2))
        if whole_blocks:
            i, j = i // block * block, j // block * block
        if not alike and rng.integers(2):
            block, order = int(rng.integers(1, most)), rng.choice(list("CF"))
        source = (0, 0) if most > 5 else tuple(int(rng.integers(p)) for p in grid.shape)
        d = pb.MatrixDescriptor((i + len(x) + 2, j + x.shape[1] + 1), block, grid, source, x.dtype, order)
        whole, at = np.full(d.shape, 77, d.dtype), (slice(i, i + len(x)), slice(j, j + x.shape[1]))
        whole[at] = x
        found[name] = ranks.matrix(whole, d), d, whole, at
    return found


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    "routine", [name for name, family in FAMILIES.items() if family in gpu_direct._COMPUTERS]
)
@pytest.mark.parametrize(
    ("size", "hosts", "least"),
    [
        (1, False, 0),
        (2, False, 0),
        (4, False, 0),
        (2, True, 1 << 20),
        (4, True, 1 << 20),
        (2, True, 1),
        (4, True, 1),
    ],
)
def test_any_layout(monkeypatch, routine, size, hosts, least):
    """Each routine on sub-matrices anywhere: each call twice, so that it is bound and found again.

    Between hosts by messages, or gathered if that many bytes of each rank are needed by all.
    """
    done, gathers = 0, list[int]()
    monkeypatch.setattr(builder, "GATHERED", least)
    gather = Nccl.gather_at
    monkeypatch.setattr(Nccl, "gather_at", lambda of, *args: (gathers.append(args[-1]), gather(of, *args)))
    monkeypatch.setattr(fakepeers, "ROOM", 1 << (17 if hosts else 16))
    seeds, name = draws(6, long=14), "b" if routine in ("trsm", "trmm") else "c"
    for seed in range(seeds):
        rng = np.random.default_rng([seed, size, 5])
        dtype = "complex128" if seed % 3 == 2 else "float64"
        ranks = Ranks(size, hosts=hosts)
        options = pick(rng, legal_options(routine, dtype))
        (alpha, beta), sizes = scalars(rng, routine, dtype), tuple(int(x) for x in rng.integers(1, 12, 3))
        alpha, beta = alpha or 2, 0 if name == "b" else beta
        drawn = calls_drawn(rng, routine, options, dtype, sizes, alpha, beta)
        here = routine in ("symm", "hemm")  # these only if one rank has all operands
        x = placed(rng, ranks, drawn.values, alike=seed % 4 > 0, most=40 if here else 5)
        parts = {
            key: (helds, at[0].start, at[1].start, *drawn.plain[key].shape, False)
            for key, (helds, _, _, at) in x.items()
        }
        parts["d"] = parts[name]
        helds, layout, want, at = x[name]
        for _ in range(2):
            result = computed(routine, drawn.plain | {name: want[at]}, options, alpha, beta)
            want[at] = np.where(written(routine, options, want[at].shape), result, want[at])
        how = {**options, "alpha": alpha, "beta": beta}
        answers = [ranks.run(parts, routine=routine, **how) for _ in range(2)]
        assert answers[0] == answers[1]
        if answers[0] is None:
            continue
        done += 1
        ranks.finish(seed)
        got = ranks.whole(helds, layout)
        assert np.allclose(got, want, rtol=1e-9, atol=1e-9, equal_nan=True), f"{seed}: {how}"
    assert done >= (seeds - 4 if size == 1 else 2)
    assert bool(gathers) <= (least == 1)
    if routine == "matmul" and size == 2:
        assert bool(gathers) is (least == 1)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("grid", "hosts"),
    [((1, 1), False), ((1, 2), False), ((2, 2), False), ((2, 1), "by messages"), ((1, 4), "gathered")],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_products_of_16_bits(monkeypatch, grid, hosts, dtype, order):
    """In any of the four forms; other routines are not direct."""
    monkeypatch.setattr(builder, "GATHERED", 1 if hosts == "gathered" else 1 << 20)
    gathers, gather = list[int](), Nccl.gather_at
    monkeypatch.setattr(Nccl, "gather_at", lambda of, *args: (gathers.append(args[-1]), gather(of, *args)))
    rng, ranks, kind = np.random.default_rng(8), Ranks(grid[0] * grid[1], hosts=bool(hosts)), DTYPES[dtype]
    d = pb.MatrixDescriptor((14, 14), 3, pb.Grid(*grid), dtype=kind, order=order)
    values = [rng.integers(-2, 3, d.shape).astype(float) for _ in range(3)]
    a, b, c = (ranks.matrix(each, d) for each in values)
    at = 4 if hosts == "gathered" else 0  # B's columns are where D's are: only A is moved
    parts = {"a": (a, 1, 2, 9, 9, False), "b": (b, 3, at, 9, 9, False), "c": (c, 0, 4, 9, 9, False)}
    parts["d"], want = parts["c"], values[2].copy()
    for op_a, op_b in itertools.product("NT", repeat=2):
        x, y = values[0][1:10, 2:11], values[1][3:12, at : at + 9]
        added = 2 * ((x if op_a == "N" else x.T) @ (y if op_b == "N" else y.T))
        want[:9, 4:13] = (added - want[:9, 4:13]).astype(kind)
        assert ranks.run(parts, routine="matmul", alpha=2.0, beta=-1.0, op_a=op_a, op_b=op_b)
    ranks.finish(1)
    assert bool(gathers) is (hosts == "gathered")
    assert np.array_equal(ranks.whole(c, d).astype(float), want)
    assert ranks.run({"a": parts["a"], "c": parts["c"], "d": parts["d"]}, routine="geadd", beta=1.0) is None


@pytest.mark.usefixtures("alone")
def test_types_of_16_bits_are_told_apart(path):
    """The core, which reads the matrices, compares types that BLAS lacks, too."""
    with machine(path, Multiplying, lt=FakeLt()), pb.Context(engine="cublasmp") as ctx:
        half, brain = (
            [ctx.zeros((12, 12), block=2, order="F", dtype=dtype) for _ in range(3)]
            for dtype in ("float16", "bfloat16")
        )
        for x, y, out in (half, brain):
            assert pb.matmul(x, y, out=out) is out
        assert len(ctx.engine.direct._calls) == 2
        for mixed in ((half[0], brain[1], half[2]), (half[0], half[1], brain[2]), (*brain[:2], half[2])):
            with pytest.raises(pb.LayoutError, match="dtype is"):
                pb.matmul(*mixed[:2], out=mixed[2])


def factor(ranks: Ranks, d: pb.MatrixDescriptor, values: np.ndarray) -> list[Held]:
    """Queue what a Cholesky factorization by blocks asks for, without its diagonal blocks."""
    whole, (n, _), nb = ranks.matrix(values, d), d.shape, d.block[0]
    for k in range(0, n - nb, nb):
        rest = n - k - nb
        corner, panel = (whole, k, k, nb, nb, False), (whole, k + nb, k, rest, nb, False)
        trailing = (whole, k + nb, k + nb, rest, rest, False)
        assert ranks.run(
            {"a": corner, "b": panel, "d": panel}, routine="trsm", side="R", uplo="L", op_a="T", diag="U"
        )
        assert ranks.run(
            {"a": panel, "c": trailing, "d": trailing}, routine="syrk", uplo="L", alpha=-1.0, beta=1.0
        )
    return whole


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("hosts", [False, True])
def test_a_sweep_in_any_order(grid, order, hosts):
    """Many calls in a row, in orders that streams and barriers allow: LDL^T with a diagonal of ones."""
    d = pb.MatrixDescriptor((22, 22), 3, pb.Grid(*grid), order=order)
    rng = np.random.default_rng(4)
    values = rng.integers(-1, 2, d.shape) / 8
    want = values.copy()
    for k in range(0, 19, 3):
        corner = np.tril(want[k : k + 3, k : k + 3], -1) + np.eye(3)
        want[k + 3 :, k : k + 3] = np.linalg.solve(corner, want[k + 3 :, k : k + 3].T).T
        update = want[k + 3 :, k : k + 3] @ want[k + 3 :, k : k + 3].T
        want[k + 3 :, k + 3 :] -= np.tril(update)
    for seed in (None, 1, *only_long(2, 3)):
        ranks = Ranks(grid[0] * grid[1], hosts=hosts)
        whole = factor(ranks, d, values)
        ranks.finish(seed)
        assert np.allclose(ranks.whole(whole, d), want)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("order", ["C", "F"])
def test_sub_matrices_that_are_dealt_out_alike_share_a_template(order):
    """As do calls on other matrices of the layout; C that is D, and C that is not, have different ones."""
    d, ld = pb.MatrixDescriptor((24, 24), 2, pb.Grid(1, 2), order=order), 8
    rng = np.random.default_rng(7)
    ranks = Ranks(2)
    values = [rng.integers(-3, 4, d.shape).astype("float64") for _ in range(3)]
    x, y, z = (ranks.matrix(each, d, ld) for each in values)
    wants = values[2].copy()
    for step, (i, j) in enumerate((i, j) for i in range(0, 18, 4) for j in range(0, 18, 6)):
        rows, cols, inner = slice(i, i + 4), slice(j, j + 6), slice(i, i + 2)
        a, b = (x, i, i, 4, 2, False), (y, i, j, 2, 6, False)
        if step % 2:
            a, b = (y, i, i, 4, 2, False), (x, i, j, 2, 6, False)
        c = (z, i, j, 4, 6, False)
        old = (x, i, j, 4, 6, False) if step > 12 else c
        assert ranks.run({"a": a, "b": b, "c": old, "d": c}, routine="matmul", alpha=2.0, beta=1.0)
        left, right = (values[1], values[0]) if step % 2 else values[:2]
        before = values[0] if step > 12 else wants
        wants[rows, cols] = 2 * left[rows, inner] @ right[inner, cols] + before[rows, cols]
    assert step == 14
    for direct in ranks.direct:
        assert len(direct._calls) == 15
        templates = [each for each in direct._templates.values() if each is not None]
        assert len(templates) == len(direct._templates) <= 6, direct._templates
    ranks.finish(1)
    assert np.array_equal(ranks.whole(z, d), wants)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("grid", [(1, 2), (2, 1)])
def test_products_of_transposed_views(order, grid):
    """Any of A, B and D may be one, of real and of complex matrices."""
    rng = np.random.default_rng(2)
    for dtype, turned in itertools.product(
        ("float64", "complex128"), itertools.product((False, True), repeat=3)
    ):
        d, ranks = pb.MatrixDescriptor((16, 16), 3, pb.Grid(*grid), dtype=dtype, order=order), Ranks(2)
        scale = 1 + 1j if dtype == "complex128" else 1
        values = [(rng.integers(-3, 4, d.shape) * scale).astype(dtype) for _ in range(3)]
        a, b, c = (ranks.matrix(each, d) for each in values)
        sizes = (7, 5), (5, 9), (7, 9)
        parts, views = {}, []
        for (name, helds), value, (m, n), turn in zip(
            {"a": a, "b": b, "d": c}.items(), values, sizes, turned, strict=True
        ):
            rows, cols = (n, m) if turn else (m, n)
            parts[name] = helds, 4, 2, rows, cols, turn
            view = value[4 : 4 + rows, 2 : 2 + cols]
            views.append(view.T if turn else view)
        views[2][...] = 2 * views[0] @ views[1]
        assert ranks.run(parts, routine="matmul", alpha=2.0), (dtype, turned)
        ranks.finish()
        assert np.array_equal(ranks.whole(c, d), values[2]), (dtype, turned)


def products(ranks: Ranks) -> None:
    """Queue products for which each rank needs a part of the other's, of one result after the other."""
    d = pb.MatrixDescriptor((6, 6), 2, pb.Grid(1, 2), order="F")
    a, *results = (ranks.matrix(np.eye(6), d) for _ in range(5))
    for result in results:
        parts = {name: (x, 0, 0, 6, 6, False) for name, x in (("a", a), ("b", a), ("d", result))}
        assert ranks.run(parts, routine="matmul")


@pytest.mark.usefixtures("_small")
def test_every_barrier_is_needed():
    """Without one of them, some order of what is queued is a fault that the model finds."""

    def attempt(skip: tuple[int, int] | None, seed: int) -> list[list[str]]:
        ranks = Ranks(2, skip=skip)
        products(ranks)
        ranks.finish(seed)
        return [gpu.names for gpu in ranks.peers.gpus]

    assert attempt(None, 0) == [["meet"] * 4] * 2
    signals = itertools.product(range(2), range(4))
    assert [each for each in signals if not is_missed(attempt, each, range(40))] == []


@pytest.mark.usefixtures("_small")
def test_two_sets_of_slabs_are_needed(monkeypatch):
    """With one set, a rank may write into what a peer still reads."""
    monkeypatch.setattr(SlabSets, "turn", lambda sets: None)
    ranks = Ranks(2)
    products(ranks)
    with pytest.raises(Fault):
        ranks.finish(0)


@pytest.mark.usefixtures("_small")
def test_what_is_kept_holds_no_array_and_is_bounded(monkeypatch):
    monkeypatch.setattr(gpu_direct, "_REMEMBERED", 5)
    ranks = Ranks(1)
    d = pb.MatrixDescriptor((8, 8), 2, pb.Grid(1, 1))
    whole, other = ranks.matrix(np.eye(8), d), ranks.matrix(np.eye(8), d)
    for i in range(8):
        part, to = (whole, 0, i, 8, 1, False), (other, 0, i, 8, 1, False)
        assert ranks.run({"a": part, "c": to, "d": to}, routine="geadd", beta=1)
        assert len(ranks.direct[0]._calls) <= 5


@pytest.mark.usefixtures("_small")
def test_every_call_asks_for_its_slabs(monkeypatch):
    """Also one that is bound already: the memory is kept if a user's graph records this call."""
    asked, symmetric = [], Gpu.symmetric_of_all
    noted = lambda gpu, name: (asked.append(gpu.rank), symmetric(gpu, name))[1]  # noqa: E731
    monkeypatch.setattr(Gpu, "symmetric_of_all", noted)
    ranks = Ranks(2)
    d = pb.MatrixDescriptor((8, 8), 2, pb.Grid(1, 2))
    a, b, c = (ranks.matrix(np.eye(8), d) for _ in range(3))
    whole = (0, 0, 8, 8, False)
    for _ in range(5):
        asked.clear()
        assert ranks.run(
            {"a": (a, *whole), "b": (b, *whole), "c": (c, *whole), "d": (c, *whole)}, routine="matmul", beta=1
        )
        assert {*asked} == {0, 1}
    ranks.finish()


@pytest.mark.usefixtures("_small")
def test_what_is_kept_is_bound_again_once_a_buffer_has_grown(monkeypatch):
    """The tiles on a triangle's diagonal are summed in a buffer of this rank's, which a larger triangle makes grow.

    A call is bound when it is made again.
    """
    made, place = [], Template.placed
    monkeypatch.setattr(Template, "placed", lambda *given: (made.append(given), place(*given))[1])
    ranks = Ranks(1)
    d = pb.MatrixDescriptor((8, 8), 2, pb.Grid(1, 1))
    a, c = ranks.matrix(np.eye(8), d), ranks.matrix(np.eye(8), d)
    bound = []
    for n in (2, 2, 2, 8, 2, 2):
        to = c, 0, 0, n, n, False
        assert ranks.run({"a": (a, 0, 0, n, 2, False), "c": to, "d": to}, routine="syrk", uplo="L", beta=1)
        bound.append(len(made))
    assert bound == [0, 1, 1, 1, 2, 2]
    ranks.finish()


def one_product(ranks: Ranks) -> dict[str, Any]:
    """Matrices of two ranks, and their product."""
    d = pb.MatrixDescriptor((8, 8), 2, pb.Grid(1, 2))
    return {name: (ranks.matrix(np.eye(8), d), 0, 0, 8, 8, False) for name in "abd"}


@pytest.mark.usefixtures("_small")
def test_calls_that_are_not_direct(monkeypatch):
    """While a graph is recorded; large ones by messages; what overlaps."""
    ranks = Ranks(2)
    parts = one_product(ranks)
    recording = SimpleNamespace(ptr=1, is_capturing=lambda: True)
    here = ranks.direct[0]._current()
    for current, given in ((recording, parts), (here, {**parts, "d": parts["b"]})):
        for each in ranks.direct:
            each._current = lambda current=current: current
        assert ranks.run(given, routine="matmul") is None
    for name, least in (("MOST_SENT", 1 << 20), ("MOST_GATHERED", 1)):
        monkeypatch.setattr(builder, "GATHERED", least)
        far = Ranks(2, hosts=True)
        monkeypatch.setattr(builder, name, 200)  # bytes: less than A takes
        assert far.run(one_product(far), routine="matmul") is None, name
        assert not any(control.numbers for control in far.controls)
    assert not any(control.numbers for control in ranks.controls)


@pytest.mark.usefixtures("_small")
def test_ranks_that_disagree_or_have_no_room_for_slabs_queue_nothing():
    disagree, small = Ranks(2), Ranks(2, reserves=False)
    for control in disagree.controls:
        control.vote = lambda number: False

    def reserve(name: str, nbytes: int) -> None:
        raise MemoryError

    for gpu in small.peers.gpus:
        gpu.reserve = reserve
    for ranks, answers in ((disagree, [False]), (small, [False, None])):
        parts = one_product(ranks)
        assert [ranks.run(parts, routine="matmul") for _ in answers] == answers
        assert not any(ranks.peers.program)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("routine", "columns", "direct"),
    [("trmm", 2, False), ("trmm", 3, True), ("symm", 4, False), ("symm", 5, True), ("trsm", 2, True)],
)
def test_a_large_matrix_and_few_columns_take_a_plan(monkeypatch, routine, columns, direct):
    """Its kernel reads the triangle as fast as a product reads a matrix, which cuBLAS does not."""
    monkeypatch.setattr(computers, "LARGE", 32**2)
    ranks = Ranks(1)
    square, thin = (pb.MatrixDescriptor((32, cols), 4, pb.Grid(1, 1)) for cols in (32, columns))
    a, b = (ranks.matrix(np.eye(*d.shape), d) for d in (square, thin))
    parts = {"a": (a, 0, 0, 32, 32, False), **dict.fromkeys("bd", (b, 0, 0, 32, columns, False))}
    if routine == "symm":
        parts["d"] = (ranks.matrix(np.eye(32, columns), thin), 0, 0, 32, columns, False)
    assert ranks.run(parts, routine=routine) is (True if direct else None)


@on_ranks(2, timeout=60)
def test_promises_of_errors(comm: Any, path: str) -> None:
    """Contexts on GPUs: what ranks do not agree on is raised on all, and nothing has been queued."""
    with machine(path, Multiplying, comm=comm, lt=FakeLt()) as lib, pytest.MonkeyPatch.context() as patch:
        ctx = pb.Context(comm, engine="cublasmp")
        a, b, c = (ctx.zeros((12, 12), block=2, grid=(1, 2), order="F") for _ in range(3))

        def queued() -> int:
            return len(lib.gpu.did("cuBLAS"))

        pb.matmul(a, b, out=c)
        pb.blas.syrk(a[2:, :2], c[2:, 2:], uplo="L", beta=1, out=c[2:, 2:])
        assert queued() >= 2
        assert not plans_kept(ctx)
        before, measured = queued(), ctx.engine.measured
        for problem in (
            pb.MatmulProblem(a.descriptor, b.descriptor, c.descriptor),
            ParallelProblem("matmul_allreduce", (8, 8), (4, 4), (6, 6), (8, 8), *[a.dtype] * 3),
        ):
            measured.add(measured.entry(problem, Options(), {"push": 1e-9}, "today"))
        pb.matmul(a, b, out=c)
        direct = queued() == before + 1 and not plans_kept(ctx)
        assert direct, "direct after measurements: they were planned"
        before = queued()
        for name, words, call, how in (
            ("alpha", ["alpha", "1", "2"], pb.matmul, {"alpha": 1 + comm.rank}),
            ("op", ["op_b"], pb.matmul, {"op_b": "NT"[comm.rank]}),
            ("calls", ["different calls"], (pb.matmul, pb.blas.trsm)[comm.rank], {}),
        ):
            refuses(ctx, pb.RankMismatchError, words, call, a, b, out=c, **how)
            assert not queued() - before, name
        refuses(ctx, pb.ArgumentError, ["shares memory"], pb.matmul, a, c[:, :], out=c)
        assert not queued() - before, "overlap"
        pb.matmul(a, b, out=c)
        assert queued() == before + 1, "afterwards: the next call was not direct"
        for name, alpha in (("new", 2), ("known", 2), ("repeated", 2), ("another", 3)):
            pb.matmul(a, b, out=c, alpha=np.float64(alpha) if comm.rank else alpha)
            before += 1
            assert queued() == before + 1, (
                f"{name}: a number that the core does not read was voted on otherwise"
            )

        def fails(*arguments: int) -> None:
            raise RuntimeError("no launch")

        try:
            if comm.rank:
                patch.setattr(ctx.engine.direct.gpu.products.cublas, "dgemm", fails)
            pb.matmul(a, b[:, 2:], out=c[:, 2:])
            found = "" if comm.rank == 0 else "nothing was raised"
        except RuntimeError as error:
            found = "" if "no launch" in str(error) else str(error)
        assert not found, "a rank that cannot queue"
        try:
            pb.matmul(a, b, out=c)
            found = "no ClosedError"
        except pb.ClosedError as error:
            found = "" if "rank 1 left matmul with RuntimeError: no launch" in str(error) else str(error)
        assert not found, "the context is broken"
        ctx.close()

        def breaks(maker: Any) -> None:
            raise RuntimeError("no call")

        ctx = pb.Context(comm, engine="cublasmp")
        a = ctx.zeros((12, 12), block=2, grid=(1, 2), order="F")
        if comm.rank:
            patch.setitem(gpu_direct._COMPUTERS, "product", breaks)
        try:
            pb.matmul(a, a)
            found = "nothing was raised"
        except (RuntimeError, pb.ClosedError) as error:
            found = "" if "no call" in str(error) else str(error)
        assert not found, "a rank that cannot prepare"
        ctx.close()


@pytest.mark.parametrize("without", [(1,), (0, 1)])
@on_ranks(2, timeout=60)
def test_without_the_core_on_a_rank_no_call_is_direct(comm: Any, path: str, without: Sequence[int]) -> None:
    with machine(path, Multiplying, comm=comm, lt=FakeLt()) as lib, pytest.MonkeyPatch.context() as patch:
        if comm.rank in without:
            patch.setenv("PBLASMP_CORE", "0")
        with pb.Context(comm, engine="cublasmp") as ctx:
            a, b, c = (ctx.zeros((12, 12), block=2, grid=(1, 2), order="F") for _ in range(3))
            for _ in range(3):
                pb.matmul(a, b, out=c)
            assert not lib.gpu.did("cuBLAS")
            assert plans_kept(ctx), "the product was not planned"
