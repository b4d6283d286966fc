# SPDX-License-Identifier: Apache-2.0
"""Options of products: what users may give, and what is said of the rest."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from pblasmp.engines.request import Options
from pblasmp.errors import ArgumentError

REAL, COMPLEX = DTYPES["float32"], DTYPES["complex64"]


def test_what_is_given_is_kept_in_one_form():
    given = {"compute": "tf32", "comm_dtype": "float16", "comm_sms": np.int64(8)}
    options = Options.of(REAL, alpha=np.float32(2), beta=1 + 0j, algo="push", **given)
    assert options == Options(2.0, 1.0, "push", "tf32", DTYPES["float16"], 8)
    assert type(options.alpha) is type(options.beta) is float
    assert type(options.comm_sms) is int
    assert Options.of(COMPLEX, alpha=2).alpha == 2 + 0j
    assert type(Options.of(COMPLEX).beta) is complex


def test_defaults():
    assert Options.of(REAL) == Options()


def test_scalars_that_must_be_real_become_real():
    options = Options.of(COMPLEX, alpha=2 + 0j, beta=3, real="alpha")
    assert (type(options.alpha), type(options.beta)) == (float, complex)


def test_every_option_that_users_give_is_a_fact_that_ranks_agree_on():
    facts = Options.of(REAL, alpha=3).facts()
    assert set(facts) == {"alpha", "beta", "algo", "compute", "comm_dtype", "comm_sms"}
    assert facts["alpha"] == 3.0


@pytest.mark.parametrize(
    ("dtype", "given", "words"),
    [
        (REAL, {"alpha": "2"}, "alpha: expected a number, got '2'"),
        (REAL, {"beta": None}, "beta: expected a number, got None"),
        (REAL, {"alpha": 1j}, "alpha: 1j is complex, but the matrices are float32"),
        (COMPLEX, {"alpha": 1j, "real": "alpha beta"}, "alpha: 1j is complex, but it must be real here"),
        (COMPLEX, {"beta": 2j, "real": "beta"}, "beta: 2j is complex, but it must be real here"),
        (REAL, {"algo": None}, "algo: expected a string, got None"),
        (REAL, {"algo": ["auto"]}, r"algo: expected a string, got \['auto'\]"),
        (REAL, {"compute": 32}, "compute: expected None or a string, got 32"),
        (REAL, {"comm_dtype": "int32"}, "int32 is not supported"),
        (REAL, {"comm_sms": 0}, "comm_sms: expected"),
        (REAL, {"comm_sms": 1.5}, "comm_sms: expected an integer"),
    ],
)
def test_wrong_options_are_refused(dtype, given, words):
    with pytest.raises(ArgumentError, match=words):
        Options.of(dtype, **given)


def test_options_that_an_algorithm_cannot_obey_are_refused():
    """And "auto" takes none that ignores them."""
    x, w = (np.ones((rows, 8), bfloat16) for rows in (4, 6))
    with pb.Context(engine="host") as ctx:
        a = ctx.zeros((4, 4))
        for call in (
            lambda: pb.matmul(a, a, comm_sms=4),
            lambda: pb.matmul(a, a, comm_sms=4, algo="panels"),
            lambda: pb.matmul_allreduce(x, w, ctx, comm_sms=4),
            lambda: pb.matmul_allgather(x, w, ctx, comm_sms=4),
        ):
            with pytest.raises(pb.UnsupportedError, match="comm_sms is for cuBLASMp's algorithms"):
                call()
        for function, names in (
            (pb.matmul_allreduce, ("push", "two_shot", "ring", "sum")),
            (pb.matmul_reduce_scatter, ("push", "pull", "ring")),
        ):
            for algo in names:
                with pytest.raises(pb.UnsupportedError, match="travel in float32 here"):
                    function(x, w, ctx, comm_dtype="float64", algo=algo)
            for enough in ("float32", "bfloat16"):
                assert (function(x, w, ctx, comm_dtype=enough) == 8).all()
