# SPDX-License-Identifier: Apache-2.0
"""Direct calls on GPUs: cuBLAS on the local arrays where they lie, and on slabs in symmetric memory.

After one vote of the ranks on a number, a call queues at most four things: a kernel that writes what others need of
this rank's operands into their memory, a barrier on the stream, products, and for a triangle of the result one kernel
that writes the tiles on its diagonal. There are two sets of slabs. A rank that writes into one has queued that behind
the barrier of the call before, which its peers reached after they had read this set for the last time.

Everything that is queued is bound to addresses when a call is first made, and kept: a repeated call only votes and
queues. Nothing that is kept holds an array.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...bindings import DiagType, FillMode, Operation, SideMode
from ...comm import Communicator, break_off, vote_on
from ...layout.intersection import Stretches
from ...layout.routines import ROUTINES
from ..direct import Asked, Part, Span, spread, whole_span
from ..sub_matrix import SubMatrix, UnfitError, check_overlap, same_elements, same_rank, vote_number
from .kernels.kernels import Deal, Tile
from .kernels.views import Move, View, moves

if TYPE_CHECKING:
    from .runtime.gpu import Gpu

__all__ = ["GpuDirect"]

Queue = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that queues work, and its arguments."""

_REMEMBERED = 1024  # calls that are kept bound, a few kB each
_LEAST = 1 << 24  # bytes of a set of slabs
_MOST = 512 << 20  # bytes of a set of slabs: a panel of 512 columns and 65536 rows, and its half
_MOST_OF_PRODUCT = 64 << 20  # bytes: a larger product is better overlapped with what it needs
_LONGEST = 1e11  # operations of a product on each rank, 2 ms: then the time of the host no longer matters
_LARGER, _MOVED = 2, 1 << 22  # see stationary.py: when it is better to move results than operands
_TURNED = 1 << 20  # elements that the sum of matrices may read across the grain
_ALIGNED = 256
_STRIP = 256  # columns of a triangle's tiles, at least
_STRIPS = 16  # of a triangle, at most
_SCRATCH = 64 << 20  # bytes for the tiles of a triangle that are summed at a time
_TILES = 32  # that one kernel writes
_MIRRORED = {"L": "U", "U": "L"}
_OTHER = {"L": "R", "R": "L"}
_SIDES = {"L": int(SideMode.LEFT), "R": int(SideMode.RIGHT)}
_FILLS = {"L": int(FillMode.LOWER), "U": int(FillMode.UPPER)}
_OPS = {"N": int(Operation.N), "T": int(Operation.T), "C": int(Operation.C)}
_DIAGONALS = {"N": int(DiagType.NON_UNIT), "U": int(DiagType.UNIT)}
_SLABS, _TRIANGLE = "direct slabs", "direct triangle"


class _Factor(NamedTuple):
    """A matrix as cuBLAS takes it: its address, whether it is in Fortran order, its leading dimension.

    With ``conjugated`` its conjugate is meant.
    """

    at: int
    by_columns: bool
    ld: int
    conjugated: bool = False

    def below(self, i: int, item: int) -> int:
        """Return the address of row ``i``. Local."""
        return self.at + i * item * (1 if self.by_columns else self.ld)


