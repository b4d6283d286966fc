# SPDX-License-Identifier: Apache-2.0
"""Noise: what disturbs the ranks of a real job while they compute, and calls that are wrong if it disturbs them.

A fault in the order of ranks shows when one of them is late. On a quiet machine none ever is. Each call here is
repeated with values that change from run to run, so that a run that reads data of another one has a wrong result.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..blas.level3 import geadd, symm, syrk, trmm, trsm
from ..dtypes import as_dtype, is_float8
from ..epilogue import Scales
from ..errors import LibraryNotFoundError, StatusError, UnsupportedError
from ..layout import Grid, Level3Problem, MatmulProblem, MatrixDescriptor, Trapezoid
from ..linalg import cholesky, eigh, lstsq, solve, svd
from ..matrix.products import matmul
from ..planning import algorithms, plan
from ..tensor_parallel import allgather_matmul, matmul_allgather, matmul_allreduce, matmul_reduce_scatter

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..context import Context

Array = Any

_VALUES = 50  # that runs go through
_TURNS = 0.3  # of the runs: those with a product beside them
_NAPS = 0.3  # those in which a rank comes late
_NAP = 1.5e-3  # seconds, at most
_EIGHT_BITS = (  # the types of x, w and the result
    ("float8_e4m3fn", "float8_e4m3fn", "float16"), ("float8_e5m2", "float8_e4m3fn", "float16"),
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn"),
)  # fmt: skip
_MOST_EQUATIONS = 128  # of eigenvalue problems, which take longer than other calls of their order
_NEIGHBOR = """
import sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), sys.exit()), daemon=True).start()
gpu = int(sys.argv[1])
if gpu < 0:
    import numpy as xp
    n, settle = 256, lambda: None  # a millisecond's, between pauses: it takes a core away often, and gives it back
else:
    import cupy as xp
    xp.cuda.Device(gpu).use()
    n, settle = 8192, lambda: xp.cuda.runtime.deviceSynchronize()
a = xp.ones((n, n), "float32" if gpu < 0 else "float16")
print("ready", flush=True)
while threading.active_count() > 1:
    a @ a
    settle()
    time.sleep(0.002)
"""


class Noise:
    """What disturbs this rank, until it is closed. Making and closing it is local.

    Args:
        ctx: the context whose ranks are disturbed.
        seed: of the random numbers; each rank has others.
        beside: products on another stream of this process, on CPU ranks on another thread.
        naps: some ranks come late to some runs.
        neighbor: another process computes on this rank's GPU, or on the cores.
    """

    def __init__(
        self, ctx: Context, seed: int = 0, *, beside: bool = True, naps: bool = True, neighbor: bool = False
    ) -> None:
        self._random = random.Random(f"{seed} {ctx.rank}")
        self._gpu = ctx.engine.traits.on_gpus
        self._beside, self._naps = beside, naps
        self._job: subprocess.Popen[str] | None = None
        n = 8192 if self._gpu else 256
        if self._gpu:
            import cupy

            self._stream, self._big = cupy.cuda.Stream(non_blocking=True), cupy.ones((n, n), "float16")
            self._nap = cupy.RawKernel(
                'extern "C" __global__ void nap(long long n) { long long t = clock64(); while (clock64() - t < n); }',
                "nap",
            )
        else:
            self._big = np.ones((n, n), np.float32)
        if neighbor:
            gpu = str(ctx.engine.device.index if self._gpu else -1)
            command = [sys.executable, "-c", _NEIGHBOR, gpu]
            # Each rank has such a process: together they leave no core alone.
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            self._job = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
            )
            assert self._job.stdout is not None
            self._job.stdout.readline()

    def make(self) -> None:
        """Disturb the next run, or leave it alone. Local."""
        if self._beside and self._random.random() < _TURNS:
            if self._gpu:
                with self._stream:
                    self._big @ self._big
            else:
                threading.Thread(target=partial(np.matmul, self._big, self._big)).start()
        if self._naps and self._random.random() < _NAPS:
            seconds = self._random.uniform(0.05, 1) * _NAP
            if self._gpu:
                self._nap((1,), (1,), (int(seconds * 2e9),))
            else:
                time.sleep(seconds / 3)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the neighbor. Local."""
        if self._job is not None:
            self._job.communicate()
            self._job = None


