# SPDX-License-Identifier: Apache-2.0
"""``pb.verify`` of what factorizations have found, right and slightly wrong, and ``eigh`` with ``check=True``."""

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.host import spectral_libraries
from pblasmp.engines.host.spectral_libraries import LapackProduct
from pblasmp.engines.local.spectral import OneRankMethod
from pblasmp.errors import FactorizationError
from tests.helpers import inside
from tests.helpers import verify_cases as cases
from tests.helpers.cases import refuses
from tests.helpers.factor_cases import placed, positive
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import only_long

TYPES = ("float32", "complex128")


@on_ranks(2, *only_long(1, 3, 4, 5, 6))
def test_verify(ctx):
    rng = np.random.default_rng(57)
    for dtype in TYPES:
        cases.right_and_wrong(ctx, rng, dtype)
    cases.wrong_in_other_ways(ctx, rng)
    faults(ctx)
    checked(ctx, rng)


def faults(ctx):
    a = ctx.eye(6)
    w, v = pb.linalg.eigh(a)
    for kind, words, args, how in (
        (pb.ArgumentError, ["expected one of the functions eigh, svd,", "got 'matmul'"], (pb.matmul, a),
         {"found": v}),
        (pb.ArgumentError, ["found: expected what eigh returns"], (pb.linalg.eigh, a), {"found": v}),
        (pb.LayoutError, ["found: 5 eigenvalues, and vectors of shape (6, 6)"], (pb.linalg.eigh, a),
         {"found": (w[:5], v)}),
        (pb.LayoutError, ["expected the shape (6, 2), got (6, 6)"], (pb.linalg.solve, a, a[:, :2]),
         {"found": v}),
        (pb.ArgumentError, ["solve is given the matrices a b, got DistributedM"], (pb.linalg.solve, a),
         {"found": v}),
        (pb.ArgumentError, ["lower: expected True or False, got 'X'"], (pb.linalg.eigh, a),
         {"found": (w, v), "lower": "X"}),
        (pb.ArgumentError, ["eigh takes no nonsense"], (pb.linalg.eigh, a),
         {"found": (w, v), "nonsense": 1}),
        (pb.ArgumentError, ["svd takes no full_matrices twice"], (pb.linalg.svd, a, True),
         {"found": (v, w, v), "full_matrices": True}),
        (pb.ArgumentError, ["uplo: expected 'L' or 'U', got ['L']"], (pb.linalg.eigh, a),
         {"found": (w, v), "uplo": ["L"]}),
        (pb.ArgumentError, ["cho_solve is given the matrices c_and_lower b"], (pb.linalg.cho_solve, (a,), a),
         {"found": v}),
        (pb.ArgumentError, ["c_and_lower: expected a factor and True or False, got 3"],
         (pb.linalg.cho_solve, (a, 3), a), {"found": v}),
        (pb.ArgumentError, ["found: expected a factor and the argument lower, got True"],
         (pb.linalg.cho_factor, a), {"found": (a, True)}),
        (pb.ArgumentError, ["lu_and_piv: expected factors and 6 integers from 0 to 5"],
         (pb.linalg.lu_solve, (a, np.arange(1, 7)), a), {"found": v}),
        (pb.ArgumentError, ["found: expected what lstsq returns"], (pb.linalg.lstsq, a, a), {"found": (w, v)}),
        (pb.LayoutError, ["expected the shape (4, 6), got (6, 6)"], (pb.linalg.lstsq, a[:, :4], a),
         {"found": v}),
        (pb.LayoutError, ["inv of a square matrix, got 6 x 2"], (pb.linalg.inv, a[:, :2]),
         {"found": a[:, :2]}),
        (pb.LayoutError, ["b: expected 6 rows, got 2 x 6"], (pb.linalg.solve, a, a[:2]),
         {"found": a[:2]}),
        (pb.LayoutError, ["b: expected 4 rows, got 6 x 6"], (pb.linalg.lstsq, a[:, :4], a),
         {"found": a, "trans": 1}),
        (pb.LayoutError, ["b: expected the shape of a, got 3 x 3"], (pb.linalg.eigh, a, a[:3, :3]),
         {"found": (w, v)}),
        (pb.ArgumentError, ["found: expected what eigh returns"], (pb.linalg.eigh, a),
         {"found": (w * 1j, v)}),
        (pb.ArgumentError, ["found: expected what svd returns"], (pb.linalg.svd, a),
         {"found": (v, np.diag(w), v)}),
        (pb.LayoutError, ["found: expected 6 pivots from 0 to 5, got array([1"],
         (pb.linalg.lu_factor, a), {"found": (a, np.arange(1, 7))}),
        (pb.LayoutError, ["found: expected 6 singular values and a rank, got 6 and 7"],
         (pb.linalg.lstsq, a, a), {"found": (a, w, 7, w), "rcond": None}),
        (pb.ArgumentError, ["rcond: expected a number, got 'x'"],
         (pb.linalg.lstsq, a, a), {"found": (a, w, 6, w), "rcond": "x"}),
        (TypeError, ["the argument found"], (pb.linalg.eigh, a), {}),
    ):  # fmt: skip
        refuses(ctx, kind, words, pb.verify, *args, **how)


def checked(ctx, rng):
    """``check=True``: right ones pass; wrong ones are computed anew; if those are wrong, too, it is an error."""
    whole = positive(rng, 12, "float64")
    a, b = placed(ctx, rng, whole), placed(ctx, rng, positive(rng, 12, "float64"))
    w, _ = pb.linalg.eigh(a, check=True)
    assert np.allclose(w, np.linalg.eigvalsh(whole)), "passes"
    pb.linalg.eigh(a, b, check=True)
    words = ["check: expected False with eigvals_only"]
    refuses(ctx, pb.ArgumentError, words, pb.linalg.eigh, a, check=True, eigvals_only=True)
    for value, text in ((3, "3"), (np.ones(2), "array")):
        words = [f"check: expected True or False, got {text}"]
        refuses(ctx, pb.ArgumentError, words, pb.linalg.eigh, a, check=value)

    def wrong(self, a, z):
        info, values, column = computed(self, a, z)
        if what == "info":
            return 1, values, column
        if z is not None and z.size:
            z[:, 1] = z[:, 0]
        return info, values, column

    class Other(OneRankMethod):
        def prepare(self, engine, problem, options, operands):
            product = super().prepare(engine, problem, options, operands)
            setattr(product, inside.EIGENVALUES[1], computed.__get__(product))
            return product

    what, computed = "vectors", getattr(*inside.EIGENVALUES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*inside.EIGENVALUES, wrong)
        words = ["eigh: the vectors are wrong, or not found, by every algorithm", "lapack"]
        patch.setenv("PBLASMP_SCALAPACK_LIBRARY", "/nowhere")
        refuses(ctx, FactorizationError, words, pb.linalg.eigh, a, check=True)
        words = ["eigh: the vectors are wrong, or not found, by every algorithm"]
        refuses(ctx, FactorizationError, words, pb.linalg.eigh, a, b, check=True)
        other = Other("scalapack", LapackProduct, 200, (0, 0))
        patch.setattr(ctx.engine, "methods", [*spectral_libraries.METHODS[:1], other], raising=False)
        with pb.plan(pb.linalg.eigh, a, check=True) as plan:
            for what in ("vectors", "info"):
                for found in (pb.linalg.eigh(a, check=True), plan()):
                    right = np.allclose(found[0], w) and pb.verify(pb.linalg.eigh, a, found=found)
                    assert right, f"another algorithm, {what}: {found[0]}"
