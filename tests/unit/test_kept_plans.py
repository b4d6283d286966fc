# SPDX-License-Identifier: Apache-2.0
"""Plans that a context keeps: which ones are closed to make room, and what they are taken to hold."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import pblasmp as pb
from pblasmp.runtime.kept_plans import KeptPlans, held_bytes
from tests.helpers import inside
from tests.helpers.mpi import on_ranks


class _Plan:
    def __init__(self, name, nbytes=0):
        self.name, self.table, self.closed = name, np.zeros(nbytes, np.uint8), False

    def close(self):
        self.closed = True


def _engine(others=0):
    """An engine of which another rank says that each plan takes so many bytes."""
    comm = SimpleNamespace(imax=lambda mine, out: out.fill(max(int(mine[0]), others)))
    return SimpleNamespace(
        transport=SimpleNamespace(comm=comm),
        operations=object(),
        device=None,
        measured=SimpleNamespace(added=0),
    )


def test_the_least_recently_used_are_closed_when_the_memory_is_full():
    kept = KeptPlans(_engine(), most=1_000_000)
    plans = {name: _Plan(name, 300_000) for name in "abcd"}
    for name in "abc":
        kept.keep(name, plans[name])
    assert kept.find("a") is plans["a"]
    kept.keep("d", plans["d"])
    assert [name for name, plan in plans.items() if plan.closed] == ["b"]
    assert kept.find("b") is None
    assert (len(kept), kept.hits, kept.evictions) == (3, 1, 1)
    assert 900_000 <= kept.nbytes <= 1_000_000


def test_many_small_plans_are_kept():
    kept = KeptPlans(_engine())
    plans = [_Plan(str(i)) for i in range(512)]
    for i, plan in enumerate(plans):
        kept.keep(i, plan)
    assert not any(plan.closed for plan in plans)


def test_many_ranks_of_a_machine_keep_less_each():
    kept = KeptPlans(_engine(), 128)
    for i in range(64):
        kept.keep(i, _Plan(str(i), 1 << 20))
    assert len(kept) > 8
    assert kept.nbytes * 128 <= 2 << 30


def test_what_a_plan_keeps_in_functions_counts():
    table, default, named = (np.zeros(100_000) for _ in range(3))

    def compute(x, y=default, *, z=named):
        return x + y + z + table

    for function in (compute, lambda: compute, partial(compute, 1)):
        held = held_bytes(SimpleNamespace(run=function), _engine())
        assert 2_400_000 <= held <= 2_410_000


def test_the_rank_with_the_largest_plan_counts():
    kept = KeptPlans(_engine(others=600_000), most=1_000_000)
    first, second = _Plan("first"), _Plan("second")
    kept.keep("first", first)
    kept.keep("second", second)
    assert first.closed
    assert not second.closed


def test_what_plans_are_bound_to_is_limited_over_all_plans():
    kept = KeptPlans(_engine(), most_bound=3)
    released = []
    for number, address in ((1, 10), (1, 20), (2, 10)):
        key = number, address
        kept.bind(number, (address,), SimpleNamespace(release=lambda key=key: released.append(key), key=key))
    assert kept.bound(1, (10,)).key == (1, 10)
    kept.bind(2, (20,), SimpleNamespace(release=lambda: released.append((2, 20)), key=(2, 20)))
    assert released == [(1, 20)]
    assert kept.bound(1, (20,)) is None
    kept.release(2)
    assert released == [(1, 20), (2, 10), (2, 20)]
    assert kept.bound(1, (10,)).key == (1, 10)


def test_all_are_closed_when_memory_is_short():
    kept = KeptPlans(_engine())
    plans = [_Plan(str(i)) for i in range(3)]
    for i, plan in enumerate(plans):
        kept.keep(i, plan)
    kept.close_all()
    assert all(plan.closed for plan in plans)
    assert (len(kept), kept.nbytes, kept.find(1), kept.evictions) == (0, 0, None, 3)


def test_one_plan_is_kept_however_large():
    kept = KeptPlans(_engine(), most=1000)
    plan = _Plan("large", 5000)
    kept.keep("large", plan)
    assert kept.find("large") is plan


def test_a_plan_of_a_loop_counts_its_tables_but_not_the_context():
    with pb.Context(engine="host") as ctx:
        held = []
        for n in (64, 512):
            a = ctx.zeros((n, n), block=8)
            before = ctx.kept.nbytes
            with mock.patch.object(ctx.kept, "keep", wraps=ctx.kept.keep) as keep:
                for _ in range(3):
                    pb.blas.tradd(a, a)
            _, plan = keep.call_args.args
            assert ctx.kept.nbytes - before >= held_bytes(plan, ctx.engine) > 1000
            held.append(held_bytes(plan, ctx.engine))
        assert 2 * held[0] < held[1] < 1 << 20
        assert ctx.kept.hits == 2


@on_ranks(2)
def test_a_kind_of_calls_that_one_rank_has_forgotten(comm: Any) -> None:
    """The ranks agree anew, on old and on new numbers of tokens, and then take one vote again."""
    x, w = np.ones((20, 3)), np.ones((2, 3))
    with pb.Context(comm, engine="host") as ctx:

        def votes(tokens: int) -> int:
            before = inside.votes(ctx)
            np.testing.assert_array_equal(pb.matmul_allreduce(x[:tokens], w, ctx), np.full((tokens, 2), 6.0))
            return inside.votes(ctx) - before

        for tokens in (20, 19, 16, 16):
            votes(tokens)
        for tokens in (19, 11):  # three less: a number that was there, and a new one
            assert votes(tokens) == 1
            if comm.rank == 0:
                inside.forget_kinds()
            assert votes(tokens - 3) > 1
            votes(tokens - 5)  # it may be read, to derive others from
            assert [votes(other) for other in (tokens - 3, tokens - 6, tokens - 5)] == [1, 1, 1], tokens
