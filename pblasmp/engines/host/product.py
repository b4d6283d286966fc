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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Communicator
from ...dtypes import accumulation_dtype
from ...layout import MatmulProblem, MatrixDescriptor, Trapezoid
from ...layout.trapezoid import copy_part
from ..after import After
from ..base import Workspace
from .blas import LocalBlas
from .common import HostProduct, Means
from .kernels import Kernel, whole
from .operand import Operand, Staging

__all__ = [
    "ALGORITHMS",
    "AllReduceProduct",
    "SlabProduct",
    "Slabs",
    "Term",
    "choose",
    "matmul_slabs",
    "needs",
]

ALGORITHMS = ("auto", "shared", "gathered", "panels")
_PANEL = 1024  # indices of k; a panel below 256 costs BLAS its speed

Array = NDArray[Any]


@dataclass(frozen=True)
class Term:
    """``alpha left right`` of a sum of products; ``left`` and ``right`` number the operands."""

    alpha: complex
    left: int
    right: int
    multiply: Kernel = whole


@dataclass(frozen=True)
class Slabs:
    """D as a sum of products of slabs.

    Attributes:
        d: its descriptor.
        k: the extent that is summed over, the same for all terms.
        operands: each as outer × k: to the left with D's rows, to the right with D's columns.
        terms: what is added up.
        part: what is written; None for all of D.
        turned: the terms are those of D's transpose, which ``d`` describes.
        in_place: D may be an operand.
    """

    d: MatrixDescriptor
    k: int
    operands: tuple[Operand, ...]
    terms: tuple[Term, ...]
    part: Trapezoid | None = None
    turned: bool = False
    in_place: bool = False


def needs(d: MatrixDescriptor, size: int, axis: int) -> tuple[tuple[int, ...], ...]:
    """Return for each of ``size`` ranks its process row (axis 0) or column (1) in D's grid, or nothing."""
    return tuple((d.grid.coords(rank)[axis],) if rank < d.grid.size else () for rank in range(size))


def matmul_slabs(p: MatmulProblem, alpha: complex, size: int) -> Slabs:
    """Return a product on ``size`` ranks."""
    conj = p.a.dtype.kind == "c"
    operands = (
        Operand(p.a, p.op_a != "N", conj and p.op_a == "C", needs(p.d, size, 0), p.d.rows, "a"),
        Operand(p.b, p.op_b == "N", conj and p.op_b == "C", needs(p.d, size, 1), p.d.cols, "b"),
    )
    return Slabs(p.d, p.k, operands, (Term(alpha, 0, 1),))


def choose(
    operands: Sequence[Operand], k: int, algo: str, means: Means, beside: int = 0
) -> tuple[str, tuple[str, ...]]:
    """Return ``(path, notes)``: ``algo`` itself or, for "auto", the fastest path whose memory fits. Collective.

    Args:
        operands: those of the product.
        k: what is summed over.
        algo: what was asked for.
        means: the engine's nodes and memory.
        beside: bytes that a rank needs beside the operands on every path.
    """
    if algo != "auto":
        return algo, ()
    moved = [x for x in operands if not x.in_place()]
    if not moved and not beside:
        return "gathered", ("both operands are multiplied where they lie",)
    notes = (means.why_not_shared,)
    if not means.why_not_shared:
        shared = max(sum(x.memory_bytes(node, k) for x in moved) + beside * len(node) for node in means.nodes)
        enough, limit = means.fits(shared)
        if enough:
            return "shared", ()
        notes = (f"a shared copy of the operands needs {shared} bytes a node, of {limit} to be had",)
    gathered = max(
        sum(x.memory_bytes([rank], k) for x in moved for rank in node) + beside * len(node)
        for node in means.nodes
    )
    enough, limit = means.fits(gathered)
    if enough:
        return "gathered", notes
    return "panels", (*notes, f"gathered operands need {gathered} bytes a node, of {limit} to be had")


def cut(k: int, path: str) -> list[tuple[int, int]]:
    """Return the panels of k that a path takes, one after the other."""
    width = min(k, _PANEL) if path == "panels" else k
    return [(at, min(at + width, k)) for at in range(0, k, width)] if width else []


