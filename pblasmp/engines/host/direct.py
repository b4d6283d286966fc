# SPDX-License-Identifier: Apache-2.0
"""Direct calls on CPU ranks: BLAS on the local arrays where they lie, and on slabs that the ranks of a node share.

One meeting of the ranks per call: each rank first writes what others need of its operands into shared memory; then all
vote on one number, which also says that everything has been written; then each rank computes its part of the result.
There are two sets of slabs. A rank that writes into one has voted since all ranks began to read the other, so nobody
reads this one any more.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Communicator, break_off, vote_on
from ...layout.intersection import Piece, copy
from ...layout.routines import ROUTINES
from ..direct import Asked, Axes, Part, Span, aligned_spans, spread, whole_span
from ..protocol import Operations, Transport
from . import blas
from .buffers import Buffers

__all__ = ["HostDirect"]

Array = NDArray[Any]
Compute = Callable[[], None]

_MOST = 32 << 20  # bytes of slabs; a larger call is worth a plan
_LARGER, _LEAST = 2, 1 << 17  # see stationary.py: when it is better to move results than operands
_ALIGNED = 64
_MIRRORED = {"L": "U", "U": "L"}
_OTHER = {"L": "R", "R": "L"}


class _Integers(dict[int, bytes]):
    """INTEGERs of Fortran, by their values."""

    def __missing__(self, n: int) -> bytes:
        if len(self) > 1 << 16:
            self.clear()
        found = self[n] = struct.pack("=i", n)
        return found


_integer = _Integers()


class _UnfitError(Exception):
    """The call is not for direct calls."""


class _Factor:
    """A local array as BLAS takes it. Local.

    Attributes:
        at: its address.
        by_columns: whether it is in Fortran order.
        ld: its leading dimension.
        conjugated: its conjugate is meant.
    """

    __slots__ = ("at", "by_columns", "conjugated", "ld")

    def __init__(self, at: int, by_columns: bool, ld: int, conjugated: bool = False) -> None:
        self.at, self.by_columns, self.ld, self.conjugated = at, by_columns, ld, conjugated


class _Matrix:
    """A sub-matrix, perhaps transposed: how it is dealt out, and what this rank has of it. Local.

    Attributes:
        rows, cols: how they are dealt out.
        row, col: this rank's process along them; -1 outside the grid.
        m, n: how many of them this rank has.
        at, by_columns, ld: its local array; with ``conjugated`` its conjugate is meant.
        transposed: whether it is, in its matrix.
    """

    __slots__ = (
        "at", "by_columns", "col", "cols", "conjugated", "held", "ld", "m", "n", "part", "row", "rows", "transposed",
    )  # fmt: skip

    def __init__(self, part: Part, *, turned: bool = False, conjugated: bool = False) -> None:
        held, i, j, m, n, transposed = part
        pattern = held.pattern
        if pattern.size == 1 and pattern.rows.mine == 0:  # all on this rank
            self._init_here(part, turned, conjugated)
            return
        down, rows, self.row = _place(pattern.rows, i, m)
        right, cols, self.col = _place(pattern.cols, j, n)
        self.held, self.part, self.ld = held, part, held.ld
        first = down[0] + right[0] * held.ld if pattern.by_columns else down[0] * held.ld + right[0]
        self.at = held.address + first * held.pattern.itemsize
        self.transposed = turned != transposed
        self.by_columns = pattern.by_columns != self.transposed
        self.conjugated = conjugated and pattern.is_complex
        self.rows, self.cols, self.m, self.n = rows, cols, down[1], right[1]
        if self.transposed:
            self.rows, self.cols, self.m, self.n = cols, rows, self.n, self.m
            self.row, self.col = self.col, self.row

    def _init_here(self, part: Part, turned: bool, conjugated: bool) -> None:
        """Make it if this rank has all of it: the same in fewer steps."""
        held, i, j, m, n, transposed = part
        pattern = held.pattern
        self.held, self.part, self.ld, self.row, self.col = held, part, held.ld, 0, 0
        first = i + j * held.ld if pattern.by_columns else i * held.ld + j
        self.at = held.address + first * pattern.itemsize
        self.transposed = turned != transposed
        self.by_columns = pattern.by_columns != self.transposed
        self.conjugated = conjugated and pattern.is_complex
        if self.transposed:
            m, n = n, m
        self.m, self.n, self.rows, self.cols = m, n, whole_span(m), whole_span(n)

    @property
    def active(self) -> bool:
        """Whether this rank has a part of it."""
        return self.row >= 0 and self.m > 0 and self.n > 0

    def local(self) -> Array:
        """Return this rank's part as an array."""
        held, i, j, m, n, _ = self.part
        (down, rows), (right, cols) = (
            _place(axes, start, extent)[0]
            for axes, start, extent in ((held.pattern.rows, i, m), (held.pattern.cols, j, n))
        )
        found: Array = held.array[down : down + rows, right : right + cols]
        return found.T if self.transposed else found

    def rank(self, row: int, col: int) -> int:
        """Return the rank of a process."""
        nprow, npcol, order = self.held.pattern.grid
        if self.transposed:
            row, col = col, row
        return col * nprow + row if order == "col" or npcol == 1 else row * npcol + col

    def same_places(self, other: _Matrix) -> bool:
        """Return whether each element is on the same rank at the same place in both."""
        return (
            self.rows == other.rows
            and self.cols == other.cols
            and self.held.pattern.grid == other.held.pattern.grid
            and (self.transposed == other.transposed or self.held.pattern.size == 1)
        )


