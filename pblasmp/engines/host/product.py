# SPDX-License-Identifier: Apache-2.0
"""Products on the host: which path they take, and taking it.

One scheme, three ways to run it. The ranks of a *domain* share slabs of the operands; k is taken in *panels*:

- ``shared``: the ranks of a node are a domain and k is one panel. Between nodes the slabs travel in messages.
- ``gathered``: every rank is its own domain and k is one panel.
- ``panels``: every rank is its own domain; while one panel of k is multiplied the next one is under way.

An operand that already lies where it is multiplied is left there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Communicator
from ...dtypes import accumulation_dtype
from ...epilogue import Epilogue
from ...errors import UnsupportedError
from ...layout import MatmulProblem
from ..after import After
from ..base import Workspace
from .blas import LocalBlas
from .memory import Buffers
from .operand import Operand, Staging

__all__ = ["ALGORITHMS", "AllReduceProduct", "SlabProduct", "choose"]

ALGORITHMS = ("auto", "shared", "gathered", "panels")
_PANEL = 1024  # indices of k; a panel below 256 costs BLAS its speed

Array = NDArray[Any]


def operands(p: MatmulProblem, size: int) -> tuple[Operand, Operand]:
    """Return both operands of a product on ``size`` ranks, each as outer × k."""
    coords = [p.d.grid.coords(rank) if rank < p.d.grid.size else None for rank in range(size)]
    conjugate = p.a.dtype.kind == "c"
    return (
        Operand(p.a, p.op_a != "N", conjugate and p.op_a == "C", tuple(c and c[0] for c in coords), p.d.rows),
        Operand(p.b, p.op_b == "N", conjugate and p.op_b == "C", tuple(c and c[1] for c in coords), p.d.cols),
    )


def choose(
    p: MatmulProblem,
    algo: str,
    nodes: Sequence[tuple[int, ...]],
    fits: Callable[[int], tuple[bool, int]],
    why_not_shared: str,
) -> tuple[str, tuple[str, ...]]:
    """Return ``(path, notes)``: ``algo`` itself or, for "auto", the fastest path whose memory fits.

    Args:
        nodes: the ranks of each node.
        fits: ``fits(nbytes)`` says whether every node has that much to give, and how much the tightest one has.
            Called only when it matters. Collective.
        why_not_shared: empty, or why ranks cannot share memory.
    """
    if algo != "auto":
        return algo, ()
    size = sum(len(node) for node in nodes)
    moved = [x for x in operands(p, size) if not x.in_place()]
    if not moved:
        return "gathered", ("both operands are multiplied where they lie",)
    notes = (why_not_shared,)
    if not why_not_shared:
        shared = max(sum(x.memory_bytes(node, p.k) for x in moved) for node in nodes)
        enough, limit = fits(shared)
        if enough:
            return "shared", ()
        notes = (f"a shared copy of the operands needs {shared} bytes a node, of {limit} to be had",)
    gathered = max(sum(x.memory_bytes([rank], p.k) for x in moved for rank in node) for node in nodes)
    enough, limit = fits(gathered)
    if enough:
        return "gathered", notes
    return "panels", (*notes, f"gathered operands need {gathered} bytes a node, of {limit} to be had")


class SlabProduct:
    """D from slabs of the operands. Making and running one is collective over ``comm``."""

    def __init__(
        self,
        p: MatmulProblem,
        alpha: complex,
        beta: complex,
        comm: Communicator,
        path: str,
        nodes: Sequence[tuple[int, ...]],
        buffers: Buffers,
        local_blas: LocalBlas,
        staging: Callable[..., Staging],
        notes: tuple[str, ...] = (),
        after: After | None = None,
    ) -> None:
        self.path, self.notes = path, notes
        self._after = after
        self._p, self._alpha, self._beta, self._comm, self._buffers = p, alpha, beta, comm, buffers
        self._blas = local_blas
        self._shared = path == "shared"
        domains = tuple(nodes) if self._shared else tuple((rank,) for rank in range(comm.size))
        self._domain = next(ranks for ranks in domains if comm.rank in ranks)
        width = min(p.k, _PANEL) if path == "panels" else p.k
        self._panels = (
            [(at, min(at + width, p.k)) for at in range(0, p.k, width)] if width and alpha != 0 else []
        )
        self._operands = operands(p, comm.size)
        self._in_place = [x.in_place() for x in self._operands]
        self._stagings = [
            [None if still else staging(x, domains, *panel) for panel in self._panels]
            for x, still in zip(self._operands, self._in_place, strict=True)
        ]
        made = [s for stagings in self._stagings for s in stagings if s is not None]
        self.sent_bytes = sum(s.sent_bytes for s in made)
        self.copied_bytes = sum(s.copied_bytes for s in made)
        # Whether the ranks meet after writing slabs: the same on every rank, also on idle ones.
        self._fenced = path == "shared" and not all(self._in_place)
        self._bytes = [
            0 if still else x.memory_bytes(self._domain, width)
            for x, still in zip(self._operands, self._in_place, strict=True)
        ]
        depth = 2 if len(self._panels) > 1 else 1
        scratch = 0
        if accumulation_dtype(p.d.dtype) != p.d.dtype and self._operands[0].needs[comm.rank] is not None:
            scratch = math.prod(p.d.local_shape(comm.rank)) * accumulation_dtype(p.d.dtype).itemsize
        self.workspace = Workspace(0, scratch + (depth * sum(self._bytes) if made else 0))

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Compute D from the local arrays. Collective over ``comm``.

        The ranks have agreed on it since the last product, so nobody still multiplies what is overwritten here.
        """
        target = self._target(c, d)
        me = self._comm.rank
        beta = self._beta
        coming = self._stage(0, a, b) if self._panels else []
        for i in range(len(self._panels)):
            slabs = [self._arrived(x, part) for x, part in zip(self._operands, coming, strict=True)]
            if self._fenced:
                self._comm.barrier()  # every slab of the node is written
            coming = self._stage(i + 1, a, b) if i + 1 < len(self._panels) else []
            if self._operands[0].needs[me] is not None:
                start, stop = self._panels[i]
                left, right = (
                    s if s is not None else self._still(j, (a, b)[j], start, stop)
                    for j, s in enumerate(slabs)
                )
                self._blas.gemm(self._alpha, left, right.T, beta, target)
            beta = 1
        if not self._panels:
            _scale(target, beta)
        if self._after is not None:
            self._after(target, a, b)
        if target is not d:
            d[...] = target

    def _target(self, c: Array | None, d: Array) -> Array:
        """Return the array that the product is summed in, holding C where beta is not 0."""
        dtype = accumulation_dtype(d.dtype)
        target = (
            d if dtype == d.dtype else np.empty(d.shape, dtype, order="C" if self._p.d.order == "C" else "F")
        )
        if self._beta != 0 and c is not None and c is not target:
            target[...] = c
        return target

    def _stage(self, i: int, a: Array, b: Array) -> list[Any]:
        """Start moving panel ``i``; panels alternate between two halves of the buffers."""
        parts: list[Any] = []
        for name, array, stagings, nbytes in zip("ab", (a, b), self._stagings, self._bytes, strict=True):
            staging = stagings[i]
            if staging is None:
                parts.append(None)
            else:
                memory = self._buffers.get(name + str(i % 2), nbytes, shared=self._shared)
                parts.append(staging.start(array, memory, ahead=len(self._panels) > 1))
        return parts

    def _arrived(self, operand: Operand, part: Any) -> Array | None:
        if part is None:
            return None
        transfer, slabs = part
        transfer.finish()
        need = operand.needs[self._comm.rank]
        return None if need is None else slabs[need]

    def _still(self, which: int, array: Array, start: int, stop: int) -> Array:
        return self._operands[which].local(array)[:, start:stop]

    def follow(self, epilogue: Epilogue) -> None:
        """Let ``epilogue`` take the place of the planned one."""
        assert self._after is not None
        self._after.epilogue = epilogue

    def release(self) -> None:
        """Forget the arrays of the last run."""
        if self._after is not None:
            self._after.epilogue = None

    def misfit(self, name: str, array: Array) -> str:  # noqa: ARG002
        """Any array of the planned layout will do."""
        return ""

    def capture(self, a: Array, b: Array, c: Array | None, d: Array) -> Callable[[], None]:  # noqa: ARG002
        """There are no graphs on the host."""
        raise UnsupportedError("a CUDA graph: the host engine has none")

    def close(self) -> None:
        """Nothing is held: buffers are the engine's."""


