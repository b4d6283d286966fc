# SPDX-License-Identifier: Apache-2.0
"""Exchanges: what each rank has to move is known without moving it; one rank moves without MPI."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm import Cell, Cells, Exchange, Side, communicator
from pblasmp.comm import exchange as exchange_module
from pblasmp.comm.exchange import SLOTS, _in_turn, ends
from pblasmp.costs.dry_engine import Ranks
from pblasmp.costs.pretend import PretendedRanks, RanksInTurn
from pblasmp.layout.axis import Axis
from pblasmp.layout.intersection import Piece, intersect
from tests.helpers.cases import layout, part
from tests.helpers.slow import draws
from tests.helpers.threads import on_ranks


def test_what_several_ranks_reach_is_read_by_the_one_that_writes():
    """Two copies, each reached by two ranks, go to four ranks: nothing crosses ranks but for the fifth."""
    whole = Axis(6, 6), Axis(4, 4)
    shared = Side(Axis(6, 3, 0, 2), whole[1], Cells.of([Cell((0, 0), (0, 1)), Cell((1, 0), (2, 3))]), "C")
    targets = Side(*whole, Cells.of([Cell((0, 0), (rank,)) for rank in range(5)]), "C")
    exchanges = [
        Exchange(SimpleNamespace(rank=rank), shared, targets, np.dtype(np.float64)) for rank in range(5)
    ]
    half = 8 * 3 * 4
    assert [exchange.copied_bytes for exchange in exchanges] == [half] * 4 + [0]
    assert [exchange.sent_bytes for exchange in exchanges] == [3 * half, 0, 3 * half, 0, 0]


def test_ranks_that_reach_the_same_parts_take_turns():
    assert [ends((owner, 1, 2), (1, 2)) for owner in (4, 5)] == [(1, 1), (2, 2)]
    assert [ends((owner,), (1, 2)) for owner in (4, 5)] == [(4, 1), (5, 2)]


@pytest.mark.parametrize("slots", [None, 1, 2])
@pytest.mark.parametrize("orders", ["CC", "FF", "CF"])
@pytest.mark.parametrize(
    ("conjugate", "travels"), [(False, "complex128"), (True, "complex128"), (False, "complex64")]
)
def test_every_rank_keeps_some_sends_some_and_receives_some(slots, orders, conjugate, travels, monkeypatch):
    """In many messages each, straight from the arrays and through buffers; nothing is left to a rank's end."""
    monkeypatch.setattr(exchange_module, "MESSAGE_BYTES", 200)
    values = np.arange(17 * 13).reshape(17, 13) * (1 - 2j)
    src = pb.MatrixDescriptor((17, 13), (2, 3), pb.Grid(1, 3), dtype="complex128", order=orders[0])
    dst = pb.MatrixDescriptor((17, 13), (3, 2), pb.Grid(3, 1), (1, 0), "complex64", orders[1])

    def work(comm):
        given, taken = [None] * 3, [None] * 3
        given[comm.rank] = np.array(part(values, src, comm.rank), order=src.order)
        out = taken[comm.rank] = np.full(dst.local_shape(comm.rank), np.nan, np.complex64, order=dst.order)
        exchange = Exchange(comm, Side.of(src), Side.of(dst), np.dtype(travels))
        assert sum(map(len, (exchange.copies, exchange.sends, exchange.receives))) == 5
        transfer = exchange.start(given, taken, conjugate=conjugate, slots=slots)
        if slots is not None:
            assert sum(rank == -1 for rank, *_ in transfer._after) == slots  # sends under way
        transfer.finish()
        if slots == 1:
            assert 1 <= len(transfer._spare) <= 5  # buffers are used again, for messages of two sizes
        return np.array_equal(out, part(values.conj() if conjugate else values, dst, comm.rank))

    assert on_ranks(3, work) == [True] * 3


class LateRequest:
    """A chunk that is there when it is waited for, and not before; the last one posted is reported first."""

    def __init__(self, deliver=lambda: None):
        self.deliver = deliver


