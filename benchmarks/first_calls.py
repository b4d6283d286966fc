# SPDX-License-Identifier: Apache-2.0
"""What the first calls of a process take on GPUs: ``mpirun -n 2 python benchmarks/first_calls.py``.

Nothing that was compiled before is there: folders for compiled kernels, CuPy's and the driver's, are empty. The slowest
rank's times count: of the first call, of the next one, and what NVRTC takes of the first one for kernels of this
package. CuPy compiles others.

``--compile`` leaves aside the machine code that wheels bring.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results

TYPES = ("float64", "float32", "complex128", "complex64")

Call = tuple[str, Callable[[], Any]]


class Nvrtc:
    """A function that compiles.

    Attributes:
        seconds: that it has taken.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.seconds, self._compiled = 0.0, compiled

    def __call__(self, *arguments: Any, **how: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._compiled(*arguments, **how)
        finally:
            self.seconds += time.perf_counter() - began


def calls(ctx: Any, n: int, dtype: str, shape: tuple[int, int, int]) -> Iterator[Call]:
    """Yield calls with their names; what they need is there. Collective."""
    import numpy as np

    import pblasmp as pb

    a, b = ctx.random((n, n), seed=1, dtype=dtype), ctx.random((n, 8), seed=2, dtype=dtype)
    s = ctx.from_function(lambda i, j: np.where(i == j, n, 1).astype(dtype), a.descriptor)
    yield f"product, {dtype}", lambda: a @ a
    yield f"Cholesky factorization, {dtype}", lambda: pb.linalg.cholesky(s)
    yield f"LU factorization, {dtype}", lambda: pb.linalg.lu_factor(a)
    yield f"QR factorization, {dtype}", lambda: pb.linalg.qr(a)
    yield f"solve by Cholesky, {dtype}", lambda: pb.linalg.solve(s, b, assume_a="pos")
    yield f"solve by LU, {dtype}", lambda: pb.linalg.solve(a, b)
    yield f"trsm, {dtype}", lambda: pb.blas.trsm(s, a, uplo="L")
    yield f"syrk, {dtype}", lambda: pb.blas.syrk(a, uplo="L")
    if dtype == TYPES[0]:
        yield from tensor_parallel(ctx, shape)


def tensor_parallel(ctx: Any, shape: tuple[int, int, int]) -> Iterator[Call]:
    """Yield products in one kernel with their names. Collective."""
    xp = ctx.engine.xp
    tokens, outputs, inputs = shape
    for form in ("matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"):
        k, n = (inputs, outputs // ctx.size) if form == "matmul_allgather" else (inputs // ctx.size, outputs)
        x, w = (xp.ones((rows, k), "float16") for rows in (tokens, n))
        algo = "auto" if ctx.engine.device is None else "one_kernel"
        yield f"{form}, float16", partial(planned, form, x, w, ctx, algo=algo)


def planned(*arguments: Any, **how: Any) -> Any:
    """Make a plan and run it. Collective."""
    import pblasmp as pb

    return pb.plan(*arguments, **how)()


def measure(ctx: Any, nvrtc: Nvrtc, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row of each call, and print it. Collective."""
    rows = []

    def timed(call: Callable[[], Any]) -> float:
        ctx.comm.barrier()
        began = time.perf_counter()
        call()
        ctx.engine.synchronize()
        return max(ctx.comm.allgather(time.perf_counter() - began))

    for dtype in options.types:
        for name, call in calls(ctx, options.n, dtype, options.shape):
            before = nvrtc.seconds
            seconds = {"first": [timed(call)], "again": [timed(call)]}
            if compiling := max(ctx.comm.allgather(nvrtc.seconds - before)):
                seconds["NVRTC"] = [compiling]
            rows.append({"case": {"call": name}, "seconds": seconds})
            if ctx.rank == 0:
                print(name, *(f"{which} {found[0]:.2f}" for which, found in seconds.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=4096, help="order of the matrices")
    parser.add_argument(
        "--types", nargs="+", choices=TYPES, default=list(TYPES[:1]), metavar="TYPE", help="of the matrices"
    )
    parser.add_argument(
        "--shape", nargs=3, type=int, default=[4096, 1792, 4096], metavar=("T", "N", "K"),
        help="tokens, outputs and inputs of tensor-parallel products",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="take no machine code that has come along")
    results.add_option(parser)
    options = parser.parse_args()

    from mpi4py import MPI

    comm, start = MPI.COMM_WORLD, time.perf_counter()
    with tempfile.TemporaryDirectory() as empty:
        os.environ |= {"CUPY_CACHE_DIR": empty, "CUDA_CACHE_PATH": empty}
        import pblasmp as pb
        from pblasmp.engines.gpu.kernels import compiler

        nvrtc, shipped = Nvrtc(compiler.compiled), Path(empty) if options.compile else compiler.SHIPPED
        with mock.patch.multiple(compiler, compiled=nvrtc, SHIPPED=shipped), pb.Context() as ctx:
            ctx.engine.synchronize()
            context = max(comm.allgather(time.perf_counter() - start))
            if ctx.rank == 0:
                print(f"imports and context {context:.2f}", flush=True)
            found = measure(ctx, nvrtc, options)
            rows = [{"case": {"call": "imports and context"}, "seconds": {"first": [context]}}, *found]
            directory = results.directory_of(options)
            if ctx.rank == 0 and directory is not None:
                gpus = 0 if ctx.engine.device is None else ctx.size
                run = results.Run(
                    benchmark=f"first_calls{'-compiled' * options.compile}", date=results.today(),
                    commit=results.this_commit(), ranks=ctx.size, gpus=gpus, **results.facts(ctx),
                    options=results.options_of(options), reference="",
                    sample="one call, of the slowest rank", rows=rows,
                )  # fmt: skip
                results.save(run, directory)


if __name__ == "__main__":
    main()
