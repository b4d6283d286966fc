# SPDX-License-Identifier: Apache-2.0
"""Operands of PBLAS calls: a local array, a row, a column and a descriptor become a DistributedMatrix."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engines.arrays import overlap
from ..engines.direct import Part
from ..engines.direct.asked import Axes
from ..engines.direct.sub_matrix import SubMatrix
from ..engines.protocol import Engine
from ..errors import PblasmpError, short_repr
from ..layout import Grid, MatrixDescriptor, Trapezoid
from ..layout.axis import Axis
from ..layout.caches import sized_cache
from ..layout.pieces import write_inside
from ..matrix.distributed import DistributedMatrix
from ..scalapack import column_major_view
from .arguments import Faults
from .grids import ProcessGrid, meant, of_number


@dataclass(frozen=True, slots=True)
class PblasOperand:
    """The four arguments of one matrix: sub(A) begins at row ``i`` and column ``j`` (from 1) of A.

    Attributes:
        name: the matrix's letter, in lower case; its arguments are a, ia, ja and desca.
        local: this process's local array of A.
        desc: its nine integers, as far as they are integers.
        shape: rows and columns of sub(A).
        beyond: the arguments under which it is reported that sub(A) has more rows, or columns, than A: in PBLAS ia and
            ja, in ScaLAPACK those of its sizes.
    """

    name: str
    local: Any
    i: int
    j: int
    desc: tuple[int, ...]
    shape: tuple[int, int]
    beyond: tuple[str, str] | None = None

    def check(self, faults: Faults, on: ProcessGrid) -> None:
        """Note what is wrong with A's descriptor and with the place of sub(A) in A. Local.

        Source: PBLAS, PB_Cchkmat; ScaLAPACK, CHK1MAT.
        """
        what = f"desc{self.name}"
        if len(self.desc) != 9:
            return  # the fault has been noted
        _, _, m, n, mb, nb, rsrc, csrc, lld = self.desc
        empty, any_size = 0 in self.shape, math.inf
        least = 0 if empty else 1
        legal = (
            (3, m, least, any_size),
            (4, n, least, any_size),
            (5, mb, 1, any_size),
            (6, nb, 1, any_size),
            (7, rsrc, 0, on.grid.nprow - 1),
            (8, csrc, 0, on.grid.npcol - 1),
        )
        wrong = [(entry, value, low, high) for entry, value, low, high in legal if not low <= value <= high]
        for entry, value, low, high in wrong:
            expected = f"at least {low}" if high == any_size else f"{low} to {high}"
            faults.add(what, f"expected {expected}, got {value}", entry)
        rows = 1
        if not (wrong or empty):
            here, cols = self.descriptor(on.grid, np.dtype("f8")).local_shape(on.context.rank)
            rows = max(1, here) if cols else 1
        if lld < rows:
            faults.add(what, f"expected at least {rows}, the rows of this process, got {lld}", 9)
        if empty or min(m, n) < least:
            return
        beyond = self.beyond or (f"i{self.name}", f"j{self.name}")
        for argument, start, extent, whole, axis in (
            (beyond[0], self.i, self.shape[0], m, "rows"),
            (beyond[1], self.j, self.shape[1], n, "columns"),
        ):
            if start + extent - 1 > whole:
                end = f"end at {start + extent - 1}, but {self.name.upper()} has {whole}"
                several = f"{extent} {axis} from {start} on {end}"
                faults.add(argument, several if extent > 1 else f"expected at most {whole}, got {start}")

    def descriptor(self, grid: Grid, dtype: np.dtype) -> MatrixDescriptor:
        """Return the layout of all of A, without the padding of the local arrays. Local."""
        _, _, m, n, mb, nb, rsrc, csrc, _ = self.desc
        return MatrixDescriptor((m, n), (mb, nb), grid, (rsrc, csrc), dtype, "F")

    def view(self, faults: Faults, descriptor: MatrixDescriptor, rank: int, *, written: bool) -> Any:
        """Return this process's part of A as an array with its true leading dimension, not a copy. Local."""
        array = self.local
        if not all(hasattr(array, name) for name in ("dtype", "strides", "ndim", "itemsize")):
            faults.add(self.name, f"expected a NumPy or CuPy array, got {type(array).__name__}")
            return None
        if array.dtype != descriptor.dtype:
            faults.add(self.name, f"expected {descriptor.dtype.name}, got {array.dtype}")
            return None
        if written and not getattr(array.flags, "writeable", True):
            faults.add(self.name, "the local array is read-only")
        if 0 in self.shape:
            return array  # it is neither read nor written
        try:
            return column_major_view(array, descriptor.local_shape(rank), self.desc[8])
        except PblasmpError as error:
            faults.add(self.name, f"the {error}")
            return None

    def matrix(
        self, faults: Faults, grid: ProcessGrid, dtype: np.dtype, *, written: bool
    ) -> DistributedMatrix | None:
        """Return sub(A) as a matrix over the memory of the local array; None if that is not possible. Local.

        Its local array is what the caller gave: perhaps NumPy's although the engine computes on GPUs, see ``staged``.
        """
        ctx = grid.context
        whole = self.descriptor(grid.grid, dtype)
        array = self.view(faults, whole, ctx.rank, written=written)
        if array is None:
            return None
        if 0 in self.shape:  # an empty part may begin anywhere
            return ctx.allocate(replace(whole, shape=self.shape))
        if not _is_for_staging(ctx.engine, array):
            try:
                array = ctx.engine.take_over(array)
            except PblasmpError as error:
                faults.add(self.name, f"the {error}")
                return None
        rows = slice(self.i - 1, self.i - 1 + self.shape[0])
        cols = slice(self.j - 1, self.j - 1 + self.shape[1])
        return DistributedMatrix(ctx, whole, array)[rows, cols]


