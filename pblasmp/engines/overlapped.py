# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products from a rank's own GEMMs and messages, piece by piece: one travels, one is multiplied.

They take any sizes, even ones that differ from rank to rank. D[T, N] = alpha X W + beta C, all C-ordered; X is tokens ×
inputs, W inputs × outputs. Every engine with a ``Lane`` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from ..dtypes import accumulation_dtype, is_float8
from ..epilogue import Epilogue
from ..errors import UnsupportedError
from ..scales import Scales
from .after import activate, store
from .base import Options, Workspace
from .lane import Lane

__all__ = ["GatheredInput", "GatheredOutput", "PiecewiseProduct", "SummedOutput"]

Array = Any
_PANELS = 4
_PANEL = 256  # columns; a narrower panel costs GEMM its speed


class PiecewiseProduct:
    """What the products here have in common.

    Args:
        lane: the engine's.
        options: alpha, beta, the type in which partial sums travel, what follows, scales.
        dtype, w_dtype: types of X and W.
        out_dtype: type of D.
        transposed: W is given as outputs × inputs.
        notes: why this way is taken.
    """

    path = ""
    copied_bytes = 0

    def __init__(
        self,
        lane: Lane,
        options: Options,
        *,
        dtype: np.dtype,
        w_dtype: np.dtype,
        out_dtype: np.dtype,
        transposed: bool,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._lane, self._transposed = lane, transposed
        self._options = replace(options, epilogue=None, scales=None)
        self._dtype, self._w_dtype, self._out_dtype = dtype, w_dtype, out_dtype
        self._float8 = is_float8(dtype)
        if self._float8:
            wide = lane.multiplies(dtype).name
            notes += (f"8-bit operands are multiplied in {wide}, which holds their values",)
        self.notes = notes
        self.workspace = Workspace(0, 0)
        self.sent_bytes = 0
        self.follow(options.epilogue, options.scales)

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Compute D from the local arrays. Collective over the context."""
        if self._scales.amax is not None:
            self._scales.amax[...] = 0
        self._run(a, b, c, d)

    def _run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        raise NotImplementedError

    def _turns(self) -> list[tuple[int, int]]:
        """Return whom to send to and whom to receive from, in turn, so that no rank is everyone's at once."""
        me, size = self._lane.rank, self._lane.size
        return [((me + step) % size, (me - step) % size) for step in range(1, size)]

    def _tokens(self, x: Array) -> Array:
        return self._lane.operand(x, self._dtype, "x")

    def _weights(self, w: Array) -> Array:
        w = self._lane.operand(w, self._w_dtype, "w")
        return w.T if self._transposed else w

    def _multiply(self, x: Array, w: Array, c: Array | None, d: Array, columns: slice) -> None:
        """Compute a part of D from W's ``columns``, and what follows; ``c`` may be ``d``."""
        exact = accumulation_dtype(d.dtype)
        followed = self._epilogue is not None or self._float8
        late = followed and exact != d.dtype  # it is rounded at the end
        target = self._lane.scratch("sum", d.shape, exact) if late else d
        self._sum(x, w, c, target)
        self._finish(target, columns)
        if late:
            d[...] = target

    def _finish(self, target: Array, columns: slice) -> None:
        """Add the bias of W's ``columns``, apply the activation and D's scale."""
        e = self._epilogue
        if e is not None:
            activate(self._lane.xp, e if e.bias is None else replace(e, bias=e.bias[columns]), target, None)
        store(self._lane.xp, self._scales, self._out_dtype, target)

    def _sum(self, x: Array, w: Array, c: Array | None, target: Array) -> None:
        """Compute ``target = alpha x w + beta c``."""
        alpha, beta = self._options.alpha, self._options.beta
        if self._float8:
            self._sum_scaled(x, w, c, target)
            return
        if beta == 0 or c is None:
            beta = 0
        elif c is not target:
            target[...] = c
        if alpha != 0 and x.size and w.size:
            self._lane.gemm(alpha, x, w, beta, target, self._options.compute)
        elif beta == 0:
            target[...] = 0
        else:
            target *= beta

    def _sum_scaled(self, x: Array, w: Array, c: Array | None, target: Array) -> None:
        """Compute ``target = alpha (a x) (b w) + beta c`` in float32, with scales as they are then."""
        options, exact = self._options, accumulation_dtype(self._dtype)
        scales = [scale for scale in (self._scales.a, self._scales.b) if scale is not None]
        numbers = [scale for scale in scales if isinstance(scale, (int, float))]
        aside = target.dtype != exact or c is target
        product = self._lane.scratch("product", target.shape, exact) if aside else target
        if options.alpha != 0 and x.size and w.size:
            self._lane.gemm(math.prod([options.alpha, *numbers]), x, w, 0, product, options.compute)
            for scale in scales:
                if not isinstance(scale, (int, float)):
                    product *= scale.reshape(())
        else:
            product[...] = 0
        if options.beta != 0 and c is not None:
            product += options.beta * c.astype(exact)
        if aside:
            target[...] = product

    def _share_amax(self) -> None:
        """Replace amax by the largest of all ranks, each of which has all of D."""
        lane, amax = self._lane, self._scales.amax
        if amax is None or lane.size == 1:
            return
        found = lane.scratch("amax", (lane.size, 1), np.dtype(np.float32))
        found[lane.rank] = amax.reshape(1)
        turns = self._turns()
        mine, others = found[lane.rank], [(found[source], source) for _, source in turns]
        lane.wait(lane.start([(mine, to) for to, _ in turns], others))
        amax[...] = found.max()

    def misfit(self, name: str, array: Array) -> str:  # noqa: ARG002
        """Any array of the planned shape will do."""
        return ""

    def follow(self, epilogue: Epilogue | None, scales: Scales | None) -> None:
        """Let these take the place of the planned ones."""
        self._epilogue, self._scales = epilogue, scales or Scales()

    def release(self) -> None:
        """Forget the arrays of the last run."""
        self.follow(None, None)

    def capture(self, a: Array, b: Array, c: Array | None, d: Array) -> Callable[[], None]:  # noqa: ARG002
        """Messages between pieces are not recorded."""
        raise UnsupportedError("a CUDA graph: this product runs piece by piece")

    def close(self) -> None:
        """Nothing is held: buffers are the engine's."""


class GatheredInput(PiecewiseProduct):
    """AllGather + GEMM: each rank's tokens are multiplied as they arrive.

    Args:
        rows: how many rows of X each rank has.
        inputs: columns of X.
        **how: of every product here.

    Attributes:
        gathered: where the next run leaves all of X; None: nowhere.
    """

    path = "every rank's part of X is multiplied as it arrives"

    def __init__(self, lane: Lane, options: Options, rows: Sequence[int], inputs: int, **how: Any) -> None:
        super().__init__(lane, options, **how)
        self._parts, self._inputs = _slices(rows), inputs
        row = inputs * self._dtype.itemsize
        self.sent_bytes = rows[lane.rank] * row * (lane.size - 1)
        self.workspace = lane.workspace(sum(rows) * row if lane.size > 1 else 0)
        self.gathered: Array | None = None

    def _run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        lane, parts = self._lane, self._parts
        mine, x = parts[lane.rank], a
        whole, self.gathered = self.gathered, None
        if whole is not None:
            whole[mine] = x
        else:
            whole = lane.scratch("gathered", (parts[-1].stop if lane.size > 1 else 0, self._inputs), x.dtype)
        if lane.size > 1 and not x.flags.c_contiguous:  # messages are
            whole[mine] = x
            x = whole[mine]
        messages = []
        for to, source in self._turns():
            arriving = whole[parts[source]]
            messages.append((source, arriving, lane.start(_some(x, to), _some(arriving, source))))
        w, columns = self._weights(b), slice(0, d.shape[1])
        self._multiply(self._tokens(x), w, *_parts_of(c, d, mine), columns)
        for source, arrived, message in messages:
            lane.wait(message)
            self._multiply(self._tokens(arrived), w, *_parts_of(c, d, parts[source]), columns)


class SummedOutput(PiecewiseProduct):
    """GEMM + ReduceScatter, or + AllReduce: each rank's rows of the partial products are sent to it and summed there.

    Args:
        rows: how many rows of D each rank sums.
        outputs: columns of D.
        everywhere: every rank gets all of D, otherwise its rows only.
        **how: of every product here.
    """

    def __init__(
        self,
        lane: Lane,
        options: Options,
        rows: Sequence[int],
        outputs: int,
        *,
        everywhere: bool,
        **how: Any,
    ) -> None:
        super().__init__(lane, options, **how)
        self._parts, self._everywhere = _slices(rows), everywhere
        self._travels = lane.carries(self._out_dtype, options.comm_dtype)
        self.path = "partial products are summed where they arrive, piece by piece"
        mine, row = rows[lane.rank], outputs * self._travels.itemsize
        self.sent_bytes = (sum(rows) - mine) * row
        if everywhere:
            self.path += ", and gathered"
            self.sent_bytes += mine * outputs * self._out_dtype.itemsize * (lane.size - 1)
        self.workspace = lane.workspace((sum(rows) + (lane.size - 1) * mine) * row if lane.size > 1 else 0)

    def _run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        lane, parts = self._lane, self._parts
        mine = parts[lane.rank]
        count, width = mine.stop - mine.start, d.shape[1]
        x, w = self._tokens(a), self._weights(b)
        messages = []
        if lane.size > 1:
            outgoing = lane.scratch("outgoing", (parts[-1].stop, width), self._travels)
            incoming = lane.scratch("incoming", ((lane.size - 1) * count, width), self._travels)
        for turn, (to, source) in enumerate(self._turns()):
            part, arriving = outgoing[parts[to]], incoming[turn * count : (turn + 1) * count]
            self._sum(x[parts[to]], w, None, part)
            messages.append((arriving, lane.start(_some(part, to), _some(arriving, source))))
        c, own = _parts_of(c, d, mine if self._everywhere else slice(None))
        exact = accumulation_dtype(own.dtype)
        target = own if exact == own.dtype else lane.scratch("sum", own.shape, exact)
        self._sum(x[mine], w, c, target)
        for arrived, message in messages:
            lane.wait(message)
            target += arrived if arrived.dtype == target.dtype else arrived.astype(target.dtype)
        self._finish(target, slice(0, width))
        if target is not own:
            own[...] = target
        if self._everywhere and lane.size > 1:
            self._gather(d)
            self._share_amax()

    def _gather(self, d: Array) -> None:
        """Send this rank's rows of D to all, and receive theirs."""
        lane, parts = self._lane, self._parts
        whole = d
        if not d.flags.c_contiguous:
            whole = lane.scratch("outgoing", d.shape, d.dtype)
            whole[parts[lane.rank]] = d[parts[lane.rank]]
        own = whole[parts[lane.rank]]
        message = lane.start(
            [each for to, _ in self._turns() for each in _some(own, to)],
            [each for _, source in self._turns() for each in _some(whole[parts[source]], source)],
        )
        lane.wait(message)
        if whole is not d:
            d[...] = whole


class GatheredOutput(PiecewiseProduct):
    """GEMM + AllGather of the output, by panels of its columns: one is gathered while the next one is multiplied.

    Args:
        columns: how many columns of D each rank computes.
        tokens: rows of D.
        inputs: columns of X.
        **how: of every product here.
    """

    def __init__(
        self, lane: Lane, options: Options, columns: Sequence[int], tokens: int, inputs: int, **how: Any
    ) -> None:
        super().__init__(lane, options, **how)
        self._parts = _slices(columns)
        worth = int(2 * tokens * max(columns) * inputs / lane.panel_flops)
        self._panels = max(1, min(_PANELS, max(columns) // _PANEL, worth))
        self.path = f"panels of columns, each gathered while the next one is multiplied: {self._panels}"
        column = tokens * self._out_dtype.itemsize
        self.sent_bytes = columns[lane.rank] * column * (lane.size - 1)
        widest = -(-sum(columns) // self._panels) + lane.size
        self.workspace = lane.workspace(min(2, self._panels) * widest * column if lane.size > 1 else 0)

    def _run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        lane = self._lane
        x, w = self._tokens(a), self._weights(b)
        if lane.size == 1:
            self._multiply(x, w, c, d, slice(0, d.shape[1]))
            return
        first = self._parts[lane.rank].start
        under_way: list[tuple[Any, list[tuple[Array, slice]]]] = []
        for panel in range(self._panels):
            parts = {rank: self._panel(rank, panel, d) for rank in range(lane.size)}
            part, columns = parts.pop(lane.rank)
            here = slice(columns.start - first, columns.stop - first)
            self._multiply(x, w[:, here], None if c is None else c[:, columns], part, here)
            message = lane.start(
                [each for to, _ in self._turns() for each in _some(part, to)],
                [each for _, source in self._turns() for each in _some(parts[source][0], source)],
            )
            under_way.append((message, [(part, columns), *parts.values()]))
            if panel:
                self._place(*under_way.pop(0), d)
        self._place(*under_way.pop(), d)
        self._share_amax()

    def _panel(self, rank: int, panel: int, d: Array) -> tuple[Array, slice]:
        """Return the buffer for what ``rank`` computes of a panel, and which columns of D these are."""
        start, stop = self._parts[rank].start, self._parts[rank].stop
        cuts = [start + (stop - start) * i // self._panels for i in (panel, panel + 1)]
        shape = d.shape[0], cuts[1] - cuts[0]
        return self._lane.scratch(f"panel{panel % 2}.{rank}", shape, d.dtype), slice(*cuts)

    def _place(self, message: Any, parts: list[tuple[Array, slice]], d: Array) -> None:
        """Write a panel that has arrived where it belongs."""
        self._lane.wait(message)
        for array, columns in parts:
            d[:, columns] = array


def _slices(counts: Sequence[int]) -> list[slice]:
    """Return where each rank's part lies, one after the other."""
    stops = list(accumulate(counts))
    return [slice(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def _parts_of(c: Array | None, d: Array, rows: slice) -> tuple[Array | None, Array]:
    """Return the same rows of C and of D, the same array where these are the same."""
    part = d[rows]
    return (None if c is None else part if c is d else c[rows]), part


def _some(array: Array, peer: int) -> list[tuple[Array, int]]:
    """Return a message, or none where there is nothing in it."""
    return [(array, peer)] if array.size else []