@dataclass(frozen=True)
class Trial:
    """A call to be repeated. Making one is collective over its context.

    Attributes:
        name: the function and the algorithm.
        run: computes with a value; returns an array that has it everywhere, empty on ranks without elements.
        error: the largest relative error that rounding explains.
    """

    name: str
    run: Callable[[float], Array]
    error: float = 0


def wrong_runs(ctx: Context, trial: Trial, noise: Noise | None, runs: int = 300) -> int | str:
    """Return how many runs were wrong on the rank with the most, or why the call is refused. Collective.

    The host waits for nothing before the last run, so the ranks may be as far apart as the library lets them.
    """
    found: list[tuple[float, Array]] = []
    try:
        for run in range(runs):
            value = float(run % _VALUES + 1)
            if noise is not None:
                noise.make()
            result = trial.run(value)
            if result.size:
                found.append((value, _ends(ctx, result)))
    except (LibraryNotFoundError, UnsupportedError, StatusError) as error:
        ctx.check_open()
        return str(error)
    wrong = 0
    for value, ends in found:
        least, most = ends.tolist()
        slack = trial.error * value
        wrong += not (value - slack <= least and most <= value + slack)
    return int(max(ctx.comm.allgather(wrong)))


def _ends(ctx: Context, result: Array) -> Array:
    """Return the least and the largest element, NaN if there is one; on a GPU without waiting for it. Local."""
    return _arrays(ctx).stack([result.min(), result.max()])


def _arrays(ctx: Context) -> Any:
    """Return the library of local arrays: CuPy or NumPy. Local."""
    if not ctx.engine.traits.on_gpus:
        return np
    import cupy

    return cupy