class SlabProduct(HostProduct):
    """D from slabs of the operands. Making and running one is collective over the ranks."""

    def __init__(
        self,
        slabs: Slabs,
        beta: complex,
        path: str,
        means: Means,
        notes: tuple[str, ...] = (),
        after: After | None = None,
    ) -> None:
        self.path, self.notes = path, notes
        self._slabs, self._beta, self._means, self._after = slabs, beta, means, after
        self._shared = path == "shared"
        me, d = means.comm.rank, slabs.d
        self._coords = d.grid.coords(me) if me < d.grid.size else None
        domains = means.domains(path)
        domain = next(ranks for ranks in domains if me in ranks)
        self._panels = cut(slabs.k, path) if any(term.alpha != 0 for term in slabs.terms) else []
        in_place = [x.in_place() for x in slabs.operands]
        self._stagings: list[list[Staging | None]] = [
            [None if still else means.staging(x, domains, *panel) for panel in self._panels]
            for x, still in zip(slabs.operands, in_place, strict=True)
        ]
        made = [s for stagings in self._stagings for s in stagings if s is not None]
        self.sent_bytes = sum(s.sent_bytes for s in made)
        self.copied_bytes = sum(s.copied_bytes for s in made)
        # Whether the ranks meet after writing slabs: the same on every rank, also on idle ones.
        self._fenced = path == "shared" and not all(in_place)
        width = max((stop - start for start, stop in self._panels), default=0)
        self._bytes = [
            0 if still else x.memory_bytes(domain, width)
            for x, still in zip(slabs.operands, in_place, strict=True)
        ]
        depth = 2 if len(self._panels) > 1 else 1
        # Whether the sum is made aside: in another type, or because D may be read until the last panel.
        self._aside = accumulation_dtype(d.dtype) != d.dtype or (slabs.in_place and len(self._panels) > 1)
        scratch = 0
        if self._aside and self._coords is not None:
            scratch = math.prod(d.local_shape(me)) * accumulation_dtype(d.dtype).itemsize
        self.workspace = Workspace(0, scratch + (depth * sum(self._bytes) if made else 0))

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Compute D from the local arrays. Collective over the ranks.

        The ranks have agreed on it since the last product, so nobody still multiplies what is overwritten here.
        """
        arrays = {"a": a, "b": b}
        target = self._target(c, d)
        seen = target.T if self._slabs.turned else target
        first = True
        coming = self._stage(0, arrays) if self._panels else []
        for i, (start, stop) in enumerate(self._panels):
            slabs = [self._arrived(part) for part in coming]
            if self._fenced:
                self._means.comm.barrier()  # every slab of the node is written
            coming = self._stage(i + 1, arrays) if i + 1 < len(self._panels) else []
            if self._coords is not None:
                still = [
                    x.local(arrays[x.source])[:, start:stop] if slab is None else None
                    for x, slab in zip(self._slabs.operands, slabs, strict=True)
                ]
                self._multiply(slabs, still, first, seen, start)
            first = False
        if not self._panels and self._coords is not None:
            nothing = [np.empty((extent, 0), seen.dtype) for extent in seen.shape]
            term = self._slabs.terms[0]
            term.multiply(self._means.blas, 0, nothing[0], nothing[1].T, self._beta, seen, 0)
        if self._after is not None:
            self._after(target, a, b)
        if target is not d:
            d[...] = target

    def _multiply(
        self,
        slabs: Sequence[dict[int, Array] | None],
        still: Sequence[Array | None],
        first: bool,
        target: Array,
        start: int,
    ) -> None:
        assert self._coords is not None
        unit = 1.0 if self._after is None else self._after.unit()
        with self._means.blas.seated():
            for i, term in enumerate(self._slabs.terms):
                left, right = (
                    slab[process] if (slab := slabs[which]) is not None else still[which]
                    for which, process in zip((term.left, term.right), self._coords, strict=True)
                )
                assert left is not None
                assert right is not None
                beta = self._beta if first and i == 0 else 1
                term.multiply(self._means.blas, unit * term.alpha, left, right.T, beta, target, start)

    def _target(self, c: Array | None, d: Array) -> Array:
        """Return the array that the product is summed in, holding C where beta is not 0."""
        slabs, dtype = self._slabs, accumulation_dtype(d.dtype)
        order: Any = "C" if (slabs.d.order == "C") != slabs.turned else "F"
        target = np.empty(d.shape, dtype, order=order) if self._aside else d
        if self._beta != 0 and c is not None and c is not target:
            if slabs.part is None:
                target[...] = c
            elif self._coords is not None:
                copy_part(target, c, slabs.part, *slabs.d.global_indices(self._means.comm.rank))
        return target

    def _stage(self, i: int, arrays: dict[str, Array]) -> list[Any]:
        """Start moving panel ``i``; panels alternate between two halves of the buffers."""
        parts: list[Any] = []
        for which, (x, stagings, nbytes) in enumerate(
            zip(self._slabs.operands, self._stagings, self._bytes, strict=True)
        ):
            staging = stagings[i]
            if staging is None:
                parts.append(None)
            else:
                name = f"{'abcd'[which]}{i % 2}"
                memory = self._means.buffers.get(name, nbytes, shared=self._shared)
                parts.append(staging.start(arrays[x.source], memory, ahead=len(self._panels) > 1))
        return parts

    @staticmethod
    def _arrived(part: Any) -> dict[int, Array] | None:
        """Return the slabs of an operand by process, None for one that stays where it lies."""
        if part is None:
            return None
        transfer, slabs = part
        transfer.finish()
        found: dict[int, Array] = slabs
        return found


class AllReduceProduct(HostProduct):
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

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Compute D from the local arrays. Collective over the context."""
        partial = np.zeros((self._p.m, self._p.n), self._dtype, order=self._p.d.order)
        if self._has_part and self._p.k and self._alpha != 0:
            left, right = _op(a, self._p.op_a, self._dtype), _op(b, self._p.op_b, self._dtype)
            alpha = self._alpha if self._after is None else self._alpha * self._after.unit()
            with self._blas.seated():
                self._blas.gemm(alpha, left, right, 0, partial)
        self._comm.sum_into(partial)
        if self._has_part and self._beta != 0 and c is not None:
            partial += self._beta * c.astype(self._dtype)
        if self._after is not None:
            self._after(partial, a, b)
        if self._has_part:
            d[...] = partial


def _op(array: Array, op: str, dtype: np.dtype) -> Array:
    out = array if op == "N" else array.T
    out = out.conj() if op == "C" else out
    return out.astype(dtype, copy=False)
