# SPDX-License-Identifier: Apache-2.0
"""Which of the overlapped algorithms "auto" takes by rule: pure, as measured on two and four H200."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.gpu.tensor import copy_methods
from pblasmp.engines.method import Taken
from pblasmp.engines.request import Options
from pblasmp.layout import ParallelProblem
from tests.helpers.copy_products import PRODUCTS
from tests.helpers.fakepeers import Peers

HALF, EIGHT, SINGLE = DTYPES["bfloat16"], FLOAT8["float8_e4m3fn"], DTYPES["float32"]
H200 = 132  # multiprocessors


def split(form: str, size: int, sizes: tuple[int, int, int]) -> ParallelProblem:
    """The product of so many tokens, outputs and inputs of all ranks together."""
    tokens, outputs, inputs = sizes
    scatters, gathers = form == "matmul_reduce_scatter", form == "allgather_matmul"
    sums = scatters or form == "matmul_allreduce"
    return ParallelProblem(
        form,
        tokens=(tokens // size if gathers else tokens,) * size,
        inputs=(inputs // size if sums else inputs,) * size,
        outputs=(outputs if sums else outputs // size,) * size,
        rows=(tokens // size if scatters else tokens,) * size,
        dtype=HALF, w_dtype=HALF, out_dtype=HALF,
    )  # fmt: skip


def taken(form: str, size: int, sizes: tuple[int, int, int], *, refused: Collection[str] = ()) -> str:
    """The algorithm of least cost for tokens, outputs and inputs of all ranks together, on GPUs before Hopper."""
    refused = {"one_kernel", *refused}
    p = split(form, size, sizes)
    names = [
        name for name, kind in PRODUCTS[form].items() if kind.ranks in (None, size) and name not in refused
    ]
    costs = {name: copy_methods.cost_by_rule(name, p, H200) for name in names}
    fastest = min(costs, key=costs.__getitem__)
    assert costs[fastest] < 1  # what cuBLASMp's algorithms cost
    return fastest


@pytest.mark.parametrize(("form", "size", "inputs", "best"), [
    ("matmul_reduce_scatter", 4, 2048, "pull"),  # 0.7e11 operations of all ranks
    ("matmul_reduce_scatter", 4, 4096, "push"),  # 1.4e11: more than 2.5e10 each
    ("matmul_reduce_scatter", 4, 16384, "push"),
    ("matmul_reduce_scatter", 8, 4096, "pull"),
    ("matmul_reduce_scatter", 8, 16384, "push"),
    ("matmul_reduce_scatter", 2, 1024, "pull"),
    ("matmul_reduce_scatter", 2, 2048, "push"),
    ("matmul_reduce_scatter", 2, 16384, "push"),
    ("matmul_allgather", 2, 256, "pull"),
    ("matmul_allgather", 2, 16384, "pull"),  # 1.9 waves of tiles on each
    ("matmul_allgather", 4, 4096, "pull"),  # fewer than 2000 inputs for each of three peers
    ("matmul_allgather", 4, 6144, "push"),
    ("matmul_allgather", 8, 8192, "pull"),
    ("matmul_allgather", 8, 16384, "push"),
    ("allgather_matmul", 2, 16, "push"),
    ("allgather_matmul", 2, 8192, "push"),
    ("allgather_matmul", 4, 256, "nccl"),  # 0.9e10 operations
    ("allgather_matmul", 4, 512, "push"),
    ("allgather_matmul", 8, 256, "nccl"),
    ("allgather_matmul", 8, 8192, "push"),
])  # fmt: skip
def test_what_is_taken_of_4096_tokens_and_outputs(form, size, inputs, best):
    assert taken(form, size, (4096, 4096, inputs)) == best


@pytest.mark.parametrize(
    ("size", "sizes", "best", "with_c"),
    [
        (2, (4096, 1792, 4096), "one_shot", "one_shot"),  # 1.7 waves of tiles
        (2, (8192, 1792, 4096), "ring", "one_shot"),  # 3.4, and 1.2e11 operations
        (2, (16384, 1792, 4096), "ring", "push"),  # 6.8
        (2, (8192, 6656, 16384), "ring", "push"),  # 1.8e12
        (4, (4096, 1792, 4096), "two_shot", "two_shot"),
        (4, (8192, 3584, 8192), "nccl", "nccl"),
        (4, (16384, 6656, 16384), "push", "push"),
    ],
)
def test_gemm_and_allreduce(size, sizes, best, with_c):
    """What has C is refused by "ring"."""
    form = "matmul_allreduce"
    assert taken(form, size, sizes) == best
    assert taken(form, size, sizes, refused={"ring"}) == with_c


@pytest.mark.parametrize(
    ("size", "sizes", "best"),
    [
        (2, (8192, 1792, 4096), "pull"),  # 1.9 waves
        (2, (16384, 1792, 4096), "push"),  # 3.9
        (2, (4096, 3584, 8192), "pull"),
        (2, (8192, 3584, 8192), "push"),
        (2, (16384, 4096, 64), "pull"),  # 0.9e10 operations hide nothing
        (4, (512, 512, 8192), "pull"),  # 0.4e10: likewise
    ],
)
def test_gemm_and_allgather_of_the_output(size, sizes, best):
    assert taken("matmul_allgather", size, sizes) == best


@pytest.mark.parametrize(("form", "size", "sizes", "fastest"), [
    ("matmul_reduce_scatter", 2, (8192, 3584, 8192), True),
    ("matmul_reduce_scatter", 2, (4096, 6656, 16384), True),  # 8.9e11 operations
    ("matmul_reduce_scatter", 2, (8192, 6656, 16384), True),  # 1.8e12: the largest that was measured
    ("matmul_reduce_scatter", 2, (16384, 6656, 16384), False),
    ("matmul_reduce_scatter", 4, (4096, 3584, 8192), True),
    ("matmul_reduce_scatter", 4, (16384, 6656, 16384), True),  # the largest that was measured
    ("matmul_reduce_scatter", 4, (32768, 6656, 16384), False),
    ("matmul_reduce_scatter", 3, (6144, 6144, 12288), True),
    ("matmul_reduce_scatter", 3, (6144, 6144, 49152), False),  # as of two
    ("matmul_reduce_scatter", 8, (16384, 6656, 16384), True),  # as of four
    ("matmul_allreduce", 2, (8192, 1792, 4096), True),
    ("matmul_allreduce", 2, (8192, 3584, 8192), True),
    ("matmul_allreduce", 2, (8192, 6656, 16384), True),
    ("matmul_allreduce", 2, (16384, 6656, 16384), False),
    ("matmul_allreduce", 4, (16384, 6656, 16384), True),  # the largest that was measured
    ("matmul_allgather", 2, (1024, 1024, 1024), True),
    ("matmul_allgather", 2, (8192, 3584, 8192), True),
    ("matmul_allgather", 2, (8192, 6656, 16384), True),
    ("matmul_allgather", 2, (16384, 6656, 16384), False),
    ("matmul_allgather", 4, (4096, 3584, 8192), True),  # 9.6e11 operations with four times the outputs
    ("matmul_allgather", 4, (8192, 14336, 8192), True),
    ("matmul_allgather", 4, (16384, 14336, 16384), False),
    ("matmul_allgather", 8, (1024, 1024, 1024), True),
])  # fmt: skip
def test_one_kernel_is_taken_where_it_was_the_fastest(form, size, sizes, fastest):
    p = split(form, size, sizes)
    in_8_bits = replace(p, dtype=EIGHT, w_dtype=EIGHT)
    for each in (p, in_8_bits):
        costs = {name: copy_methods.cost_by_rule(name, each, H200) for name in PRODUCTS[form]}
        assert (min(costs, key=costs.__getitem__) == "one_kernel") is fastest


@pytest.mark.parametrize("form", ["matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"])
@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_gpus_without_wgmma_take_one_kernel_for_small_products(form, capability):
    """What they take otherwise is what Hopper's take without it."""
    for order, best in ((256, "one_kernel"), (1024, "one_kernel"), (2048, ""), (8192, "")):
        costs = {
            name: copy_methods.cost_by_rule(name, split(form, 2, (order,) * 3), H200, capability=capability)
            for name in PRODUCTS[form]
        }
        assert min(costs, key=costs.__getitem__) == (best or taken(form, 2, (order,) * 3))


