# SPDX-License-Identifier: Apache-2.0
"""``pblasmp run``: what a descriptor file describes, on integers, against NumPy. Every comparison is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import pblasmp as pb

from ..context import Context
from ..errors import LayoutError, counted
from ..launchers import surroundings
from ..layout import FactorProblem, Level3Problem, MatrixDescriptor, ParallelProblem
from ..layout.routines import ROUTINES
from ..problems.files import ProblemFile, Text, read_text
from ..resources import memory_bytes, usable_cores
from .descriptor_files import parse
from .ranks import on_ranks
from .reports import Reporter


def run_file(
    file: str, nranks: int | None, max_ranks: int | None, engine: str, algo: str = "auto"
) -> dict[str, Any]:
    """Run the problem of a descriptor file and return how it compares. Collective over ranks.

    As many ranks are started as the file needs, unless told otherwise; for a file that asks for them at most
    ``max_ranks``, by default 16, or twice the cores. LayoutError if the file is faulty, its grid needs more or fewer
    ranks, or its matrices do not fit into memory; FailureError if a rank that was started failed.
    """
    if surroundings() is not None:
        return on_ranks(_work, (file, None, engine, algo), nranks)
    text = read_text(file)
    found = _load(file, text)
    if nranks is None:
        nranks = found.nranks
        most = max_ranks or max(16, 2 * usable_cores())
        if nranks > most:
            raise LayoutError(
                f"{file} needs {counted(nranks, 'rank')}, at most {most} are started: give --max-ranks {nranks} if the "
                "machine can take them"
            )
    if nranks < found.nranks:
        raise LayoutError(
            f"{file} needs {counted(found.nranks, 'rank')}, got {nranks}: give -n {found.nranks}"
        )
    return on_ranks(_work, (file, text, engine, algo), nranks)


def _load(file: str, text: Text) -> ProblemFile:
    """Return the problem in a file, checked to be legal and to fit into memory as whole matrices on one rank. Local."""
    found = parse(file, text)
    try:
        found.problem.validate()
    except LayoutError as error:
        raise LayoutError(f"{found.path}: {error}") from None
    if isinstance(found.problem, ParallelProblem):
        needed, where = needed_bytes(found.problem) * found.nranks, "every rank"
    else:
        elements = sum(parent.shape[0] * parent.shape[1] for parent in found.parents.values())
        distributed = sum(parent.nbytes for parent in found.parents.values())
        needed, where = distributed + elements * 2 * np.dtype(complex).itemsize, "one rank"
    here = memory_bytes()
    if needed > here:
        raise LayoutError(
            f"{file}: run compares whole matrices on {where}; these need {needed / 2**30:.3g} GiB, "
            f"this machine has {here / 2**30:.3g} GiB"
        )
    return found


def _work(options: tuple[str, Text | None, Any, str], reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    file, text, engine, algo = options
    with Context(engine=engine) as ctx, reporter.errors():
        with ctx.agreement("pblasmp run: reading"):
            if text is None and ctx.rank == 0:  # standard input is rank 0's alone
                text = read_text(file)
        text = ctx.comm.bcast(text)
        with ctx.agreement("pblasmp run"):
            assert text is not None
            found = _load(file, text)
            if ctx.size < found.nranks:
                raise LayoutError(f"{file} needs {counted(found.nranks, 'rank')}, got {ctx.size}")
        checked: dict[str, Any] = {}
        if isinstance(found.problem, ParallelProblem):
            report, wrong, elements = run_parallel(ctx, found, algo, reporter)
        elif isinstance(found.problem, FactorProblem):
            report, verified = run_factorization(ctx, found, algo, reporter)
            wrong, elements = int(not verified), 0
            checked = {"error": verified.error, "bound": verified.bound}
        else:
            run_file_of = run_routine if isinstance(found.problem, Level3Problem) else _run_product
            report, wrong = run_file_of(ctx, found, algo, reporter)
            elements = found.parents["d"].shape[0] * found.parents["d"].shape[1]
        return {
            "file": str(found.path),
            "title": found.title,
            "ranks": ctx.size,
            "engine": ctx.engine.name,
            "algorithm": report.algorithm,
            "path": report.path,
            "report": str(report),
            "elements": elements,
            "wrong": ctx.comm.bcast(wrong),
            **checked,
        }


def _run_product(ctx: Context, found: ProblemFile, algo: str, reporter: Reporter) -> tuple[Any, int]:
    """Return the plan's report, and on rank 0 how many elements of D's whole matrix are wrong. Collective."""
    problem = found.problem
    reporter.step("making operands")
    whole = {
        name: ctx.from_function(integers(seed, parent), parent)
        for seed, (name, parent) in enumerate(found.parents.items())
    }
    a, b, d = (whole[name][found.windows[name]] for name in "abd")
    c = whole["c"][found.windows["c"]] if "c" in whole else None
    reporter.step("multiplying")
    with pb.plan(
        pb.matmul, a, b, c, out=d, alpha=found.alpha, beta=found.beta,
        op_a=problem.op_a, op_b=problem.op_b, scheme=problem.scheme, algo=algo,
    ) as plan:  # fmt: skip
        plan()
        report = plan.report()
    reporter.step("comparing")
    scalars: dict[str, Any] = {"alpha": found.alpha, "beta": found.beta}
    ops: dict[str, Any] = {"op_a": problem.op_a, "op_b": problem.op_b, "scheme": problem.scheme}
    verified = pb.verify(a, b, c, d, **scalars, **ops, exact=True)
    got = whole["d"].gather()
    if got is None:
        return report, 0
    outside = np.ones(got.shape, bool)
    outside[found.windows["d"]] = False
    before = integers(list(whole).index("d"), found.parents["d"])(*np.ogrid[: got.shape[0], : got.shape[1]])
    return report, verified.wrong + int(np.count_nonzero((got != before) & outside))


def print_run(result: dict[str, Any]) -> None:
    """Print what was run and how it compares. Local."""
    click.echo(f"{click.style(result['title'], bold=True)}, on {counted(result['ranks'], 'rank')}")
    click.echo(result["report"])
    if "error" in result:
        right = "WRONG" if result["wrong"] else "right"
        click.echo(
            f"  result     {right}: error {result['error']:.1e}, rounding explains {result['bound']:.1e}"
        )
        return
    agree = (
        "all equal to"
        if not result["wrong"]
        else f"{result['wrong']} DIFFER{'S' if result['wrong'] == 1 else ''} from"
    )
    click.echo(f"  result     {counted(result['elements'], 'element')}, {agree} NumPy's")


Array = NDArray[Any]


def run_routine(ctx: Context, found: ProblemFile, algo: str, reporter: Reporter) -> tuple[Any, int]:
    """Run the routine of a file with alpha 1, and beta 1 if there is a C. Collective over the context.

    Return the plan's report, and on rank 0 how many elements of D's whole matrix differ from NumPy's.
    """
    problem = found.problem
    has = problem.traits
    reporter.step("making operands")
    values, expected = _values(found) if ctx.rank == 0 else ({}, None)
    wholes = {name: ctx.scatter(values.get(name), parent) for name, parent in found.parents.items()}
    parts = {name: whole[found.windows[name]] for name, whole in wholes.items()}
    operands: dict[str, Any] = {name: parts[name] for name in has.operands if name in parts}
    how: dict[str, Any] = {name: getattr(problem, name) for name in has.options}
    if "c" in has.operands:
        how["beta"] = int("c" in parts)
        operands.setdefault("c", parts["d"] if has.shape == "added" else None)  # sums need one, read or not
    reporter.step("computing")
    run: Any = pb.plan(problem.routine, **operands, out=parts["d"], algo=algo, **how)
    with run as plan:
        plan()
        report = plan.report()
    reporter.step("comparing")
    got = wholes["d"].gather()
    return report, 0 if got is None else int(np.count_nonzero(got != expected))


def _values(found: ProblemFile) -> tuple[dict[str, Array], Array]:
    """Return the whole matrices, and what D's must hold afterwards."""
    p = found.problem
    wholes = {name: _whole(seed, parent) for seed, (name, parent) in enumerate(found.parents.items())}
    parts = {name: whole[found.windows[name]] for name, whole in wholes.items()}
    flags = {name: getattr(p, name) for name in p.traits.options}
    if p.traits.solves:
        _make_solvable(parts["a"])
        result = parts["b"].copy()
        parts["b"][...] = dense("trmm", parts, flags, 1, 0)  # the solution is the B from before
    else:
        result = dense(p.routine, parts, flags, 1, int("c" in parts))
    expected = wholes["d"].copy()
    np.copyto(expected[found.windows["d"]], result, where=touched(p.routine, "d", flags, result.shape))
    return wholes, expected.astype(found.parents["d"].dtype)


