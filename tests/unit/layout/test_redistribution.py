# SPDX-License-Identifier: Apache-2.0
"""The legal product that is nearest to one whose layouts are not."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pblasmp.layout import Grid, MatmulProblem
from pblasmp.layout.problem import nearest_legal
from tests.helpers.oracle import descriptors
from tests.helpers.slow import draws

few = settings(max_examples=draws(30, long=100))

ops = st.sampled_from("NTC")


@st.composite
def problems(draw):
    """Draw products whose sizes and types fit, and nothing else."""
    m, n, k = (draw(st.integers(0, 9)) for _ in range(3))
    op_a, op_b = draw(ops), draw(ops)
    a = draw(descriptors((m, k) if op_a == "N" else (k, m)))
    b = draw(descriptors((k, n) if op_b == "N" else (n, k)))
    d = draw(descriptors((m, n)))
    return MatmulProblem(a, b, d, op_a, op_b, draw(st.none() | descriptors((m, n))))


@few
@given(problems())
def test_every_product_has_a_legal_one_near_it(p):
    q = nearest_legal(p)
    assert q.faults() == []
    assert (q.op_a, q.op_b, q.scheme) == (p.op_a, p.op_b, p.scheme)
    for before, after in ((p.a, q.a), (p.b, q.b), (p.d, q.d), (p.c, q.c)):
        assert (before is None) == (after is None)
        if before is not None:
            assert (after.shape, after.dtype, after.order) == (before.shape, before.dtype, before.order)


@few
@given(problems())
def test_what_is_legal_stays_as_it_is(p):
    q = nearest_legal(p)
    assert nearest_legal(q) == q
    if not p.faults():
        assert q == p


def test_sizes_and_types_are_beyond_moving():
    p = MatmulProblem.gemm(40, 30, 20, Grid(2, 3), 4, with_c=True)
    for broken in (
        replace(p, b=replace(p.b, shape=(21, 30))),
        replace(p, a=replace(p.a, dtype="float32")),
        replace(p, c=replace(p.c, shape=(40, 31))),
    ):
        assert nearest_legal(broken).faults() == broken.faults() != []
