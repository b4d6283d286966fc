# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues under ScaLAPACK's names: their options and faults. ``test_calls.py`` has the calls."""

from functools import partial

import numpy as np

import pblasmp as pb
from pblasmp import pblas
from tests.helpers.cases import refuses, scattered
from tests.helpers.mpi import on_ranks


@on_ranks(1, 2)
def test_options_and_faults(comm, ctx):
    """What is no option, arrays of a wrong length or type, sizes of workspaces, no eigenvectors, and NaN."""
    context = pblas.gridinit(ctx, "Row", comm.size, 1)
    options_and_faults(ctx, partial(arguments, ctx, context))
    pblas.gridexit(context)


def arguments(ctx, context, whole):
    """The four arguments of a matrix."""
    grid = pb.Grid(ctx.size, 1)
    return scattered(ctx, pb.MatrixDescriptor(whole.shape, (2, 3), grid, order="F"), whole).to_scalapack(
        context=context
    )


def options_and_faults(ctx, arguments):
    a, z = (arguments(np.eye(4)) for _ in range(2))
    w, short, single = np.zeros(4), np.zeros(3), np.zeros(4, np.float32)
    wrong = pblas.ParameterError
    for words, function, given in (
        (["argument 1 (jobz)", "expected one of N, V, got 'X'"], pblas.pdsyevd, ("X", "L", 4, *a, w, *z)),
        (["argument 8 (w)", "expected at least 4 numbers here, got 3"], pblas.pdsyev,
         ("V", "L", 4, *a, short, *z)),
        (["argument 8 (w)", "float64"], pblas.pdsyevd, ("V", "L", 4, *a, single, *z)),
        (["argument 12 (iu)", "expected 2 to 4, got 5"], pblas.pdsyevr,
         ("V", "I", "L", 4, *a, 0, 0, 2, 5, None, None, w, *z)),
        (["argument 10 (vu)", "expected more than vl"], pblas.pdsyevr,
         ("V", "V", "L", 4, *a, 2.0, 1.0, 1, 1, None, None, w, *z)),
        (["argument 9 (vl)", "expected a real number, got 'low'"], pblas.pdsyevr,
         ("V", "V", "L", 4, *a, "low", 1.0, 1, 1, None, None, w, *z)),
        (["argument 1 (ibtype)", "expected 1, got 2"], pblas.pdsygvx,
         (2, "V", "A", "L", 4, *a, *a, 0, 0, 1, 1, 0, None, None, w, 0, *z)),
        (["(z)", "its local array shares memory with that of A"], pblas.pdsyevd, ("V", "L", 4, *a, w, *a)),
        (["argument 13 (m)", "one element, or None"], pblas.pdsyevr,
         ("N", "A", "L", 4, *a, 0, 0, 1, 1, "m", None, w, *z)),
        *((["argument 26 (ifail)", "expected a writeable array of integers"], pblas.pdsyevx,
           ("N", "A", "L", 4, *a, 0, 0, 1, 1, 0, None, None, w, 0, *z, None, None, None, None, each))
          for each in ("x", np.zeros(4), np.broadcast_to(0, 4))),
    ):  # fmt: skip
        refuses(ctx, wrong, words, function, *given)
    spaces = [np.zeros(1), -1, np.zeros(1, np.int32), -1]
    asked = pblas.pdsyevd("V", "L", 4, *a, w, *z, *spaces)
    assert asked == 0
    assert spaces[0][0] == spaces[2][0] == 1
    assert not w.any()
    none = pblas.pdsyevd("N", "L", 4, *a, w, None, 1, 1, z[3])
    assert none == 0
    assert np.allclose(w, 1)
    ifail, one = np.zeros(4, np.int32), np.zeros(1, np.int32)
    b = arguments(np.diag([1.0, 2, -1, 1]))
    info = pblas.pdsygvx(
        1, "N", "A", "L", 4, *a, *b, 0, 0, 1, 1, 0, None, None, w, 0, *z, *[None] * 4, ifail, None, None, one
    )
    right = info == one[0] == 16 and ifail.tolist() == [3, 0, 0, 0]
    assert right, f"B is not positive definite: {info} {ifail}"
    spoiled = arguments(np.full((4, 4), np.nan))
    info = pblas.pdsyevr("V", "V", "L", 4, *spoiled, 0.0, 3.0, 1, 1, one, None, w, *z)
    assert info == 0
    assert one[0] == 4
    assert np.isnan(w).all()
    counted = np.full(2, -7, np.int32)
    empty = pblas.pdsyevr("V", "I", "L", 0, *a, 0, 0, 1, 0, counted[:1], counted[1:], w, *z)
    assert empty == 0
    assert not counted.any()
