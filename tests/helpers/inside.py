# SPDX-License-Identifier: Apache-2.0
"""What tests of whole calls look at inside of the library: only this module of theirs has its private names."""

from __future__ import annotations

from typing import Any

from pblasmp.engines.host.direct import FIRST_SLABS


def votes(ctx: Any) -> int:
    """How many times the ranks have agreed."""
    return ctx.control.channel._agreements


def plans_made(ctx: Any) -> int:
    """How many plans there have been."""
    return ctx._adopted


def plans_open(ctx: Any) -> int:
    return len(ctx._children)


def plans_kept(ctx: Any) -> int:
    """How many plans and readings of earlier calls are kept."""
    return len(ctx.calls._known) + len(ctx.kept._plans)


def keep_at_most(ctx: Any, nbytes: int) -> None:
    """Bound the memory of the plans that are kept."""
    ctx.kept._most = nbytes


def graphs_kept(ctx: Any) -> int:
    """How many repeated calls on GPUs are replayed as CUDA graphs."""
    return sum(bound._graph is not None for bound in ctx.kept._bound.values())


def bound_calls(ctx: Any) -> dict[Any, Any]:
    """The direct calls on GPUs that this rank keeps bound."""
    return ctx.engine.direct._calls


def buffers(ctx: Any) -> tuple[int, int]:
    """The bytes that a plan's buffers share on CPU ranks, and those that they don't."""
    of = ctx.engine._buffers
    shared = sum(memory._size for name, memory in of._shared.items() if name != FIRST_SLABS[0])
    return shared, sum(memory.nbytes for memory in of._private.values())


def release_buffers(ctx: Any) -> None:
    ctx.engine._buffers.close()


def of_the_core(ctx: Any) -> Any:
    """The state of the messages that the compiled core sends."""
    return ctx.control.board._post.state


def is_freed(ctx: Any) -> bool:
    """Whether a broken context has freed its communicators."""
    return not any(each._made for each in (ctx.comm, ctx.control))


def messages(ctx: Any, rank: int) -> tuple[int, int]:
    """How many messages a rank was sent, and how many came from it, notes among them."""
    return ctx.control._counts["to", rank], ctx.control._counts["from", rank]


def wait_patiently(ctx: Any, patient: bool) -> None:
    """Have ranks wait as those that share cores, or as those that have their own."""
    ctx.comm.patient = ctx.control.patient = ctx.engine._node.patient = patient
