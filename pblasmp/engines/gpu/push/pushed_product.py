# SPDX-License-Identifier: Apache-2.0
"""Products whose operands copy engines push while they are multiplied, for GPUs that reach each other.

Every rank pushes its part of the operands into its peers' slabs, in chunks of D's rows and columns, with a flag after
each. When a chunk arrives, a rank multiplies it by all that has arrived of the other operand, over the whole of k, with
one rounding, while the next chunks are under way. See ``plan`` for who sends what, and in which order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from ....dtypes import accumulation_dtype, is_float8
from ....layout import MatmulProblem
from ....layout.intersection import Stretches, packed, unpacked
from ...composite import QueuedProduct
from ...local.finish import Finish, number, read_by_host
from ...method import type_refusal
from ...protocol import Engine, Method
from ...request import AnyProblem, Operands, Options
from ..kernels.lt_product import Batch, Op
from ..kernels.views import View, contiguous, moves, why_no_float8
from ..runtime.gpu import Gpu
from ..runtime.windows import PUSHED
from ..session import Session, session_of
from .plan import Part, PushPlan, Slab, push_plan

_BUFFER = "slabs"
_STREAM = "copy"  # copies on two streams would share the copy engines in an unknown order
_FLOAT8 = 16  # 8-bit products take multiples of this
_ALIGNED = 16  # bytes

Array = Any


class _Sent(NamedTuple):
    """One push: what this rank has of one chunk of the receiver's slab."""

    which: int
    chunk: int
    to: int
    part: Part


