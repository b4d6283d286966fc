# SPDX-License-Identifier: Apache-2.0
"""The overlapped algorithms through the public functions: on one rank, with a GPU that computes at once."""

import ctypes
import gc
import weakref

import numpy as np
import pytest
from ml_dtypes import bfloat16

import pblasmp as pb
from pblasmp.tensor_parallel import call, made
from tests.helpers.copy_products import PRODUCTS
from tests.helpers.pairs import pairs
from tests.helpers.schemes import AG, AR, MAKERS, RS

NAMES = [
    (form, name)
    for form, kinds in PRODUCTS.items()
    for name in kinds
    if kinds[name].ranks is None and name != "one_kernel"
]
TYPES = [np.float32, np.float64, np.complex64, bfloat16]


@pytest.fixture
def numbers():
    import cupy

    rng = np.random.default_rng(9)

    def make(shape, dtype=np.float64):
        return cupy.asarray(rng.integers(-2, 3, shape).astype(dtype))

    return make


def wide(x):
    return np.asarray(x).astype(complex if x.dtype.kind == "c" else float)


@pytest.mark.parametrize(("product", "transposed", "dtype"), list(pairs(NAMES, (False, True), TYPES)))
def test_results(ctx, gpu, numbers, product, transposed, dtype):
    form, name = product
    x, w, c, bias = numbers((6, 4), dtype), numbers((5, 4), dtype), numbers((6, 5), dtype), numbers(5, dtype)
    given = np.ascontiguousarray(w.T).view(type(w)) if transposed else w
    function = getattr(pb, form)
    y = function(x, given, ctx, algo=name, transposed=transposed)
    assert gpu.queued == 1
    np.testing.assert_array_equal(wide(y), wide(x) @ wide(w).T)
    expected = 2 * wide(x) @ wide(w).T - wide(c) + wide(bias)
    activation = None if np.dtype(dtype).kind == "c" else "relu"
    out = c.copy()
    function(
        x, given, ctx, algo=name, transposed=transposed, alpha=2, beta=-1, c=out, out=out, bias=bias,
        activation=activation,
    )  # fmt: skip
    np.testing.assert_array_equal(wide(out), expected if activation is None else np.maximum(expected, 0))


@pytest.mark.parametrize(("scheme", "name"), [
    *((AG, name) for name in ("push", "pull", "nccl")), *((RS, name) for name in ("pull", "push", "nccl")),
    (AR, "one_shot"), (AR, "two_shot"),
])  # fmt: skip
@pytest.mark.parametrize("order", ["C", "F"])
def test_products_of_matrices(ctx, gpu, scheme, name, order):
    ops = "NT" if order == "C" else "TN"
    p = MAKERS[scheme](6, 5, 4, 1, *ops, order=order, dtype="float32")
    a, b = ctx.random(p.a, seed=1), ctx.random(p.b, seed=2)
    d = pb.matmul(a, b, op_a=ops[0], op_b=ops[1], scheme=scheme, algo=name, out=ctx.empty(p.d))
    assert gpu.queued == 1
    left, right = a.gather(), b.gather()
    expected = (left.T if ops[0] == "T" else left) @ (right.T if ops[1] == "T" else right)
    np.testing.assert_allclose(d.gather(), expected, rtol=1e-5)


def test_a_single_call_keeps_no_array(ctx, gpu, numbers):
    x, w = numbers((6, 4)), numbers((5, 4))
    for _ in range(3):
        pb.matmul_allreduce(x, w, ctx, algo="one_shot")
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_repeated_calls_replay_a_graph_where_the_addresses_are_the_same(ctx, lib, gpu, numbers, monkeypatch):
    x, w, y, read = numbers((6, 4)), numbers((5, 4)), numbers((6, 5)), []
    monkeypatch.setattr(made, "new_like", lambda *_: y)  # as an allocator does that gives memory again
    placed = call.ParallelCall.placed
    monkeypatch.setattr(
        call.ParallelCall, "placed", lambda self, product: read.append(1) or placed(self, product)
    )

    def multiply(x):
        y[...] = np.nan
        assert pb.matmul_reduce_scatter(x, w, ctx, algo="pull") is y
        if not lib.gpu.did("graph launched"):  # which computes nothing here
            np.testing.assert_array_equal(y, x @ w.T)

    multiply(x)
    multiply(x)
    assert len(read) == 1  # bound to these addresses
    multiply(x)
    assert not lib.gpu.did("graph launched")
    queued = gpu.queued
    for _ in range(3):
        multiply(x)
    assert gpu.queued == queued + 1  # to be recorded
    assert len(lib.gpu.did("graph launched")) == 3
    assert len(read) == 1
    multiply(x.copy())
    assert gpu.queued == queued + 2  # other memory: not the graph's
    assert len(read) == 2
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    ctx.kept._most = 0
    for _ in range(2):  # the last one is kept
        pb.matmul_allreduce(numbers((6, 4)), w, ctx, algo="one_shot")
    gc.collect()
    assert lib.gpu.did("graph destroyed")


@pytest.mark.parametrize(
    ("form", "how", "words"),
    [
        (RS, {"algo": "pull", "comm_sms": 4}, "comm_sms is for cuBLASMp"),
        (RS, {"algo": "pull", "comm_dtype": "float16"}, "has no product of float64 in float16"),
        (AG, {"algo": "push", "alpha": 0}, ""),
    ],
)
def test_what_is_refused(ctx, gpu, numbers, form, how, words):
    x, w = numbers((6, 4)), numbers((5, 4))
    if not words:  # by messages instead
        assert (getattr(pb, form)(x, w, ctx, **how) == 0).all()
        assert gpu.queued == 0
        return
    with pytest.raises(pb.UnsupportedError, match=words):
        getattr(pb, form)(x, w, ctx, **how)


@pytest.mark.parametrize("algo", ["pull", "push"])
def test_gathered_x_is_written_where_the_caller_gets_it(ctx, gpu, numbers, algo):
    x, w = numbers((6, 4)), numbers((5, 4))
    y, gathered = pb.allgather_matmul(x, w, ctx, return_gathered=True, algo=algo)
    assert gpu.queued == 1
    np.testing.assert_array_equal(wide(gathered), wide(x))
    np.testing.assert_array_equal(wide(y), wide(x) @ wide(w).T)
    buffer = gpu.windows.buffer("gathered")
    assert (
        ctypes.string_at(buffer.peers.get(0, 0), buffer.nbytes) == b"\xff" * buffer.nbytes
    )  # nobody wrote there