class _Slab:
    """Copies of an operand's parts in the memory of those who need them, and do not have them in place. Local.

    Args:
        x: the operand.
        rows, cols: how its rows and columns are dealt out to those who need them.
        receivers: by rank, whose of the rows and of the columns it needs.
        start: its offset in a set of slabs.
        end: the offset after it.
    """

    def __init__(
        self,
        x: SubMatrix,
        rows: Span,
        cols: Span,
        receivers: dict[int, tuple[int, int]],
        start: int,
        end: int,
    ) -> None:
        self.x, self.rows, self.cols, self.start, self.end = x, rows, cols, start, end
        self.receivers = receivers

    def ld(self, p: int, q: int) -> int:
        return max(1, self.rows.count(p) if self.x.by_columns else self.cols.count(q))

    def moves(self, bases: dict[int, int]) -> Iterator[Move]:
        """Yield the copies of what this rank has; ``bases`` has the addresses of the ranks' sets of slabs."""
        x = self.x
        if not (x.active and self.receivers):
            return
        dtype = x.held.pattern.dtype
        down, across = (
            _by_process(*each) for each in ((x.rows, x.row, self.rows), (x.cols, x.col, self.cols))
        )
        of = View(x.at, 1, 1, x.ld, dtype)
        for rank, (p, q) in self.receivers.items():
            rows, cols = down.get(p), across.get(q)
            if rows and cols:
                to = View(bases[rank] + self.start, 1, 1, self.ld(p, q), dtype)
                yield from moves(to, of, *((cols, rows) if x.by_columns else (rows, cols)))

    def factor(self, rank: int, whose: tuple[int, int], base: int, *, conjugated: bool = False) -> _Factor:
        """Return what a rank multiplies: its slab, or its local array."""
        x = self.x
        if rank in self.receivers:
            return _Factor(base + self.start, x.by_columns, self.ld(*whose), conjugated)
        return _Factor(x.at, x.by_columns, x.ld, conjugated)


@lru_cache(4096)
def _by_process(of: Span, process: int, to: Span) -> dict[int, Stretches]:
    """Return where the indices of a process go, by process."""
    found: dict[int, Stretches] = {}
    for p, stretch in spread(of, process, to):
        found[p] = (*found.get(p, ()), stretch)
    return found


def _covers(of: Span, process: int, needed: Span, needing: int) -> bool:
    """Return whether a process's indices are just those that another distribution gives a process."""
    if process < 0:
        return False
    if needed.whole:
        return of.whole and process == of.source
    return of == needed and process == needing


class _Call:
    """A call that is ready to be queued, with what is queued for each set of slabs. Local.

    Attributes:
        number: that the ranks vote on.
        nbytes: of a set of slabs.
        bind: returns what is queued, for a stream and the addresses of the ranks' sets of slabs.
        bound: what is queued, by set of slabs.
        replacements: of memory, when ``bound`` was bound to it.
    """

    __slots__ = ("bind", "bound", "nbytes", "number", "replacements")

    def __init__(self, number: int, nbytes: int, bind: Callable[[Any, dict[int, int]], list[Queue]]) -> None:
        self.number, self.nbytes, self.bind = number, nbytes, bind
        self.bound: list[list[Queue] | None] = [None, None]
        self.replacements = -1

    def other_half(self, half: int) -> int:
        """Return which set of slabs the next call uses."""
        return 1 - half if self.nbytes else half


