# SPDX-License-Identifier: Apache-2.0
"""New matrices: what ``Context`` makes of shapes, values, functions and arrays. Values written into matrices."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..comm import Side
from ..dtypes import DTYPES, FLOAT8, as_dtype, scalar
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, not_two, short_repr
from ..layout import Grid, MatrixDescriptor
from ..layout.descriptor import is_integer
from ..layout.grid import PAIR_OF_SHAPE, as_block, as_grid, integer, one_of, pair
from ..runtime.handle import Handle, Matrix
from ..runtime.interop import as_local, as_typed, shard_of
from ..runtime.runtime import Runtime
from ..scalapack import column_major_view, read_descriptor
from .arithmetic import (
    as_element,
    as_numbers,
    on_arrays,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ..layout.descriptor import MemoryOrder

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Return four 32-bit numbers, in uint64 arrays, for counters of four such numbers, which broadcast. Local."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _LOW, (a >> 32) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def random_values(xp: Any, i: Any, j: Any, seed: int, dtype: np.dtype, distribution: str) -> Any:
    """Return the elements at rows ``i`` (a column, uint64) and columns ``j`` (a row) of a random matrix. Local.

    Args:
        xp: NumPy or CuPy, whose arrays ``i`` and ``j`` are.
        i, j: global indices.
        seed: 0 to 2**64 - 1.
        dtype: element type; for complex types both parts are random.
        distribution: "uniform" in [0, 1), or "normal" with mean 0 and variance 1.

    Returns:
        float64 or complex128; uniform numbers are exact in ``dtype``, which makes none of them 1.
    """
    counter = i & _LOW, j >> 32, j & _LOW, i >> 32
    words = philox4x32(counter, (seed & _LOW, seed >> 32))
    bits = (words[0] << 32) | words[1], (words[2] << 32) | words[3]
    if distribution == "normal":  # Box and Muller: two normal numbers from two uniform ones
        radius = xp.sqrt(-2 * xp.log(((bits[0] >> 11) + 1) * 2.0**-53))
        angle = (bits[1] >> 11) * (2.0**-52 * np.pi)
        real = radius * xp.cos(angle)
        return real + 1j * (radius * xp.sin(angle)) if dtype.kind == "c" else real
    digits = int(ml_dtypes.finfo(dtype).nmant) + 1  # type: ignore[no-untyped-call]
    real = (bits[0] >> (64 - digits)) * 2.0**-digits
    return real + 1j * ((bits[1] >> (64 - digits)) * 2.0**-digits) if dtype.kind == "c" else real


Block: TypeAlias = "int | Sequence[int]"
GridLike: TypeAlias = "Grid | Sequence[int] | str"

DEFAULT_BLOCK = 256
"""Rows and columns of the blocks of large matrices."""
_SLAB = 1 << 16  # elements filled at a time on a CPU, within its caches
_SLAB_OF_GPUS = 1 << 22


class LayoutKeywords(TypedDict, total=False):
    """How a new matrix is distributed, in place of a descriptor.

    Attributes:
        block: one block size or ``(mb, nb)``, by default 256, or less if that leaves a process without a part.
        grid: a ``Grid``, ``(2, 3)`` or ``"2x3"``; by default the squarest one of all ranks.
        source: process that owns the first block, by default (0, 0).
        dtype: element type, by default float64.
        order: memory order of the local arrays, "C" (the default) or "F".
    """

    block: Block | None
    grid: GridLike | None
    source: Sequence[int] | None
    dtype: DTypeLike | None
    order: MemoryOrder | None


class Layout:
    """What a caller gives for a new matrix: a descriptor, or a shape and ``LayoutKeywords``. Local."""

    def __init__(
        self, given: MatrixDescriptor | Sequence[int] | None, keywords: LayoutKeywords | None = None
    ) -> None:
        self.given = given
        values: dict[str, Any] = {**(keywords or {})}
        self.keywords = {name: values.pop(name, None) for name in LayoutKeywords.__annotations__}
        self._unknown = sorted(values)

    def descriptor(self, nranks: int, **defaults: Any) -> MatrixDescriptor:
        """Return the descriptor on at most ``nranks`` ranks; ``defaults`` for keywords that were not given. Local.

        LayoutError if a value is illegal, ArgumentError if keywords come with a descriptor.
        """
        if self._unknown:
            raise ArgumentTypeError(f"{', '.join(self._unknown)}: expected only {', '.join(self.keywords)}")
        given = {name: value for name, value in self.keywords.items() if value is not None}
        if isinstance(self.given, MatrixDescriptor):
            if given:
                raise ArgumentError(
                    f"{', '.join(given)}: cannot be given with a descriptor; expected one or the other"
                )
            descriptor = self.given
        else:
            if not isinstance(self.given, (tuple, list, np.ndarray)):
                n = short_repr(self.given)
                hint = f": ({n}, {n}) is a square matrix, ({n}, 1) a column" if is_integer(self.given) else ""
                raise ArgumentTypeError(
                    f"expected a MatrixDescriptor or a shape (rows, columns), got {n}{hint}"
                )
            values = defaults | given
            grid = as_grid(values["grid"]) if "grid" in values else Grid.squarest(nranks)
            descriptor = MatrixDescriptor(
                self.given,
                as_block(values["block"]) if "block" in values else default_block(self.given, grid),
                grid,
                values.get("source", (0, 0)),
                values.get("dtype", "float64"),
                values.get("order", "C"),
            )
        if descriptor.grid.size > nranks:
            grid, least = descriptor.grid, descriptor.grid.size
            raise LayoutError(
                f"descriptor: a grid of {grid} needs {least} ranks, got {nranks}: mpirun -n {least} starts as many, "
                "Grid.squarest(ctx.size) fits any number"
            )
        return descriptor


def default_block(shape: Sequence[int], grid: Grid) -> tuple[int, int]:
    """Return ``(mb, nb)`` for a new matrix: 256 each, or less if some process would have no part of it. Local.

    Both depend on the longer side of the grid, so that the blocks of two dimensions are equal if these are: products
    of matrices with default blocks need not move any.
    """
    mb, nb = (
        min(DEFAULT_BLOCK, max(1, -(-n // max(grid.shape)))) for n in pair(shape, "shape", 0, PAIR_OF_SHAPE)
    )
    return mb, nb


def new(ctx: Runtime[Matrix], call: str, layout: Layout) -> Matrix:
    """Return an uninitialized matrix. Collective over the context."""
    with ctx.agreement(call) as facts:
        facts["descriptor"] = descriptor = layout.descriptor(ctx.size)
        return ctx.allocate(descriptor)


def full(ctx: Runtime[Matrix], layout: Layout, value: Any, call: str = "full") -> Matrix:
    """Return a matrix of equal elements. Collective over the context; see ``Context.full``."""
    with ctx.agreement(call) as facts:
        kind = "complex128" if np.iscomplexobj(value) else "float64"
        descriptor = layout.descriptor(ctx.size, dtype=kind)
        value = scalar(value, descriptor.dtype, "value")
        facts.update(descriptor=descriptor, value=value)
        out = ctx.allocate(descriptor)
        out.local[...] = as_element(out, value)
    return out


def eye(ctx: Runtime[Matrix], layout: Layout) -> Matrix:
    """Return the identity. Collective over the context; see ``Context.eye``."""
    with ctx.agreement("eye") as facts:
        facts["descriptor"] = descriptor = layout.descriptor(ctx.size)
        out = ctx.allocate(descriptor)
        out.local[...] = 0
        coords = ctx.coords(descriptor)
        if coords is not None:
            i, j = diagonal_places(descriptor, coords)
            xp = ctx.engine.xp
            out.local[xp.asarray(i), xp.asarray(j)] = as_element(out, 1)
    return out


def diagonal_places(d: MatrixDescriptor, coords: tuple[int, int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the local rows and columns of the diagonal's elements on the process at ``coords``. Local."""
    rows, cols = d.rows.globals(coords[0]), d.cols.globals(coords[1])
    _, i, j = np.intersect1d(rows, cols, assume_unique=True, return_indices=True)
    return i, j