def trials(ctx: Context, n: int) -> Iterator[Trial]:
    """Yield the library's calls by each algorithm that applies here. Collective over the context.

    Run each trial before you ask for the next. Matrices have order n; tensor-parallel products have 4n tokens, 2n
    inputs and 2n outputs.
    """
    yield from _parallel_trials(ctx, 4 * n, 2 * n)
    yield from _matrix_trials(ctx, n)
    yield from _factor_trials(ctx, n // 2)
    yield from _spectral_trials(ctx, min(n // 2, _MOST_EQUATIONS))


def _parallel_trials(ctx: Context, tokens: int, width: int) -> Iterator[Trial]:
    """Yield the tensor-parallel products, in plain calls and as plans."""
    xp, size = _arrays(ctx), ctx.size
    kind = np.dtype("float16" if ctx.engine.traits.on_gpus else "float32")
    t, k = (extent // size * size for extent in (tokens, width))
    part = k // size
    shapes: dict[Callable[..., Any], tuple[tuple[int, int], tuple[int, int]]] = {
        allgather_matmul: ((t // size, k), (part, k)),
        matmul_reduce_scatter: ((t, part), (k, part)),
        matmul_allreduce: ((t, part), (k, part)),
        matmul_allgather: ((t, k), (part, k)),
    }
    for function, (of_x, of_w) in shapes.items():
        x, w = xp.ones(of_x, kind), xp.full(of_w, 1 / k, kind)

        def run(value: float, call: Callable[[], Array], x: Array = x) -> Array:
            x.fill(value)
            return call()

        sizes = f"{function.__name__}, {t} x {k} x {k}"
        with plan(function, x, w, ctx) as prepared:
            yield Trial(f"{sizes}, a plan", partial(run, call=prepared), 2**-10)
        epilogue: dict[str, Any] = {"bias": xp.zeros(of_w[0], kind), "activation": "relu"}
        for algo in _names(function, x, w, ctx):
            for what, how in (("", {}), (", bias and relu", epilogue)):
                call = partial(function, x, w, ctx, algo=algo, **how)
                yield Trial(f"{sizes}, {algo}{what}", partial(run, call=call), 2**-10)
        for types in _EIGHT_BITS:
            yield from _eight_bit_trials(ctx, function, of_x, of_w, k, types)


def _eight_bit_trials(
    ctx: Context,
    function: Callable[..., Any],
    of_x: tuple[int, int],
    of_w: tuple[int, int],
    inputs: int,
    types: tuple[str, str, str],
) -> Iterator[Trial]:
    """Yield a product of 8-bit operands, whose scales are arrays that change as well.

    A result in 8 bits has its largest value, too; any other has a bias and an activation.
    """
    xp, stored = _arrays(ctx), ctx.engine.operations.stored
    x_kind, w_kind, y_kind = (as_dtype(name) for name in types)
    units, one = _small(x_kind, stored(x_kind)), _small(w_kind, stored(w_kind))[0]
    x, w = xp.empty(of_x, stored(x_kind)), xp.full(of_w, one, stored(w_kind))
    scale, shrink, amax = (xp.ones(1, np.float32) for _ in range(3))
    narrow = is_float8(y_kind)
    how: dict[str, Any] = {
        "scales": Scales(a=scale, b=1 / inputs, **({"d": shrink, "amax": amax} if narrow else {})),
        "dtype": y_kind, "x_dtype": x_kind, "w_dtype": w_kind,
        **({} if narrow else {"bias": xp.zeros(of_w[0], y_kind), "activation": "relu"}),
    }  # fmt: skip
    read = xp.asarray(np.arange(256, dtype=np.uint8).view(y_kind).astype(np.float32)) if narrow else None

    def run(value: float, algo: str) -> Array:
        which = int(value) % len(units)
        x.fill(units[which])
        scale.fill(value / (which + 1))
        shrink.fill((which + 1) / value)
        y = function(x, w, ctx, algo=algo, **how)
        if read is None:
            return y
        return xp.concatenate([read[y.view(np.uint8)].ravel() * (value / (which + 1)), amax])

    try:
        names = _names(function, x, w, ctx, **how)
    except UnsupportedError:  # every rank's: GPUs without such products
        return
    kinds = "{} x {} to {}".format(*(name.removeprefix("float8_") for name in types))
    for algo in names:
        yield Trial(f"{function.__name__}, {kinds}, {algo}", partial(run, algo=algo), 2**-9)


def _small(kind: np.dtype, stored: np.dtype) -> list[Any]:
    """Return 1 to 8 in 8 bits, as an array of the engine holds them. Local."""
    return list(np.arange(1, 9).astype(kind).view(stored).tolist())


def _matrix_trials(ctx: Context, n: int) -> Iterator[Trial]:
    """Yield products of matrices, routines of level 3 and moves."""
    xp, kind = _arrays(ctx), np.dtype(np.float32)
    of = MatrixDescriptor((n, n), (-(-n // 8),) * 2, Grid.squarest(ctx.size), dtype=kind)
    elsewhere = MatrixDescriptor((n, n), (-(-n // 5),) * 2, Grid(1, ctx.size), dtype=kind, order="F")
    a, b, unit = ctx.empty(of), ctx.empty(of), ctx.from_function(lambda i, j: (i == j) * 1.0, of)
    lower = xp.asarray(Trapezoid("L").mask(*of.global_indices(ctx.rank)))

    def product(value: float, algo: str) -> Array:
        a.local.fill(value)
        b.local.fill(1 / n)
        return matmul(a, b, algo=algo).local

    def move(value: float) -> Array:
        a.local.fill(value)
        return a.redistribute(elsewhere).local

    def sided(value: float, algo: str, routine: Callable[..., Any]) -> Array:
        solves = routine is trsm
        xp.multiply(unit.local, value, out=a.local)
        b.local.fill(value * value if solves else value)
        found = routine(a, b, algo=algo).local
        return found if solves else found / value

    def update(value: float, algo: str) -> Array:
        a.local.fill(value)
        found = syrk(a, alpha=1 / (n * value), algo=algo).local
        return xp.where(lower, found, value)

    def total(value: float, algo: str) -> Array:
        a.local.fill(value)
        b.local.fill(value / 2)
        return geadd(a, b, op_a="T", alpha=0.5, beta=1, algo=algo).local

    calls: list[tuple[str, Any, Callable[..., Array]]] = [
        ("matmul", MatmulProblem(of, of, of), product),
        ("syrk", Level3Problem("syrk", of, of), update),
        ("geadd", Level3Problem("geadd", of, of, c=of, op_a="T"), total),
    ]
    for routine in (symm, trmm, trsm):
        name = routine.__name__
        calls.append((name, Level3Problem(name, of, of, b=of), partial(sided, routine=routine)))
    for name, problem, call in calls:
        for algo in _names(problem, ctx):
            yield Trial(f"{name}, order {n}, {algo}", partial(call, algo=algo), 1e-4)
    yield Trial(f"redistribute, order {n}", move)
    yield from _eight_bit_matrix_trials(ctx, n)


def _eight_bit_matrix_trials(ctx: Context, n: int) -> Iterator[Trial]:
    """Yield products of 8-bit matrices, a scale of which changes as well."""
    kind, n = as_dtype(_EIGHT_BITS[0][0]), -(-n // 16) * 16
    of = MatrixDescriptor((n, n), (-(-n // 128) * 16,) * 2, Grid.squarest(ctx.size), dtype=kind)
    a, b, scale = ctx.empty(of), ctx.empty(of), _arrays(ctx).ones(1, np.float32)
    units = _small(kind, ctx.engine.operations.stored(kind))
    b.local.fill(units[0])
    how: dict[str, Any] = {"op_b": "T", "scales": Scales(a=scale, b=1 / n)}

    def run(value: float, algo: str) -> Array:
        which = int(value) % len(units)
        a.local.fill(units[which])
        scale.fill(value / (which + 1))
        return matmul(a, b, algo=algo, **how).local

    try:
        names = _names(matmul, a, b, **how)
    except UnsupportedError:  # every rank's: GPUs without such products
        return
    for algo in names:
        yield Trial(f"matmul of 8 bits, order {n}, {algo}", partial(run, algo=algo), 2**-7)


def _factor_trials(ctx: Context, n: int) -> Iterator[Trial]:
    """Yield a Cholesky factorization, and solutions by LU and by QR."""
    xp, kind = _arrays(ctx), np.dtype(np.float64)
    of = MatrixDescriptor((n, n), (-(-n // 16),) * 2, Grid.squarest(ctx.size), dtype=kind)
    of_b = MatrixDescriptor((n, 8), (of.block[0], 1), of.grid, dtype=kind)
    first_a = ctx.from_function(lambda i, j: 1 / (1 + abs(i - j)) + (i == j) * 2.0, of)
    first_b = ctx.from_function(lambda i, j: (i + j) % 7 + 1.0, of_b)
    a, b = ctx.empty(of), ctx.empty(of_b)

    def factored(value: float, algo: str, right: Array) -> Array:
        xp.multiply(first_a.local, value * value, out=a.local)
        return _ratio(xp, cholesky(a, algo=algo).local, right, value)

    def solved(value: float, algo: str, right: Array, call: Callable[..., Any]) -> Array:
        xp.multiply(first_a.local, value, out=a.local)
        xp.multiply(first_b.local, value * value, out=b.local)
        return _ratio(xp, call(a, b, algo=algo).local, right, value)

    for algo in _names(cholesky, first_a):
        run = partial(factored, algo=algo, right=cholesky(first_a).local)
        yield Trial(f"cholesky, order {n}, {algo}", run, 1e-6)
    for function in (solve, lstsq):
        for algo in _names(function, first_a, first_b):
            run = partial(solved, algo=algo, right=function(first_a, first_b).local, call=function)
            yield Trial(f"{function.__name__}, order {n}, {algo}", run, 1e-6)


def _spectral_trials(ctx: Context, n: int) -> Iterator[Trial]:
    """Yield eigenvalues and singular values with their vectors, by each library; they are known."""
    xp, of = _arrays(ctx), MatrixDescriptor((n, n), (-(-n // 16),) * 2, Grid.squarest(ctx.size))
    first = ctx.from_function(lambda i, j: (i == j) * 2.0 - (abs(i - j) == 1), of)
    a, right = ctx.empty(of), 2 - 2 * np.cos(np.arange(1, n + 1) * np.pi / (n + 1))

    def decomposed(value: float, algo: str, call: Callable[..., Any]) -> Array:
        xp.multiply(first.local, value, out=a.local)
        if call is eigh:
            values, left = eigh(a, algo=algo)
            along, of_values = left.T, right
        else:
            left, values, along = svd(a, algo=algo)
            of_values = right[::-1]
        again = matmul(matmul(left, ctx.scatter(np.diag(values), of)), along)
        return xp.concatenate(
            [xp.asarray(values / of_values), _ratio(xp, again.local, first.local, value).ravel()]
        )

    for call in (eigh, svd):
        for algo in _names(call, first):
            run = partial(decomposed, algo=algo, call=call)
            yield Trial(f"{call.__name__}, order {n}, {algo}", run, 1e-6)


def _names(what: Any, *operands: Any, **how: Any) -> list[str]:
    """Return the names by which a function computes these, or a problem is computed. Collective over the context."""
    return ["auto", *(name for name, verdict in algorithms(what, *operands, **how).items() if verdict)]


def _ratio(xp: Any, found: Array, right: Array, value: float) -> Array:
    """Return the ratio of two results where the other one is large, elsewhere the value. Local."""
    large = abs(right) > 1e-3
    return xp.where(large, found / xp.where(large, right, 1), value)
