# SPDX-License-Identifier: Apache-2.0
"""``pblasmp bench``: tensor-parallel products next to a GEMM and a plain collective; ``pblasmp tune`` keeps times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from ..comm import is_agreed
from ..context import Context
from ..dtypes import ELEMENT_TYPES, accumulation_dtype, as_dtype
from ..engines.choose import EngineName
from ..errors import ArgumentError, PblasmpError
from ..launchers import surroundings
from ..layout.axis import Axis
from ..layout.schemes import FORMS, Form
from ..layout.value import bytes_text
from ..planning import plan as plan_of_product
from ..planning import tune as tune_product
from ..problems.files import load_model
from ..tuning.timing import in_a_row, samples
from .ranks import on_ranks
from .reports import Reporter
from .terminal import plain

_SPLIT = {
    "allgather_matmul": "T",
    "matmul_reduce_scatter": "TK",
    "matmul_allreduce": "K",
    "matmul_allgather": "",
}
_ON_CPUS = ((512, 256, 512), (1024, 512, 1024), (2048, 512, 1024))
_ON_GPUS = ((1024, 1024, 1024), (4096, 1792, 4096), (8192, 3584, 8192), (4096, 6656, 16384))
Others = Callable[[Context, Form, Any, Any], "tuple[dict[str, Callable[[], Any]], str]"]
"""What returns more contenders by name, and why some are left out."""

OWN, SYMMETRIC, ALONE = "pblasmp", "pblasmp, symmetric", "GEMM alone"
_WARM_UP, _TURNS = 3, 25
_DEPTH = 128  # inputs per rank in a sweep of sizes: few, so that the collective is most of the work


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the user asks for.

    Attributes:
        products: which of ``FORMS``, in this order.
        shapes: T, N, K each; empty: defaults of the engine.
        dtype: of all arrays; None: bfloat16 on GPUs, float32 on the host.
        samples: runs that are timed.
        engine: as in Context.
        algo: how the products are computed: "auto", the name of an algorithm, or "all" that apply, side by side.
        sizes: bytes that the collective moves, instead of shapes.
        in_a_row: runs queued one behind the other for each sample: the host's time of queueing does not count then.
    """

    products: tuple[Form, ...]
    shapes: tuple[tuple[int, int, int], ...]
    dtype: str | None
    samples: int
    engine: EngineName
    algo: str = "auto"
    sizes: tuple[int, ...] = ()
    in_a_row: int = 1


def bench(options: BenchOptions, nranks: int | None) -> dict[str, Any]:
    """Time what the options say on ``nranks`` ranks and return the times. Collective over ranks."""
    return on_ranks(bench_on_ranks, options, nranks)


