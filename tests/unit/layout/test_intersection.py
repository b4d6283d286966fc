# SPDX-License-Identifier: Apache-2.0
"""Which indices two layouts share, and the copies and messages that move a matrix from one to the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pblasmp.layout import Axis, Grid, MatrixDescriptor
from pblasmp.layout.intersection import (
    Piece,
    common_counts,
    copy,
    copy_all,
    extent,
    intersect,
    packed,
    strided,
    unpacked,
)
from tests.helpers.oracle import axes, deal, descriptors, empty, number, positions, read, views, write
from tests.helpers.slow import draws

few = settings(max_examples=draws(30, long=100))


def expected(src, p, dst, q):
    both = zip(deal(src), deal(dst), strict=True)
    return [(at, to) for (owner, at), (taker, to) in both if (owner, taker) == (p, q)]


two_axes = st.integers(0, 60).flatmap(lambda n: st.tuples(axes(n), axes(n)))


@few
@given(two_axes)
def test_common_finds_every_index_that_two_processes_share_once(two):
    src, dst = two
    for p in range(src.nprocs):
        for q in range(dst.nprocs):
            found = intersect(src, p, dst, q)
            assert sorted(positions(found)) == expected(src, p, dst, q)
            assert extent(found) == len(positions(found))


@pytest.mark.parametrize(
    ("src", "dst", "most"),
    [
        (Axis(10**6, 64, 0, 4), Axis(10**6, 64, 0, 4), 1),  # the same layout: one run
        (Axis(10**6 + 9, 64, 0, 4), Axis(10**6 + 9, 10**7, 0, 1), 2),  # all blocks, and the ragged one
        (Axis(10**6 + 9, 64, 0, 4), Axis(10**6 + 9, 64, 1, 2), 2),
        (Axis(10**6, 64, 0, 4), Axis(10**6, 48, 0, 3), 6),  # 24 places where runs begin in 768 indices
        (Axis(10**6, 64, 0, 4, lead=5), Axis(10**6, 96, 0, 2, lead=5), 4),  # the first run is cut as well
        (Axis(10**6, 48, 1, 3, lead=37), Axis(10**6, 96, 0, 2, lead=5), 4),
        (Axis(10**6, 64, 1, 4, lead=40), Axis(10**6, 8, 0, 5, lead=3), 10),
    ],
)
def test_regular_runs_make_few_stretches(src, dst, most):
    """Each costs a copy from Python, so their number must not grow with the matrix."""
    counts = [len(intersect(src, p, dst, q)) for p in range(src.nprocs) for q in range(dst.nprocs)]
    assert 0 < max(counts) <= most


def test_layouts_whose_rounds_have_no_small_common_multiple():
    src, dst = Axis(7, 2**62 - 1, 1, 2), Axis(7, 2**61 - 1, 0, 3, lead=2)
    assert positions(intersect(src, 1, dst, 0)) == [(i, i) for i in range(7)]
    assert intersect(src, 0, dst, 0) == ()


@few
@given(two_axes)
def test_sender_and_receiver_see_the_same_order(two):
    src, dst = two
    for p in range(src.nprocs):
        for q in range(dst.nprocs):
            found = intersect(src, p, dst, q)
            sent, received = positions(packed(found)), positions(unpacked(found))
            assert [at for _, at in sent] == [at for at, _ in received] == list(range(extent(found)))
            assert [(of, to) for (of, _), (_, to) in zip(sent, received, strict=True)] == positions(found)


def pieces(src, dst):
    """Yield (source rank, destination rank, piece) for every pair of ranks."""
    for (prow, pcol), rank in number(src.grid).items():
        for (qrow, qcol), other in number(dst.grid).items():
            yield (
                rank,
                other,
                Piece(intersect(src.rows, prow, dst.rows, qrow), intersect(src.cols, pcol, dst.cols, qcol)),
            )


def numbered(d):
    return np.arange(1, d.shape[0] * d.shape[1] + 1, dtype=float).reshape(d.shape)


two_layouts = st.tuples(st.integers(0, 14), st.integers(0, 14)).flatmap(
    lambda shape: st.tuples(descriptors(shape), descriptors(shape))
)


@few
@given(two_layouts)
def test_copying_every_piece_redistributes_a_matrix(two):
    src, dst = two
    of, to = write(empty(src), src, numbered(src)), empty(dst)
    before = [flat.copy() for flat in to]
    for rank, other, piece in pieces(src, dst):
        assert piece.size == piece.shape[0] * piece.shape[1]
        copy(views(to, dst)[other], views(of, src)[rank], piece)
    assert np.array_equal(read(to, dst), numbered(src))
    write(before, dst, numbered(src))  # the padding is as it was
    assert all(np.array_equal(a, b) for a, b in zip(to, before, strict=True))


@few
@given(two_layouts, st.sampled_from("CF"), st.integers(1, 30))
def test_messages_redistribute_a_matrix(two, order, limit):
    """Packing, sending in parts and unpacking is the same as copying."""
    src, dst = two
    of, to = write(empty(src), src, numbered(src)), empty(dst)
    for rank, other, whole in pieces(src, dst):
        parts = whole.split(limit, order)
        assert sum(part.size for part in parts) == whole.size
        for part in parts:
            rows, cols = part.shape
            assert part.size <= max(limit, cols if order == "C" else rows)
            message = np.empty(part.shape, order=order)
            copy(message, views(of, src)[rank], part.packed())
            copy(views(to, dst)[other], message, part.unpacked())
    assert np.array_equal(read(to, dst), numbered(src))


@few
@given(two_layouts, st.integers(1, 30))
def test_splitting_keeps_the_order_of_the_message(two, limit):
    for _, _, whole in pieces(*two):
        for piece, order, axis in ((whole, "C", 0), (whole.T, "F", 1)):
            parts = [(part.rows, part.cols) for part in piece.split(limit, order)]
            assert all(part[1 - axis] == (piece.rows, piece.cols)[1 - axis] for part in parts)
            assert [pair for part in parts for pair in positions(part[axis])] == positions(whole.rows)


@few
@given(two_layouts, st.sampled_from("CF"))
def test_a_contiguous_piece_is_its_own_message(two, order):
    src, dst = two
    of = write(empty(src), src, numbered(src))
    for rank, other, piece in pieces(src, dst):
        if piece.size == 0:
            continue
        message = np.empty(piece.shape, order=order)
        copy(message, views(of, src)[rank], piece.packed())
        direct = piece.region(views(of, src)[rank], order, source=True)
        if direct is not None:
            assert np.array_equal(direct, message)
            assert direct.flags[f"{order}_CONTIGUOUS"]
        to = empty(dst)
        into = piece.region(views(to, dst)[other], order, source=False)
        if into is not None:
            assert into.flags[f"{order}_CONTIGUOUS"]
            into[...] = message
            there = empty(dst)
            copy(views(there, dst)[other], message, piece.unpacked())
            assert np.array_equal(to[other], there[other])


@pytest.mark.parametrize("shape", [(300, 270), (128, 129), (1, 500), (5, 1000)])
@pytest.mark.parametrize("block", [(1000, 1000), (130, 140), (128, 7), (8, 8), (1, 1)])
def test_transposing_copies_go_tile_by_tile(shape, block):
    src = MatrixDescriptor(shape, block, Grid(2, 2), order="C")
    dst = MatrixDescriptor(shape, (1000, 1000), Grid(1, 1), order="F")
    of, to = write(empty(src), src, numbered(src)), empty(dst)
    for rank, _, piece in pieces(src, dst):
        copy(views(to, dst)[0], views(of, src)[rank], piece)
    assert np.array_equal(read(to, dst), numbered(src))
    back = empty(src)
    for _, rank, piece in pieces(dst, src):
        copy(views(back, src)[rank], views(to, dst)[0], piece)
    assert np.array_equal(read(back, src), numbered(src))


@pytest.mark.parametrize("seed", range(4))
def test_counts_of_common_indices_are_those_of_the_stretches(seed):
    """Of any two distributions: periods that fit several times or never, starts inside a block, huge blocks."""
    rng = np.random.default_rng(seed)
    for _ in range(draws(60, long=150)):
        size = int(rng.choice([0, 1, 7, 40, 333, 2000]))
        src, dst = (
            Axis(size, block, int(rng.integers(n)), n, int(rng.integers(min(block, 50))))
            for n, block in zip(
                rng.integers(1, 6, 2).tolist(),
                rng.choice([1, 2, 3, 7, 16, 50, 10**6, 2**40], 2).tolist(),
                strict=True,
            )
        )
        counts = common_counts(src, dst)
        expected = [[extent(intersect(src, p, dst, q)) for q in range(dst.nprocs)] for p in range(src.nprocs)]
        assert counts.tolist() == expected, (src, dst)
        assert int(counts.sum()) == size
        assert not counts.flags.writeable


def test_counts_of_an_extent_beyond_memory():
    src, dst = Axis(10**15, 64, 1, 16), Axis(10**15, 100, 3, 7)
    counts = common_counts(src, dst)
    assert counts.sum(axis=1).tolist() == src.counts()
    assert counts.sum(axis=0).tolist() == dst.counts()


@pytest.mark.parametrize(
    ("order", "back", "conjugate"), [("C", False, True), ("F", True, False), ("C", True, True)]
)
def test_a_mask_restricts_a_copy(order, back, conjugate):
    """It is in the order of a message: several runs of rows and columns, turned and conjugated, and the way back."""
    rng = np.random.default_rng(2)
    (m, i), (n, j) = ((Axis(47, block, 1, 2, lead), Axis(47, 5, 0, 3)) for block, lead in ((3, 1), (8, 0)))
    piece = Piece(intersect(m, 1, i, 0), intersect(n, 1, j, 1))
    shapes = (m.count(1), n.count(1)), (i.count(0), j.count(1))
    if back:
        piece, shapes = piece.back, shapes[::-1]
    src = np.asarray(rng.random(shapes[0]) + 1j, order=order)
    message, mask = np.empty(piece.shape, complex), rng.integers(2, size=piece.shape).astype(bool)
    copy(message, src, piece.packed(), conjugate=conjugate)
    expected, found = np.zeros(shapes[1], complex), np.zeros(shapes[1], complex)
    copy(expected, np.where(mask, message, 0), piece.unpacked())
    copy(found, src, piece, conjugate=conjugate, where=mask)
    assert len(piece.rows) > 1 < len(piece.cols)
    assert 0 < np.count_nonzero(found) == mask.sum()
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("conjugate", [False, True])
def test_copy_all_of_nothing_into_the_other_memory_order(shape, conjugate):
    whole, other = np.zeros((7, 9), "c16"), np.ones((7, 9), "c16", order="F")
    copy_all(other[: shape[0], : shape[1]], whole[: shape[0], : shape[1]], conjugate=conjugate)
    assert (other == 1).all()


def test_a_strided_view_of_an_array_of_another_package():
    class Array:
        def __init__(self, shape, dtype, data, strides):
            self.shape, self.dtype, self.data, self.strides = shape, dtype, data, strides

    found = strided(Array((9,), "f8", "memory", (8,)), (2, 3), (32, 8))
    assert (found.shape, found.dtype, found.data, found.strides) == ((2, 3), "f8", "memory", (32, 8))
