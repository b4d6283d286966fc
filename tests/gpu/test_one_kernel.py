# SPDX-License-Identifier: Apache-2.0
"""Algorithm "one_kernel" on real GPUs: sizes that fit no tile, epilogues, slow ranks, many runs, sizes in turn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import FLOAT8
from pblasmp.engines.gpu.kernels import one_kernel as kernels
from pblasmp.engines.gpu.kernels.one_kernel import PARTS, WIDTHS
from pblasmp.engines.gpu.tensor import one_kernel_products as algorithms
from tests.helpers.gpu.one_kernel import FORMS, SLEEP, Product
from tests.helpers.slow import in_turn

SIZES = [
    (1, 8, 1),
    (5, 24, 3),
    (96, 80, 112),
    (131, 85, 70),
    (300, 520, 1000),
    (1024, 640, 264),
    (2049, 1800, 513),
]
EIGHT = [(1, 16, 16), (5, 32, 48), (131, 80, 112), (300, 528, 1008), (1024, 640, 272), (2049, 1808, 528)]
E4, E5 = "float8_e4m3fn", "float8_e5m2"
RUNS = 1000


def into_a_part(ctx, product):
    """A result with room beside its rows, which stays as it is."""
    import cupy

    out = cupy.full((product.expected.shape[0], product.expected.shape[1] + 5), 7, product.x.dtype)
    product(out=out[:, 3:-2])
    product.check(out[:, 3:-2].copy())
    around = np.concatenate([out[:, :3].get(), out[:, -2:].get()], axis=1).astype(float)
    assert ctx.comm.allgather(bool((around == 7).all())) == [True] * ctx.size


def standard_normal(form, ctx):
    """A product of numbers whose sums are rounded, the same in every run."""
    import cupy

    rng, product = np.random.default_rng(5), Product(ctx, form, (512, 384, 256))
    product.x, product.w = (
        cupy.asarray(rng.standard_normal(a.shape).astype(a.dtype)) for a in (product.x, product.w)
    )
    return product


def needs_tokens(form: str, sizes: tuple[int, int, int], ranks: int) -> bool:
    return form == "matmul_allreduce" and sizes[0] < ranks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes(ctx, form, dtype, sizes):
    product = Product(ctx, form, sizes, dtype)
    if needs_tokens(form, sizes, ctx.size):
        with pytest.raises(pb.UnsupportedError, match="fewer tokens than ranks"):
            product()
        return
    product.check(product())


@pytest.mark.parametrize(
    ("form", "dtype", "operands"),  # each has a kernel, or several, which NVRTC compiles for a second
    [
        (form, dtype, operands)
        for number, (form, dtype) in enumerate(itertools.product(FORMS, ["bfloat16", "float16", E4, E5]))
        for operands in in_turn([(E4, E4), (E5, E4), (E4, E5)], keep=3, first=number)
    ],
)
def test_8_bits(ctx, form, dtype, operands):
    """Sums of odd tiles, the largest result, which rows beyond the last one do not raise; a bias and relu."""
    if dtype == E5 and E5 not in operands:
        operands = (E5, E4)  # such a result has such an operand, as cuBLASLt's
    for sizes in EIGHT:
        product = Product(ctx, form, sizes, dtype, operands)
        if needs_tokens(form, sizes, ctx.size):
            continue
        product.check(product())
        assert float(product.amax[0]) == np.abs(product.expected).max()
        y = product(bias=product.local_bias + 100, activation="relu")
        followed = np.maximum(product.expected + product.bias_here + 100, 0)
        product.check(y, followed)
        assert float(product.amax[0]) == followed.max()


@pytest.mark.parametrize("form", FORMS)
def test_8_bits_are_added_as_by_cublaslt(ctx, form):
    """The tensor cores add few of them before float32 does: as near to float64 as the other algorithms."""
    import cupy

    product, rng = Product(ctx, form, (512, 256, 8192), "float16", (E4, E4)), np.random.default_rng(ctx.rank)
    x, w = (rng.uniform(0, 1, of.shape).astype(FLOAT8[E4]) for of in (product.x, product.w))
    product.x, product.w = (cupy.asarray(values.view(np.uint8)) for values in (x, w))
    if form == "matmul_allgather":
        x = ctx.comm.bcast(x, root=0)
        product.x = cupy.asarray(x.view(np.uint8))
    parts = ctx.comm.allgather(x.astype(float) @ w.astype(float).T)
    exact = np.hstack(parts) if form == "matmul_allgather" else sum(parts)[product.part]
    errors = {}
    for algo in ("one_kernel", "nccl", "push"):
        y = getattr(pb, form)(product.x, product.w, ctx, algo=algo, **product.how).get().astype(float)
        errors[algo] = max(ctx.comm.allgather(float(np.linalg.norm(y - exact) / np.linalg.norm(exact))))
    assert errors["one_kernel"] < 1.5 * errors["push"], errors


@pytest.mark.parametrize("form", FORMS)
def test_blocks_that_add_several_tiles(ctx, form):
    """Blocks use the same shared memory for one tile after the other, whose parts come from every other rank."""
    tokens = 2048 if form == "matmul_reduce_scatter" else 2048 * ctx.size
    product = Product(ctx, form, (tokens, 3584, 24))
    for _ in range(3):
        product.check(product())


@pytest.mark.parametrize(
    ("form", "way"),
    [
        *(("matmul_reduce_scatter", way) for way in PARTS if way != "exchanged"),
        *(("matmul_allreduce", way) for way in PARTS),
    ],
)  # fmt: skip
@pytest.mark.parametrize("types", [("bfloat16",), ("bfloat16", (E4, E4)), (E4, (E5, E4))])
def test_every_way_of_parts(ctx, monkeypatch, form, way, types):
    """Also those that the rule takes for other sizes and numbers of ranks; one call follows another."""
    monkeypatch.setattr(algorithms, "way_of_parts", lambda *_, **__: way)
    shapes = ((131, 85, 70), (1024, 640, 264), (2048, 1800, 24)) if types == ("bfloat16",) else EIGHT[2:5]
    products = [Product(ctx, form, sizes, *types) for sizes in shapes]
    for _ in range(3):
        for product in products:
            y = product(bias=product.local_bias, activation="relu")
            product.check(y, np.maximum(product.expected + product.bias_here, 0))


@pytest.mark.parametrize(
    ("form", "width", "types"),
    [
        (form, width, types)
        for number, form in enumerate(FORMS)
        for at, width in enumerate(WIDTHS[2:])
        for types in in_turn([("bfloat16",), (E4, (E4, E4))], keep=2, first=number + at)
    ],
)
def test_wide_tiles(ctx, monkeypatch, form, width, types):
    """The rule takes them for larger products. Of 8-bit results, 16 columns are as few as TMA stores at once."""
    monkeypatch.setattr(kernels, "WIDTHS", (width,))
    monkeypatch.setattr(algorithms, "way_of_parts", lambda *_, **__: "sent")
    # No other test has these sizes: tilings are remembered.
    product = Product(ctx, form, (393, 3 * width + 16, 272), *types)
    for _ in range(2):
        product.check(product())


@pytest.fixture
def by_mma(monkeypatch):
    """The kernel of other GPUs, on Hopper."""
    monkeypatch.setattr(algorithms, "by_mma", lambda capability: True)


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("matmul_reduce_scatter", "stored"), ("matmul_allreduce", "exchanged"), ("matmul_allreduce", "stored"),
        ("matmul_allgather", "stored"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mma(ctx, monkeypatch, by_mma, form, way, dtype):
    """Without WGMMA and TMA: all sizes, tiles in turn, views with gaps, a bias and relu."""
    monkeypatch.setattr(algorithms, "way_of_parts", lambda *_, **__: way)
    products = [
        Product(ctx, form, sizes, dtype)
        for sizes in [*SIZES, (2048, 3584, 24)]
        if not needs_tokens(form, sizes, ctx.size)
    ]
    for product in products * 2:
        product.check(product())
        y = product(bias=product.local_bias, activation="relu")
        product.check(y, np.maximum(product.expected + product.bias_here, 0))
    into_a_part(ctx, Product(ctx, form, (131, 85, 70), dtype))


@pytest.mark.parametrize("form", FORMS)
def test_mma_beside_the_kernel_of_hopper(ctx, monkeypatch, form):
    """In turn, on the same boxes and flags, while now one rank is late, now another: the same but for rounding."""
    import cupy

    sleep, product = cupy.RawKernel(SLEEP, "sleep"), standard_normal(form, ctx)
    plans = []
    for mma in (False, True):
        monkeypatch.setattr(algorithms, "by_mma", lambda capability, mma=mma: mma)
        plans.append(pb.plan(form, product.x, product.w, ctx, algo="one_kernel"))
    first = [plan().copy() for plan in plans]
    differ = cupy.zeros((), np.int64)
    for turn in range(100):
        if turn % 10 == ctx.rank:
            sleep((1,), (1,), (2_000_000,))
        differ += (plans[turn % 2]().view(np.uint16) != first[turn % 2].view(np.uint16)).any()
    assert ctx.comm.allgather(int(differ)) == [0] * ctx.size
    hopper, other = (y.get().astype(float) for y in first)
    assert np.linalg.norm(hopper - other) < 3e-3 * np.linalg.norm(hopper)
    for plan in plans:
        plan.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_epilogues(ctx, form, activation):
    product = Product(ctx, form, (300, 520, 1000))
    y = product(bias=product.local_bias, activation=activation, alpha=0.5)
    v = 0.5 * product.expected + product.bias_here
    if activation == "gelu":
        v = 0.5 * v * (1 + np.tanh(0.7978845608028654 * (v + 0.044715 * v**3)))
        error = float(np.abs(y.get().astype(float) - v).max() / np.abs(v).max())
        assert max(ctx.comm.allgather(error)) < 8e-3
        return
    if activation == "relu":
        v = np.maximum(v, 0)
    if form in ("matmul_reduce_scatter", "matmul_allreduce"):  # halves of odd parts are rounded on their way
        error = float(np.abs(y.get().astype(float) - v).max() / np.abs(v).max())
        assert max(ctx.comm.allgather(error)) < 8e-3
        return
    product.check(y, v)


@pytest.mark.parametrize("form", FORMS)
def test_views_that_no_tensor_map_can_reach(ctx, form):
    import cupy

    product = Product(ctx, form, (131, 85, 70))
    for name in ("x", "w"):
        whole = getattr(product, name)
        wide = cupy.zeros((whole.shape[0], whole.shape[1] + 3), whole.dtype)
        wide[:, 1:-2] = whole
        setattr(product, name, wide[:, 1:-2])
    into_a_part(ctx, product)


@pytest.mark.parametrize("form", FORMS)
def test_a_slow_rank_changes_nothing(ctx, form):
    import cupy

    sleep = cupy.RawKernel(SLEEP, "sleep")

    products = [Product(ctx, form, sizes) for sizes in ((300, 520, 1000), (1024, 640, 264), (131, 85, 70))]
    for turn in range(24):
        product = products[turn % 3]
        if turn % ctx.size == ctx.rank:
            sleep((1,), (1,), (4_000_000,))
        y = product()
        if turn % 4 == 0:
            product.check(y)


def test_forms_and_sizes_in_turn(ctx):
    rng = np.random.default_rng(7)
    products = [Product(ctx, form, sizes) for form in FORMS for sizes in ((131, 85, 70), (1024, 640, 264))]
    plans = [pb.plan(p.form, p.x, p.w, ctx, algo="one_kernel") for p in products]
    graphs = [plan.graph() for plan in plans]
    for _ in range(100):
        which = int(rng.integers(len(products)))
        products[which].check([plans[which], graphs[which].replay][int(rng.integers(2))]())
    for plan in plans:
        plan.close()


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_in_every_run(ctx, form):
    import cupy

    product = standard_normal(form, ctx)
    with pb.plan(form, product.x, product.w, ctx, algo="one_kernel") as plan:
        first = plan().view(np.uint16).copy()
        differ = cupy.zeros((), np.int64)
        for _ in range(RUNS):  # compared on the GPU, so that the host never waits
            differ += (plan().view(np.uint16) != first).any()
    assert ctx.comm.allgather(int(differ)) == [0] * ctx.size