def run_factorization(ctx: Context, found: ProblemFile, algo: str, reporter: Reporter) -> tuple[Any, Any]:
    """Run the factorization of a file on a definite matrix. Collective over the context.

    Return the plan's report, and ``pb.verify``'s.
    """
    p = found.problem
    function, how = _function(p)
    with ctx.agreement("pblasmp run"):
        if function is None or p.factored or p.unit or p.conjugate:
            raise LayoutError(f"{found.path}: {p}: no function computes this from A and B alone")
    reporter.step("making operands")
    wholes = {
        name: ctx.from_function(_definite if name == "a" else integers(1, parent), parent)
        for name, parent in found.parents.items()
    }
    parts = {name: whole[found.windows[name]] for name, whole in wholes.items()}
    given = [parts[name] for name in ("ab" if p.b is not None else "a")]
    result = parts.get("c" if p.d is None else "d")
    if result is not None and p.routine not in ("eigh", "svd"):  # those have results of their own
        how = {**how, "out": result}
    reporter.step("computing")
    with pb.plan(function, *given, algo=algo, **how) as plan:
        made = plan()
        report = plan.report()
    reporter.step("checking")
    how.pop("out", None)
    return report, pb.verify(function, *given, found=made, **how)


def _function(p: FactorProblem) -> tuple[Any, dict[str, Any]]:
    """Return the public function that computes a problem, and its options; None if there is none. Local."""
    la: Any = pb.linalg
    lower = {"lower": True}
    kinds: dict[str, dict[str, Any]] = {
        "cholesky": {"assume_a": "pos", **lower},
        "lu": {},
        "triangular": {"assume_a": "lower triangular"},
    }
    if p.routine == "eigh" and p.b is None:
        return la.eigh, {} if p.subset is None else {"subset_by_index": p.subset}
    if p.routine == "svd":
        return la.svd, {"full_matrices": p.d is not None and p.d.shape[0] == p.d.shape[1]}
    if p.op != "N":
        return None, {}
    if p.d is None:
        alone = {"cholesky": (la.cholesky, lower), "lu": (la.lu_factor, {}), "qr": (la.qr, {})}
        return alone.get(p.routine, (None, {}))
    if p.routine == "lstsq":
        return la.lstsq, {}
    if p.routine not in kinds:
        return None, {}
    return (la.inv if p.inverse else la.solve), kinds[p.routine]