def random(ctx: Runtime[Matrix], layout: Layout, seed: int | None, distribution: str) -> Matrix:
    """Return a random matrix. Collective over the context; see ``Context.random``."""
    with ctx.agreement("random") as facts:
        descriptor = layout.descriptor(ctx.size)
        if seed is not None and integer(seed, "seed", 0, ArgumentError) >= 1 << 64:
            raise ArgumentError(f"seed: expected less than 2**64, got {seed}")
        if not one_of(distribution, ("uniform", "normal")):
            raise ArgumentError(
                f"distribution: expected 'uniform' or 'normal', got {short_repr(distribution)}"
            )
        facts.update(descriptor=descriptor, seed=seed, distribution=distribution)
        out = ctx.allocate(descriptor)
    key: int = ctx.comm.bcast(secrets.randbits(64)) if seed is None else int(seed)
    with ctx.agreement("random: filling"):
        if ctx.rank < descriptor.grid.size:
            _fill_at_random(out, key, distribution)
    return out


def _fill_at_random(out: Handle, seed: int, distribution: str) -> None:
    engine, dtype = out.context.engine, out.dtype
    known = engine.traits.computes(dtype)
    xp: Any = engine.xp if known else np
    local = out.local if known else out.like_on_host()
    rows, cols = (
        xp.asarray(each.astype(np.uint64)) for each in out.descriptor.global_indices(out.context.rank)
    )
    step = max(1, (_SLAB if isinstance(local, np.ndarray) else _SLAB_OF_GPUS) // max(1, len(cols)))
    for at in range(0, len(rows), step):
        here = rows[at : at + step, None]
        local[at : at + step] = random_values(xp, here, cols[None, :], seed, dtype, distribution).astype(
            dtype
        )
    if not known:
        engine.from_host(out.local, local)


def scatter(ctx: Runtime[Matrix], array: Any, layout: Layout, root: int) -> Matrix:
    """Return a matrix with the values of an array on ``root``. Collective over the context; see ``Context.scatter``."""
    with ctx.agreement("scatter") as facts:
        facts["root"] = root
        ctx.check_rank(root, "root")
        descriptor = layout.given
        if isinstance(descriptor, MatrixDescriptor):
            descriptor = layout.descriptor(ctx.size)
        elif descriptor is not None:
            raise ArgumentTypeError(f"descriptor: expected a MatrixDescriptor, got {short_repr(descriptor)}")
        facts["descriptor"] = descriptor
        facts["keywords"] = layout.keywords
        if ctx.rank == root:
            if array is None:
                raise ArgumentTypeError(f"array: expected an array of rank {root}, the root, got None")
            array = as_numbers(array, "array")
            if array.ndim != 2:
                raise ArgumentError(f"array: {not_two(array.ndim)}")
    if descriptor is None:
        layout.given, kind = ctx.comm.bcast((array.shape, array.dtype) if ctx.rank == root else None, root)
        with ctx.agreement("scatter: descriptor"):
            kind = kind.newbyteorder("=")
            if kind not in (DTYPES | FLOAT8).values() and layout.keywords["dtype"] is None:
                raise ArgumentError(
                    f"array: {kind} is not an element type of matrices: give dtype= to convert it, such as "
                    "dtype='float64'"
                )
            descriptor = layout.descriptor(ctx.size, dtype=kind)
    with ctx.agreement("scatter: matrix"):
        if ctx.rank == root:
            _check_fits(array, "array", descriptor)
        out = ctx.allocate(descriptor)
    whole = Side.on_rank(root, descriptor.shape, descriptor.order)
    mine = {0: array} if ctx.rank == root else {}
    ctx.engine.put(whole, mine, Side.of(descriptor), ctx.cells(descriptor, out.local), descriptor.dtype)
    return out


def _check_fits(array: NDArray[Any], name: str, descriptor: MatrixDescriptor) -> None:
    """Raise ArgumentError unless an array has the descriptor's shape and converts to its dtype. Local."""
    if array.shape != descriptor.shape:
        raise ArgumentError(f"{name}: shape is {array.shape}, expected the descriptor's {descriptor.shape}")
    if array.dtype.kind == "c" and descriptor.dtype.kind != "c":
        raise ArgumentError(f"{name}: {array.dtype} does not convert to {descriptor.dtype.name}")


def from_function(ctx: Runtime[Matrix], function: Callable[..., Any], layout: Layout) -> Matrix:
    """Return the matrix of a function of i and j. Collective over the context; see ``Context.from_function``."""
    with ctx.agreement("from_function") as facts:
        facts["descriptor"] = descriptor = layout.descriptor(ctx.size)
        if not callable(function):
            raise ArgumentTypeError(f"function: expected a function of i and j, got {short_repr(function)}")
        out = ctx.allocate(descriptor)
        if ctx.rank < descriptor.grid.size:
            rows, cols = descriptor.global_indices(ctx.rank)
            with ctx.engine.on_device():
                _store(out, on_arrays("from_function", function, rows[:, None], cols[None, :]))
    return out


def _store(out: Matrix, values: Any) -> None:
    """Write what a function has returned, in arrays of NumPy or of the engine, to this rank's part. Local."""
    engine, d = out.context.engine, out.descriptor
    here = isinstance(values, engine.xp.ndarray)
    if here and not engine.traits.computes(d.dtype):
        values, here = engine.xp.asnumpy(values), False
    place = out.local if here else out.like_on_host()
    values = as_numbers(values, "from_function", engine.xp if here else np)
    if values.dtype.kind == "c" and d.dtype.kind != "c":
        raise ArgumentError(f"from_function: {values.dtype} does not convert to {d.dtype.name}")
    try:
        place[...] = values
    except ValueError as error:
        raise ArgumentError(f"from_function: {error}; expected values of shape {place.shape}") from None
    if not here:
        engine.from_host(out.local, place)


def from_local(ctx: Runtime[Matrix], local: Any, descriptor: MatrixDescriptor) -> Matrix:
    """Return a matrix over the caller's local arrays. Collective over the context; see ``Context.from_local``."""
    with ctx.agreement("from_local") as facts:
        facts["descriptor"] = descriptor
        ctx.check_descriptor(descriptor)
        if ctx.rank >= descriptor.grid.size:
            return ctx.allocate(descriptor)
        if isinstance(local, np.ma.MaskedArray):
            raise ArgumentError("local array: a masked array, whose mask would be lost: fill it first")
        array = as_local(ctx.engine, local, "local array", descriptor.dtype)
        expected = descriptor.local_shape(ctx.rank)
        if array.shape != expected:
            raise ArgumentError(f"local array: shape is {array.shape}, expected {expected}")
        if array.dtype != ctx.engine.operations.stored(descriptor.dtype):
            raise ArgumentError(f"local array: dtype is {array.dtype}, expected {descriptor.dtype.name}")
        contiguous, other = (1, 0) if descriptor.order == "C" else (0, 1)
        item, apart = array.itemsize, array.strides[other]
        if array.size and (
            (expected[contiguous] > 1 and array.strides[contiguous] != item)
            or (expected[other] > 1 and (apart < expected[contiguous] * item or apart % item))
        ):
            raise ArgumentError(
                f"local array: strides are {array.strides} bytes, expected contiguous "
                f"{'rows (C order)' if descriptor.order == 'C' else 'columns (F order)'}, "
                f"a multiple of {item} bytes apart"
            )
        return ctx.matrix(descriptor, array)


def from_shards(ctx: Runtime[Matrix], array: Any, axis: int, dtype: DTypeLike | None) -> Matrix:
    """Return a matrix over shards. Collective over the context; see ``Context.from_dlpack_shards``."""
    call = "from_dlpack_shards"
    with ctx.agreement(call) as facts:
        facts["axis"] = axis
        if not (is_integer(axis) and axis in (0, 1)):
            raise ArgumentError(f"axis: expected 0 or 1, got {short_repr(axis)}")
        wanted = None if dtype is None else as_dtype(dtype)
        part, split, start = shard_of(array, ctx.rank, ctx.size)
        local, kind = as_typed(ctx.engine, part, "shard", wanted)
        if wanted is not None and kind != wanted:
            raise ArgumentError(f"shard: dtype is {kind.name}, expected {wanted.name}")
        if local.ndim != 2:
            raise ArgumentError(f"shard: {not_two(local.ndim)}")
        legal = [
            order
            for order, i in (("C", 1), ("F", 0))
            if local.shape[i] < 2 or local.strides[i] == local.itemsize
        ]
        mine = local.shape, axis if split is None else split, start, legal if local.size else ["C", "F"]
    everyones = ctx.comm.allgather(mine)
    with ctx.agreement(f"{call}: layout") as facts:
        facts["dtype"] = kind.name
        descriptor = _of_shards(everyones, kind)
    return from_local(ctx, part, descriptor)


def _of_shards(
    everyones: Sequence[tuple[Any, int, int | None, list[str]]], dtype: np.dtype
) -> MatrixDescriptor:
    """Return the layout of shards: a block for each rank, of which the last may be shorter, or empty. Local."""
    shapes, axes, starts, orders = zip(*everyones, strict=True)
    if len(set(axes)) > 1:
        raise ArgumentError(
            f"shard: the ranks have arrays that are split along axes {', '.join(map(str, axes))}"
        )
    axis, count = axes[0], len(shapes)
    extents, widths = [shape[axis] for shape in shapes], {shape[1 - axis] for shape in shapes}
    total, block = sum(extents), max(1, *extents)
    expected = [min(block, max(0, total - rank * block)) for rank in range(count)]
    lines, others = ("columns", "rows") if axis else ("rows", "columns")
    if extents != expected or len(widths) > 1:
        raise LayoutError(
            f"shard: the ranks have shapes {', '.join(map(str, shapes))}: expected as many {others} on every rank, and "
            f"as many {lines}, of which the last ranks may have fewer"
        )
    for rank, start in enumerate(starts):
        if start is not None and extents[rank] and start != rank * block:
            raise LayoutError(
                f"shard: rank {rank} has the {lines} from {start} on, expected those from {rank * block} on: the "
                "devices of the mesh are to be in the order of the context's ranks"
            )
    order: MemoryOrder
    for order in ("C", "F"):
        if all(order in legal for legal in orders):
            shape = (total, *widths) if axis == 0 else (*widths, total)
            return shard_layout(shape, axis, count, dtype, order, block)
    found = ", ".join(" or ".join(legal) or "neither" for legal in orders)
    raise LayoutError(
        f"shard: expected C order on all ranks, or F order; in their order the ranks have {found}: "
        "np.ascontiguousarray makes C order"
    )


def shard_layout(
    shape: tuple[int, ...],
    axis: int,
    size: int,
    dtype: np.dtype,
    order: MemoryOrder = "C",
    block: int | None = None,
) -> MatrixDescriptor:
    """Return the layout of a matrix of which each of ``size`` ranks has a block of rows, or of columns. Local."""
    blocks = [max(1, each) for each in shape]
    blocks[axis] = -(-blocks[axis] // size) if block is None else block
    grid = Grid(1, size) if axis else Grid(size, 1)
    return MatrixDescriptor(shape, blocks, grid, dtype=dtype, order=order)


def from_scalapack(ctx: Runtime[Matrix], local: Any, desc: Sequence[int], grid: Grid) -> Matrix:
    """Return the matrix of a ScaLAPACK descriptor. Collective over the context; see ``Context.from_scalapack``."""
    with ctx.agreement("from_scalapack") as facts:
        facts["grid"] = grid
        if not isinstance(grid, Grid):
            raise ArgumentTypeError(f"grid: expected a Grid, got {short_repr(grid)}")
        inside = ctx.rank < grid.size
        if inside:
            local = ctx.engine.take_over(local)
            if not isinstance(desc, (Sequence, np.ndarray)):
                raise ArgumentTypeError(f"desc: expected nine integers, got {short_repr(desc)}")
        mine = (list(desc), str(local.dtype)) if inside else None
    first = ctx.comm.bcast(mine)
    with ctx.agreement("from_scalapack: descriptor"):
        numbers, kind = first if mine is None else mine
        descriptor, lld = read_descriptor(numbers, kind, grid)
        ctx.check_descriptor(descriptor)
        if inside:
            local = column_major_view(local, descriptor.local_shape(ctx.rank), lld)
    return from_local(ctx, local, descriptor)