def _is_for_staging(engine: Engine, array: Any) -> bool:
    """Return whether it is an array of the host, of which GPUs compute with a copy. Local."""
    return engine.traits.on_gpus and isinstance(array, np.ndarray)


def entries(faults: Faults, name: str, desc: Any) -> tuple[int, ...]:
    """Return a descriptor's nine integers; note what is wrong with it. Local.

    Of one of eleven (type 2), whose first blocks must be as large as the others, those that say how large they are are
    left out.
    """
    try:
        values = tuple(operator.index(value) for value in desc)
    except Exception:  # noqa: BLE001 (a descriptor of any kind)
        faults.add(name, f"expected nine integers, got {short_repr(desc)}")
        return ()
    if len(values) not in (9, 11):
        faults.add(name, f"expected nine integers, got {len(values)}")
        return ()
    kind = 1 if len(values) == 9 else 2
    if values[0] != kind:
        faults.add(
            name, f"expected {kind}, a block-cyclic matrix in {len(values)} integers, got {values[0]}", 1
        )
        return ()
    return values if kind == 1 else _shortened(faults, name, values)


def _shortened(faults: Faults, name: str, values: tuple[int, ...]) -> tuple[int, ...]:
    legal = True
    for at, (first, other) in zip((4, 5), (("IMB_", "MB_"), ("INB_", "NB_")), strict=True):
        of_first, of_others = values[at], values[at + 2]
        if of_first < 1 or of_others < 1:
            entry, value = (first, of_first) if of_first < 1 else (other, of_others)
            faults.add(name, f"expected at least 1, got {value}", entry)
            legal = False
        elif of_first != of_others:
            faults.add(name, f"expected {of_others}, as {other} is, got {of_first}", first)
            legal = False
    return (1, *values[1:4], *values[6:]) if legal else ()


def check_sharing(faults: Faults, matrices: dict[str, DistributedMatrix], written: Iterable[str]) -> None:
    """Note which other matrices overlap those that are written, if they are NumPy arrays. Local."""
    arrays = {name: x.local for name, x in matrices.items() if isinstance(x.local, np.ndarray)}
    for target in written:
        out = arrays.pop(target, None)
        for name, array in arrays.items():
            if out is not None and overlap(array, out):
                faults.add(target, f"its local array shares memory with that of {name.upper()}")


def one_grid_of(
    faults: Faults, names: Iterable[str], given: Mapping[str, Any], limit: float = math.inf
) -> ProcessGrid:
    """Return the grid whose processes agree on a call's arguments: that of its descriptors. Local.

    ParameterError if no descriptor has a context of this process, and it is not in one grid only; ``limit``: see
    ``meant``.
    """
    descs = {x: given[f"desc{x}"] for x in names}
    contexts = [_context_of(desc) for desc in descs.values()]
    found = meant(faults.call, contexts, limit)
    if found is None:
        for x, desc in descs.items():
            values = entries(faults, f"desc{x}", desc)
            if values:
                check_grid(faults, x, values, None)
        raise faults.error()
    return found


def _context_of(desc: Any) -> Any:
    try:
        return desc[1]
    except Exception:  # noqa: BLE001 (a descriptor of any kind)
        return None