class Mailed:
    """A rank whose messages wait in ``mail`` until they are received, in chunks of 24 bytes."""

    def __init__(self, rank, mail):
        self.rank, self.mail = rank, mail

    def isend(self, array, dest):
        chunks = [chunk.copy() for chunk in communicator.chunks(array)]
        self.mail.setdefault((self.rank, dest), []).extend(chunks)
        return [LateRequest() for _ in chunks]

    def wait(self, request):
        request.deliver()

    def wait_some(self, requests):
        requests[-1].deliver()
        return [len(requests) - 1]

    def test_some(self, requests):
        return []

    def irecv(self, array, source):
        waiting = self.mail[source, self.rank]
        return [
            LateRequest(partial(np.copyto, chunk, waiting.pop(0))) for chunk in communicator.chunks(array)
        ]


@pytest.mark.parametrize("slots", [None, 1, 3])
@pytest.mark.parametrize("block", [(2, 3), (1, 7), (9, 1)])
def test_a_message_is_there_when_all_its_chunks_are(slots, block, monkeypatch):
    """Chunks may arrive in any order, messages are matched in the order in which they are sent."""
    monkeypatch.setattr(communicator, "CHUNK_BYTES", 24)
    monkeypatch.setattr(exchange_module, "MESSAGE_BYTES", 100)
    values = np.arange(63.0).reshape(9, 7)
    src = pb.MatrixDescriptor((9, 7), block, pb.Grid(1, 1))
    dst = pb.MatrixDescriptor((9, 7), (9, 7), pb.Grid(1, 2), source=(0, 1), order="F")
    mail, out = {}, np.full((9, 7), np.nan, order="F")
    for rank, (source, target) in enumerate((([values], [None, None]), ([None], [None, out]))):
        exchange = Exchange(Mailed(rank, mail), Side.of(src), Side.of(dst), src.dtype)
        exchange.start(source, target, slots=slots).finish()
    assert np.array_equal(out, values)
    assert mail == {(0, 1): []}


class Counted(PretendedRanks):
    """A rank whose messages are done once both ranks have begun them; it hears of them late and in any order.

    Attributes:
        most: the most receives that were open at once.
    """

    def __init__(self, world, rank, rng):
        super().__init__(world, rank)
        self.rng, self.open, self.received, self.most = rng, 0, {}, 0

    def irecv(self, array, source):
        posted = super().irecv(array, source)
        self.received.update((id(each), each) for each in posted)
        self.open += len(posted)
        self.most = max(self.most, self.open)
        return posted

    def test_some(self, requests):
        done = [i for i, each in enumerate(requests) if each.done]
        told = self.rng.permutation(done)[: self.rng.integers(1, 4)].astype(int).tolist()
        for i in told:
            requests[i].waits += 1
            self.open -= self.received.pop(id(requests[i]), None) is not None
        return told


@pytest.mark.parametrize(("slots", "awaited"), [(1, 1), (SLOTS, 2), (SLOTS, 16)])
@pytest.mark.parametrize("travels", ["float64", "float32"])
def test_few_receives_are_open_at_once(slots, awaited, travels, monkeypatch):
    """However many messages and ranks there are, whichever ends first; no rank waits for one that is not sent yet."""
    monkeypatch.setattr(exchange_module, "MESSAGE_BYTES", 64)
    monkeypatch.setattr(exchange_module, "_AWAITED", awaited)
    rng = np.random.default_rng(3)
    values = np.arange(60.0 * 50).reshape(60, 50)
    most, messages = 0, 0
    for _ in range(4):
        src, dst = (layout(rng, values.shape, 4, dtype=dtype) for dtype in ("float64", travels))
        world = RanksInTurn(Ranks(4, 4))
        ranks = [Counted(world, rank, rng) for rank in range(4)]
        right = []

        def run(rank, src=src, dst=dst, ranks=ranks, right=right):
            given, taken = ([None] * d.grid.size for d in (src, dst))
            if rank < src.grid.size:
                given[rank] = np.array(part(values, src, rank), order=src.order)
            if rank < dst.grid.size:
                taken[rank] = np.zeros(dst.local_shape(rank), dst.dtype, order=dst.order)
            exchange = Exchange(ranks[rank], Side.of(src), Side.of(dst), dst.dtype)
            exchange.start(given, taken, slots=slots).finish()
            right.append(rank >= dst.grid.size or np.array_equal(taken[rank], part(values, dst, rank)))

        world.run(run)
        assert right == [True] * 4
        most, messages = max(most, *(each.most for each in ranks)), messages + world.messages.sum()
    assert most <= min(3, awaited) * slots
    assert messages > 200


