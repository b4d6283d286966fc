# SPDX-License-Identifier: Apache-2.0
"""Names of the last release (pblasmp/__init__.py): each warns, says what to use instead, and does what it did."""

import operator
import warnings

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.linalg.former import FORMER


def former(name):
    """What a former name stands for, and its warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = getattr(pb, name)
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    return value, str(warning.message)


def test_each_former_name_warns_and_is_its_successor(subtests):
    assert set(FORMER) < set(pb._FORMER)
    for name, successor in pb._FORMER.items():
        with subtests.test(name):
            value, words = former(name)
            assert words.startswith(f"pblasmp.{name} is now pblasmp.{successor}")
            assert ("arguments" in words) == (name in FORMER)
            found = value.successor if name in FORMER else value
            assert found is operator.attrgetter(successor)(pb)
            assert name not in pb.__all__
            assert name not in dir(pb)


def test_former_arguments_mean_what_they_meant():
    rng = np.random.default_rng(5)
    whole = rng.standard_normal((6, 6)) + 1j * rng.standard_normal((6, 6)) + 4 * np.eye(6)
    square = whole @ whole.conj().T
    right = rng.standard_normal((6, 2)) + 0j
    lower, upper = np.linalg.cholesky(square), np.triu(whole)
    half = np.where(np.tri(6) > 0, square, np.nan)
    with pb.Context(engine="host") as ctx, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        a, p, t, b = (ctx.scatter(x, block=4) for x in (whole, square, upper, right))
        given, outs = ctx.scatter(half), [ctx.zeros(b.descriptor) for _ in range(3)]
        factors, pivots = pb.lu(a)
        found = pb.qr(a)
        x = np.linalg.solve
        for case, result, expected in (
            ("cholesky", pb.cholesky(given), lower),
            ("cholesky U", pb.cholesky(p, "U"), lower.conj().T),
            ("cho_solve", pb.cho_solve(pb.cholesky(p), b), x(square, right)),
            ("cho_solve U", pb.cho_solve(pb.cholesky(p, "U"), b, "U", outs[0]), x(square, right)),
            ("solve", pb.solve(a, b), x(whole, right)),
            ("solve T", pb.solve(a, b, op_a="T"), x(whole.T, right)),
            ("solve pos", pb.solve(given, b, "pos"), x(square, right)),
            ("solve tri", pb.solve(t, b, "tri", uplo="U", op_a="C", out=outs[1]), x(upper.conj().T, right)),
            ("solve unit", pb.solve(t, b, "tri", diag="U"), right),
            ("lu_solve", pb.lu_solve(factors, pivots, b, "T"), x(whole.T, right)),
            ("inv", pb.inv(a), np.linalg.inv(whole)),
            ("inv pos", pb.inv(given, "pos"), np.linalg.inv(square)),
            ("inv tri", pb.inv(t, "tri", uplo="U"), np.linalg.inv(upper)),
            ("inv unit", pb.inv(t, "tri", diag="U"), np.eye(6)),
            ("lstsq", pb.lstsq(a, b, "C", outs[2]), x(whole.conj().T, right)),
            ("qr", pb.matmul(found.q(), found.r()), whole),
            ("lu out", pb.lu(a, ctx.zeros(a.descriptor))[0], factors.allgather()),
            ("plan", pb.plan(pb.solve, given, b, "pos")(), x(square, right)),
            ("plan by name", pb.plan("lu", a)()[0], factors.allgather()),
        ):
            assert np.allclose(result.allgather(), expected), case
        with pytest.raises(pb.ArgumentError, match=r"lower: expected True or False, got 'X'"):
            pb.cholesky(p, "X")
        with pytest.raises(pb.ArgumentError, match=r"assume_a: expected one of 'gen', .*, got 'none'"):
            pb.solve(a, b, "none")
        with pytest.raises(pb.ArgumentTypeError, match=r"^plan: cholesky\(\) takes from 1 to 3 positional"):
            pb.plan(pb.cholesky, p, "L", None, 4)
        w, v = pb.eigh(p, "U")
        assert pb.verify(pb.linalg.eigh, p, found=(w, v), lower=False)
