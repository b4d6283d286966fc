# SPDX-License-Identifier: Apache-2.0
"""Triangles and trapezoids cut into pieces, beside masks by NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pblasmp.engines.direct.asked import Axes, span_of
from pblasmp.layout import Trapezoid
from pblasmp.layout.pieces import Rectangle, even_runs, pieces, write_inside

M = 24


@st.composite
def spans(draw):
    """A range of an axis in blocks, and a process."""
    start, nprocs, block = draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 7))
    axes = Axes(block, nprocs, draw(st.integers(0, nprocs - 1)), draw(st.integers(0, block - 1)), 0)
    return span_of(axes, start, draw(st.integers(1, M))), draw(st.integers(0, nprocs - 1))


def inside(part, rows, cols):
    """Which elements of the whole matrix are in a part, at these rows and columns."""
    triangle = np.tril if part.uplo == "L" else np.triu
    return triangle(np.ones((M, M)), part.diagonal)[np.ix_(rows, cols)]


def counted(part, found, rows, cols):
    """How many pieces each element of a rank's part is in."""
    count = np.zeros((len(rows), len(cols)))
    for piece in found:
        down, across = piece.here
        assert piece.size == count[piece.here].size > 0
        assert piece.shape == count[piece.here].shape
        count[piece.here] += inside(part, rows[down], cols[across]) if piece.cut else 1
    return count


@given(
    rows=spans(), cols=spans(), uplo=st.sampled_from("LU"), diagonal=st.integers(-M, M),
    finest=st.none() | st.integers(1, 6), width=st.none() | st.integers(1, 9),
)  # fmt: skip
def test_every_element_is_in_one_piece(rows, cols, uplo, diagonal, finest, width):
    """Of unlike blocks, unlike grids, sub-matrices, any diagonal, in bands or not."""
    part, i, j = Trapezoid(uplo, diagonal), *(span.globals(process) for span, process in (rows, cols))
    n = len(j)
    ends = None if width is None else [min(n, at) for at in range(width, n + width, width)]
    found = list(pieces(part, i, j, ends, finest))
    assert np.array_equal(counted(part, found, i, j), inside(part, i, j))
    for piece in found:
        assert not piece.cut or finest is None or piece.shape[1] <= finest
        assert width is None or piece.j // width == (piece.j1 - 1) // width, "a piece is of one band"


@given(cols=spans(), uplo=st.sampled_from("LU"), unit=st.booleans())
def test_tiles_of_blocks_are_triangles(cols, uplo, unit):
    """Where rows are dealt out like columns, what is cut of a block begins and ends on the diagonal of the matrix."""
    span, process = cols
    part, j = Trapezoid.of_shape((span.extent,) * 2, uplo, "U" if unit else "N"), span.globals(process)
    for row in range(span.nprocs):
        i = span.globals(row)
        ends = (1 + np.flatnonzero(np.diff(j) > 1)).tolist() if span.nprocs > 1 else []
        found = list(pieces(part, i, j, [*ends, len(j)]))
        assert np.array_equal(counted(part, found, i, j), inside(part, i, j))
        for piece in found:
            if piece.cut and not unit:
                assert np.array_equal(i[piece.i : piece.i1], j[piece.j : piece.j1])
                assert row == process


@given(st.lists(st.integers(0, 2**M - 1), min_size=2, max_size=2), st.sampled_from("LU"), st.integers(-3, 3))
def test_indices_with_gaps(bits, uplo, diagonal):
    """Masks, transposes, the rest, and copies, of any rows and columns."""
    rows, cols = (np.flatnonzero([each >> i & 1 for i in range(M)]) for each in bits)
    part, expected = Trapezoid(uplo, diagonal), inside(Trapezoid(uplo, diagonal), rows, cols)
    assert np.array_equal(part.mask(rows, cols), expected)
    assert np.array_equal(part.T.mask(cols, rows), expected.T)
    assert np.array_equal(part.rest.mask(rows, cols), 1 - expected)
    to = np.zeros(expected.shape)
    write_inside(to, np.ones(to.shape).__getitem__, part, rows, cols)
    assert np.array_equal(to, expected)
    write_inside(to, lambda _: 2, None, rows, cols)
    assert np.array_equal(to, np.full(to.shape, 2))


@pytest.mark.parametrize("most", [None, 1, 2])
def test_runs_are_of_one_size_at_equal_distances(most):
    """Two squares, one farther away, two of another size."""
    some = [Rectangle(at, at + n, at, at + n, True) for at, n in ((0, 2), (2, 2), (6, 2), (8, 3), (11, 3))]
    runs = list(even_runs(some, most))
    assert [len(run) for run in runs] == ([1] * 5 if most == 1 else [2, 1, 2])
    assert [piece for run in runs for piece in run] == some
    assert list(even_runs([])) == []