def check_grid(faults: Faults, name: str, desc: Sequence[int], grid: ProcessGrid | None) -> bool:
    """Return whether a matrix's descriptor has the context of ``grid``; note it if not. Local."""
    found = of_number(desc[1])
    if found is None:
        faults.add(f"desc{name}", f"{desc[1]} is not a context of this process", 2)
    elif found is not grid:
        faults.add(f"desc{name}", f"{desc[1]} is not the context of the other matrices", 2)
    return found is not None and found is grid


@contextmanager
def staged(
    matrices: dict[str, DistributedMatrix], written: Container[str]
) -> Iterator[dict[str, DistributedMatrix]]:
    """Yield matrices that the engine can use: copies on the GPU for NumPy arrays, written back at the end. Local."""
    used, back = {}, []
    for name, x in matrices.items():
        ctx = x.context
        if not _is_for_staging(ctx.engine, x.local):
            used[name] = x
            continue
        rows = x.local.shape[0]
        array = ctx.engine.empty(x.local.shape, x.dtype, "F", max(1, rows))
        ctx.engine.from_host(array, x.local)
        used[name] = DistributedMatrix(ctx, x.descriptor, array)
        if name in written:
            back.append((x, array))
    yield used
    for x, array in back:
        x.local[...] = x.context.engine.to_host(array)


class OwnElements(NamedTuple):
    """The elements of a sub-matrix that this process has.

    Attributes:
        xp: the module of their array.
        local: that array.
        rows, cols: their rows and columns in the sub-matrix, counted from 0, ascending.
    """

    xp: Any
    local: Any
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]

    @classmethod
    def of(cls, x: DistributedMatrix) -> OwnElements | None:
        """Return a matrix's; None if this process has no element of it. Local."""
        ctx, d = x.context, x.descriptor
        if ctx.coords(d) is None or not x.local.size:
            return None
        return cls(ctx.engine.xp, x.local, *d.global_indices(ctx.rank))

    @classmethod
    def of_part(cls, part: Part) -> OwnElements | None:
        """Return a part's on the host; None if this process has no element of it. Local."""
        x = SubMatrix(part)
        if not x.active:
            return None
        return cls(np, x.local(), _indices(x.rows, x.row), _indices(x.cols, x.col))

    def write(self, values: Callable[[tuple[slice, slice]], Any], part: Trapezoid | None) -> None:
        """Write into those of a trapezoid, or all: ``values`` returns what a piece becomes. Local."""
        write_inside(self.local, values, part, self.rows, self.cols, self.xp)

    def scale(self, factor: Any, part: Trapezoid | None) -> None:
        """Multiply those of a trapezoid, or all. Local."""
        local = self.local
        if part is None:
            local *= factor
        else:
            self.write(lambda here: local[here] * factor, part)


@sized_cache(lambda found: found.nbytes)
def _indices(span: Axis, process: int) -> NDArray[np.int64]:
    return span.globals(process)


def with_same_places(a: Part, b: Part) -> bool:
    """Return whether each process has the same elements of two sub-matrices, which share no memory. Local."""
    apart = a[0].end <= b[0].address or b[0].end <= a[0].address
    return apart and SubMatrix(a).same_places(SubMatrix(b))


def element_place(part: Part) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the process that has the first element of a sub-matrix, and where in its local array. Local."""
    held, i, j, *_ = part
    (row, down), (col, right) = _owner(held.pattern.rows, i), _owner(held.pattern.cols, j)
    return (row, col), (down, right)


def _owner(axes: Axes, index: int) -> tuple[int, int]:
    """Return the process that has an index of a whole matrix, and its local index. Local."""
    blocks, within = divmod(index, axes.block)
    rounds, turn = divmod(blocks, axes.nprocs)
    return (axes.source + turn) % axes.nprocs, rounds * axes.block + within


def filled(piece: OwnElements, part: Trapezoid | None, alpha: Any, beta: Any) -> None:
    """Set the elements of a trapezoid, or all, to ``beta`` on the diagonal and to ``alpha`` off it. Local."""
    xp, local, rows, cols = piece
    alpha, beta = (local.dtype.type(each) for each in (alpha, beta))
    piece.write(lambda _: alpha, part)
    at = cols.searchsorted(rows)
    i = (cols.take(at, mode="clip") == rows).nonzero()[0]
    local[xp.asarray(i), xp.asarray(at[i])] = beta
