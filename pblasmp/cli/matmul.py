# SPDX-License-Identifier: Apache-2.0
"""``pblasmp matmul``: read matrices, multiply, check, write, and report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import pblasmp as pb

from ..comm import nodes_of
from ..context import Context
from ..drawing.labels import OPS, terms
from ..dtypes import DTYPES, as_dtype, scalar
from ..engines.choose import EngineName
from ..errors import ArgumentError
from ..launchers import surroundings
from ..layout import Grid, MatmulProblem
from ..layout.schemes import Op
from ..matrix.creation import default_block
from ..matrix.distributed import DistributedMatrix
from ..matrix.io.formats import Source, element_type
from ..matrix.io.saving import format_of, open_source
from ..tuning.timing import samples
from .options import require_directory
from .ranks import on_ranks
from .reports import Reporter
from .terminal import plain

_NAMED = re.compile(r"(.+\.(?:h5|hdf5|zarr)):(.*)", re.IGNORECASE)  # a file, and the matrix in it
_MOST_REPEATS = 5
_REPEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ProductOptions:
    """What the user asks for; ``None`` if the user says nothing.

    Attributes:
        a, b: the files; both None for random matrices. A matrix in an HDF5 or Zarr file is FILE:NAME.
        c: the file of C.
        output: the file of D.
        grid: rows and columns of the grid.
        block: as for ``MatmulProblem.gemm``; None: the default of each matrix.
        op_a, op_b: "N", "T" or "C".
        alpha, beta: scalars of ``alpha op(A) op(B) + beta C``.
        dtype: element type of all matrices.
        engine: as in Context.
        algo: as for ``pb.matmul``.
        check: whether to verify the product.
        repeat: number of calls timed after the first one; None: as many as fit into a second.
        size: rows and columns of random matrices.
    """

    a: Path | None
    b: Path | None
    c: Path | None
    output: Path | None
    grid: tuple[int, int] | None
    block: int | tuple[int, ...] | None
    op_a: Op
    op_b: Op
    alpha: complex
    beta: complex
    dtype: str | None
    engine: EngineName
    algo: str
    check: bool
    repeat: int | None
    size: int

    @property
    def operand_steps(self) -> dict[str, Path | None]:
        """The steps that make the operands, each with the file that it reads, if any."""
        if self.a is None:
            return {"making A": None, "making B": None}
        files = {"A": self.a, "B": self.b, "C": self.c}
        return {f"reading {name}": path for name, path in files.items() if path is not None}


def multiply(options: ProductOptions, nranks: int | None) -> dict[str, Any]:
    """Do what the options say on ``nranks`` ranks and return the facts to report. Collective over ranks."""
    if surroundings() is None:
        _validate(options)  # before any rank is started
    return on_ranks(_work, options, nranks)


def _validate(options: ProductOptions) -> np.dtype:
    """Return the element type of the product; ArgumentError or OSError if the input is not valid. Local."""
    asked = None if options.dtype is None else as_dtype(options.dtype)
    files = {name: path for name in "abc" if (path := getattr(options, name)) is not None}
    arrays: dict[str, Source] = {}
    for name, path in files.items():
        with closing(open_source(*_place(path))) as arrays[name]:  # its shape and type stay
            pass
    dtype = _common_dtype({path: arrays[name] for name, path in files.items()}, asked)
    scalar(options.alpha, dtype, "--alpha")
    scalar(options.beta, dtype, "--beta")
    if files:
        (m, k), (k_b, n) = (
            arrays[name].shape if op == "N" else arrays[name].shape[::-1]
            for name, op in (("a", options.op_a), ("b", options.op_b))
        )
        if k != k_b:
            raise ArgumentError(
                f"{options.a} is {_size(arrays['a'])} and {options.b} {_size(arrays['b'])}: with --trans "
                f"{options.op_a}{options.op_b}, op(A) has {k} columns and op(B) {k_b} rows, expected the same number"
            )
        if "c" in arrays and arrays["c"].shape != (m, n):
            raise ArgumentError(f"{options.c} is {_size(arrays['c'])}, but the product is {m} × {n}")
    if options.output is not None:
        _check_output(options.output, list(files.values()))
    return dtype


def _place(given: Path) -> tuple[Path, str | None]:
    """Return a file and the name of the matrix in it, None without one. Local."""
    found = _NAMED.fullmatch(str(given))
    if found is None or given.exists():
        return given, None
    if not found[2]:  # or "/", which paths do not keep
        raise ArgumentError(f"{given} names no matrix: expected one after the colon, as in {found[1]}:NAME")
    return Path(found[1]), found[2]


def _size(array: Source) -> str:
    return f"{array.shape[0]} × {array.shape[1]}"


def _common_dtype(arrays: dict[Path, Source], asked: np.dtype | None) -> np.dtype:
    """Return the type asked for, or the one that all files have."""
    types = {}
    for path, array in arrays.items():
        if asked is None and array.dtype.newbyteorder("=") not in DTYPES.values():
            raise ArgumentError(
                f"{path} holds {array.dtype}: choose a type to multiply in with --dtype ({', '.join(DTYPES)})"
            )
        types[path] = element_type(path, array.dtype, asked)
    if len(set(types.values())) > 1:
        found = ", ".join(f"{path} {dtype.name}" for path, dtype in types.items())
        raise ArgumentError(f"the matrices differ in type ({found}): choose one to multiply in with --dtype")
    return next(iter(types.values()), asked or DTYPES["float64"])


def _check_output(given: Path, inputs: list[Path]) -> None:
    path, name = _place(given)
    require_directory(path)
    kind = format_of(path)
    if path.is_dir() and kind != "zarr":
        raise IsADirectoryError(f"{path} is a directory, expected a file after -o")
    if kind == "hdf5" and name is None:
        raise ArgumentError(f"{path}: an HDF5 file holds matrices by their names: give -o {path}:NAME")
    for one, of in map(_place, inputs):
        if path.exists() and path.samefile(one) and (name == of or None in (name, of)):
            raise ArgumentError(f"{given} is also read: write the product to another file")


class _Clock:
    """Times steps; all ranks begin and end each step together."""

    def __init__(self, ctx: Context, reporter: Reporter) -> None:
        self.context = ctx
        self.reporter = reporter
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Report and time a step. Collective over the context."""
        self.reporter.step(name)
        self.context.comm.barrier()
        start = time.perf_counter()
        yield
        self.context.comm.barrier()
        self.seconds[name] = time.perf_counter() - start