def _place(axes: Axes, start: int, extent: int) -> tuple[tuple[int, int], Span, int]:
    """Return the first local index and the number of indices of a range, how it is dealt out, and this process."""
    block, nprocs, source, lead, mine = axes
    span = Span.of(axes, start, extent)
    if nprocs == 1:
        return (start if mine == 0 else 0, extent if mine == 0 else 0), span, mine
    if mine < 0:
        return (0, 0), span, mine
    whole = Span(start + extent, block, source, nprocs, lead)
    below = whole.below(start, mine)
    return (below, whole.below(start + extent, mine) - below), span, mine


class _Slabs:
    """Copies of an operand's parts, one for each process of the result that needs one, in shared memory. Local.

    Args:
        x: the operand.
        rows, cols: how its rows and columns are dealt out to those who need them.
        start: the offset of the first slab.
        by_columns: their memory order.
    """

    def __init__(self, x: _Matrix, rows: Span, cols: Span, start: int, by_columns: bool) -> None:
        self.x, self.rows, self.cols, self.by_columns = x, rows, cols, by_columns
        item = x.held.pattern.itemsize
        down, across = (
            [span.count(p) for p in range(span.nprocs)] if span.nprocs > 1 else [span.extent]
            for span in (rows, cols)
        )
        self._down, self._across = down, across
        self.offsets: dict[tuple[int, int], int] = {}
        at = start
        for p, m in enumerate(down):
            for q, n in enumerate(across):
                self.offsets[p, q] = at
                at += -(-m * n * item // _ALIGNED) * _ALIGNED
        self.end = at

    def shape(self, p: int, q: int) -> tuple[int, int]:
        return self._down[p], self._across[q]

    def array(self, memory: Array, p: int, q: int) -> Array:
        """Return a slab."""
        order: Any = "F" if self.by_columns else "C"
        dtype: Any = self.x.held.pattern.dtype
        found: Array = np.ndarray(self.shape(p, q), dtype, memory, self.offsets[p, q], order=order)
        return found

    def write(self, memory: Array) -> None:
        """Write this rank's part of the operand into the slabs."""
        x = self.x
        if not x.active:
            return
        local = x.local()
        slabs: dict[tuple[int, int], Array] = {}
        across = spread(x.cols, x.col, self.cols)
        for p, rows in spread(x.rows, x.row, self.rows):
            for q, cols in across:
                slab = slabs.get((p, q))
                if slab is None:
                    slab = slabs[p, q] = self.array(memory, p, q)
                if rows.repeat == cols.repeat == 1 and not x.conjugated:
                    slab[rows.dst : rows.dst + rows.length, cols.dst : cols.dst + cols.length] = local[
                        rows.src : rows.src + rows.length, cols.src : cols.src + cols.length
                    ]
                else:
                    copy(slab, local, Piece((rows,), (cols,)), conjugate=x.conjugated)

    def factor(self, base: int, p: int, q: int) -> _Factor:
        """Return a slab as BLAS takes it; ``base`` is the memory's address."""
        m, n = self.shape(p, q)
        return _Factor(base + self.offsets[p, q], self.by_columns, max(1, m if self.by_columns else n))


class HostDirect:
    """Direct calls of the host engine. Local to make.

    Args:
        library: the local BLAS.
        buffers: where slabs are.
        operations: sums of arrays.
        transport: which ranks share memory.
    """

    def __init__(self, library: str, buffers: Buffers, operations: Operations, transport: Transport) -> None:
        self._library, self._buffers = library, buffers
        self._operations, self._transport = operations, transport
        self._single = transport.size == 1
        self._able = self._single or (len(transport.nodes) == 1 and not transport.why_not_shared)
        self._capacity = 0
        self._half = 0
        self._memory: list[tuple[Array, int]] = []  # the two sets of slabs and their addresses
        self._staged: list[_Slabs] = []
        self._functions: dict[tuple[str, str], Callable[..., None]] = {}

    # -- the call

    def run(self, control: Communicator, asked: Asked) -> bool | None:
        """See ``Direct``. Collective over the context."""
        if not self._able or (not self._single and control.board is None):
            return None
        channel, call = control.channel, asked.call
        self._staged.clear()
        try:
            compute = _COMPUTERS[asked.routine](self, asked)
        except _UnfitError:
            return None
        if self._single:
            channel.take_turn(call)
            try:
                channel.runs += 1
                compute()
            finally:
                channel.end_turn()
            return True
        channel.take_turn(call)
        try:
            nbytes = self._staged[-1].end if self._staged else 0
            fits = nbytes <= self._capacity
            if fits:
                self._write()
            if not vote_on(control, call, _number(asked)):
                return False
            if not fits:
                if not self._grow(nbytes):
                    return False
                self._write()
                self._transport.fence()
            channel.runs += 1
            compute()
            self._half ^= bool(self._staged)
        except BaseException as error:
            break_off(control, error, call)
            raise
        finally:
            channel.end_turn()
        return True

    def _write(self) -> None:
        """Write what this rank has of the staged operands into their slabs."""
        if self._staged:
            memory, _ = self._memory[self._half]
            for slabs in self._staged:
                slabs.write(memory)

    def _grow(self, nbytes: int) -> bool:
        """Make room for slabs; return whether that was possible. Collective over the context."""
        nbytes = max(1 << 20, 1 << (nbytes - 1).bit_length())
        try:
            arrays = [self._buffers.get(f"direct{half}", nbytes, shared=True) for half in (0, 1)]
        except MemoryError:  # on every rank
            self._able = False
            return False
        self._memory = [(array, array.__array_interface__["data"][0]) for array in arrays]
        self._capacity = nbytes
        return True

    # -- what the routines need

    def _function(self, letter: str, routine: str) -> Callable[..., None]:
        found = self._functions.get((letter, routine))
        if found is None:
            found = self._functions[letter, routine] = blas.load(self._library, letter, routine)
        return found

    def _stage(self, x: _Matrix, rows: Span, cols: Span, *, by_columns: bool | None = None) -> _Slabs:
        """Have an operand copied into slabs before the ranks vote."""
        start = self._staged[-1].end if self._staged else 0
        slabs = _Slabs(x, rows, cols, start, x.by_columns if by_columns is None else by_columns)
        if slabs.end > _MOST:
            raise _UnfitError
        self._staged.append(slabs)
        return slabs

    def _slab(self, slabs: _Slabs, process: int) -> _Factor:
        """Return the slab of some rows as BLAS takes it."""
        return slabs.factor(self._memory[self._half][1], process if slabs.rows.nprocs > 1 else 0, 0)

    def _with_old(self, asked: Asked, d: _Matrix) -> Compute | None:
        """Return what copies C to D before it is updated, None if nothing is to be copied."""
        c = asked.c
        if c is None or asked.beta == 0 or _same(c, asked.d):
            return None
        old = _Matrix(c)
        if not old.same_places(d):
            raise _UnfitError
        return lambda: np.copyto(d.local(), old.local()) if d.active else None


def _same(x: Part, y: Part) -> bool:
    """Return whether two parts are the same elements at the same addresses."""
    return x[0].address == y[0].address and x[0].ld == y[0].ld and x[1:] == y[1:]


def _check_overlap(asked: Asked, in_place: Part | None) -> None:
    """Raise _UnfitError if D may share memory with an operand other than the one that may be D itself."""
    d = asked.d
    held, i, j, m, n, _ = d
    if not held.array.flags.writeable:
        raise _UnfitError
    for x in (asked.a, asked.b, asked.c):
        if x is None or (x is in_place and _same(x, d)):
            continue
        other = x[0]
        if other.end <= held.address or held.end <= other.address:
            continue
        if (
            other.address != held.address
            or other.ld != held.ld
            or other.pattern.digest != held.pattern.digest
        ):
            raise _UnfitError
        _, p, q, rows, cols, _ = x
        if p < i + m and i < p + rows and q < j + n and j < q + cols:
            raise _UnfitError


def _number(asked: Asked) -> int:
    """Return the number that the ranks vote on: equal if, and only if, they ask for the same."""
    alpha, beta = complex(asked.alpha), complex(asked.beta)
    options = f"{asked.call} {asked.routine} {asked.side}{asked.uplo}{asked.op_a}{asked.op_b}{asked.diag} {asked.new} "
    parts = [
        part[0].pattern.digest + struct.pack("=4q?", *part[1:]) if part is not None else b"-"
        for part in (asked.a, asked.b, asked.c, asked.d)
    ]
    scalars = struct.pack("=4d", alpha.real, alpha.imag, beta.real, beta.imag)
    digest = hashlib.blake2b(b"".join((options.encode(), scalars, *parts)), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# -- the routines: each returns what this rank computes once the ranks have agreed


def _gemm(
    function: Callable[..., None],
    m: int,
    n: int,
    k: int,
    alpha: bytes,
    x: _Factor | _Matrix,
    y: _Factor | _Matrix,
    beta: bytes,
    d: _Factor | _Matrix,
) -> None:
    """Compute ``d = alpha x y^T + beta d``; x is m × k, y is n × k."""
    if not d.by_columns:  # compute its transpose
        x, y, m, n = y, x, n, m
    of_x = b"N" if x.by_columns else b"C" if x.conjugated else b"T"
    of_y = b"N" if not y.by_columns else b"C" if y.conjugated else b"T"
    function(
        of_x, of_y, _integer[m], _integer[n], _integer[k],
        alpha, x.at, _integer[x.ld], y.at, _integer[y.ld], beta, d.at, _integer[d.ld],
    )  # fmt: skip


def _scalar(x: complex, letter: str) -> bytes:
    if letter == "d":
        return struct.pack("=d", x)
    if letter == "s":
        return struct.pack("=f", x)
    x = complex(x)
    return struct.pack("=2d" if letter == "z" else "=2f", x.real, x.imag)


def _real(x: complex, letter: str) -> bytes:
    return struct.pack("=d" if letter in "dz" else "=f", complex(x).real)


def _matmul(self: HostDirect, asked: Asked) -> Compute:
    a, b, d = asked.a, asked.b, asked.d
    assert b is not None
    _check_overlap(asked, asked.c)
    x = _Matrix(a, turned=asked.op_a != "N", conjugated=asked.op_a == "C")
    y = _Matrix(b, turned=asked.op_b == "N", conjugated=asked.op_b == "C")  # op(B)^T
    to = _Matrix(d)
    old = self._with_old(asked, to)
    k, letter = x.cols.extent, d[0].pattern.letter
    left: _Slabs | None = None
    right: _Slabs | None = None
    if not self._single:
        inner = whole_span(k)
        x_stays, y_stays = _stays(x, to, to.cols), _stays(y, to, to.rows, flipped=True)
        moved = (0 if x_stays else to.rows.extent * k) + (0 if y_stays else to.cols.extent * k)
        kept = min(to.rows.extent, to.cols.extent)
        here = (
            to.rows.extent * to.cols.extent * (x.cols if to.rows.extent >= to.cols.extent else y.cols).nprocs
            + kept * k
        )
        if moved >= max(_LARGER * here, _LEAST):
            raise _UnfitError  # moving results is better: "stationary"
        if not x_stays:
            left = self._stage(x, to.rows, inner)
        if not y_stays:
            right = self._stage(y, to.cols, inner)
    # BLAS conjugates only what it transposes; slabs are conjugated when they are written.
    if left is None and x.conjugated and x.by_columns == to.by_columns:
        raise _UnfitError
    if right is None and y.conjugated and y.by_columns != to.by_columns:
        raise _UnfitError
    alpha, beta = _scalar(asked.alpha, letter), _scalar(asked.beta, letter)
    function = self._function(letter, "gemm")

    def compute() -> None:
        if not to.active:
            return
        if old is not None:
            old()
        one: Any = x if left is None else self._slab(left, to.row)
        other: Any = y if right is None else self._slab(right, to.col)
        _gemm(function, to.m, to.n, k, alpha, one, other, beta, to)

    return compute


def _stays(x: _Matrix, d: _Matrix, across: Span, *, flipped: bool = False) -> bool:
    """Return whether each rank that multiplies a slab of ``x`` has it: all of k and the rows that it has of D.

    Args:
        x: the operand, as rows × k.
        d: the result.
        across: the dimension of D that x does not share.
        flipped: x's rows are D's columns.
    """
    rows = d.cols if flipped else d.rows
    if not x.cols.whole or not across.whole or x.rows != rows:
        return False
    column = across.source
    pairs = (
        (x.rank(p, x.cols.source), d.rank(column, p) if flipped else d.rank(p, column))
        for p in range(rows.nprocs)
    )
    return all(one == other for one, other in pairs)


def _triangular(self: HostDirect, asked: Asked) -> Compute:
    """Return trsm or trmm: a rank solves for, or multiplies, its columns of B (rows for "R") if it has all of each."""
    a, b, d = asked.a, asked.b, asked.d
    assert b is not None
    _check_overlap(asked, b)
    x, to = _Matrix(a), _Matrix(d)
    source = None if _same(b, d) else _Matrix(b)
    if source is not None and not source.same_places(to):
        raise _UnfitError
    slabs: _Slabs | None = None
    if not self._single:
        if not (to.rows if asked.side == "L" else to.cols).whole:
            raise _UnfitError
        if not _same_rank(x, to):
            everything = whole_span(x.rows.extent)
            slabs = self._stage(x, everything, everything)
    # BLAS sees both in Fortran order: a matrix in C order is the transpose of that.
    letter, is_complex = d[0].pattern.letter, d[0].pattern.is_complex
    side = asked.side if to.by_columns else _OTHER[asked.side]
    uplo = asked.uplo if x.by_columns else _MIRRORED[asked.uplo]
    op = "T" if asked.op_a == "C" and not is_complex else asked.op_a
    if to.by_columns != x.by_columns:
        if op == "C":
            raise _UnfitError
        op = "T" if op == "N" else "N"
    alpha, function = _scalar(asked.alpha, letter), self._function(letter, asked.routine)
    options = side.encode(), uplo.encode(), op.encode(), asked.diag.encode()

    def compute() -> None:
        if not to.active:
            return
        if source is not None:
            np.copyto(to.local(), source.local())
        factor = x if slabs is None else self._slab(slabs, 0)
        m, n = (to.m, to.n) if to.by_columns else (to.n, to.m)
        function(
            *options, _integer[m], _integer[n], alpha, factor.at, _integer[factor.ld], to.at, _integer[to.ld]
        )

    return compute


def _same_rank(x: _Matrix, d: _Matrix) -> bool:
    """Return whether one rank has all of both."""
    spans = (x.rows, x.cols, d.rows, d.cols)
    return all(span.whole for span in spans) and (
        x.rank(x.rows.source, x.cols.source) == d.rank(d.rows.source, d.cols.source)
    )


def _sided(self: HostDirect, asked: Asked) -> Compute:
    """Return symm or hemm, if one rank has all operands."""
    b, d = asked.b, asked.d
    assert b is not None
    _check_overlap(asked, asked.c)
    x, y, to = _Matrix(asked.a), _Matrix(b), _Matrix(d)
    if not self._single and not (_same_rank(x, to) and _same_rank(y, to)):
        raise _UnfitError
    letter = d[0].pattern.letter
    hermitian = asked.routine == "hemm" and d[0].pattern.is_complex
    if y.by_columns != to.by_columns or (hermitian and x.by_columns != to.by_columns):
        raise _UnfitError
    old = self._with_old(asked, to)
    side = asked.side if to.by_columns else _OTHER[asked.side]
    uplo = asked.uplo if x.by_columns else _MIRRORED[asked.uplo]
    function = self._function(letter, "hemm" if hermitian else "symm")
    alpha, beta = _scalar(asked.alpha, letter), _scalar(asked.beta, letter)

    def compute() -> None:
        if not to.active:
            return
        if old is not None:
            old()
        m, n = (to.m, to.n) if to.by_columns else (to.n, to.m)
        function(
            side.encode(), uplo.encode(), _integer[m], _integer[n],
            alpha, x.at, _integer[x.ld], y.at, _integer[y.ld], beta, to.at, _integer[to.ld],
        )  # fmt: skip

    return compute


class _Update:
    """BLAS's rank-k and rank-2k updates of a triangle in Fortran order: ``d = alpha x x^T + beta d``, or x y^T + y x^T.

    Args:
        function: BLAS's routine.
        uplo, trans: its options.
        alpha, beta: its scalars.
    """

    def __init__(
        self, function: Callable[..., None], uplo: str, trans: str, alpha: bytes, beta: bytes
    ) -> None:
        self._function, self._options, self._alpha, self._beta = (
            function,
            (uplo.encode(), trans.encode()),
            alpha,
            beta,
        )

    def __call__(self, n: int, k: int, factors: list[Any], at: int, ld: int) -> None:
        given: list[Any] = []
        for x in factors:
            given += [x.at, _integer[x.ld]]
        self._function(
            *self._options, _integer[n], _integer[k], self._alpha, *given, self._beta, at, _integer[ld]
        )


def _updated(self: HostDirect, asked: Asked) -> Compute:
    """Return syrk, herk, syr2k or her2k: BLAS's for triangles of D that a rank has, products for the rest."""
    a, b, d = asked.a, asked.b, asked.d
    _check_overlap(asked, asked.c)
    to, k = _Matrix(d), a[3] if (asked.op_a == "N") == a[5] else a[4]
    seed = _seed(asked, to)
    is_complex = d[0].pattern.is_complex
    hermitian = ROUTINES[asked.routine].hermitian and is_complex
    if is_complex and (asked.op_a == ("T" if hermitian else "C")):
        raise _UnfitError
    lefts = [_Matrix(p, turned=asked.op_a != "N") for p in (a, b) if p is not None]
    if self._single or all(_same_rank(each, to) for each in lefts):
        by_columns = lefts[0].by_columns
        if any(each.by_columns != by_columns for each in lefts):
            raise _UnfitError
        update = _update(self, asked, to, by_columns=by_columns, hermitian=hermitian)

        def whole() -> None:
            if to.active:
                seed()
                update(to.m, k, lefts, to.at, to.ld)

        return whole
    rows, cols = to.rows, to.cols
    if is_complex or (
        not (rows.whole or cols.whole) and (rows.block, rows.lead) != (cols.block, cols.lead)
    ):  # a block of the diagonal would be on several ranks
        raise _UnfitError
    update = _update(self, asked, to, by_columns=to.by_columns, hermitian=False)
    inner, alike = whole_span(k), aligned_spans(rows, cols)
    of_rows = [self._stage(each, rows, inner, by_columns=to.by_columns) for each in lefts]
    of_cols = (
        of_rows if alike else [self._stage(each, cols, inner, by_columns=to.by_columns) for each in lefts]
    )
    letter = d[0].pattern.letter
    gemm, scalars = self._function(letter, "gemm"), [_scalar(s, letter) for s in (asked.alpha, asked.beta, 1)]

    def compute() -> None:
        if not to.active:
            return
        seed()
        col = (to.col - cols.source + rows.source) % rows.nprocs if alike else to.col
        down, across = ([self._slab(each, p) for each in of] for of, p in ((of_rows, to.row), (of_cols, col)))
        _staircase(gemm, scalars, update, k, to, asked.uplo, down, across)

    return compute


def _seed(asked: Asked, to: _Matrix) -> Compute:
    """Return what makes D start as C, unless C is D or is not needed."""
    c = asked.c
    if c is None or _same(c, asked.d) or (not asked.new and asked.beta == 0):
        return _nothing
    old = _Matrix(c)
    if not asked.new or not old.same_places(to):
        raise _UnfitError  # outside the triangle, a D that was given keeps its values
    return lambda: np.copyto(to.local(), old.local())


def _nothing() -> None:
    """Do nothing."""


def _update(self: HostDirect, asked: Asked, to: _Matrix, *, by_columns: bool, hermitian: bool) -> _Update:
    """Return BLAS's update of a triangle for factors in a memory order."""
    if hermitian and ((asked.op_a != "N") != to.by_columns) != by_columns:
        raise _UnfitError  # BLAS conjugates only what it transposes
    letter, name = asked.d[0].pattern.letter, asked.routine
    if not hermitian:
        name = name.replace("her", "syr")
    alpha = complex(asked.alpha).conjugate() if hermitian and not to.by_columns else asked.alpha
    return _Update(
        self._function(letter, name),
        asked.uplo if to.by_columns else _MIRRORED[asked.uplo],
        "N" if by_columns else "C" if hermitian else "T",
        (_real if hermitian and asked.b is None else _scalar)(alpha, letter),
        (_real if hermitian else _scalar)(asked.beta, letter),
    )


def _staircase(
    gemm: Callable[..., None], scalars: list[bytes], update: _Update, k: int, d: _Matrix, uplo: str,
    down: list[_Factor], across: list[_Factor],
) -> None:  # fmt: skip
    """Update what this rank has of a triangle: tiles on the diagonal, and what is below or above each of them.

    Args:
        gemm: BLAS's.
        scalars: alpha, beta and 1.
        update: of a tile.
        k: the extent of the summation.
        d: the result.
        uplo: its triangle.
        down, across: A, and B if there is one, in the rows and in the columns of this rank's part.
    """
    rows, cols, row, col, m, n = d.rows, d.cols, d.row, d.col, d.m, d.n
    item = d.held.pattern.itemsize
    right, below = (d.ld, 1) if d.by_columns else (1, d.ld)
    pairs = [(down[0], across[0])] if len(down) == 1 else [(down[0], across[1]), (down[1], across[0])]

    def multiply(i: int, i1: int, j: int, j1: int) -> None:
        beta = scalars[1]
        if i1 > i and j1 > j:
            at = _Factor(d.at + item * (i * below + j * right), d.by_columns, d.ld)
            for x, y in pairs:
                _gemm(gemm, i1 - i, j1 - j, k, scalars[0], _from(x, i, item), _from(y, j, item), beta, at)
                beta = scalars[2]

    def tile(i: int, j: int, width: int) -> None:
        update(width, k, [_from(x, i, item) for x in down], d.at + item * (i * below + j * right), d.ld)

    if rows == cols and row == col:
        tile(0, 0, m)
    elif not cols.whole:
        for start, stop, j in cols.blocks(col):
            i, i1 = rows.below(start, row), rows.below(stop, row)
            if i1 > i:
                tile(i, j, stop - start)
            multiply(*((i1, m) if uplo == "L" else (0, i)), j, j + stop - start)
    else:
        for start, stop, i in rows.blocks(row):
            j, j1 = cols.below(start, col), cols.below(stop, col)
            if j1 > j:
                tile(i, j, stop - start)
            multiply(i, i + stop - start, *((0, j) if uplo == "L" else (j1, n)))


def _from(x: _Factor, i: int, item: int) -> _Factor:
    """Return a slab's rows from ``i`` on."""
    return _Factor(x.at + i * item * (1 if x.by_columns else x.ld), x.by_columns, x.ld)


def _added(self: HostDirect, asked: Asked) -> Compute:
    """Return geadd: op(A) is read in place, or moved to where D is."""
    _check_overlap(asked, asked.c)
    x, to = _Matrix(asked.a, turned=asked.op_a != "N", conjugated=asked.op_a == "C"), _Matrix(asked.d)
    old = to if asked.c is None or asked.beta == 0 or _same(asked.c, asked.d) else _Matrix(asked.c)
    if old is not to and not old.same_places(to):
        raise _UnfitError
    slabs = (
        None
        if self._single or x.same_places(to)
        else self._stage(x, to.rows, to.cols, by_columns=to.by_columns)
    )

    def compute() -> None:
        if not to.active:
            return
        d = to.local()
        if slabs is None:
            of, conjugate = x.local(), x.conjugated
        else:
            process = (to.row if to.rows.nprocs > 1 else 0), (to.col if to.cols.nprocs > 1 else 0)
            of, conjugate = slabs.array(self._memory[self._half][0], *process), False
        c = d if old is to else old.local()
        with np.errstate(all="ignore"):
            self._operations.add(d, asked.alpha, of, asked.beta, c, None, conjugate=conjugate)

    return compute


_COMPUTERS: dict[str, Callable[[HostDirect, Asked], Compute]] = {
    "matmul": _matmul,
    "trsm": _triangular,
    "trmm": _triangular,
    "symm": _sided,
    "hemm": _sided,
    "syrk": _updated,
    "herk": _updated,
    "syr2k": _updated,
    "her2k": _updated,
    "geadd": _added,
}