def _definite(i: Array, j: Array) -> Array:
    """Return elements of a matrix that is symmetric, and positive definite with the diagonal. Local."""
    values: Array = np.exp(-abs(i - j) / 2.0) + (i == j)
    return values


def integers(seed: int, descriptor: MatrixDescriptor) -> Callable[[Array, Array], Array]:
    """Return a function of indices whose values are small integers, complex for a complex matrix. Local."""

    def values(i: Array, j: Array) -> Array:
        real: Array = (3 * i + 5 * j + i * j + seed) % 7 - 3.0
        return real + 1j * ((i + 2 * j + seed) % 5 - 2) if descriptor.dtype.kind == "c" else real

    return values


def _whole(seed: int, descriptor: MatrixDescriptor) -> Array:
    return integers(seed, descriptor)(*np.ogrid[: descriptor.shape[0], : descriptor.shape[1]])


def _make_solvable(a: Array) -> None:
    """Give a matrix integer inverses of both triangles: ones and minus ones on the diagonal, few other elements.

    Off the diagonal only elements in an odd row and an even column are not 0, and the product of two such matrices is
    0. So the inverse of D + N is D - D N D, and all algorithms compute with small integers.
    """
    i, j = np.ogrid[: a.shape[0], : a.shape[1]]
    a[(i % 2 == 0) | (j % 2 == 1)] = 0
    np.fill_diagonal(a, 1 - 2 * (np.arange(len(a)) % 3 == 1))


