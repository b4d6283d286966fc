# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products by PyTorch, in its symmetric memory: what benchmarks compare with on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from pblasmp import Context, PblasmpError
from pblasmp.runtime.interop import as_local, view_like

__all__ = ["by_pytorch"]

Array = Any


def by_pytorch(ctx: Context, name: str, x: Array, w: Array) -> tuple[dict[str, Callable[[], Array]], str]:
    """Return PyTorch's ways to compute a product in symmetric memory, or why they are left out. Collective.

    The same on every rank: none if a rank has no PyTorch, or one of the ways fails on a rank.

    Args:
        ctx: the context; on CPUs there are none.
        name: the product, by its name in Python; there are none for "matmul_allgather".
        x, w: this rank's operands.
    """
    found: dict[str, Callable[[], Array]] = {}
    if ctx.engine.device is None or name == "matmul_allgather":
        return found, ""
    if not all(ctx.comm.allgather(find_spec("torch") is not None)):
        return found, "PyTorch is not installed on every rank"
    fault = ""
    try:
        found = _ways(ctx, name, x, w)
    except (RuntimeError, PblasmpError) as error:
        fault = f"PyTorch is left out: {error}"
    why = next((each for each in ctx.comm.allgather(fault) if each), "")
    return ({} if why else found), why


def _ways(ctx: Context, name: str, x: Array, w: Array) -> dict[str, Callable[[], Array]]:
    import torch
    import torch.distributed._symmetric_memory as symmetric_memory

    from pblasmp.torch.meshes import mesh_of

    assert ctx.engine.device is not None
    torch.cuda.set_device(ctx.engine.device.index)
    mesh = mesh_of(ctx)
    if mesh is None:
        return {}
    group, ops = mesh.get_group().group_name, torch.ops.symm_mem
    like = torch.empty(0, device="cuda")
    tx, tw = (view_like(like, each, each.dtype) for each in (x, w))
    if name != "matmul_allreduce":
        fused: Callable[[], Any] = {
            "allgather_matmul": lambda: ops.fused_all_gather_matmul(tx, [tw.t()], 0, group, return_A=False)[
                1
            ][0],
            "matmul_reduce_scatter": lambda: ops.fused_matmul_reduce_scatter(tx, tw.t(), "sum", 0, group),
        }[name]
        return _tried({"PyTorch async TP": lambda: as_local(ctx.engine, fused(), "y")})
    part = symmetric_memory.empty(tx.shape[0], tw.shape[0], dtype=tx.dtype, device=tx.device)
    symmetric_memory.rendezvous(part, group)

    def product_and(reduce: Callable[[Any, str, str], Any]) -> Callable[[], Array]:
        def run() -> Array:
            torch.mm(tx, tw.t(), out=part)
            return as_local(ctx.engine, reduce(part, "sum", group), "y")

        return run

    ways = {"one_shot": ops.one_shot_all_reduce, "two_shot": ops.two_shot_all_reduce_}
    return _tried({f"PyTorch {way}": product_and(reduce) for way, reduce in ways.items()})


def _tried(runs: dict[str, Callable[[], Array]]) -> dict[str, Callable[[], Array]]:
    """Return what ran once without an error. Collective."""
    for run in runs.values():
        run()
    return runs
