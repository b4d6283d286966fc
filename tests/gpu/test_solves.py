# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues, singular values, refined solves, ranks, warnings and ``pb.verify`` on GPUs: every option, every type."""

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.cusolvermp import solver_of
from pblasmp.engines.gpu.session import session_of
from tests.helpers import solve_cases, spectral_cases, verify_cases
from tests.helpers.factor_cases import TYPES
from tests.helpers.slow import draws, fewer

WIDE = ("float64", "complex128")


def algorithms(ctx):
    """Those that are here."""
    several = not isinstance(solver_of(session_of(ctx.engine)), str)
    return ("auto", "cusolver", *(["cusolvermp"] if several else []))


def eigenvalues(ctx, rng, dtype):
    """All, a subset, values alone, and of a pair, by each algorithm; those of even orders are checked."""
    for turn, algo in enumerate(algorithms(ctx)):
        for kind in fewer(("pair", "all", "subset", "values"), turn):
            for n in (1, 4 * int(rng.integers(1, 20)), int(rng.integers(1, 90))):
                spectral_cases.eigh(ctx, rng, dtype, n, algo, kind=kind)


def singular_values(ctx, rng, dtype):
    """Of tall and of wide matrices, full ones or not; then tiny, large and spoiled ones."""
    for turn, algo in enumerate(algorithms(ctx)):
        for shape in fewer(((40, 13), (13, 40), (1, 1), (1, 7), (30, 30), (300, 200)), turn):
            spectral_cases.svd(ctx, rng, dtype, shape, algo)
    spectral_cases.svd_at_the_ends(ctx, rng, dtype)


def refined(ctx, rng, dtype):
    """Kinds of matrices, triangles and transposes; TF32 half of the time."""
    for _ in range(draws(12, long=100)):
        solve_cases.refined_case(ctx, rng, dtype)


def ranked(ctx, rng, dtype):
    """Any rank, with ``rcond`` and without."""
    for _ in range(draws(12, long=100)):
        solve_cases.ranked_case(ctx, rng, dtype)


def ill_conditioned(ctx, rng, dtype):
    for _ in range(draws(6, long=50)):
        solve_cases.conditions_case(ctx, rng, dtype)


TABLE = [
    *(
        (each, dtype)
        for number, each in enumerate((eigenvalues, singular_values, ranked, ill_conditioned))
        for dtype in fewer(TYPES, number)
    ),
    *((refined, dtype) for dtype in WIDE),
    *((verify_cases.right_and_wrong, dtype) for dtype in fewer(TYPES, 0)),
]
ENDS = (
    solve_cases.refinement_ends, solve_cases.ranks_at_the_ends, solve_cases.conditions_elsewhere,
    verify_cases.wrong_in_other_ways,
)  # fmt: skip


@pytest.mark.parametrize(("cases", "dtype"), TABLE, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_every_option(ctx, cases, dtype):
    cases(ctx, np.random.default_rng(95), dtype)


@pytest.mark.parametrize("cases", ENDS, ids=lambda each: each.__name__)
def test_ends(ctx, cases):
    cases(ctx, np.random.default_rng(96))


def test_nothing(ctx):
    """Matrices without elements."""
    nothing = ctx.zeros((0, 0))
    w, v = pb.linalg.eigh(nothing, check=True)
    u, s, vh = pb.linalg.svd(ctx.zeros((4, 0)), full_matrices=True)
    assert (w.shape, v.shape, u.shape, s.shape, vh.shape) == ((0,), (0, 0), (4, 4), (0,), (0, 0))
    assert pb.linalg.svdvals(nothing).shape == pb.linalg.eigvalsh(nothing).shape == (0,)
