# SPDX-License-Identifier: Apache-2.0
"""What tests of whole calls look at inside of the library: only this module of theirs has its private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pblasmp.engines.dense import add
from pblasmp.engines.gpu.runtime import host_copies
from pblasmp.engines.gpu.runtime.host_copies import HostCopies
from pblasmp.engines.host import host_operations
from pblasmp.engines.host.direct import FIRST_SLABS
from pblasmp.engines.host.direct.calls import HostDirect
from pblasmp.engines.host.spectral_libraries import LapackProduct
from pblasmp.engines.tensor import algorithms
from pblasmp.runtime.plans import Plan
from pblasmp.tensor_parallel import made


def votes(ctx: Any) -> int:
    """How many times the ranks have agreed."""
    return ctx.control.channel._agreements


def has_boards(ctx: Any) -> bool:
    """Whether the ranks meet in shared memory, which takes the compiled core."""
    return ctx.control.board is not None


def plans_made(ctx: Any) -> int:
    """How many plans there have been."""
    return ctx._adopted


def plans_open(ctx: Any) -> int:
    return len(ctx._children)


def plans_kept(ctx: Any) -> int:
    """How many plans and readings of earlier calls are kept."""
    return len(ctx.calls._known) + len(ctx.kept._plans)


def forget_kinds() -> None:
    """Have this rank forget the kinds of tensor-parallel calls that there have been."""
    made._alike.cache_clear()


def keep_at_most(ctx: Any, nbytes: int) -> int:
    """Bound the memory of the plans that are kept; return the bound until now."""
    before, ctx.kept._most = ctx.kept._most, nbytes
    return int(before)


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


def is_open(ctx: Any) -> bool:
    return ctx._open


def notes(ctx: Any) -> Any:
    """What carries this rank's notes to others."""
    return ctx.control.channel._transport


def notes_read(ctx: Any) -> int:
    """How many notes in PyTorch's store this rank has read."""
    return notes(ctx)._read


def limits_blas(engine: Any) -> bool:
    """Whether the engine limits BLAS's threads."""
    return engine._limit.is_set


def have_available(ctx: Any, available: Callable[[], int]) -> None:
    """Have the node's available memory, in bytes, told by a function."""
    ctx.engine.transport._available = available


def library(ctx: Any, name: str) -> Any:
    """The shared library of that name that the CPU ranks' engine has opened."""
    return ctx.engine.mpi_libraries[name]._libraries[0]


def product(plan: Any) -> Any:
    """What a plan runs."""
    return plan._product


def new_layout(plan: Any) -> Any:
    """The descriptor of the new matrix that a plan makes."""
    return plan._call.result(None).descriptor


def have_run(plan: Any, run: Callable[[], None]) -> None:
    """Have a plan's runs do something else."""
    plan._bound.run = run


def takes_turns(session: Any) -> bool:
    """Whether a context is one of those that take turns on a GPU."""
    return session.runtime in session.runtime.turns._members


def split(layer: Any) -> int:
    """The dimension of its weight that a layer splits."""
    return layer._split


def addresses_of_blas(direct: Any, dtype: str) -> Any:
    """The addresses of BLAS's and LAPACK's routines for a type ("s", "d", "c", "z"), which the core calls."""
    direct._load()
    return direct._state.functions["sdcz".index(dtype)]


def grow(workspace: Any) -> None:
    """Have a workspace on a GPU replaced by a larger one."""
    workspace.grow(workspace._device_bytes + 1, 0)


def double(arena: Any) -> None:
    """Have all buffers on a GPU replaced by larger ones."""
    for owner, name in list(arena._buffers):
        arena.buffer(owner, name, 2 * arena._buffers[owner, name][0].size)


def windows_retired(ctx: Any) -> Any:
    """The windows of GPUs' memory that have been replaced, but may still be read."""
    return ctx.engine.session.gpu.windows._retired


def options(call: Any) -> dict[str, Any]:
    """The keywords of a plain call."""
    return call._how


def processes(job: Any) -> list[int]:
    """The processes of a job that are there."""
    return list(job._members())


# Methods, for ``mock.patch.object(*METHOD, other)``
CARRY_OUT = HostDirect, "_status"
EIGENVALUES = LapackProduct, "_eigenvalues"
RUN_AGAIN = Plan, "_run_with"
STAGING_BUFFER = HostCopies, "_buffer"
START = "_start"  # of a context's ``direct``
# Sizes from which large matrices are treated in other ways, for ``mock.patch.object(*SIZE, other)``
STRIPES = add, "_LEAST"  # bytes of a sum that is moved in stripes
STRIPE = add, "_MOST"  # bytes of one
CHUNK = host_operations, "_CHUNK"  # elements that are added at a time
PANEL_OF_TOKENS = algorithms, "_PANEL"  # columns
WORTH_PINNING = host_copies, "_WORTH"  # bytes of a copy between host and GPU
RUNS = "_run", "_queued"  # of a plan: a run that may wait, one that only queues