class GpuDirect:
    """Direct calls of GPU ranks. Local to make.

    Args:
        gpu: this rank's GPU.
        current: returns CuPy's current stream.
        follow: lets work move to CuPy's current stream.
    """

    def __init__(self, gpu: Gpu, current: Callable[[], Any], follow: Callable[[], None]) -> None:
        self.gpu, self._current, self._follow = gpu, current, follow
        self._single, self._shares = gpu.size == 1, not gpu.why_no_windows
        self._half, self._capacity, self._most = 0, 0, _MOST
        self._calls: dict[Any, _Call | None] = {}
        self._scalars: dict[tuple[complex, str], Any] = {}
        self._functions: dict[str, Any] = {}
        self.patterns: dict[Any, tuple[dict[int, tuple[int, int]], int]] = {}

    # -- the call

    def run(self, control: Communicator, asked: Asked) -> bool | None:
        """See ``Direct``. Collective over the context."""
        stream = self._current()
        if stream.is_capturing():  # a replay would not take turns with the sets of slabs
            return None
        channel, name = control.channel, asked.call
        channel.take_turn(name)
        try:
            call = self._found(stream, asked)
            if call is None or call.nbytes > self._most:
                return None
            if not self._single and not vote_on(control, name, call.number):
                return False
            if call.nbytes > self._capacity and not self._grow(call.nbytes):
                return False
            self._follow()
            half = self._half
            queue = call.bound[half]
            if queue is None or call.replacements != self.gpu.arena.replacements:
                queue = self._bound(call, stream, half)
            self.gpu.products.solver(stream.ptr)
            channel.runs += 1
            for function, arguments in queue:
                function(*arguments)
            self._half = call.other_half(half)
        except BaseException as error:
            break_off(control, error, name)
            raise
        finally:
            channel.end_turn()
        return True

    def _found(self, stream: Any, asked: Asked) -> _Call | None:
        """Return a call, kept or new; None if it is not for direct calls."""
        key = (
            stream.ptr, *asked[:2], *map(_key, asked[2:6]), *asked[6:],
        )  # fmt: skip
        try:
            return self._calls[key]
        except KeyError:
            pass
        if len(self._calls) >= _REMEMBERED:
            self._calls.clear()
            self._scalars.clear()
            self.patterns.clear()
        try:
            self._calls[key] = _Maker(self, asked).call()
        except UnfitError:
            self._calls[key] = None
        return self._calls[key]

    def _bound(self, call: _Call, stream: Any, half: int) -> list[Queue]:
        """Bind a call to the memory that there is now."""
        gpu = self.gpu
        bases: dict[int, int] = {}
        if call.nbytes:
            bases = {rank: gpu.symmetric(_SLABS, rank) + half * self._capacity for rank in range(gpu.size)}
        if call.replacements != gpu.arena.replacements:
            call.bound = [None, None]
        queue = call.bound[half] = call.bind(stream, bases)
        call.replacements = gpu.arena.replacements  # now that it has its scratch memory
        return queue

    def _grow(self, nbytes: int) -> bool:
        """Make room for slabs; return whether that was possible. Collective over the context."""
        nbytes = max(_LEAST, 1 << (nbytes - 1).bit_length())
        try:
            self.gpu.reserve(_SLABS, 2 * nbytes)
        except MemoryError:  # on every rank
            self._most = self._capacity
            return False
        self._capacity = nbytes
        return True

    @property
    def can_stage(self) -> bool:
        """Whether ranks reach each other's memory."""
        return self._shares

    def function(self, name: str) -> Any:
        """Return a routine of cuBLAS."""
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = getattr(self.gpu.products.cublas, name)
        return found

    def scalar(self, value: complex, letter: str) -> int:
        """Return the address of a scalar on the host."""
        found = self._scalars.get((value, letter))
        if found is None:
            kind = {"s": np.float32, "d": np.float64, "c": np.complex64, "z": np.complex128}[letter]
            found = self._scalars[value, letter] = np.array(
                [value if letter in "cz" else complex(value).real], kind
            )
        return int(found.ctypes.data)


def _key(part: Part | None) -> Any:
    """Return what decides where a sub-matrix is and how it is dealt out."""
    if part is None:
        return None
    held = part[0]
    return held.address, held.ld, held.pattern.digest, *part[1:]


