# SPDX-License-Identifier: Apache-2.0
"""The overlapped tensor-parallel algorithms on pretended GPUs: results, the order of signals, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pblasmp.dtypes import DTYPES, FLOAT8, is_float8
from pblasmp.engines.gpu.kernels.lt import WORKSPACE_BYTES
from pblasmp.engines.gpu.kernels.lt_product import Fused
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.engines.gpu.tensor import base, pushed
from pblasmp.engines.request import Options
from pblasmp.engines.tensor.tensor_product import offsets, pieces, shares
from pblasmp.errors import UnsupportedError
from tests.helpers.copy_products import PRODUCTS, SPLIT, problem, product, queue
from tests.helpers.fakepeers import Peers, Process, is_missed

NAMES = [(form, name) for form, algorithms in PRODUCTS.items() for name in algorithms if name != "one_kernel"]
OVERLAPPED = [(form, name) for form, name in NAMES if name != "nccl"]
IN_PIECES = [("matmul_allreduce", "push"), ("matmul_allreduce", "ring"), ("matmul_allgather", "push")]
PAIRS = {name for form, name in NAMES if PRODUCTS[form][name].ranks == 2}


class Case:
    """A product of whole numbers, and the ranks' parts of it."""

    def __init__(
        self, peers: Peers, form: str, extents: dict[str, int], dtype: str = "float32", **how: Any
    ) -> None:
        self.peers, self.form = peers, form
        size, kind = peers.size, (DTYPES | FLOAT8)[dtype]
        uneven, self.once = how.pop("uneven", False), how.pop("once", False)
        self.with_bias, self.gathers = how.pop("bias", False), how.pop("gathered", False)
        self.tight = how.pop("tight", False)
        out_dtype = (DTYPES | FLOAT8)[how.pop("out_dtype", dtype)]
        self.parts = {
            name: (_uneven(n, size) if uneven else shares(n, size)) if name in SPLIT[form] else (n,)
            for name, n in extents.items()
        }
        self.activation = how.pop("activation", None)
        outputs_first = how.pop("transposed", True)
        self.options = Options(**how)
        self.p = problem(
            form, size, self.parts, kind, out_dtype=out_dtype, c_dtype=out_dtype, outputs_first=outputs_first
        )
        rng = np.random.default_rng(5)
        t, n, k = (extents[name] for name in ("tokens", "outputs", "inputs"))
        self.x, self.w, self.c, self.bias = (
            self._numbers(rng, shape) for shape in ((t, k), (n, k), (t, n), (1, n))
        )

    def _numbers(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.integers(-2, 3, shape).astype(float)
        return values + 1j * rng.integers(-2, 3, shape) if self.p.dtype.kind == "c" else values

    def _cut(self, name: str, rank: int) -> slice:
        parts = self.parts[name]
        return slice(None) if len(parts) == 1 else slice(*offsets(parts)[rank : rank + 2])

    def arrays(self, rank: int) -> dict[str, Any]:
        """Return this rank's operands, rows further apart than they are long, unless they are to be tight."""
        p, options, put = self.p, self.options, self.peers.array
        tokens, outputs, inputs = (self._cut(name, rank) for name in ("tokens", "outputs", "inputs"))
        gathers = self.form == "allgather_matmul"
        self.part = getattr(self, "part", {})
        all_ = slice(None)
        rows = tokens if self.form == "matmul_reduce_scatter" else all_
        cols = outputs if gathers else all_
        self.part[rank] = rows, cols
        x = self.x[tokens if gathers else all_, inputs].astype(p.dtype)
        w = self.w[outputs, inputs].astype(p.w_dtype)
        w = w if p.outputs_first else np.ascontiguousarray(w.T)
        c = self.c[rows, cols].astype(p.c_dtype)
        out = np.full(c.shape, 77).astype(p.out_dtype)
        gaps = (0, 0, 0) if self.tight else (16, 32, 16) if is_float8(p.dtype) else (3, 1, 2)
        return {
            "x": put(rank, x, ld=x.shape[1] + gaps[0]), "w": put(rank, w, ld=w.shape[1] + gaps[1]),
            "c": put(rank, c) if options.beta else None, "out": put(rank, out, ld=c.shape[1] + gaps[2]),
            "bias": put(rank, self.bias[:, outputs].astype(p.out_dtype)) if self.with_bias else None,
            "gathered": put(rank, np.full(self.x.shape, 77).astype(p.dtype)) if self.gathers else None,
        }  # fmt: skip

    def expected(self, rank: int) -> np.ndarray:
        p, options = self.p, self.options
        y = options.alpha * (self.x @ self.w.T) + options.beta * self.c
        y = y + self.bias if self.with_bias else y
        y = np.maximum(y, 0) if self.activation == "relu" else y
        return y[self.part[rank]].astype(p.out_dtype)

    def product(self, gpu: Any, name: str) -> Any:
        made = product(gpu, name, self.p, self.options)
        return made.resized(self.p, once=True) if self.once else made

    def why_not(self, name: str) -> str:
        return PRODUCTS[self.form][name].why_not(self.peers.gpus[0], self.p, self.options)

    def run(self, *names: str, seed: int | None = 0, of: int = 1) -> list[int]:
        """Queue products one behind another on every rank, run them, and check the last one.

        Returns:
            How many signals rank ``of`` had queued after each product.
        """
        outs, signals = [], []
        gpus = self.peers.gpus
        chosen = [[self.product(gpu, name) for gpu in gpus] for name in names]
        for rank, gpu in enumerate(gpus):
            arrays = self.arrays(rank)
            outs.append(
                (arrays["out"].values, None if arrays["gathered"] is None else arrays["gathered"].values)
            )
            for algorithms in chosen:
                queue(algorithms[rank], **arrays, activation=self.activation)
                gpu.use(*(a for a in arrays.values() if a is not None))
                signals += [gpu.synchronizations] if rank == of else []
        self.peers.run(seed)
        for rank, (out, gathered) in enumerate(outs):
            if gathered is not None:
                np.testing.assert_array_equal(gathered.astype(self.p.dtype), self.x.astype(self.p.dtype))
            np.testing.assert_array_equal(
                out.astype(self.p.out_dtype), self.expected(rank), err_msg=f"rank {rank}"
            )
        return signals


def _uneven(total: int, size: int) -> tuple[int, ...]:
    """The first rank has the most, the last one nothing."""
    return (total - sum(range(1, size - 1)), *range(1, size - 1), 0) if size > 1 else (total,)


SMALL = {"tokens": 13, "outputs": 11, "inputs": 12}
TALL = {"tokens": 900, "outputs": 2, "inputs": 3}  # enough for several pieces


def case(peers: Peers, form: str, **how: Any) -> Case:
    return Case(peers, form, how.pop("extents", SMALL), **how)


@pytest.mark.parametrize(("form", "name"), NAMES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("uneven", [False, True])
def test_products_are_right(form, name, size, uneven):
    peers = Peers(size)
    product = case(peers, form, uneven=uneven)
    if name in PAIRS and size != 2:
        assert product.why_not(name) == f"it is for 2 GPUs, not {size}"
    else:
        product.run(name, name)


DOMAINS = {
    "hosts of one GPU": [(0,), (1,)],
    "more of them": [(rank,) for rank in range(5)],
    "pairs": [(0, 1), (2, 3)],
    "interleaved pairs": [(0, 2), (1, 3)],
    "triples, not in order": [(0, 4, 2), (1, 3, 5)],
}


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("domains", DOMAINS.values(), ids=DOMAINS)
@pytest.mark.parametrize("tokens", [13, 300])  # in one piece, in several
def test_push_between_domains(monkeypatch, form, domains, tokens):
    """In any order that signals and messages allow, strictly in the order of queueing, with ranks that have nothing."""
    monkeypatch.setattr(pushed, "WORTH", 1e3)
    extents = {"tokens": tokens, "outputs": 11, "inputs": 12}
    for seed, uneven in ((1, False), (None, True)):
        peers = Peers(sum(map(len, domains)), domains=domains, multiprocessors=1)
        how = {"bias": True, "activation": "relu", "gathered": form == "allgather_matmul"} if uneven else {}
        case(peers, form, extents=extents, uneven=uneven, dtype="float16", **how).run(
            *3 * ["push"], seed=seed
        )


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_a_product_without_inputs_is_the_rest_of_it(dtype):
    """C, bias, activation; scales of 8-bit operands scale nothing, and the largest entry is that of this product."""
    peers, out = Peers(1), np.dtype(np.float32)
    gpu, kind = peers.gpus[0], (DTYPES | FLOAT8)[dtype]
    c, bias = (peers.array(0, np.full((n, 4), fill, out)) for n, fill in ((3, -2.0), (1, 3.0)))
    d, amax = peers.array(0, np.full((3, 4), 77, out)), peers.array(0, np.full((1, 1), 99, out))
    scale = peers.array(0, np.full((1, 1), 5, out)).data.ptr if dtype.startswith("float8") else 0
    x, w = View(64, 3, 0, 0, kind), View(64, 4, 0, 0, kind)
    finish = Fused("relu", bias.data.ptr, out, scale, scale, amax=amax.data.ptr)
    gpu.multiply("main", x, w, View.of(d), op_w="T", alpha=7, beta=1, c=View.of(c), finish=finish)
    peers.run()
    assert (d.values == 1).all()
    assert amax.values.item() == 1
    gpu.multiply("main", x, w, View.of(d), op_w="T", beta=2)  # C is D
    gpu.multiply("main", x, w, View.of(c), op_w="T", finish=Fused(scale_x=scale, scale_w=scale))
    peers.run()
    assert (d.values == 2).all()
    assert (c.values == 0).all()


@pytest.mark.parametrize("name", PRODUCTS["allgather_matmul"])
@pytest.mark.parametrize("seed", [1, 2, 3, None])
@pytest.mark.parametrize("uneven", [False, True])
def test_x_gathered_as_well(name, seed, uneven):
    """Copied out before a peer may overwrite it: in any order that the signals allow, product after product."""
    case(Peers(3), "allgather_matmul", uneven=uneven, gathered=True).run(name, name, name, seed=seed)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("where", ["small", "large", "between nodes", "once"])
def test_nccl_works_on_large_arrays_of_the_user_alone(monkeypatch, form, gathered, where):
    """Which it may register with a graph: small ones are copied, so that graphs are replayed at their addresses.

    Not in what comes once, nor between nodes, where no graph has its work.
    """
    if where == "large":
        monkeypatch.setattr(base, "STAGED", 0)
    if where == "once":
        monkeypatch.setattr(base.CopyProduct, "once", True)
    peers, theirs, reached = (
        Peers(3, domains=[(0,), (1,), (2,)] if where == "between nodes" else []),
        set(),
        set(),
    )
    array, collective = Peers.array, Process.collective

    def noted(*args: Any, **how: Any) -> Any:
        made = array(*args, **how)
        theirs.update(range(made.data.ptr, made.data.ptr + made.values.nbytes))
        return made

    def noting(self: Process, name: str, comm: Any, stream: int, of: Any, takes: Any, **how: Any) -> None:
        reached.update(view.address for view in (of, *(to for to, _ in takes)) if view.nbytes)
        collective(self, name, comm, stream, of, takes, **how)

    monkeypatch.setattr(Peers, "array", noted)
    monkeypatch.setattr(Process, "collective", noting)
    product = case(peers, form, uneven=True, tight=True, gathered=gathered and form == "allgather_matmul")
    product.run("nccl", "nccl")
    assert reached
    assert bool(reached & theirs) is (where != "small" and form != "matmul_allgather")
    registers = any(product.product(gpu, "nccl").registers for gpu in peers.gpus)
    assert registers is (where == "large" and bool(reached & theirs))


@pytest.mark.parametrize(("form", "name"), NAMES)
@pytest.mark.parametrize("how", [
    {"transposed": False, "alpha": 2, "beta": -1},
    {"bias": True, "activation": "relu"},
    {"dtype": "bfloat16", "bias": True, "beta": 3, "activation": "relu"},
    {"dtype": "float16", "out_dtype": "float32"},
    {"dtype": "bfloat16", "comm_dtype": DTYPES["float32"]},
    {"dtype": "float64", "bias": True, "activation": "relu"},
    {"dtype": "complex64", "alpha": 1j, "beta": 2 - 1j, "bias": True},
], ids=str)  # fmt: skip
def test_options(form, name, how):
    peers = Peers(2 if name in PAIRS else 3)
    product = case(peers, form, uneven=True, **how)
    refused = ""
    if name in PAIRS and "beta" in how:
        refused = "in place of C"
    elif name in PAIRS and "comm_dtype" in how:
        refused = "adds no float32 to a bfloat16 D"
    if refused:
        assert refused in product.why_not(name)
    else:
        product.run(name, name)


@pytest.mark.parametrize(("form", "name"), [pair for pair in NAMES if pair[1] not in PAIRS])
@pytest.mark.parametrize("tokens", [5, 260])  # in one piece, in several
def test_amax_is_the_largest_of_all_pieces(form, name, tokens):
    peers = Peers(2, multiprocessors=1)
    extents = {"tokens": tokens, "outputs": 32, "inputs": 32}
    product = case(peers, form, extents=extents, dtype="float8_e4m3fn")
    product.x[0] *= 4  # the first piece has the largest
    algorithms = [product.product(gpu, name) for gpu in peers.gpus]
    found = []
    for rank, algorithm in enumerate(algorithms):
        amax = peers.array(rank, np.full((1, 1), np.nan, np.float32))
        scales = SimpleNamespace(a=None, b=None, d=None, amax=amax)
        queue(algorithm, **product.arrays(rank), scales=scales)
        found.append(amax.values)
    peers.run(1)
    largest, whole = [amax.item() for amax in found], abs(product.x @ product.w.T)
    if form in ("allgather_matmul", "matmul_reduce_scatter"):  # each rank has its own part of D
        assert largest == [whole[product.part[rank]].max() for rank in range(2)]
    else:
        assert max(largest) == whole.max()


@pytest.mark.parametrize(("form", "name"), OVERLAPPED)
@pytest.mark.parametrize("seed", [1, 2, None])
def test_any_order_that_the_signals_allow_is_right(form, name, seed):
    """Without a seed each rank runs strictly in the order of queueing: streams that share a hardware queue."""
    peers = Peers(2 if name in PAIRS else 3)
    case(peers, form, extents=TALL, dtype="float16").run(name, name, seed=seed)


@pytest.mark.parametrize(("form", "name"), IN_PIECES)
@pytest.mark.parametrize("seed", [1, None])
def test_what_comes_once_is_multiplied_in_fewer_pieces(monkeypatch, form, name, seed):
    counts = []
    for once in (False, True):
        peers, counted = Peers(2 if name in PAIRS else 4, multiprocessors=1), []
        multiply = peers.gpus[0].multiply
        monkeypatch.setattr(
            peers.gpus[0], "multiply", lambda *a, m=multiply, n=counted, **k: (n.append(1), m(*a, **k))
        )
        case(peers, form, extents=TALL, dtype="float16", once=once).run(name, name, seed=seed)
        counts.append(len(counted))
    kept, first = counts
    assert first < kept


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("seed", [1, 2, None])
def test_tokens_that_come_once_are_multiplied_when_all_have_come(monkeypatch, uneven, seed):
    """The ranks meet once, and each multiplies once; unless that takes long."""
    for once, extents, at_once in ((True, SMALL, True), (True, TALL, False), (False, SMALL, False)):
        peers, done = Peers(4, multiprocessors=1), []
        for gpu in peers.gpus[1:2]:
            for name in ("multiply", "await_flags", "meet"):
                made = getattr(gpu, name)
                monkeypatch.setattr(
                    gpu, name, lambda *a, m=made, n=name, d=done, **k: (d.append(n), m(*a, **k))
                )
        how = {"uneven": uneven, "gathered": True, "dtype": "float16", "once": once}
        case(peers, "allgather_matmul", extents=extents, **how).run("push", "push", "push", seed=seed)
        ranks = 3 if uneven else 4  # that have tokens
        assert done.count("multiply") == 3 * (1 if at_once else ranks), extents
        assert done.count("await_flags") == 3 * (0 if at_once else ranks - 1), extents
        assert done.count("meet") == 3 * at_once, extents


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("cols", "ld"), [(6, 6), (6, 7), (160, 160)])
def test_a_matrix_is_copied_to_more_places_than_a_kernel_takes(rows, cols, ld):
    """With and without gaps between its rows; there are none where it is copied to."""
    peers, dtype = Peers(1), DTYPES["float16"]
    gpu, values = peers.gpus[0], np.arange(rows * cols, dtype=dtype).reshape(rows, cols)
    of, places = (
        peers.array(0, values, ld=ld),
        [peers.array(0, np.ones((rows, cols), dtype)) for _ in range(35)],
    )
    gpu.use_current_stream()
    gpu.spread("main", [each.data.ptr for each in places], View(of.data.ptr, rows, cols, ld, dtype))
    peers.run()
    assert all(np.array_equal(each.values, values) for each in places)


def test_what_comes_once_is_prepared_for_its_own_size():
    """A small one stays on one stream, a large one waits for copies on theirs, and so does what is kept."""
    peers = Peers(2, multiprocessors=1)
    small, tall = (case(peers, "allgather_matmul", extents=extents).p for extents in (SMALL, TALL))
    made, other = (product(gpu, "push", tall, Options()) for gpu in peers.gpus)
    for p, streams in ((small, ()), (tall, ("copy",)), (small, ())):
        assert made.resized(p, once=True).streams == streams
    assert made.resized(small, once=False).streams == made.streams == ("copy",)
    # one rank's part would fit, another's does not: they all wait for copies
    wide = replace(small, outputs=(256, 257), tokens=(64, 64))
    assert {each.resized(wide).streams for each in (made, other)} == {("copy",)}


@pytest.mark.parametrize(("form", "name", "once"), [
    *((*each, False) for each in OVERLAPPED), *((*each, True) for each in IN_PIECES),
    ("allgather_matmul", "push", True),
])  # fmt: skip
def test_no_signal_can_be_left_out(form, name, once):
    """Each barrier, flag and event of a product between two others, left out on one rank, must be missed."""
    other = {"matmul_reduce_scatter": "pull", "matmul_allreduce": "one_shot"}.get(form, name)
    pieces_of = {"matmul_allreduce": 400, "matmul_allgather": 400} if name in {"push", *PAIRS} else {}
    tokens = pieces_of.get(form, 13)
    size = 3 if tokens == 13 else 2  # several pieces have many signals
    found = _signals(form, tokens, 1, size, (other, name, other), once=once)
    assert [name for name, missed in found if not missed()] == []


@pytest.mark.parametrize("form", PRODUCTS)
def test_no_signal_between_domains_can_be_left_out(monkeypatch, form):
    """With a peer in the domain, or alone there, each kind is missed at least once."""
    monkeypatch.setattr(pushed, "WORTH", 300)  # two pieces
    kinds: dict[str, bool] = {}
    for domains in ([(0, 1), (2, 3)], [(0,), (1,)]):
        for name, missed in _signals(form, 140, 0, 2 * len(domains[0]), 3 * ("push",), domains):
            kind = name.rstrip(" 0123456789")
            kinds[kind] = kinds.get(kind, False) or missed()
    if (
        form == "matmul_allreduce"
    ):  # each rank needs the sums of all others, which they send when they have read theirs
        assert not kinds.pop("await all")
    assert all(kinds.values()), kinds


def _signals(
    form: str,
    tokens: int,
    rank: int,
    size: int,
    names: Sequence[str],
    domains: Sequence[tuple[int, ...]] = (),
    *,
    once: bool = False,
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield each signal of a rank's second product, and what tells whether the result is found wrong without it."""
    extents = {"tokens": tokens, "outputs": 3, "inputs": 3}

    def signals(skip: tuple[int, int] | None, seed: int) -> tuple[list[int], list[str]]:
        peers = Peers(size, skip, multiprocessors=1, domains=domains)
        queued = case(peers, form, extents=extents, once=once).run(*names, seed=seed, of=rank)
        return queued, peers.gpus[rank].names

    (start, stop, _), found = signals(None, 3)
    for number in range(start, stop):
        yield found[number], partial(is_missed, signals, (rank, number), [3])


@pytest.mark.parametrize(("form", "name"), NAMES)
def test_the_workspace_is_all_that_is_reserved(form, name):
    """And that of each lane of products by cuBLASLt."""
    peers = Peers(2 if name in PAIRS else 3)
    tall = case(peers, form, extents=TALL, uneven=True)
    for gpu in peers.gpus:
        told = tall.product(gpu, name).workspace.device_bytes
        reserved = [*(nbytes for _, nbytes in gpu.scratches.values()), *gpu.reserved.values()]
        assert told == sum(reserved) + {"one_kernel": 0, "ring": 2}.get(name, 1) * WORKSPACE_BYTES


def test_every_algorithm_is_under_its_name():
    for form, algorithms in PRODUCTS.items():
        assert all((a.form, a.name) == (form, name) for name, a in algorithms.items())


def test_without_windows_messages_are_left():
    peers = Peers(2)
    for gpu in peers.gpus:
        gpu.why_no_windows = "one of them is far away"
    for form, name in NAMES:
        why = case(peers, form).why_not(name)
        assert why == ("" if name in ("nccl", "push") else "one of them is far away")
    with pytest.raises(UnsupportedError, match="'two_shot' of matmul_allreduce: one of them is far away"):
        case(peers, "matmul_allreduce").product(peers.gpus[0], "two_shot")


def test_what_8_bit_products_cannot_be():
    gpu = Peers(2).gpus[0]
    e4m3, e5m2 = FLOAT8["float8_e4m3fn"], FLOAT8["float8_e5m2"]

    def why(**how: Any) -> str:
        types = {
            "dtype": e4m3,
            "w_dtype": e4m3,
            "out_dtype": DTYPES["bfloat16"],
            "c_dtype": DTYPES["bfloat16"],
        }
        parts = {"tokens": (32,), "outputs": (48,), "inputs": (32, 32)}
        parts |= {name: how.pop(name) for name in parts if name in how}
        p = problem("matmul_allreduce", 2, parts, **(types | how))
        return PRODUCTS["matmul_allreduce"]["push"].why_not(gpu, p, Options())

    assert why() == ""
    assert "outputs × inputs" in why(outputs_first=False)
    assert "both float8_e5m2" in why(dtype=e5m2, w_dtype=e5m2)
    assert why(inputs=(32, 24)) == "8-bit products need multiples of 16 inputs, got 24"
    assert why(outputs=(50,)) == "8-bit products need multiples of 16 outputs, got 50"
    assert why(out_dtype=DTYPES["float64"]) == "8-bit products are not summed in float64"
    assert why(tokens=(0,)) == "there is nothing to multiply"


@pytest.mark.parametrize(("rows", "cols", "sms"), [
    (16384, 6656, 116), (8192, 3584, 116), (4096, 1792, 116), (1, 1, 1), (127, 9000, 1), (5000, 300, 3),
    (128, 10**6, 2),
])  # fmt: skip
def test_pieces_are_whole_tiles_and_cover_all(rows, cols, sms):
    found = pieces(rows, cols, sms)
    assert sum(found) == rows
    assert min(found) > 0
    assert len(found) <= 6
    assert all(piece % 128 == 0 for piece in found[:-1])


def test_pieces_follow_the_waves():
    assert pieces(1024, 1024, 116) == (1024,)
    assert pieces(4096, 6656, 132) == (1280, 1152, 1024, 640)
    large, *_, small = pieces(16384, 6656, 132)
    assert (len(pieces(16384, 6656, 132)), large, small) == (6, 3328, 1664)