@pytest.mark.parametrize(("tokens", "nodes", "best"), [(8192, 4, "nccl"), (8192, 2, "push"), (64, 2, "nccl")])
def test_between_nodes_nccl_is_taken_but_for_large_products_of_several_gpus_each(tokens, nodes, best):
    rows, outputs = (tokens,) * 4, (8192,) * 4
    p = ParallelProblem(
        "matmul_allreduce", tokens=rows, inputs=(2048,) * 4, outputs=outputs, rows=rows,
        dtype=HALF, w_dtype=HALF, out_dtype=HALF,
    )  # fmt: skip
    costs = {name: copy_methods.cost_by_rule(name, p, H200, domains=nodes) for name in ("nccl", "push")}
    assert min(costs, key=lambda name: costs[name]) == best
    assert max(costs.values()) < 1


def test_other_numbers_of_tokens_take_what_the_next_multiple_of_128_takes(monkeypatch):
    """By rule, or by times that were measured; the rule is asked once for all numbers in between."""
    form, asked = "matmul_allreduce", []
    rows = {row.name: row for row in copy_methods.METHODS if form in row.forms}
    measured = SimpleNamespace(added=0, entries={}, seconds=lambda *_: {"push": 1e-6, "nccl": 2e-6})
    gpu = Peers(2, multiprocessors=H200).gpus[0]
    session = SimpleNamespace(gpu=gpu, runtime=SimpleNamespace(size=2, others_of_late=False), refused={})
    engine: Any = SimpleNamespace(measured=measured, session=session)
    cost = copy_methods.cost_by_rule

    def counted(name: str, p: ParallelProblem, *args: Any, **how: Any) -> float:
        asked.append(p.tokens[0])
        return cost(name, p, *args, **how)

    monkeypatch.setattr(copy_methods, "cost_by_rule", counted)

    def of(tokens: int) -> ParallelProblem:
        return replace(split(form, 2, (tokens, 1792, 4096)), dtype=SINGLE, w_dtype=SINGLE, out_dtype=SINGLE)

    first = Taken(
        "one_shot", rows, of(100), Options(), "", {}, {"one_kernel": "it is refused", "ring": "it is, too"}
    )
    names = {}
    for tokens in range(9400, 9900):
        found = first.resized(engine, of(tokens))
        assert found is not None
        names[tokens] = found.name
    assert {*asked} == {9472, 9600, 9728, 9856, 9984}
    assert len(asked) <= len(rows) * 5
    whole = {tokens: (-(-tokens // 128) * 128, 1792, 4096) for tokens in names}
    assert names == {tokens: taken(form, 2, sizes, refused={"ring"}) for tokens, sizes in whole.items()}
    assert {*names.values()} == {"one_shot", "push"}
    measured.entries["some"] = measured.added = 1
    found = first.resized(engine, of(9400))
    assert found is not None
    assert found.name == "push"


@pytest.mark.parametrize(("dtype", "others", "names"), [
    (HALF, True, "one_kernel push one_kernel"), (HALF, None, "one_kernel one_kernel one_kernel"),
    (HALF, False, "one_kernel one_kernel one_kernel"), (SINGLE, True, "pull push pull"),
])  # fmt: skip
def test_other_numbers_of_tokens_beside_other_communicators(dtype, others, names):
    """One kernel is asked again for those that are small enough, whether or not it was refused for another number."""
    form = "matmul_reduce_scatter"
    rows = {row.name: row for row in copy_methods.METHODS if form in row.forms}
    gpu = Peers(4, multiprocessors=H200).gpus[0]
    session = SimpleNamespace(gpu=gpu, runtime=SimpleNamespace(size=4, others_of_late=others), refused={})
    engine: Any = SimpleNamespace(measured=SimpleNamespace(added=0, entries={}), session=session)

    def of(tokens: int) -> ParallelProblem:
        p = split(form, 4, (tokens, 2048, 8192))
        p = replace(p, tokens=(tokens,) * 4, dtype=dtype, w_dtype=dtype, out_dtype=dtype)
        assert (p.flops > 1.5e11) == (tokens > 4480)
        return p

    for first, refused in (("one_kernel", {}), ("pull", {"one_kernel": "beside others"})):
        if refused or dtype == HALF:
            taken = Taken(first, rows, of(1024), Options(), "", {}, refused)
            chosen = [taken.for_problem(engine, of(tokens)).name for tokens in (1024, 4608, 2048)]
            assert chosen == names.split()
            found = [taken.resized(engine, of(tokens)) for tokens in (1024, 4608, 2048)]
            assert [each is None for each in found] == [name in refused for name in chosen]