class _Maker:
    """Makes a call: reads the operands, and stages those that must move. Local.

    Args:
        direct: for whom.
        asked: the call.
    """

    def __init__(self, direct: GpuDirect, asked: Asked) -> None:
        self._direct, self._gpu, self._asked = direct, direct.gpu, asked
        self._to = SubMatrix(asked.d)
        pattern = asked.d[0].pattern
        self._letter, self._item, self._dtype = pattern.letter, pattern.itemsize, pattern.dtype
        self._slabs: list[_Slab] = []

    def call(self) -> _Call:
        """Return the call, or raise UnfitError."""
        asked, gpu = self._asked, self._gpu
        check_overlap(asked, asked.b if asked.routine in ("trsm", "trmm") else asked.c)
        compute = _COMPUTERS[asked.routine](self)
        slabs = [slab for slab in self._slabs if slab.receivers]
        if slabs and not self._direct.can_stage:
            raise UnfitError
        nbytes = slabs[-1].end if slabs else 0

        def bind(stream: Any, bases: dict[int, int]) -> list[Queue]:
            queue: list[Queue] = []
            if slabs:
                copies = [move for slab in slabs for move in slab.moves(bases)]
                queue += [(launch, (stream,)) for launch in gpu.launches_of_moves(copies)]
                queue.append((gpu.launch_of_meeting(), (stream,)))
            if self._to.active:
                queue += compute(stream, bases.get(gpu.rank, 0))
            return queue

        return _Call(vote_number(asked), nbytes, bind)

    # -- what the routines need

    def _stage(self, x: SubMatrix, rows: Span, cols: Span, whose: str) -> _Slab:
        """Have an operand copied to those who need it.

        Args:
            x: the operand.
            rows, cols: how its rows and columns are dealt out to those who need them.
            whose: which of D's processes its rows and perhaps its columns are dealt out to: "row", "col", "row col";
                or "": everyone needs all of it.
        """
        to, patterns = self._to, self._direct.patterns
        key = (
            x.rows, x.cols, x.held.pattern.grid, x.transposed, rows, cols,
            to.rows, to.cols, to.held.pattern.grid, to.transposed, whose,
        )  # fmt: skip
        found = patterns.get(key)
        if found is None:
            found = patterns[key] = self._receivers(x, rows, cols, whose)
        receivers, most = found
        start = self._slabs[-1].end if self._slabs else 0
        end = start + -(-most * self._item // _ALIGNED) * _ALIGNED
        slab = _Slab(x, rows, cols, receivers, start, end)
        self._slabs.append(slab)
        return slab

    def _receivers(
        self, x: SubMatrix, rows: Span, cols: Span, whose: str
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """Return who needs what of an operand and lacks it, and the most elements that one of them needs."""
        to = self._to
        receivers, most = {}, 0
        down, across = to.rows.counts(), to.cols.counts()
        heights, widths = rows.counts(), cols.counts()
        for p, q in itertools.product(range(len(down)), range(len(across))):
            if not (down[p] and across[q]):
                continue
            r, c = {"row": (p, 0), "col": (q, 0), "row col": (p, q), "": (0, 0)}[whose]
            rank = to.rank(p, q)
            row, col = x.process(rank)
            if not (_covers(x.rows, row, rows, r) and _covers(x.cols, col, cols, c)):
                receivers[rank] = r, c
                most = max(most, heights[r] * widths[c])
        return receivers, most

    def _scalar(self, value: complex) -> int:
        return self._direct.scalar(value, self._letter)

    def _function(self, name: str) -> Any:
        return self._direct.function(self._letter + name)

    def _handle(self, stream: Any) -> int:
        return self._gpu.products.solver(stream.ptr)

    def _copied(self, source: SubMatrix | None) -> list[Move]:
        """Return the copies that make D start as another matrix in the same places."""
        to = self._to
        if source is None:
            return []
        if not source.same_places(to) or source.by_columns != to.by_columns:
            raise UnfitError
        if not to.active:
            return []
        lines, run = (to.n, to.m) if to.by_columns else (to.m, to.n)
        item = self._item
        return [(to.at, (0, 0, to.ld * item), source.at, (0, 0, source.ld * item), (1, 1, lines, run * item))]

    def _old(self) -> SubMatrix | None:
        """Return C if it is read, and is not where D is."""
        c, asked = self._asked.c, self._asked
        return None if c is None or asked.beta == 0 or same_elements(c, asked.d) else SubMatrix(c)

    def _queued(self, stream: Any, copies: list[Move]) -> list[Queue]:
        return [(launch, (stream,)) for launch in self._gpu.launches_of_moves(copies)] if copies else []

    # -- the routines: each returns a function that returns what this rank queues once slabs are there

    def matmul(self) -> Callable[[Any, int], list[Queue]]:
        asked, to = self._asked, self._to
        assert asked.b is not None
        x = SubMatrix(asked.a, turned=asked.op_a != "N", conjugated=asked.op_a == "C")
        y = SubMatrix(asked.b, turned=asked.op_b == "N", conjugated=asked.op_b == "C")  # op(B)^T
        m, n, k = to.rows.extent, to.cols.extent, x.cols.extent
        if 2.0 * m * n * k > _LONGEST * to.rows.nprocs * to.cols.nprocs:
            raise UnfitError
        inner = whole_span(k)
        left = self._stage(x, to.rows, inner, "row")
        right = self._stage(y, to.cols, inner, "col")
        if left.receivers or right.receivers:
            moved = (m * k if left.receivers else 0) + (n * k if right.receivers else 0)
            here = m * n * (x.cols if m >= n else y.cols).nprocs + min(m, n) * k
            if moved >= max(_LARGER * here, _MOVED) or right.end > _MOST_OF_PRODUCT:
                raise UnfitError
        copies = self._copied(self._old())
        product = self._product(k, x.conjugated, y.conjugated, x.by_columns, y.by_columns)
        alpha, beta = self._scalar(asked.alpha), self._scalar(asked.beta)

        def compute(stream: Any, base: int) -> list[Queue]:
            rank = self._gpu.rank
            of_x = left.factor(rank, (to.row, 0), base, conjugated=x.conjugated)
            of_y = right.factor(rank, (to.col, 0), base, conjugated=y.conjugated)
            one = product(
                self._handle(stream),
                to.m,
                to.n,
                alpha,
                of_x.at,
                of_x.ld,
                of_y.at,
                of_y.ld,
                beta,
                to.at,
                to.ld,
            )
            return [*self._queued(stream, copies), one]

        return compute

    def _product(
        self, k: int, x_conjugated: bool, y_conjugated: bool, x_by_columns: bool, y_by_columns: bool
    ) -> Callable[..., Queue]:
        """Return what makes one product ``d = alpha x y^T + beta d``; x is m × k, y is n × k.

        It has the arguments: handle, m, n, alpha, x and its leading dimension, y and its, beta, d and its.

        Raises:
            UnfitError: cuBLAS conjugates only what it transposes.
        """
        function, by_columns = self._function("gemm"), self._to.by_columns
        if not by_columns:  # compute its transpose
            x_conjugated, y_conjugated = y_conjugated, x_conjugated
            x_by_columns, y_by_columns = y_by_columns, x_by_columns
        if (x_conjugated and x_by_columns) or (y_conjugated and not y_by_columns):
            raise UnfitError
        op_x = _OPS["N" if x_by_columns else "C" if x_conjugated else "T"]
        op_y = _OPS["N" if not y_by_columns else "C" if y_conjugated else "T"]

        def queue(
            handle: int,
            m: int,
            n: int,
            alpha: int,
            x: int,
            ldx: int,
            y: int,
            ldy: int,
            beta: int,
            d: int,
            ldd: int,
        ) -> Queue:
            if not by_columns:
                m, n, x, ldx, y, ldy = n, m, y, ldy, x, ldx
            return function, (handle, op_x, op_y, m, n, k, alpha, x, ldx, y, ldy, beta, d, ldd)

        return queue

    def triangular(self) -> Callable[[Any, int], list[Queue]]:
        """Return trsm or trmm, if each column of B (each row for "R") is on one rank."""
        asked, to = self._asked, self._to
        assert asked.b is not None
        x = SubMatrix(asked.a)
        source = None if same_elements(asked.b, asked.d) else SubMatrix(asked.b)
        copies = self._copied(source)
        if not (to.rows if asked.side == "L" else to.cols).whole:
            raise UnfitError
        everything = whole_span(x.rows.extent)
        slab = self._stage(x, everything, everything, "")
        # cuBLAS sees both in Fortran order: a matrix in C order is the transpose of that.
        is_complex = self._dtype.kind == "c"
        side = asked.side if to.by_columns else _OTHER[asked.side]
        uplo = asked.uplo if x.by_columns else _MIRRORED[asked.uplo]
        op = "T" if asked.op_a == "C" and not is_complex else asked.op_a
        if to.by_columns != x.by_columns:
            if op == "C":
                raise UnfitError
            op = "T" if op == "N" else "N"
        alpha, function = self._scalar(asked.alpha), self._function(asked.routine)
        options = _SIDES[side], _FILLS[uplo], _OPS[op], _DIAGONALS[asked.diag]
        m, n = (to.m, to.n) if to.by_columns else (to.n, to.m)
        after = () if asked.routine == "trsm" else (to.at, to.ld)

        def compute(stream: Any, base: int) -> list[Queue]:
            a = slab.factor(self._gpu.rank, (0, 0), base)
            one = function, (self._handle(stream), *options, m, n, alpha, a.at, a.ld, to.at, to.ld, *after)
            return [*self._queued(stream, copies), one]

        return compute

    def sided(self) -> Callable[[Any, int], list[Queue]]:
        """Return symm or hemm, if one rank has all operands."""
        asked, to = self._asked, self._to
        assert asked.b is not None
        x, y = SubMatrix(asked.a), SubMatrix(asked.b)
        if self._gpu.size > 1 and not (same_rank(x, to) and same_rank(y, to)):
            raise UnfitError
        hermitian = asked.routine == "hemm" and self._dtype.kind == "c"
        if y.by_columns != to.by_columns or (hermitian and x.by_columns != to.by_columns):
            raise UnfitError
        copies = self._copied(self._old())
        side = asked.side if to.by_columns else _OTHER[asked.side]
        uplo = asked.uplo if x.by_columns else _MIRRORED[asked.uplo]
        function = self._function("hemm" if hermitian else "symm")
        alpha, beta = self._scalar(asked.alpha), self._scalar(asked.beta)
        m, n = (to.m, to.n) if to.by_columns else (to.n, to.m)

        def compute(stream: Any, _: int) -> list[Queue]:
            one = function, (
                self._handle(stream), _SIDES[side], _FILLS[uplo], m, n,
                alpha, x.at, x.ld, y.at, y.ld, beta, to.at, to.ld,
            )  # fmt: skip
            return [*self._queued(stream, copies), one]

        return compute

    def added(self) -> Callable[[Any, int], list[Queue]]:
        """Return geadd: op(A) is read in place, or moved to where D is."""
        asked, to = self._asked, self._to
        x = SubMatrix(asked.a, turned=asked.op_a != "N", conjugated=asked.op_a == "C")
        old = self._old() or to
        if old is not to and not old.same_places(to):
            raise UnfitError
        slab = self._stage(x, to.rows, to.cols, "row col")
        across = x.by_columns != to.by_columns or old.by_columns != to.by_columns
        if across and to.rows.extent * to.cols.extent > _TURNED:
            raise UnfitError

        def compute(stream: Any, base: int) -> list[Queue]:
            of = slab.factor(self._gpu.rank, (to.row, to.col), base)
            tile = Tile(to.at, of.at, old.at, to.m, to.n)
            launches = self._gpu.launches_of_sum(
                self._dtype, [tile], (to.by_columns, to.ld), (of.by_columns, of.ld), (old.by_columns, old.ld),
                asked.alpha, asked.beta, conjugate=x.conjugated,
            )  # fmt: skip
            return [(launch, (stream,)) for launch in launches]

        return compute

    def updated(self) -> Callable[[Any, int], list[Queue]]:
        """Return syrk, herk, syr2k or her2k."""
        asked, to = self._asked, self._to
        is_complex = self._dtype.kind == "c"
        hermitian = ROUTINES[asked.routine].hermitian and is_complex
        if is_complex and asked.op_a == ("T" if hermitian else "C"):
            raise UnfitError
        turned, k = asked.op_a != "N", asked.a[3] if (asked.op_a == "N") == asked.a[5] else asked.a[4]
        factors = [SubMatrix(part, turned=turned) for part in (asked.a, asked.b) if part is not None]
        inner = whole_span(k)
        down = [self._stage(each, to.rows, inner, "row") for each in factors]
        across, column = down, to.row
        if not (to.rows.whole and to.cols.whole):  # otherwise one rank has all of D
            across, column = (
                [self._stage(each, to.cols, inner, "col") for each in factors],
                to.col,
            )
        pairs = [(asked.alpha, 0, 0)]
        if asked.b is not None:
            other = complex(asked.alpha).conjugate() if hermitian else asked.alpha
            pairs = [(asked.alpha, 0, 1), (other, 1, 0)]
        first, second = hermitian and turned, hermitian and not turned  # which is conjugated
        products = [
            self._product(k, first, second, factors[i].by_columns, factors[j].by_columns) for _, i, j in pairs
        ]
        seed = self._copied(self._seed())
        strips = _strips(to.rows, to.row, to.cols, to.col, to.m, to.n, asked.uplo) if to.active else ()

        def compute(stream: Any, base: int) -> list[Queue]:
            rank = self._gpu.rank
            lefts = [slab.factor(rank, (to.row, 0), base) for slab in down]
            rights = [slab.factor(rank, (column, 0), base) for slab in across]
            terms = [
                (product, self._scalar(alpha), lefts[i], rights[j])
                for product, (alpha, i, j) in zip(products, pairs, strict=True)
            ]
            queue = self._queued(stream, seed)
            queue += self._whole_parts(stream, strips, terms)
            queue += self._diagonal(stream, strips, terms, k, hermitian)
            return queue

        return compute

    def _seed(self) -> SubMatrix | None:
        """Return what D starts as, None if it is C already or what it is does not matter."""
        asked = self._asked
        if asked.c is None or same_elements(asked.c, asked.d) or (not asked.new and asked.beta == 0):
            return None
        if not asked.new:
            raise UnfitError  # outside the triangle, a D that was given keeps its values
        return SubMatrix(asked.c)

    def _whole_parts(self, stream: Any, strips: Sequence[_Strip], terms: Sequence[Any]) -> list[Queue]:
        """Return the products of what is entirely in the triangle, one for each strip of columns."""
        to, item, handle = self._to, self._item, self._handle(stream)
        queue: list[Queue] = []
        right, below = (to.ld, 1) if to.by_columns else (1, to.ld)
        beta, one = self._scalar(self._asked.beta), self._scalar(1)
        for strip in strips:
            m, i = strip.stop - strip.start, strip.start
            if not m:
                continue
            at = to.at + item * (i * below + strip.j * right)
            for number, (product, alpha, x, y) in enumerate(terms):
                queue.append(
                    product(
                        handle, m, strip.width, alpha, x.below(i, item), x.ld, y.below(strip.j, item), y.ld,
                        one if number else beta, at, to.ld,
                    )
                )  # fmt: skip
        return queue

    def _diagonal(
        self, stream: Any, strips: Sequence[_Strip], terms: Sequence[Any], k: int, hermitian: bool
    ) -> list[Queue]:
        """Return the products of tiles on the diagonal, and the kernels that write their triangles."""
        to, item, gpu, asked = self._to, self._item, self._gpu, self._asked
        tiles = [strip for strip in strips if strip.rows]
        right, below = (to.ld, 1) if to.by_columns else (1, to.ld)
        queue: list[Queue] = []
        handle, one, zero = self._handle(stream), self._scalar(1), self._scalar(0)
        portions = list(_portions(tiles, item))
        sizes = [sum(tile.rows * tile.width for tile in some) * item for some in portions]
        scratch = gpu.scratch(_TRIANGLE, max(sizes)) if sizes else 0  # at once: it may not move in between
        for some in portions:
            at, written = scratch, []
            for run in _runs(some):
                first = run[0]
                size = first.rows * first.width
                ld = first.rows if to.by_columns else first.width
                steps = (run[1].i - first.i, run[1].j - first.j) if len(run) > 1 else (0, 0)
                for number, (product, alpha, x, y) in enumerate(terms):
                    one_of_them = product(
                        handle, first.rows, first.width, alpha, x.below(first.i, item), x.ld,
                        y.below(first.j, item), y.ld, one if number else zero, at, ld,
                    )  # fmt: skip
                    queue.append(self._batched(one_of_them, x, y, steps, size, len(run)))
                for count, tile in enumerate(run):
                    d = to.at + item * (tile.i * below + tile.j * right)
                    written.append(
                        (ld, Tile(d, at + count * size * item, d, tile.rows, tile.width, tile.i, tile.j))
                    )
                at += len(run) * size * item
            for ld in sorted({ld for ld, _ in written}):
                alike = [tile for of, tile in written if of == ld]
                for start in range(0, len(alike), _TILES):
                    launches = gpu.launches_of_sum(
                        self._dtype, alike[start : start + _TILES], (to.by_columns, to.ld), (to.by_columns, ld),
                        (to.by_columns, to.ld), 1, asked.beta, uplo=asked.uplo, real=hermitian,
                        deals=(_deal(to.rows, to.row), _deal(to.cols, to.col)),
                    )  # fmt: skip
                    queue += [(launch, (stream,)) for launch in launches]
        return queue

    def _batched(
        self, one: Queue, x: _Factor, y: _Factor, steps: tuple[int, int], size: int, count: int
    ) -> Queue:
        """Return ``count`` products like one: what x, y and d begin with is so many rows, or elements, later."""
        if count == 1:
            return one
        _, (handle, op_x, op_y, m, n, k, alpha, a, lda, b, ldb, beta, d, ldd) = one
        step_x, step_y = (
            step * (1 if each.by_columns else each.ld) for step, each in zip(steps, (x, y), strict=True)
        )
        if not self._to.by_columns:
            step_x, step_y = step_y, step_x
        return self._function("gemm_strided_batched"), (
            handle, op_x, op_y, m, n, k, alpha, a, lda, step_x, b, ldb, step_y, beta, d, ldd, size, count,
        )  # fmt: skip


class _Strip(NamedTuple):
    """Some adjacent local columns of a triangle.

    Attributes:
        j, width: the first, and how many.
        start, stop: the local rows that are entirely in the triangle.
        i, rows: the first of the rows that the diagonal crosses, and how many they are.
    """

    j: int
    width: int
    start: int
    stop: int
    i: int
    rows: int


@lru_cache(1024)
def _strips(rows: Span, row: int, cols: Span, col: int, m: int, n: int, uplo: str) -> tuple[_Strip, ...]:
    """Return a rank's columns of a triangle, cut so that tiles on the diagonal get the same size."""
    turn = (col - cols.source) % cols.nprocs
    lead = cols.lead if turn == 0 else 0
    width = -(-max(_STRIP, -(-n // _STRIPS)) // _STRIP) * _STRIP
    strips, j = [], 0
    while j < n:
        stop = min(n, (j + lead) // width * width + width - lead)
        first, last = cols.at_place(col, j), cols.at_place(col, stop - 1)
        i, end = rows.below(first, row), rows.below(last + 1, row)
        strips.append(_Strip(j, stop - j, *((end, m) if uplo == "L" else (0, i)), i, end - i))
        j = stop
    return tuple(strips)


def _portions(tiles: Sequence[_Strip], item: int) -> Iterator[list[_Strip]]:
    """Yield tiles whose sums fit into the scratch memory together."""
    some: list[_Strip] = []
    nbytes = 0
    for tile in tiles:
        size = tile.rows * tile.width * item
        if some and nbytes + size > _SCRATCH:
            yield some
            some, nbytes = [], 0
        some.append(tile)
        nbytes += size
    if some:
        yield some


def _runs(tiles: Sequence[_Strip]) -> Iterator[list[_Strip]]:
    """Yield tiles of the same size at equal distances, so that one call multiplies them all."""
    run: list[_Strip] = []
    for tile in tiles:
        alike = not run or (tile.rows, tile.width) == (run[0].rows, run[0].width)
        if alike and len(run) > 1:
            alike = (tile.i - run[-1].i, tile.j - run[-1].j) == (run[1].i - run[0].i, run[1].j - run[0].j)
        if not alike:
            yield run
            run = []
        run.append(tile)
    if run:
        yield run


def _deal(span: Span, process: int) -> Deal:
    """Return how the indices of a process are dealt out, as kernels take it."""
    turn = (process - span.source) % span.nprocs
    return Deal(span.block, span.nprocs, turn, span.lead, span.lead if turn == 0 else 0)


_COMPUTERS: dict[str, Callable[[_Maker], Callable[[Any, int], list[Queue]]]] = {
    "matmul": _Maker.matmul,
    "trsm": _Maker.triangular,
    "trmm": _Maker.triangular,
    "symm": _Maker.sided,
    "hemm": _Maker.sided,
    "syrk": _Maker.updated,
    "herk": _Maker.updated,
    "syr2k": _Maker.updated,
    "her2k": _Maker.updated,
    "geadd": _Maker.added,
}