@pytest.mark.parametrize("order", ["row", "col"])
def test_cells_as_arrays_are_those_of_a_grid(order):
    grid = pb.Grid(2, 3, order)
    cells, expected = Cells.of_grid(grid), [Cell(grid.coords(rank), (rank,)) for rank in range(6)]
    assert cells == expected
    assert cells == Cells.of(expected)
    assert cells != expected[1:]
    assert [cells.owned_by(rank) for rank in (0, 5, 6)] == [0, 5, None]
    mixed = [Cell((0, 1), (4, 2, 3)), Cell((1, 0), (1,))]
    assert list(Cells.of(mixed)) == mixed
    assert Cells.of(mixed).counts.tolist() == [3, 1]
    assert list(Cells.of(mixed).T) == [Cell((1, 0), (4, 2, 3)), Cell((0, 1), (1,))]
    assert not Cells.of(())


def test_messages_take_turns_and_begin_after_this_rank():
    queues = {0: ["a", "b", "c"], 1: ["d"], 3: ["e", "f"]}
    assert _in_turn(queues, 2) == [(3, "e"), (0, "a"), (1, "d"), (3, "f"), (0, "b"), (0, "c")]
    received = _in_turn(queues, 2, receives=True)
    assert received == [(1, "d"), (0, "a"), (3, "e"), (0, "b"), (3, "f"), (0, "c")]
    assert _in_turn({}, 0) == []


def by_all_pairs(me, src, dst):
    """What rank ``me`` copies, sends and receives, and the most that two ranks exchange, from every pair of cells."""
    copies, sends, receives, between = [], {}, {}, {}
    for i, source in enumerate(src.cells):
        for j, target in enumerate(dst.cells):
            owner, writer = ends(source.ranks, target.ranks)
            rows = intersect(src.rows, source.coords[0], dst.rows, target.coords[0])
            cols = intersect(src.cols, source.coords[1], dst.cols, target.coords[1])
            piece = Piece(rows, cols)
            if owner != writer:
                between[owner, writer] = between.get((owner, writer), 0) + piece.size
            if piece.size == 0 or me not in (owner, writer):
                continue
            if owner == writer:
                copies.append((i, j, piece))
            elif me == owner:
                sends.setdefault(writer, []).append((i, j, piece))
            else:
                receives.setdefault(owner, []).append((i, j, piece))
    return copies, sends, receives, max(between.values(), default=0)


