# SPDX-License-Identifier: Apache-2.0
"""Direct calls on CPU ranks: BLAS on the local arrays where they lie, and on slabs that the ranks of a node share.

One meeting of the ranks per call: each rank first writes what others need of its operands into shared memory; then all
vote on one number, which also says that everything has been written; then each rank computes its part of the result.
There are two sets of slabs. A rank that writes into one has voted since all ranks began to read the other, so nobody
reads this one any more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Communicator, break_off, vote_on
from ...layout.intersection import Piece, copy
from ...layout.routines import ROUTINES
from ..direct import Asked, Span, aligned_spans, spread, whole_span
from ..protocol import Operations, Transport
from ..sub_matrix import SubMatrix, UnfitError, check_overlap, same_elements, same_rank, stays, vote_number
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


class _Slabs:
    """Copies of an operand's parts, one for each process of the result that needs one, in shared memory. Local.

    Args:
        x: the operand.
        rows, cols: how its rows and columns are dealt out to those who need them.
        start: the offset of the first slab.
        by_columns: their memory order.
    """

    def __init__(self, x: SubMatrix, rows: Span, cols: Span, start: int, by_columns: bool) -> None:
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
        except UnfitError:
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
            if not vote_on(control, call, vote_number(asked)):
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

    def _stage(self, x: SubMatrix, rows: Span, cols: Span, *, by_columns: bool | None = None) -> _Slabs:
        """Have an operand copied into slabs before the ranks vote."""
        start = self._staged[-1].end if self._staged else 0
        slabs = _Slabs(x, rows, cols, start, x.by_columns if by_columns is None else by_columns)
        if slabs.end > _MOST:
            raise UnfitError
        self._staged.append(slabs)
        return slabs

    def _slab(self, slabs: _Slabs, process: int) -> _Factor:
        """Return the slab of some rows as BLAS takes it."""
        return slabs.factor(self._memory[self._half][1], process if slabs.rows.nprocs > 1 else 0, 0)

    def _with_old(self, asked: Asked, d: SubMatrix) -> Compute | None:
        """Return what copies C to D before it is updated, None if nothing is to be copied."""
        c = asked.c
        if c is None or asked.beta == 0 or same_elements(c, asked.d):
            return None
        old = SubMatrix(c)
        if not old.same_places(d):
            raise UnfitError
        return lambda: np.copyto(d.local(), old.local()) if d.active else None


# -- the routines: each returns what this rank computes once the ranks have agreed


def _gemm(
    function: Callable[..., None],
    m: int,
    n: int,
    k: int,
    alpha: bytes,
    x: _Factor | SubMatrix,
    y: _Factor | SubMatrix,
    beta: bytes,
    d: _Factor | SubMatrix,
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
    check_overlap(asked, asked.c)
    x = SubMatrix(a, turned=asked.op_a != "N", conjugated=asked.op_a == "C")
    y = SubMatrix(b, turned=asked.op_b == "N", conjugated=asked.op_b == "C")  # op(B)^T
    to = SubMatrix(d)
    old = self._with_old(asked, to)
    k, letter = x.cols.extent, d[0].pattern.letter
    left: _Slabs | None = None
    right: _Slabs | None = None
    if not self._single:
        inner = whole_span(k)
        x_stays, y_stays = stays(x, to, to.cols), stays(y, to, to.rows, flipped=True)
        moved = (0 if x_stays else to.rows.extent * k) + (0 if y_stays else to.cols.extent * k)
        kept = min(to.rows.extent, to.cols.extent)
        here = (
            to.rows.extent * to.cols.extent * (x.cols if to.rows.extent >= to.cols.extent else y.cols).nprocs
            + kept * k
        )
        if moved >= max(_LARGER * here, _LEAST):
            raise UnfitError  # moving results is better: "stationary"
        if not x_stays:
            left = self._stage(x, to.rows, inner)
        if not y_stays:
            right = self._stage(y, to.cols, inner)
    # BLAS conjugates only what it transposes; slabs are conjugated when they are written.
    if left is None and x.conjugated and x.by_columns == to.by_columns:
        raise UnfitError
    if right is None and y.conjugated and y.by_columns != to.by_columns:
        raise UnfitError
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


def _triangular(self: HostDirect, asked: Asked) -> Compute:
    """Return trsm or trmm: a rank solves for, or multiplies, its columns of B (rows for "R") if it has all of each."""
    a, b, d = asked.a, asked.b, asked.d
    assert b is not None
    check_overlap(asked, b)
    x, to = SubMatrix(a), SubMatrix(d)
    source = None if same_elements(b, d) else SubMatrix(b)
    if source is not None and not source.same_places(to):
        raise UnfitError
    slabs: _Slabs | None = None
    if not self._single:
        if not (to.rows if asked.side == "L" else to.cols).whole:
            raise UnfitError
        if not same_rank(x, to):
            everything = whole_span(x.rows.extent)
            slabs = self._stage(x, everything, everything)
    # BLAS sees both in Fortran order: a matrix in C order is the transpose of that.
    letter, is_complex = d[0].pattern.letter, d[0].pattern.is_complex
    side = asked.side if to.by_columns else _OTHER[asked.side]
    uplo = asked.uplo if x.by_columns else _MIRRORED[asked.uplo]
    op = "T" if asked.op_a == "C" and not is_complex else asked.op_a
    if to.by_columns != x.by_columns:
        if op == "C":
            raise UnfitError
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


def _sided(self: HostDirect, asked: Asked) -> Compute:
    """Return symm or hemm, if one rank has all operands."""
    b, d = asked.b, asked.d
    assert b is not None
    check_overlap(asked, asked.c)
    x, y, to = SubMatrix(asked.a), SubMatrix(b), SubMatrix(d)
    if not self._single and not (same_rank(x, to) and same_rank(y, to)):
        raise UnfitError
    letter = d[0].pattern.letter
    hermitian = asked.routine == "hemm" and d[0].pattern.is_complex
    if y.by_columns != to.by_columns or (hermitian and x.by_columns != to.by_columns):
        raise UnfitError
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
    check_overlap(asked, asked.c)
    to, k = SubMatrix(d), a[3] if (asked.op_a == "N") == a[5] else a[4]
    seed = _seed(asked, to)
    is_complex = d[0].pattern.is_complex
    hermitian = ROUTINES[asked.routine].hermitian and is_complex
    if is_complex and (asked.op_a == ("T" if hermitian else "C")):
        raise UnfitError
    lefts = [SubMatrix(p, turned=asked.op_a != "N") for p in (a, b) if p is not None]
    if self._single or all(same_rank(each, to) for each in lefts):
        by_columns = lefts[0].by_columns
        if any(each.by_columns != by_columns for each in lefts):
            raise UnfitError
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
        raise UnfitError
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


def _seed(asked: Asked, to: SubMatrix) -> Compute:
    """Return what makes D start as C, unless C is D or is not needed."""
    c = asked.c
    if c is None or same_elements(c, asked.d) or (not asked.new and asked.beta == 0):
        return _nothing
    old = SubMatrix(c)
    if not asked.new or not old.same_places(to):
        raise UnfitError  # outside the triangle, a D that was given keeps its values
    return lambda: np.copyto(to.local(), old.local())


def _nothing() -> None:
    """Do nothing."""


def _update(self: HostDirect, asked: Asked, to: SubMatrix, *, by_columns: bool, hermitian: bool) -> _Update:
    """Return BLAS's update of a triangle for factors in a memory order."""
    if hermitian and ((asked.op_a != "N") != to.by_columns) != by_columns:
        raise UnfitError  # BLAS conjugates only what it transposes
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
    gemm: Callable[..., None], scalars: list[bytes], update: _Update, k: int, d: SubMatrix, uplo: str,
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
    check_overlap(asked, asked.c)
    x, to = SubMatrix(asked.a, turned=asked.op_a != "N", conjugated=asked.op_a == "C"), SubMatrix(asked.d)
    old = to if asked.c is None or asked.beta == 0 or same_elements(asked.c, asked.d) else SubMatrix(asked.c)
    if old is not to and not old.same_places(to):
        raise UnfitError
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
