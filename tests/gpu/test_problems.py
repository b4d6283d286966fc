# SPDX-License-Identifier: Apache-2.0
"""Every problem under descriptors/ that fits the ranks, on both engines, against NumPy."""

from __future__ import annotations

import numpy as np

import pblasmp as pb
from pblasmp.problems import files
from tests.helpers.gpu.products import OPS, everywhere, integers, place, poisoned, wrong


def run(ctx: pb.Context, file: files.ProblemFile) -> tuple[pb.DistributedMatrix, np.ndarray, np.ndarray]:
    p, half = file.problem, file.problem.a.dtype.itemsize == 2
    values = {n: integers(getattr(p, n).shape, getattr(p, n).dtype, i, 1 if half else 3)
              for i, n in enumerate("abc") if getattr(p, n) is not None}  # fmt: skip
    a, b = place(ctx, values["a"], p.a), place(ctx, values["b"], p.b)
    c = place(ctx, values["c"], p.c) if p.c is not None else None
    out = poisoned(ctx, p.d)
    pb.matmul(a, b, c, out=out, alpha=file.alpha, beta=file.beta, op_a=p.op_a, op_b=p.op_b, scheme=p.scheme)
    expected = file.alpha * (OPS[p.op_a](values["a"]) @ OPS[p.op_b](values["b"]))
    if p.scheme == "matmul_allreduce":
        expected = np.tile(expected, (1, p.d.grid.size) if p.d.order == "F" else (p.d.grid.size, 1))
    if c is not None and file.beta:
        expected = expected + file.beta * values["c"]
    return out, expected, np.asarray(ctx.engine.to_host(out.local))


def test_problems_are_right_on_both_engines(ctx, host):
    fitting = [files.load_problem_file(path) for path in files.find("problems")]
    fitting = [
        file for file in fitting if file.problem.d.grid.size <= ctx.size and file.problem.faults() == []
    ]
    assert fitting
    faults = []
    for file in fitting:
        tolerance = 2.0**-6 if file.problem.d.dtype.itemsize == 2 else 0
        try:
            got, expected, local = run(ctx, file)
            reference = run(host, file)[2]
        except pb.PblasmpError as error:
            faults.append(f"{file.path.name}: {type(error).__name__}: {error}")
            continue
        fault = wrong(ctx, got, expected, tolerance)
        if not fault and not np.allclose(
            local.astype(complex), reference.astype(complex), rtol=tolerance, atol=tolerance
        ):
            fault = "the engines differ"
        fault = everywhere(ctx, fault)
        if fault:
            faults.append(f"{file.path.name}: {fault}")
    assert not faults, "\n".join(faults)