def needed_bytes(p: ParallelProblem) -> int:
    """Return how much memory each rank needs to compute the whole product as well. Local."""
    tokens, outputs, inputs = p.sizes
    return 4 * np.dtype(complex).itemsize * (tokens * inputs + outputs * inputs + tokens * outputs)


def run_parallel(ctx: Context, file: ProblemFile, algo: str, reporter: Reporter) -> tuple[Any, int, int]:
    """Run the function of a file, and compare exactly with NumPy on every rank. Collective over the context.

    Return the plan's report, how many elements of the ranks' results are wrong, and how many there are.
    """
    p, rank = file.problem, ctx.rank
    with ctx.agreement("pblasmp run"):
        if ctx.size != p.size:
            raise LayoutError(f"{file.path} is for {p.size} ranks, got {ctx.size}")
        if p.turned or p.transposed or p.conjugated:
            raise LayoutError(
                f"{file.path}: a product of matrices in this form, which no function computes: run its own file"
            )
    reporter.step("making operands")
    tokens, outputs, inputs = p.sizes
    X, W, C = (
        integers(seed, MatrixDescriptor((rows, cols), 1, "1x1", dtype=kind))(*np.ogrid[:rows, :cols])
        for seed, (rows, cols, kind) in enumerate(
            ((tokens, inputs, p.dtype), (outputs, inputs, p.w_dtype), (tokens, outputs, p.out_dtype))
        )
    )
    expected = (X @ W.T + (0 if p.c_dtype is None else C)).astype(p.out_dtype)
    ends = list(accumulate(p.inputs)) if p.sums else []
    mine = slice(ends[rank] - p.inputs[rank], ends[rank]) if p.sums else slice(None)
    of_x = p.slices("tokens")[rank] if p.gathers else slice(None)
    of_w = slice(None) if p.sums else p.slices("outputs")[rank]
    of_y = p.slices("rows")[rank] if p.form == "matmul_reduce_scatter" else slice(None)
    result = of_y, of_w if p.gathers else slice(None)
    w = _array(ctx, p, "w", W[of_w, mine] if p.outputs_first else W[of_w, mine].T, p.w_dtype)
    how: dict[str, Any] = {"transposed": not p.outputs_first, "dtype": p.out_dtype, "algo": algo}
    if p.c_dtype is not None:
        how |= {"beta": 1, "c": _folded(p, _array(ctx, p, "c", C[result], p.c_dtype))}
    if p.return_gathered:
        how["return_gathered"] = True
    x = _folded(p, _array(ctx, p, "x", X[of_x, mine], p.dtype))
    reporter.step("multiplying")
    with pb.plan(p.form, x, w, ctx, **how) as plan:
        found = plan()
        report = plan.report()
        reporter.step("comparing")
        pairs = [(found, expected[result])]
        if p.return_gathered:
            pairs = [(found[0], expected[result]), (found[1], X.astype(p.dtype))]
        wrong = sum(
            int(np.count_nonzero(ctx.engine.to_host(got).reshape(wanted.shape) != wanted))
            for got, wanted in pairs
        )
    counts = ctx.comm.allgather((wrong, sum(wanted.size for _, wanted in pairs)))
    return report, sum(each for each, _ in counts), sum(each for _, each in counts)