def bench_on_ranks(options: BenchOptions, reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    with Context(engine=options.engine) as ctx, reporter.errors():
        return measure(ctx, options, reporter)


def measure(
    ctx: Context, options: BenchOptions, reporter: Reporter, others: Others | None = None
) -> dict[str, Any]:
    """Time what the options say. Collective over the context.

    ``others`` returns more contenders for a product and its operands x and w, by name, and why some are left out. With
    ``algo="all"`` they are timed, too.
    """
    shapes = options.shapes or default_shapes(ctx.size, on_gpus=ctx.engine.traits.on_gpus)
    with ctx.agreement("pblasmp bench"):
        for name in options.products:
            for shape in shapes:
                require_even(name, shape, ctx.size)
    dtype = options.dtype or ("bfloat16" if ctx.engine.traits.on_gpus else "float32")
    itemsize = as_dtype(dtype).itemsize
    sections = {}
    for name in options.products:
        swept = [_shape_of(name, size // itemsize, ctx.size) for size in options.sizes]
        sections[name] = [
            _case(ctx, reporter, name, shape, dtype, options, others) for shape in swept or shapes
        ]
        for row, size in zip(sections[name], options.sizes, strict=False):
            row["bytes"] = size
    return {
        "ranks": ctx.size,
        "engine": ctx.engine.name,
        "why": ctx.engine.why,
        "dtype": dtype,
        "separate": Separate.name(ctx),
        "samples": options.samples,
        "sections": sections,
    }


def default_shapes(ranks: int, *, on_gpus: bool) -> list[tuple[int, int, int]]:
    """Return T, N, K of the products that are timed by default, T and K multiples of ``ranks``. Local."""
    shapes = _ON_GPUS if on_gpus else _ON_CPUS
    return [(round_up(t, ranks), n, round_up(k, ranks)) for t, n, k in shapes]


def require_even(name: Form, shape: tuple[int, int, int], ranks: int) -> None:
    """Raise ArgumentError unless what a product splits over the ranks makes equal shares. Local.

    pblasmp takes unequal shares, but the plain collectives that they are compared with do not.
    """
    sizes = dict(zip("TNK", shape, strict=True))
    uneven = [letter for letter in _SPLIT[name] if sizes[letter] % ranks]
    if uneven:
        what = " and ".join(uneven) + (" is" if len(uneven) == 1 else " are")
        multiple = "a multiple" if len(uneven) == 1 else "multiples"
        given = ",".join(map(str, shape))
        raise ArgumentError(f"{name} of {given}: {what} split over the ranks, expected {multiple} of {ranks}")


def round_up(n: int, ranks: int) -> int:
    """Return the next multiple of ``ranks``. Local."""
    return -(-n // ranks) * ranks


def _shape_of(name: Form, elements: int, ranks: int) -> tuple[int, int, int]:
    """Return T, N and K of a product with few inputs whose collective moves about so many elements. Local."""
    width = 1 << (max(1, elements).bit_length() - 1) // 2
    t = round_up(max(1, elements // width), ranks)
    if name == "allgather_matmul":  # of x
        return t, _DEPTH, round_up(width, ranks)
    if name == "matmul_allgather":  # of y
        return t, max(1, width // ranks), round_up(_DEPTH, ranks)
    return t, width, round_up(_DEPTH * ranks, ranks)


def _case(
    ctx: Context,
    reporter: Reporter,
    name: Form,
    shape: tuple[int, int, int],
    dtype: str,
    options: BenchOptions,
    others: Others | None,
) -> dict[str, Any]:
    """Time one product of one shape. Collective over the context."""
    t, n, k = shape
    reporter.step(f"{name} {t}, {n}, {k}")
    with ctx.agreement("pblasmp bench: arrays"):
        separate = Separate(ctx, name, shape, as_dtype(dtype))
    with ExitStack() as stack:

        def plan_of(algo: str, out: Any = None) -> Any:
            return stack.enter_context(plan_of_product(name, separate.x, separate.w, ctx, algo=algo, out=out))

        def plan_if_it_applies(algo: str) -> Any:
            try:
                plan = plan_of(algo, result)
                plan()  # libraries refuse some products only when they run
            except PblasmpError as refusal:
                if not is_agreed(refusal, ctx.comm):
                    raise
                return None
            return plan

        asked, all_of_them = ("auto", True) if options.algo == "all" else (options.algo, False)
        plans = {OWN: plan_of(asked)}
        report, result = plans[OWN].report(), plans[OWN]()
        if name == "allgather_matmul" and ctx.engine.traits.on_gpus:
            plans[SYMMETRIC] = plan_of(asked, result)
            plans[SYMMETRIC].input_buffer()[...] = separate.x
        found = {algo: plan_if_it_applies(algo) for algo in report.algorithms if all_of_them}
        plans.update({algo: plan for algo, plan in found.items() if plan is not None})
        checked: dict[str, Callable[[], Any]] = {**plans}
        left_out = ""
        if all_of_them and others is not None:
            more, left_out = others(ctx, name, separate.x, separate.w)
            checked.update(more)
        contenders = {**checked, Separate.name(ctx): separate.run, ALONE: separate.gemm}
        times, ratios = _in_turn(ctx, contenders, options.samples, options.in_a_row)
        fastest = min((times[algo] for algo in found if algo in plans), default=None)
        error = max(ctx.comm.allgather(max(separate.error(run()) for run in checked.values())))
    return {
        "case": f"{t}, {n}, {k}", "flops": 2 * t * n * k * (1 if "K" in _SPLIT[name] else ctx.size),
        "us": times, "ratios": ratios, "fastest_us": fastest, "algorithm": report.algorithm, "path": report.path,
        "error": error, "good": error <= ELEMENT_TYPES[dtype].tolerance, "left_out": left_out,
    }  # fmt: skip


def _in_turn(
    ctx: Context, contenders: dict[str, Callable[[], Any]], count: int, times: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return each contender's median time until all ranks are done, in µs, and that of pblasmp's. Collective.

    They take turns of one or a few samples, each time in a different order, so that other load on the machine, and what
    the previous one leaves in the caches, affects all of them alike. Ratios are of samples of the same turn.
    """
    shuffle = np.random.default_rng(0)  # the same on every rank
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        samples(ctx.engine, ctx.comm, run, _WARM_UP)
    for turn in Axis.even(count, min(_TURNS, count)).counts():
        for name in shuffle.permutation(list(contenders)):
            found[name] += samples(ctx.engine, ctx.comm, in_a_row(contenders[name], times), int(turn))
    arrays = {name: np.array(each) / times for name, each in found.items()}
    return (
        {name: float(np.median(each)) * 1e6 for name, each in arrays.items()},
        {name: float(np.median(each / arrays[OWN])) for name, each in arrays.items() if name != OWN},
    )


def print_bench(result: dict[str, Any], *, rate: bool = False) -> None:
    """Print a table for each product: times, or ``rate``. Local."""
    for line in _lines(result, rate):
        click.echo(line)


def _cell(row: dict[str, Any], column: str, rate: bool) -> str:
    time = row["us"].get(column)
    if time is None:
        return f"{'-':>18}"
    return f"{row['flops'] / time / 1e6:18.3g}" if rate else f"{time:18.0f}"


def _lines(result: dict[str, Any], rate: bool) -> Iterator[str]:
    ranks = "one rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    yield f"{ranks}, {result['dtype']}, engine {result['engine']}"
    what = "TFLOP/s over all ranks" if rate else "times until all ranks are done in µs"
    yield f"{what}, median of {result['samples']}"
    for name, rows in result["sections"].items():
        columns = list(dict.fromkeys(column for row in rows for column in row["us"]))
        yield ""
        yield click.style(f"{FORMS[name].title} (-p {name})", bold=True)
        yield f"{'T, N, K':>20}" + "".join(f"{column:>18}" for column in columns)
        for row in rows:
            cells = "".join(_cell(row, column, rate) for column in columns)
            size = f"  {bytes_text(row['bytes'])}" if "bytes" in row else ""
            yield f"{row['case']:>20}{cells}{size}" + ("" if row["good"] else "   WRONG")
        yield from _taken(rows)
        behind = [row["us"][OWN] / row["fastest_us"] for row in rows if row.get("fastest_us")]
        if behind:
            yield f"  pblasmp takes at most {max(behind):.2f} times as long as the fastest algorithm"
        for reason in dict.fromkeys(row["left_out"] for row in rows if row["left_out"]):
            yield f"  {reason}"


def _taken(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the algorithms that the column "pblasmp" has, with the shapes if there are several."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cases.setdefault((row["algorithm"], row["path"]), []).append(row["case"])
    for (name, path), some in cases.items():
        where = f" at {' and at '.join(some)}" if len(cases) > 1 else ""
        yield f"  pblasmp{where}: {name}" + ("" if path in ("", name) else f", {path}")


Array = Any


class Separate:
    """Arrays of random numbers, and their product by cuBLAS and NCCL, or by BLAS and MPI. Making one is local.

    The shape is T, N, K; N is per rank for the gathers, K is over all ranks for the sums. ``x`` and ``w`` are this
    rank's.
    """

    def __init__(self, ctx: Context, name: str, shape: tuple[int, int, int], dtype: np.dtype) -> None:
        t, n, k = shape
        p = ctx.size
        self._ctx, self._name, self._operations = ctx, name, ctx.engine.operations
        self._random = np.random.default_rng([7, ctx.rank])
        self._shared = np.random.default_rng(7)
        sums = name in ("matmul_reduce_scatter", "matmul_allreduce")
        self.x = self._numbers((t // p if name == "allgather_matmul" else t, k // p if sums else k), dtype)
        self.w = self._numbers((n, k // p if sums else k), dtype)
        # MPI cannot sum 16-bit types
        travels = dtype if ctx.engine.traits.on_gpus else accumulation_dtype(dtype)
        self._gathered = self._empty((t, k), dtype) if name == "allgather_matmul" else self.x
        self._part = self._empty((t, n), travels if sums else dtype)
        self._sent = self._empty((t // p, n), travels) if name == "matmul_reduce_scatter" else None
        self._panels = self._empty((p * t, n), dtype) if name == "matmul_allgather" else None
        self._y = self._empty((t, n * p), dtype) if name == "matmul_allgather" else None

    @staticmethod
    def name(ctx: Context) -> str:
        """Return its name in reports. Local."""
        return "NCCL + cuBLAS" if ctx.engine.traits.on_gpus else "MPI + BLAS"

    def _numbers(self, shape: tuple[int, int], dtype: np.dtype) -> Array:
        random = self._shared if self._name == "matmul_allgather" and not hasattr(self, "x") else self._random
        out = self._empty(shape, dtype)
        self._ctx.engine.from_host(out, (random.random(shape, dtype=np.float32) - 0.5).astype(dtype))
        return out

    def _empty(self, shape: tuple[int, int], dtype: np.dtype) -> Array:
        return self._ctx.engine.empty(shape, dtype, "C", max(1, shape[1]))

    def gemm(self) -> None:
        """Multiply without communication, as if all of x were here. Local."""
        x, w = (self._operations.operand(array, array.dtype) for array in (self._gathered, self.w))
        self._operations.gemm(1, x, w.T, 0, self._part)

    def run(self) -> Array:
        """Return the product, by a GEMM and a collective. Collective over the context."""
        if self._name == "allgather_matmul":
            self._collective("gather", self.x, self._gathered)
            self.gemm()
            return self._part
        self.gemm()
        if self._name == "matmul_reduce_scatter":
            self._collective("scatter", self._part, self._sent)
            return self._sent
        if self._name == "matmul_allreduce":
            self._collective("sum", self._part, self._part)
            return self._part
        assert self._panels is not None
        assert self._y is not None
        self._collective("gather", self._part, self._panels)
        p, (t, n) = self._ctx.size, self._part.shape
        self._y.reshape(t, p, n)[...] = self._panels.reshape(p, t, n).transpose(1, 0, 2)
        return self._y

    def _collective(self, name: str, source: Array, target: Array) -> None:
        if not self._ctx.engine.traits.on_gpus:
            self._by_mpi(name, source, target)
            return
        import cupy
        import nccl.core as nccl_core

        stream, comm = cupy.cuda.get_current_stream().ptr, self._ctx.engine.session.nccl.all  # type: ignore[attr-defined]  # cublasmp has one
        if name == "gather":
            comm.allgather(source, target, stream=stream)
        elif name == "scatter":
            comm.reduce_scatter(source, target, nccl_core.SUM, stream=stream)
        else:
            comm.allreduce(source, target, nccl_core.SUM, stream=stream)

    def _by_mpi(self, name: str, source: Array, target: Array) -> None:
        if self._ctx.size == 1:
            if source is not target:
                target[...] = source
            return
        from mpi4py import MPI

        given = self._ctx.made_of
        comm: Any = MPI.COMM_WORLD if given is None else given
        if name == "gather":
            comm.Allgather(source.view(np.uint8), target.view(np.uint8))
        elif name == "scatter":
            comm.Reduce_scatter_block(source, target)
        else:
            comm.Allreduce(MPI.IN_PLACE, target)

    def error(self, y: Array) -> float:
        """Return how far ``y`` is from what ``run()`` returns, relative in the Frobenius norm. Collective."""
        precise = np.dtype(np.float64 if y.dtype.itemsize == 8 else np.float32)
        expected = self.run().astype(precise)
        difference = y.astype(precise) - expected
        squares = [float((each * each).sum()) for each in (difference, expected)]
        return (squares[0] / squares[1]) ** 0.5 if squares[1] else squares[0]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What the user asks for.

    Attributes:
        products: which of ``FORMS``; empty: the model's, or each of them.
        shapes: T, N, K each.
        model: name of a model in descriptors/models.
        tokens: numbers of tokens, for the model.
        dtype: of all arrays; None: bfloat16 on GPUs, float32 on the host.
        limit: seconds for one product.
        engine: as in Context.
    """

    products: tuple[Form, ...]
    shapes: tuple[tuple[int, int, int], ...]
    model: str | None
    tokens: tuple[int, ...]
    dtype: str | None
    limit: float
    engine: EngineName


def tune(options: TuneOptions, nranks: int | None) -> dict[str, Any]:
    """Measure what the options say on ``nranks`` ranks. Collective over ranks.

    Raises:
        PblasmpError: the options are not valid.
        FailureError: a rank that was started failed.
    """
    if surroundings() is None and options.model is not None:
        load_model(options.model)
    return on_ranks(_tune, options, nranks)


def _cases(options: TuneOptions, ranks: int, *, on_gpus: bool) -> list[tuple[Form, tuple[int, int, int]]]:
    """Return the products to measure: which one, and T, N, K as ``pblasmp bench`` takes them. Local."""
    if options.model is not None:
        asked = options.products or tuple(FORMS)
        return [
            (layer.product, layer.shape(tokens, ranks))
            for tokens in options.tokens
            for layer in load_model(options.model)
            if layer.product in asked
        ]
    shapes = options.shapes or default_shapes(ranks, on_gpus=on_gpus)
    return [(name, shape) for name in options.products or FORMS for shape in shapes]


def _tune(options: TuneOptions, reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    with Context(engine=options.engine) as ctx, reporter.errors():
        dtype = options.dtype or ("bfloat16" if ctx.engine.traits.on_gpus else "float32")
        with ctx.agreement("pblasmp tune"):
            cases = _cases(options, ctx.size, on_gpus=ctx.engine.traits.on_gpus)
            for name, shape in cases:
                require_even(name, shape, ctx.size)
        rows, file, reason = [], "", ""
        for name, shape in cases:
            t, n, k = shape
            reporter.step(f"{name} {t}, {n}, {k}")
            with ctx.agreement("pblasmp tune: arrays"):
                operands = Separate(ctx, name, shape, as_dtype(dtype))
            found = tune_product(
                name, operands.x, operands.w, ctx, limit=options.limit, progress=reporter.progress
            )
            file, reason = found.file, found.reason
            rows.append(
                {
                    "product": name, "case": f"{t}, {n}, {k}", "best": found.best,
                    "us": {each: seconds * 1e6 for each, seconds in found.seconds.items()},
                    "refused": found.refused,
                }
            )  # fmt: skip
        return {
            "machine": ctx.engine.measured.machine, "dtype": dtype, "file": file, "reason": reason, "measured": rows,
        }  # fmt: skip


def print_tuned(result: dict[str, Any]) -> None:
    """Print what was measured. Local."""
    click.echo(f"{result['machine']}, {result['dtype']}")
    known = "; from now on auto takes the fastest algorithm" if result["file"] else ""
    click.echo(f"median times until all ranks are done, in µs{known}")
    for row in result["measured"]:
        times = sorted(row["us"].items(), key=lambda each: each[1])
        head = click.style(f"{row['product']:<23}", bold=True)
        click.echo(f"{head}{row['case']:>20}  " + "  ".join(f"{name} {us:.0f}" for name, us in times))
    failed = f"the times could not be kept: {plain(result['reason'])}"
    click.echo(f"kept in {plain(result['file'])}" if result["file"] else failed)