def random_side(rng, shape, size):
    """A matrix or a sub-matrix on some of ``size`` ranks, perhaps transposed, or copies of it for groups of ranks."""
    kind = rng.integers(3)
    if kind == 2:
        ranks = rng.permutation(size).tolist()
        cuts = sorted({0, size, *rng.integers(1, size, 2).tolist()})
        groups = [tuple(ranks[i:j]) for i, j in itertools.pairwise(cuts)]
        nprocs = int(rng.integers(1, 4))
        rows = Axis(shape[0], int(rng.integers(1, 9)), int(rng.integers(nprocs)), nprocs)
        cells = tuple(Cell((p, 0), group) for group in groups for p in range(nprocs) if rng.integers(4))
        return Side(rows, Axis(shape[1], max(1, shape[1])), Cells.of(cells), "C")
    nprow = int(rng.integers(1, 4))
    grid = pb.Grid(nprow, int(rng.integers(1, size // nprow + 1)), rng.choice(["row", "col"]))
    start = rng.integers(0, 12, 2).tolist() if kind else [0, 0]
    if rng.integers(2):
        shape = shape[::-1]
    whole = pb.MatrixDescriptor(
        (shape[0] + start[0], shape[1] + start[1]),
        rng.integers(1, 10, 2).tolist(),
        grid,
        (int(rng.integers(grid.nprow)), int(rng.integers(grid.npcol))),
    )
    return whole, start


@pytest.mark.parametrize("seed", range(draws(3, long=6)))
def test_plans_are_those_of_all_pairs_of_cells(seed):
    """Ragged blocks, sources, sub-matrices, transposed matrices, copies for groups; on every rank, in one order."""
    rng, size = np.random.default_rng(seed), 7
    moved = 0
    for _ in range(25):
        shape = tuple(rng.choice([0, 1, 5, 23, 64], 2, p=[0.05, 0.1, 0.25, 0.3, 0.3]).tolist())
        src, dst = (as_side(random_side(rng, shape, size), shape) for _ in range(2))
        for rank in range(size):
            exchange = Exchange(SimpleNamespace(rank=rank), src, dst, np.dtype("float32"))
            copies, sends, receives, largest = by_all_pairs(rank, src, dst)
            plain = partial(map, lambda part: (part.src, part.dst, part.piece))
            assert list(plain(exchange.copies)) == copies
            assert [(to, list(plain(parts))) for to, parts in exchange.sends.items()] == list(sends.items())
            assert [(of, list(plain(parts))) for of, parts in exchange.receives.items()] == list(
                receives.items()
            )
            assert exchange.largest_bytes == 4 * largest
            moved += len(copies) + len(sends) + len(receives)
    assert moved > 100


def as_side(made, shape):
    """The side of what ``random_side`` made, turned so that it has this shape."""
    if isinstance(made, Side):
        return made
    whole, (i, j) = made
    side = Side.of(whole[i:, j:])
    return side if (side.rows.extent, side.cols.extent) == shape else side.T


def test_planning_looks_at_no_cells_that_share_nothing(monkeypatch):
    """On 16 x 16 ranks, matrices alike: each rank intersects its own part, and no other."""
    seen = []
    monkeypatch.setattr(exchange_module, "intersect", lambda *args: seen.append(args) or intersect(*args))
    d = pb.MatrixDescriptor((1024, 1024), (16, 16), pb.Grid(16, 16))
    exchange = Exchange(SimpleNamespace(rank=37), Side.of(d), Side.of(d[0:1024, 0:1024]), np.dtype("float64"))
    assert (len(exchange.copies), len(seen)) == (1, 2)
    other = pb.MatrixDescriptor((1024, 1024), (32, 32), pb.Grid(16, 16), (3, 5))
    exchange = Exchange(SimpleNamespace(rank=37), Side.of(d), Side.of(other), np.dtype("float64"))
    parts = [*exchange.copies, *itertools.chain(*exchange.sends.values(), *exchange.receives.values())]
    assert len(seen) - 2 == 2 * len(parts) <= 2 * 8


@pytest.mark.parametrize(("grid", "k", "getters", "gathers"), [
    (pb.Grid(1, 3), 24, (0, 1, 2), True), (pb.Grid(1, 3), 20, (0, 1, 2), False), (pb.Grid(1, 3), 24, (0, 1), False),
    (pb.Grid(1, 2), 24, (0, 1, 2), False), (pb.Grid(3, 1), 0, (0, 1, 2), False),
])  # fmt: skip
def test_an_exchange_is_an_all_gather_if_all_have_as_much_and_get_all(grid, k, getters, gathers):
    d = pb.MatrixDescriptor((6, k), (2, 4), grid)
    whole = Cells.of([Cell((0, 0), (rank,)) for rank in getters])
    for rank in range(3):
        ranks = SimpleNamespace(rank=rank, size=3)
        dst = Side(Axis.whole(6), Axis.whole(k), whole, "C")
        assert Exchange(ranks, Side.of(d), dst, np.dtype("float32")).gathers is gathers
    halves = Side(Axis(6, 3, 0, 2), Axis.whole(k), Cells.of([Cell((0, 0), (0,)), Cell((1, 0), (1,))]), "C")
    assert not Exchange(ranks, Side.of(d), halves, np.dtype("float32")).gathers