class AllReduceProduct:
    """Scheme "ar": each rank multiplies its part of k, the partial products are summed over all ranks."""

    path = "partial products summed over ranks"

    def __init__(
        self,
        p: MatmulProblem,
        alpha: complex,
        beta: complex,
        comm: Communicator,
        local_blas: LocalBlas,
        after: After | None = None,
    ) -> None:
        self._p, self._alpha, self._beta, self._comm, self._blas = p, alpha, beta, comm, local_blas
        self._after = after
        self._dtype = accumulation_dtype(p.a.dtype)
        self._has_part = comm.rank < p.d.grid.size
        nbytes = p.m * p.n * self._dtype.itemsize
        self.workspace = Workspace(0, nbytes)
        self.sent_bytes, self.copied_bytes = nbytes, 0
        self.notes: tuple[str, ...] = ()

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Compute D from the local arrays. Collective over the context."""
        partial = np.zeros((self._p.m, self._p.n), self._dtype, order=self._p.d.order)
        if self._has_part and self._p.k and self._alpha != 0:
            left, right = _op(a, self._p.op_a, self._dtype), _op(b, self._p.op_b, self._dtype)
            self._blas.gemm(self._alpha, left, right, 0, partial)
        self._comm.sum_into(partial)
        if self._has_part and self._beta != 0 and c is not None:
            partial += self._beta * c.astype(self._dtype)
        if self._after is not None:
            self._after(partial, a, b)
        if self._has_part:
            d[...] = partial

    def follow(self, epilogue: Epilogue) -> None:
        """Let ``epilogue`` take the place of the planned one."""
        assert self._after is not None
        self._after.epilogue = epilogue

    def release(self) -> None:
        """Forget the arrays of the last run."""
        if self._after is not None:
            self._after.epilogue = None

    def misfit(self, name: str, array: Array) -> str:  # noqa: ARG002
        """Any array of the planned layout will do."""
        return ""

    def capture(self, a: Array, b: Array, c: Array | None, d: Array) -> Callable[[], None]:  # noqa: ARG002
        """There are no graphs on the host."""
        raise UnsupportedError("a CUDA graph: the host engine has none")

    def close(self) -> None:
        """Nothing is held."""


def _op(array: Array, op: str, dtype: np.dtype) -> Array:
    out = array if op == "N" else array.T
    out = out.conj() if op == "C" else out
    return out.astype(dtype, copy=False)


def _scale(array: Array, beta: complex) -> None:
    if beta == 0:
        array[...] = 0
    elif beta != 1:
        array *= beta