class Pushed:
    """The work that this rank queues for one product. Making one is collective: it reserves symmetric memory.

    Args:
        plan: who sends what.
        multiply: computes a local product: takes the name of a stream, then the arguments of ``operations.multiply``.

    Attributes:
        sent_bytes: bytes that this rank pushes in one run.
        copied_bytes: bytes that it packs, unpacks and copies to its own slabs.
        packed_bytes: memory for its packed messages.
    """

    def __init__(self, gpu: Gpu, plan: PushPlan, p: MatmulProblem, multiply: Callable[..., None]) -> None:
        self._product = multiply
        self._gpu, self._plan, self._p, self._rank = gpu, plan, p, gpu.rank
        self._dtypes = p.a.dtype, p.b.dtype
        if plan.nbytes and gpu.size > 1:
            gpu.reserve(_BUFFER, plan.nbytes)
        self._receivers = [(gpu.rank + step) % gpu.size for step in range(1, gpu.size)]
        self._parts = [slab.parts(gpu.rank) for slab in plan.slabs]
        self._in_place = [slab.in_place(gpu.rank) for slab in plan.slabs]
        self._own = [slab.read_in_place(gpu.rank) for slab in plan.slabs]
        self._chunks = [plan.chunks(which, gpu.rank) for which in (0, 1)]
        self._received = [plan.received(which, gpu.rank) for which in (0, 1)]
        self._steps = self._in_order()
        self._packs: dict[tuple[int, Stretches, Stretches], int] = {}
        self._packing: tuple[list[_Sent], list[_Sent]] = [], []  # for the first step, and for the rest
        self.packed_bytes = self.sent_bytes = self.copied_bytes = 0
        for step, sends in enumerate(self._steps):
            for sent in sends:
                nbytes = self._nbytes(sent.which, sent.part)
                self.sent_bytes += nbytes
                if sent.part.packed and self._pack(sent) not in self._packs:
                    self._packing[step > 0].append(sent)
                    self._packs[self._pack(sent)] = self.packed_bytes
                    self.packed_bytes += -(-nbytes // 256) * 256
                    self.copied_bytes += nbytes
        for which in (0, 1):
            own = [part for part in self._parts[which] if part.source == gpu.rank and not self.stays(which)]
            messages = [part for part in chain.from_iterable(self._received[which]) if not part.direct]
            self.copied_bytes += sum(self._nbytes(which, part) for part in own + messages)
        gpu.scratch("packed", self.packed_bytes)
        if gpu.size == 1:
            gpu.scratch(_BUFFER, plan.nbytes)

    def _nbytes(self, which: int, part: Part) -> int:
        return math.prod(part.shape) * self._dtypes[which].itemsize

    def stays(self, which: int) -> bool:
        """Return whether this rank's own part of an operand's slab is multiplied where it is. Local."""
        return self._in_place[which] or self._own[which] is not None

    def takes_many_commands(self, which: int, ld: int) -> bool:
        """Return whether copy engines take many commands for blocks of a local array with this ``ld``. Local."""
        if self._plan.slabs[which].side.order != "C":
            return False
        parts = [sent.part for sent in chain.from_iterable(self._steps) if sent.which == which]
        return not all(part.packed or part.has_few_copies(ld) for part in parts)

    @staticmethod
    def _pack(sent: _Sent) -> tuple[int, Stretches, Stretches]:
        """Return what is packed for a push; pushes of the same data to several ranks share it."""
        return sent.which, packed(sent.part.outer), packed(sent.part.inner)

    def run(self, a: View, b: View, d: View, c: View | None, *, turned: bool, alpha: complex = 1,
            beta: complex = 0, compute: str | None = None) -> None:  # fmt: skip
        """Queue the product. Local to queue, collective to run.

        Args:
            a, b: this rank's local arrays as they are in memory, row by row.
            d, c: this rank's D and C, also as they are in memory; ``c`` is None if beta is 0.
            turned: ``d`` is in F order: its rows are D's columns.
            alpha, beta, compute: as in ``Options``.
        """
        gpu, views = self._gpu, (a, b)
        gpu.begin()
        if self._steps:
            self._begin(views)
        slabs = [self._slab(which, views[which]) if self._parts[which] else views[which] for which in (0, 1)]
        for which, parts in enumerate(self._parts):
            for part in parts:
                if part.source == self._rank and not self.stays(which):
                    self._move(which, views[which], slabs[which], part.outer, part.inner)
        steps = iter(self._steps[1:])
        arrived = [(0, 0), (0, 0)]  # rows of A and columns of B
        awaited: list[tuple[int, int]] = []
        for which, chunk in self._plan.sequence(self._rank):
            awaited.append((which, chunk))
            new = self._chunks[which][chunk]
            rows, cols = (new, arrived[1]) if which == 0 else (arrived[0], new)
            arrived[which] = 0, new[1]
            if rows[1] and cols[1]:
                self._receive(awaited, slabs)
                awaited = []
                self._multiply(views, slabs, rows, cols, d, c, turned, alpha, beta, compute)
                self._push(views, next(steps, []))  # queued after the product, so that this begins sooner
        self._push(views, chain.from_iterable(steps))
        gpu.end(*([_STREAM] if self._steps else []))

    # -- sending

    def _in_order(self) -> list[list[_Sent]]:
        """Return this rank's pushes in steps, in the order that the receivers need.

        The first step is what they need for their first products, beginning with what need not be packed: it travels
        while the rest is packed.
        """
        steps: list[list[_Sent]] = []
        for to in self._receivers:
            for i, (which, chunk) in enumerate(self._plan.sequence(to)):
                if i == len(steps):
                    steps.append([])
                parts = self._plan.received(which, to)[chunk]
                steps[i] += [_Sent(which, chunk, to, part) for part in parts if part.source == self._rank]
        begin = sorted(chain.from_iterable(steps[:2]), key=lambda sent: sent.part.packed)
        return [step for step in (begin, *steps[2:]) if step]

    def _begin(self, views: tuple[View, View]) -> None:
        """Queue the first step's pushes, and the packing for all steps."""
        early = [sent for sent in self._steps[0] if not sent.part.packed]
        if early:
            self._gpu.follow(_STREAM, "main")
            self._push(views, early)
        for packing, sends in ((self._packing[0], self._steps[0][len(early) :]), (self._packing[1], [])):
            for sent in packing:
                which, outer, inner = self._pack(sent)
                self._move(which, views[which], self._packed(sent), outer, inner)
            if packing:
                self._gpu.follow(_STREAM, "main")
            self._push(views, sends)

    def _push(self, views: tuple[View, View], sends: Iterable[_Sent]) -> None:
        """Queue these pushes, each with a flag."""
        gpu = self._gpu
        for sent in sends:
            which, chunk, to, part = sent
            of, here = (self._packed(sent), 0) if part.packed else (views[which], part.outer[0].src)
            target, there = self._peer_slab(which, to), part.outer[0].dst
            if not part.direct:
                target, there = self._message(to, which, chunk, self._rank, part), 0
            by_rows, count = self._plan.slabs[which].side.order == "C", part.shape[0]
            for s in part.copies:
                gpu.push(
                    _STREAM,
                    self._cut(which, target, (there, there + count), (s.dst, s.dst + s.length)),
                    self._cut(which, of, (here, here + count), (s.src, s.src + s.length)),
                    s.repeat,
                    (s.dst_step, s.src_step) if by_rows else (s.dst_step * target.ld, s.src_step * of.ld),
                )
            gpu.raise_flag(_STREAM, to, PUSHED[which].at(chunk))

    # -- receiving

    def _receive(self, chunks: list[tuple[int, int]], slabs: list[View]) -> None:
        """Queue the wait for what other ranks push of these chunks, and unpack it if that is needed."""
        received = [(which, chunk, part) for which, chunk in chunks for part in self._received[which][chunk]]
        self._gpu.await_flags(
            "main", [(part.source, PUSHED[which].at(chunk)) for which, chunk, part in received]
        )
        for which, chunk, part in received:
            if not part.direct:
                message = self._message(self._rank, which, chunk, part.source, part)
                self._move(which, message, slabs[which], unpacked(part.outer), unpacked(part.inner))

    def _multiply(self, views: tuple[View, View], slabs: list[View], rows: tuple[int, int], cols: tuple[int, int],
                  d: View, c: View | None, turned: bool, alpha: complex, beta: complex,
                  compute: str | None) -> None:  # fmt: skip
        """Queue one tile of D: a batch of products if its rows or columns are blocks at equal distances."""
        everything = 0, self._p.k
        tiles = [self._plan.tiles(which, self._rank, *outer) for which, outer in enumerate((rows, cols))]
        for pair in product(*tiles):
            factors = []
            for which, s in enumerate(pair):
                view, at = self._rows(which, s.src, views, slabs)
                step = s.src_step * (view.ld if self._plan.slabs[which].side.order == "C" else 1)
                factors.append((which, self._cut(which, view, (at, at + s.length), everything), s, step))
            (left, x, down, x_step), (right, w, across, w_step) = factors[::-1] if turned else factors
            count = max(down.repeat, across.repeat)
            place = (down.dst, down.dst + down.length), (across.dst, across.dst + across.length)
            batch = None
            if count > 1:
                d_step, c_step = (
                    down.dst_step * (0 if y is None else y.ld) + across.dst_step for y in (d, c)
                )
                batch = Batch(count, x_step, w_step, d_step, c_step)
            self._product(
                "main", x, w, _tile(d, *place), c=None if c is None else _tile(c, *place),
                op_x=self._letter(left, to_the_left=True), op_w=self._letter(right, to_the_left=False),
                alpha=alpha, beta=beta, compute=compute, batch=batch,
            )  # fmt: skip

    def _rows(self, which: int, at: int, views: tuple[View, View], slabs: list[View]) -> tuple[View, int]:
        """Return the memory that holds a row of this rank's slab, and the index of the row in it."""
        own = self._own[which]
        if own is not None and at < self._chunks[which][0][1]:  # this rank's own section is the first chunk
            return views[which], own + at
        return slabs[which], at

    def _letter(self, which: int, *, to_the_left: bool) -> Op:
        """Return cuBLASLt's letter for a slab: left factors are outer × k, right ones k × outer."""
        if (self._plan.slabs[which].side.order == "C") == to_the_left:
            return "N"
        return "C" if conjugated(self._p, which) else "T"

    # -- memory

    def _slab(self, which: int, view: View) -> View:
        """Return this rank's slab: its local array, or the buffer where it is assembled."""
        if self._in_place[which]:
            return view
        return self._peer_slab(which, self._rank)

    def _peer_slab(self, which: int, rank: int) -> View:
        slab, gpu = self._plan.slabs[which], self._gpu
        base = gpu.symmetric(_BUFFER, rank) if gpu.size > 1 else gpu.scratch(_BUFFER, self._plan.nbytes)
        at = base + self._plan.places(rank)[0][which]
        return View(at, *slab.shape(rank), max(1, slab.ld(rank)), self._dtypes[which])

    def _packed(self, sent: _Sent) -> View:
        """Return the memory in which a part is packed."""
        at = self._gpu.scratch("packed", self.packed_bytes) + self._packs[self._pack(sent)]
        return self._view(sent.which, at, *sent.part.shape)

    def _message(self, rank: int, which: int, chunk: int, source: int, part: Part) -> View:
        """Return the memory of ``rank`` in which a part of a chunk arrives that it unpacks."""
        at = self._gpu.symmetric(_BUFFER, rank) + self._plan.places(rank)[1][which, chunk, source]
        return self._view(which, at, *part.shape)

    def _view(self, which: int, at: int, outer: int, k: int) -> View:
        """Return a view of contiguous memory in an operand's memory order."""
        rows, cols = (outer, k) if self._plan.slabs[which].side.order == "C" else (k, outer)
        return View(at, rows, cols, max(1, cols), self._dtypes[which])

    def _cut(self, which: int, view: View, outer: tuple[int, int], k: tuple[int, int]) -> View:
        rows, cols = (outer, k) if self._plan.slabs[which].side.order == "C" else (k, outer)
        return _tile(view, rows, cols)

    def _move(self, which: int, of: View, to: View, outer: Stretches, inner: Stretches) -> None:
        """Queue a copy of blocks by kernels on the main stream."""
        slab: Slab = self._plan.slabs[which]
        lines, runs = (outer, inner) if slab.side.order == "C" else (inner, outer)
        self._gpu.move("main", moves(to, of, lines, runs))


def _tile(view: View, rows: tuple[int, int], cols: tuple[int, int]) -> View:
    return view.lines(*rows).columns(*cols)


def conjugated(p: MatmulProblem, which: int) -> bool:
    """Return whether an operand's values are conjugated. Local."""
    return p.a.dtype.kind == "c" and (p.op_a, p.op_b)[which] == "C"


def conjugated_first(p: MatmulProblem, plan: PushPlan, which: int) -> bool:
    """Return whether an operand must be conjugated first: the product conjugates only what it transposes. Local."""
    to_the_left = (which == 0) == (p.d.order == "C")
    return conjugated(p, which) and (plan.slabs[which].side.order == "C") == to_the_left


class PushedProduct(QueuedProduct):
    """A product of distributed matrices. Making and running one is collective over the context.

    Args:
        operands: the planned ones, whose epilogue and scales every run has.
    """

    path = "push"
    allocates = False

    def __init__(
        self, engine: Engine, session: Session, p: MatmulProblem, options: Options, operands: Operands
    ) -> None:
        self._engine, self._p, self._options = engine, p, options
        self._gpu = session.gpu
        follows, why = Finish.needed(p, operands), _why_not_one_kernel(operands)
        self._finish = Finish(engine, p) if follows and why else None
        self._by_kernel = follows and not why
        self._why_no_graph = why or read_by_host(operands)
        plan = push_plan(p, engine.transport.size)
        self._conjugates = [conjugated_first(p, plan, which) for which in (0, 1)]
        self._exact = accumulation_dtype(p.d.dtype)
        self._temporary = follows and self._exact != p.d.dtype
        self._pushed = Pushed(self._gpu, plan, p, self._multiply)
        self.sent_bytes, self.copied_bytes = self._pushed.sent_bytes, self._pushed.copied_bytes
        nbytes = plan.nbytes + self._pushed.packed_bytes + self._own_bytes(operands)
        self.workspace = engine.operations.workspace(nbytes)
        self.replays = not self._why_no_graph
        self.first = partial(session.runtime.queueing, "push: the first run")
        self._copies: dict[str, Array] = {}  # kept, since graphs hold their addresses

    def _multiply(self, stream: str, x: View, w: View, d: View, *, c: View | None, **how: Any) -> None:
        self._engine.operations.multiply(x, w, d, c, **how)  # type: ignore[attr-defined]

    def _own_bytes(self, operands: Operands) -> int:
        """Return the bytes of the copies that this product keeps for these operands."""
        p, d = self._p, operands.d
        copied = self._temporary or (d is not None and not _starts_well(d))
        wanted = [(p.d, self._exact if self._temporary else p.d.dtype)] if copied else []
        for which, (x, array) in enumerate(((p.a, operands.a), (p.b, operands.b))):
            if self._conjugates[which] or (array is not None and self._is_copied_first(which, array)):
                wanted.append((x, x.dtype))
        rank = self._engine.transport.rank
        return sum(
            math.prod(_padded(x.local_shape(rank), dtype, x.order)) * dtype.itemsize
            for x, dtype in wanted
            if rank < x.grid.size
        )

    def why_no_graph(self) -> str:
        return self._why_no_graph

    def _queue(self, operands: Operands) -> None:
        p, options, d = self._p, self._options, operands.d
        alpha = options.alpha
        if operands.scales is not None:
            alpha = alpha * number(operands.scales.a) * number(operands.scales.b)
        target = d
        if self._temporary or not _starts_well(d):
            kind = self._exact if self._temporary else p.d.dtype
            target = self._copy("target", d.shape, kind, p.d.order)
        self._gpu.use_current_stream()
        turned = p.d.order == "F"
        c = operands.c if options.beta != 0 else None
        if c is not None and target.size and not _readable(c, target.dtype, turned=turned):
            target[...] = c
            c = target
        views = [self._view(which, x) for which, x in enumerate((operands.a, operands.b))]
        self._pushed.run(
            views[0], views[1], _oriented(target, turned), None if c is None else _oriented(c, turned),
            turned=turned, alpha=alpha, beta=0 if c is None else options.beta, compute=options.compute,
        )  # fmt: skip
        if self._by_kernel:
            self._follow(target, operands)
            return
        if self._finish is not None:
            self._finish(target, operands)
        if self._temporary:
            self._engine.operations.store(d, target, p.d.dtype)
        elif target is not d:
            self._gpu.copy("main", _oriented(d, turned), _oriented(target, turned))

    def _follow(self, target: Array, operands: Operands) -> None:
        """Queue the rest after the product as one kernel, which writes D."""
        p, d, e, scales = self._p, operands.d, operands.epilogue, operands.scales
        amax = None if scales is None else scales.amax
        if amax is not None:
            amax.fill(0)
        if not d.size:
            return
        turned, bias = p.d.order == "F", None if e is None else e.bias
        self._gpu.add(
            "main", [_oriented(target, turned)], [View.of(d.T if turned else d, p.d.dtype)],
            bias=None if bias is None else View.of(bias.reshape(1, -1), name="bias"),
            activation=None if e is None else e.activation,
            scale=self._gpu.scalar(scales.d) if scales is not None and is_float8(p.d.dtype) else 0,
            amax=self._gpu.scalar(amax),
        )  # fmt: skip

    def _view(self, which: int, array: Array) -> View:
        """Return a local operand as it is in memory, conjugated if the product cannot do that."""
        matrix = (self._p.a, self._p.b)[which]
        if array is None or not array.size:
            return View(0, 0, 0, 1, matrix.dtype)
        if self._conjugates[which]:
            copy = self._copy(f"conjugate {which}", array.shape, matrix.dtype, matrix.order)
            array = self._engine.xp.conjugate(array, out=copy)
        elif self._is_copied_first(which, array):
            copy = self._copy(f"aligned {which}", array.shape, matrix.dtype, matrix.order)
            self._gpu.copy("main", self._memory(which, copy), self._memory(which, array))
            array = copy
        return self._memory(which, array)

    def _memory(self, which: int, array: Array) -> View:
        matrix = (self._p.a, self._p.b)[which]
        return View.of(array if matrix.order == "C" else array.T, matrix.dtype, "ab"[which])

    def _is_copied_first(self, which: int, array: Array) -> bool:
        """Return whether a local operand is copied first, because its alignment slows cuBLASLt or the copy engines."""
        if self._pushed.stays(which) and not _starts_well(array):
            return True
        return self._pushed.takes_many_commands(which, self._memory(which, array).ld)

    def _copy(self, name: str, shape: tuple[int, int], dtype: np.dtype, order: str) -> Array:
        """Return this product's own array of that name; its rows start at multiples of 16 bytes."""
        if name not in self._copies:
            kind = self._engine.operations.stored(dtype)
            cols = shape[1] if order == "C" else shape[0]
            array = self._engine.xp.empty(_padded(shape, dtype, order), kind)[:, :cols]
            self._copies[name] = array if order == "C" else array.T
        return self._copies[name]


def _why_not_one_kernel(operands: Operands) -> str:
    """Return why the rest after the product takes more than the one kernel that writes D, or an empty string. Local."""
    e = operands.epilogue
    if e is None or (not {*e.given} - {"bias"} and e.activation in (None, "relu", "gelu")):
        return ""
    return f"epilogue {e.name!r} is computed after the product in steps that allocate; bias, relu and gelu are not"


def _padded(shape: tuple[int, int], dtype: np.dtype, order: str) -> tuple[int, int]:
    """Return lines, and entries of one, so that each starts at a multiple of 16 bytes. Local."""
    unit = max(1, _ALIGNED // dtype.itemsize)
    rows, cols = shape if order == "C" else shape[::-1]
    return rows, -(-cols // unit) * unit


def _starts_well(array: Array) -> bool:
    """Return whether cuBLASLt's fast kernels take an array: others are 1.3 (float64) to 7 (bfloat16) times as slow."""
    apart = max(array.strides) if min(array.shape, default=0) > 1 else 0
    return not array.size or not (int(array.data.ptr) % _ALIGNED or apart % _ALIGNED)


def _readable(c: Array, dtype: np.dtype, *, turned: bool) -> bool:
    """Return whether cuBLASLt reads C where it is, as it does if it could write D there."""
    return c.dtype == dtype and contiguous(c, turned=turned) and _starts_well(c)


def _oriented(array: Array, turned: bool) -> View:
    if not array.size:
        return View(0, 0, 0, 1, np.dtype(array.dtype))
    return View.of(array.T if turned else array)


# -- the row of the registry


class PushMethod(Method):
    """Products whose operands copy engines push."""

    name = "push"

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, MatmulProblem) and problem.scheme == "gemm"

    def refusal(
        self, engine: Engine, problem: MatmulProblem, options: Options, operands: Operands | None
    ) -> str:
        session, p = session_of(engine), problem
        why = type_refusal(engine, p, options, operands)
        if why:
            return why
        if session.runtime.size > 1 and session.gpu.why_no_windows:
            return session.gpu.why_no_windows
        if 0 in (p.m, p.n, p.k) or options.alpha == 0:
            return "there is nothing to multiply"
        plan = push_plan(p, session.runtime.size)
        if is_float8(p.a.dtype):
            why = why_no_float8(session.runtime.capability) or _why_not_float8(p, plan)
            if why:
                return why
        if options.algo != "auto":
            return ""
        windows = session.gpu.windows
        if windows is not None and plan.nbytes <= windows.buffer(_BUFFER).nbytes:
            return ""
        enough, limit = engine.transport.fits(plan.nbytes)
        needs = f"gathered operands would need {plan.nbytes} bytes per GPU, only {limit} available"
        return "" if enough else needs

    def cost(self, engine: Engine, problem: MatmulProblem, options: Options) -> float:
        """Return less than cuBLASMp costs if anything is sent. Local."""
        return 0.9 if engine.transport.size > 1 else 5.0

    def prepare(
        self, engine: Engine, problem: MatmulProblem, options: Options, operands: Operands
    ) -> PushedProduct:
        return PushedProduct(engine, session_of(engine), problem, options, operands)


def _why_not_float8(p: MatmulProblem, plan: PushPlan) -> str:
    """Return why cuBLASLt cannot multiply the 8-bit floats of some rank. Local."""
    if p.a.dtype == p.b.dtype and p.a.dtype.name == "float8_e5m2":
        return "A and B are both float8_e5m2: cuBLASLt multiplies them in bfloat16 only"
    for name, slab in zip("AB", plan.slabs, strict=True):
        if slab.side.order != "C":
            return f"{name}: 8-bit products need k contiguous in memory"
    sizes = {p.k, *(n for shape in plan.shapes for n in shape)}
    sizes |= {x.local_shape(rank)[x.order == "C"] for x in (p.a, p.b) for rank in range(x.grid.size)}
    odd = [n for n in sizes if n % _FLOAT8]
    return f"8-bit products need multiples of {_FLOAT8}, got {odd[0]} rows or columns" if odd else ""


METHODS = (PushMethod(),)
