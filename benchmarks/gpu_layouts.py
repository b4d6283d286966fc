# SPDX-License-Identifier: Apache-2.0
"""One 2D product with every op, unequal blocks, sources and sub-matrices, timed in turns with the plain one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu_bench import WARM_UP, Bench, together
from benchmarks.gpu_report import GEMM, summary
from reference.gpu import Contender

OPS = ("NN", "TN", "NT", "TT")


def operands(n: int, block: int, dtype: str, shape: tuple[int, int]) -> dict[str, tuple[Any, Any, Any]]:
    """Return what the descriptors of A, B and D are in each case, and for sub-matrices those of the whole. Local."""
    import pblasmp as pb

    grid = pb.Grid(*shape)
    last = (shape[0] - 1, shape[1] - 1)

    def descriptor(rows: float, cols: float, source: tuple[int, int] = (0, 0), order: int = n) -> Any:
        blocks = (max(1, int(rows * block)), max(1, int(cols * block)))
        return pb.MatrixDescriptor((order, order), blocks, grid, source, dtype)

    plain, whole = descriptor(1, 1), descriptor(1, 1, order=n + block)
    return {
        "plain": (plain, plain, plain),
        "unequal blocks": (descriptor(1, 0.75), descriptor(0.75, 1.25), descriptor(1, 1.25)),
        "sources": (descriptor(1, 1, last),) * 3,
        "sub-matrices": (whole, whole, whole),
        "any blocks": (descriptor(1, 0.75), descriptor(0.375, 1.25), descriptor(0.625, 0.875)),
        "any offsets": (whole, whole, whole),
    }


def products(
    bench: Bench, n: int, block: int, dtype: str, shape: tuple[int, int]
) -> Iterator[tuple[str, str, Any, Any, Any]]:
    """Yield name, ops and the matrices A, B and D of every product. Collective."""
    for name, (a, b, d) in operands(n, block, dtype, shape).items():
        matrices = bench.matrix(a, 1), bench.matrix(b, 2), bench.ctx.empty(d)
        if name == "plain":
            for ops in OPS:
                yield ops, ops, *matrices
        elif matrices[0].shape[0] > n:
            starts = (0, block), (block, 0), (0, 0)
            if name == "any offsets":
                starts = (block // 3, block // 2), (block // 2 + 1, block // 3), (1, block - 1)
            parts = (x[i : i + n, j : j + n] for x, (i, j) in zip(matrices, starts, strict=True))
            yield name, "NN", *parts
        else:
            yield name, "NN", *matrices


def planned(a: Any, b: Any, d: Any, ops: str) -> Contender:
    """Return our plan of ``op(A) op(B)``. Collective."""
    import pblasmp as pb

    plan = pb.plan(pb.matmul, a, b, out=d, op_a=ops[0], op_b=ops[1])
    return Contender(plan, None, plan.close, lambda: plan.report().path)


def time_layouts(bench: Bench, n: int, block: int, dtype: str, shape: tuple[int, int]) -> None:
    """Time products of n × n matrices on a grid of ``shape``, in turns: a GPU's power differs over time. Collective."""
    entries: dict[str, Any] = {}
    contenders: dict[str, Contender] = {}

    def add(name: str, make: Any) -> None:
        bench.alive()
        contender, fault = together(bench.comm, make)
        if not fault:
            contenders[name] = contender
            _, fault = together(bench.comm, lambda: [contender.run() for _ in range(WARM_UP)])
        entries[name] = {"failed": fault} if fault else {"path": contender.path()}

    for name, ops, a, b, d in products(bench, n, block, dtype, shape):
        if name == "NN" and bench.torch is not None:
            kind = bench.torch.view(a.local).dtype
            add(GEMM, partial(bench.torch.block_cyclic_gemm, d.local.shape, n, kind, ops))
        add(name, partial(planned, a, b, d, ops))
    bench.alive()
    good = [name for name, entry in entries.items() if "failed" not in entry]
    times: dict[str, list[float]] = {name: [] for name in good}

    def timed() -> None:
        order = random.Random(n)  # the same on every rank: a GPU's power also depends on what ran just before
        for _ in range(bench.samples):
            for name in order.sample(good, len(good)):
                times[name] += bench.device.samples(bench.comm, contenders[name].run, 1)

    _, fault = together(bench.comm, timed)
    for name in good:
        entries[name] |= {"failed": fault} if fault else summary(bench.comm.allgather(times[name]))
    for contender in reversed(contenders.values()):
        together(bench.comm, contender.close)
    bench.record("layouts", f"{n}, {dtype}, {shape[0]}x{shape[1]}, {block}", entries)
