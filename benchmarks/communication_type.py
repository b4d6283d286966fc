# SPDX-License-Identifier: Apache-2.0
"""Measure sums over ranks by the type they travel in: ``mpirun -n 4 python3 benchmarks/communication_type.py``.

GEMM + ReduceScatter and GEMM + AllReduce of normally distributed numbers, beside float64. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import as_dtype

FORMS = {"RS": pb.matmul_reduce_scatter, "AR": pb.matmul_allreduce}
SHAPES = ((4096, 1792, 4096), (4096, 3584, 8192), (4096, 6656, 16384))


class Numbers:
    """This rank's part of X and W, and the exact Y of both forms. Collective over the context."""

    def __init__(self, ctx: Any, shape: tuple[int, int, int], dtype: str) -> None:
        t, n, k = shape
        inputs = k // ctx.size
        random = np.random.default_rng([11, ctx.rank])
        self.x, self.w = (
            self._on_device(
                ctx, random.standard_normal((rows, inputs), dtype=np.float32).astype(as_dtype(dtype))
            )
            for rows in (t, n)
        )
        wide = [each.astype(np.float64) for each in (self.x, self.w)]
        self.exact = {name: function(*wide, ctx) for name, function in FORMS.items()}

    @staticmethod
    def _on_device(ctx: Any, values: np.ndarray) -> Any:
        array = ctx.engine.empty(values.shape, values.dtype, "C", values.shape[1])
        ctx.engine.from_host(array, values)
        return array

    def errors(self, ctx: Any, form: str, travels: str) -> tuple[float, float]:
        """Return the relative error in the Frobenius norm, and the largest one relative to the largest element."""
        exact = self.exact[form]
        y = FORMS[form](self.x, self.w, ctx, comm_dtype=travels)
        difference = y.astype(np.float64) - exact
        sums = [float((each * each).sum()) for each in (difference, exact)]
        largest = [float(abs(each).max()) for each in (difference, exact)]
        every = ctx.comm.allgather((sums, largest))
        total = [sum(each[0][i] for each in every) for i in (0, 1)]
        most = [max(each[1][i] for each in every) for i in (0, 1)]
        return (total[0] / total[1]) ** 0.5, most[0] / most[1]


def shape(text: str) -> tuple[int, int, int]:
    """Return T, N, K."""
    numbers = [int(number) for number in text.split(",")]
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected T,N,K")
    return numbers[0], numbers[1], numbers[2]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=shape, action="append", help="T,N,K; K summed over ranks")
    parser.add_argument("--engine", default="auto", choices=("auto", "host", "cublasmp"))
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    with pb.Context(engine=arguments.engine) as ctx:
        say = print if ctx.rank == 0 else lambda *_, **__: None
        say(f"{ctx.size} ranks, {ctx.engine.name}\n")
        say("| type of x, w and y | form | T, N, K | travels in | relative error | largest |")
        say("| --- | --- | --- | --- | ---: | ---: |")
        for dtype, size in itertools.product(("bfloat16", "float16"), arguments.shape or SHAPES):
            numbers = Numbers(ctx, size, dtype)
            for form, travels in itertools.product(FORMS, (dtype, "float32")):
                relative, largest = numbers.errors(ctx, form, travels)
                case = ", ".join(map(str, size))
                say(f"| {dtype} | {form} | {case} | {travels} | {relative:.2e} | {largest:.2e} |", flush=True)


if __name__ == "__main__":
    main()