def _array(ctx: Context, p: ParallelProblem, name: str, values: Any, dtype: np.dtype) -> Any:
    """Return values as an array of this rank's, its rows as far apart as the file says. Local."""
    apart = dict(p.row_bytes).get(name)
    ld = values.shape[1] if apart is None else apart[ctx.rank] // dtype.itemsize
    array = ctx.engine.empty(values.shape, dtype, "C", max(1, ld))
    ctx.engine.from_host(array, values.astype(dtype))
    return array


def _folded(p: ParallelProblem, array: Any) -> Any:
    """Return an array whose first dimension is in groups of ``inner`` tokens. Local."""
    return array if p.inner == 1 else array.reshape(-1, p.inner, array.shape[1])


Flags = Mapping[str, str]

OPS: dict[str, Callable[[Array], Array]] = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
"""What each op makes of a matrix."""


def touched(routine: str, name: str, flags: Flags, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a mask of what the routine may read of "a" or "c", or writes of "d". Local."""
    has = ROUTINES[routine]
    mask = np.ones(shape, bool)
    if has.triangle == ("a" if name == "a" else "d"):
        mask = np.tril(mask) if flags["uplo"] == "L" else np.triu(mask)
        if flags.get("diag") == "U":
            np.fill_diagonal(mask, val=False)
    if routine == "tradd" and name == "a":
        lower = (flags["uplo"] == "L") != (flags["op_a"] != "N")
        mask = np.tril(mask) if lower else np.triu(mask)
    return mask


def dense(routine: str, values: Mapping[str, Array], flags: Flags, alpha: complex, beta: complex) -> Array:
    """Return the result; NaN where the routine does not write. What it may not read has no effect. Local."""
    has, a = ROUTINES[routine], values["a"]
    op = OPS[flags.get("op_a", "N")]
    if has.triangle == "a":
        a = _mirrored(routine, a, flags)
    a = op(a)
    if has.shape == "sided":
        b = values["b"]
        if has.solves:
            left = flags["side"] == "L"
            solved: Array = np.linalg.solve(a, alpha * b) if left else np.linalg.solve(a.T, alpha * b.T).T
            return solved
        out: Array = alpha * (a @ b if flags["side"] == "L" else b @ a)
    elif has.shape == "updated":
        adjoint = OPS["C" if has.hermitian else "T"]
        b = op(values["b"]) if "b" in values else a
        out = alpha * (a @ adjoint(b))
        if has.swept_twice:
            out = out + (np.conj(alpha) if has.hermitian else alpha) * (b @ adjoint(a))
    else:
        out = alpha * a
    if "c" in values and beta != 0:
        out = out + beta * values["c"]
    if has.hermitian and has.shape == "updated":
        out = np.where(np.eye(len(out), dtype=bool), out.real, out).astype(out.dtype)
    whole: Array = np.where(touched(routine, "d", flags, out.shape), out, np.nan)
    return whole


def _mirrored(routine: str, a: Array, flags: Flags) -> Array:
    """Return all of the matrix that a triangle of A stands for."""
    has = ROUTINES[routine]
    a = np.where(touched(routine, "a", flags, a.shape), a, 0)
    if flags.get("diag") == "U":
        np.fill_diagonal(a, 1)
    if not has.triangular:
        diagonal = a.diagonal().real if has.hermitian else a.diagonal().copy()
        a = a + (a.conj().T if has.hermitian else a.T)
        np.fill_diagonal(a, diagonal)
    return a