def _work(options: ProductOptions, reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    with Context(engine=options.engine) as ctx, reporter.errors():
        with ctx.agreement("pblasmp matmul"):
            dtype = _validate(options)
            grid = Grid(*options.grid) if options.grid else Grid.squarest(ctx.size)
        clock = _Clock(ctx, reporter)
        a, b, c = _operands(options, clock, grid, dtype)
        scalars: dict[str, Any] = {
            "alpha": options.alpha, "beta": options.beta, "op_a": options.op_a, "op_b": options.op_b,
        }  # fmt: skip
        with clock.step("preparing"):
            plan = pb.plan(pb.matmul, a, b, c, algo=options.algo, **scalars)
        with clock.step("multiplying"):
            d = plan()
            ctx.engine.synchronize()
        report = plan.report()
        result = _facts(ctx, a, b, d, options) | {"algorithm": report.algorithm, "path": report.path}
        result["repeated_seconds"] = _repeated(ctx, plan, options.repeat, clock.seconds["multiplying"])
        if options.check:
            with clock.step("checking"):
                found = pb.verify(a, b, c, d, **scalars)
            result |= {**asdict(found), "ok": found.ok}
        if options.output is not None and result.get("ok", True):
            file, name = _place(options.output)
            if ctx.rank == 0:
                reporter.temporary(file if name is None or format_of(file) != "zarr" else file / name)
            with clock.step("writing"):
                d.save(file, dataset=name, progress=reporter.progress)
            result["bytes"] = d.descriptor.nbytes
        return result | {"seconds": clock.seconds}


def _repeated(ctx: Context, plan: Callable[[], Any], repeat: int | None, first: float) -> list[float]:
    """Return the times of calls after the first one, until all ranks are done. Collective over the context."""
    if repeat is None:
        repeat = ctx.comm.bcast(min(_MOST_REPEATS, int(_REPEAT_SECONDS / max(first, 1e-9))))
    return samples(ctx.engine, ctx.comm, plan, repeat)


def _operands(
    options: ProductOptions, clock: _Clock, grid: Grid, dtype: np.dtype
) -> tuple[DistributedMatrix, DistributedMatrix, DistributedMatrix | None]:
    """Read A, B and C, or make A and B. Collective over the context."""
    ctx, size = clock.context, options.size
    block = options.block or default_block((size, size), grid)
    square = MatmulProblem.gemm(
        size, size, size, grid, block, op_a=options.op_a, op_b=options.op_b, dtype=dtype
    )
    made: list[DistributedMatrix] = []
    layouts = (square.a, square.b, square.d)
    for seed, ((step, path), layout) in enumerate(zip(options.operand_steps.items(), layouts, strict=False)):
        with clock.step(step):
            if path is None:
                made.append(ctx.random(layout, seed=seed, distribution="normal"))
            else:
                progress = clock.reporter.progress
                given = layout.block if options.block else None
                file, name = _place(path)
                made.append(
                    ctx.load(file, dataset=name, grid=grid, block=given, dtype=dtype, progress=progress)
                )
    return made[0], made[1], made[2] if len(made) > 2 else None


def _facts(
    ctx: Context, a: DistributedMatrix, b: DistributedMatrix, d: DistributedMatrix, options: ProductOptions
) -> dict[str, Any]:
    """The facts about the layout, in JSON's types. Collective over the context."""
    m, n = d.shape
    k = a.shape[1 if options.op_a == "N" else 0]
    return {
        "shapes": [a.shape, b.shape, d.shape],
        "orders": [x.descriptor.order for x in (a, b, d)],
        "flops": (8 if d.dtype.kind == "c" else 2) * m * n * k,
        "dtype": d.dtype.name,
        "grid": [d.descriptor.grid.nprow, d.descriptor.grid.npcol],
        "blocks": d.descriptor.block,
        "local": d.descriptor.local_shape(0),
        "ranks": ctx.size,
        "nodes": len(nodes_of(ctx.comm.locations())),
        "engine": ctx.engine.name,
        "why": ctx.engine.why,
    }


def print_result(options: ProductOptions, result: dict[str, Any]) -> None:
    """Print the grid, the layout, the engine, the times and the verdict. Local."""
    for name, text in _lines(options, result):
        click.echo(click.style(f"{name:<10}", bold=True) + text)


def _lines(options: ProductOptions, result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    seconds = result["seconds"]
    a, b, d = (
        f"{rows} × {cols}, {order} order"
        for (rows, cols), order in zip(result["shapes"], result["orders"], strict=True)
    )
    product = f"A{OPS[options.op_a]} ({a}) · B{OPS[options.op_b]} ({b})"
    yield "product", f"D ({d}) = {terms(options.alpha, product, options.beta)}"
    nodes = "one node" if result["nodes"] == 1 else f"{result['nodes']} nodes"
    ranks = "one rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    yield "grid", f"{result['grid'][0]} × {result['grid'][1]}, of {ranks} on {nodes}"
    block, local = (f"{rows} × {cols}" for rows, cols in (result["blocks"], result["local"]))
    yield "layout", f"{result['dtype']} in blocks of {block}, rank 0 holds {local} of D"
    path = "" if result["path"] == result["algorithm"] else f", path {result['path']}"
    yield "engine", f"{result['engine']}, algorithm {result['algorithm']}{path}"
    operands = sum(seconds[step] for step in options.operand_steps)
    yield ("make" if options.a is None else "read"), f"{operands:.3f} s"
    yield "prepare", f"{seconds['preparing']:.3f} s"
    first, repeated = seconds["multiplying"], result["repeated_seconds"]
    if repeated:
        steady = float(np.median(repeated))
        rate = _rate(result["flops"], steady)
        calls = "one more call" if len(repeated) == 1 else f"the median of {len(repeated)} more calls"
        yield "multiply", f"{first:.4f} s for the first call, then {steady:.4f} s, {rate} ({calls})"
    else:
        yield "multiply", f"{first:.4f} s, {_rate(result['flops'], first)} (the first call)"
    if "error" in result:
        yield "check", _verdict(result)
    if "bytes" in result:
        rate = result["bytes"] / seconds["writing"] / 1e6
        yield "write", f"{seconds['writing']:.3f} s, {rate:.0f} MB/s, {plain(options.output)}"


def _verdict(result: dict[str, Any]) -> str:
    text = "right" if result["ok"] else "WRONG"
    text += f": relative error {result['error']:.1e}, rounding explains {result['bound']:.1e}"
    if result["nans"] or result["infinities"]:
        text += f"; D holds {result['nans']} NaN and {result['infinities']} infinite numbers"
        text += ", as NumPy's does" if not result["wrong"] else ""
    if result["wrong"]:
        text += f"; {result['wrong']} elements are NaN, infinite or finite where NumPy's are not"
    return text


def _rate(flops: int, seconds: float) -> str:
    return f"{flops / seconds / 1e9 if seconds else 0:.1f} GFLOP/s"
