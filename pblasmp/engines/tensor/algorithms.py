# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products from local GEMMs, by messages or in memory that all ranks reach.

"push": one part travels while the next one is multiplied. It takes any sizes, even ones that differ from rank to rank.

The others: every rank writes its part of X, or its GEMM's result, into shared memory. Then the ranks multiply all
that was written; or they add or copy it, in pieces that stay in the caches, and write each element of the result once.
The ranks have agreed since the previous run, so that no rank still reads what is overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from ...comm import Partners
from ...dtypes import accumulation_dtype
from ...layout import ParallelProblem
from ..method import follower_refusal, library_refusal, travel_refusal
from ..protocol import Engine, Transfer
from ..request import Operands, Options
from .tensor_product import Memory, OperandsT, ParallelProduct, TensorMethod, TensorProduct

Array = Any
_PANELS = 4
_PANEL = 256  # columns; narrower panels slow GEMM down


class MessageGather(ParallelProduct):
    """AllGather + GEMM: each rank's tokens are multiplied as they arrive."""

    path = "every rank's part of X is multiplied as it arrives"

    def _prepare(self) -> None:
        p = self.p
        if p.size > 1 and not p.return_gathered:
            self.own["gathered"] = Memory(p.dtype, [(sum(p.tokens), p.inputs[0])])
        self.sent_bytes = self._sent()

    def _multiply(self, operands: Operands) -> None:
        if self.size == 1:
            if operands.gathered is not None:
                operands.gathered[...] = operands.a
            self.whole(operands, operands.a, operands.c, operands.d)
            return
        x, parts = operands.a, self.p.slices("tokens")
        mine, total = parts[self.rank], operands.gathered
        if total is None:
            total = self.memory("gathered")
        if operands.gathered is not None or not x.flags.c_contiguous:  # messages must be contiguous
            total[mine] = x
            x = total[mine]
        transfers = []
        for to, source in _turns(self):
            arriving = total[parts[source]]
            transfers.append((source, arriving, self._transport.start(_some(x, to), _some(arriving, source))))
        self.whole(operands, x, *_parts_of(operands, mine))
        for source, arrived, transfer in transfers:
            transfer.finish()
            self.whole(operands, arrived, *_parts_of(operands, parts[source]))


class MessageSum(ParallelProduct):
    """GEMM + ReduceScatter, or + AllReduce: each rank receives its rows of all partial products and sums them."""

    def _prepare(self) -> None:
        self._parts = self.added
        self.path = "partial products are summed by the rank that owns their rows"
        if self.everywhere:
            self.path += ", and gathered"
        self.sent_bytes = self._sent()
        tokens, outputs, mine = self.p.tokens[0], self.p.outputs[0], self._parts[self.rank]
        if self.size > 1:
            self.own["outgoing"] = Memory(self.travels, [(tokens, outputs)])
            incoming = (self.size - 1) * (mine.stop - mine.start)
            self.own["incoming"] = Memory(self.travels, [(incoming, outputs)])

    def _multiply(self, operands: Operands) -> None:
        parts, x = self._parts, operands.a
        mine = parts[self.rank]
        count, width = mine.stop - mine.start, operands.d.shape[1]
        transfers = []
        if self.size > 1:
            outgoing, incoming = self.memory("outgoing"), self.memory("incoming")
        for turns in self._multiplied_at_once():
            rows = slice(parts[turns[0][1]].start, parts[turns[-1][1]].stop)
            self.part(operands, x[rows], outgoing[rows])
            for turn, to, source in turns:
                arriving = incoming[turn * count : (turn + 1) * count]
                transfer = self._transport.start(_some(outgoing[parts[to]], to), _some(arriving, source))
                transfers.append((arriving, transfer))
        c, own = _parts_of(operands, mine if self.everywhere else slice(None))
        exact = accumulation_dtype(self.p.out_dtype)
        target = own if exact == own.dtype else self._operations.scratch("sum", own.shape, exact)
        self._sum(operands, x[mine], operands.b, c, target)
        for arrived, transfer in transfers:
            transfer.finish()
            target += arrived if arrived.dtype == target.dtype else arrived.astype(target.dtype)
        self._finish(operands, target, slice(0, width))
        if target is not own:
            self._operations.store(own, target, self.p.out_dtype)
        if self.everywhere and self.size > 1:
            self._gather(operands.d)

    def _multiplied_at_once(self) -> list[list[tuple[int, int, int]]]:
        """Return the turns, each with the ranks to send to and to receive from, by the products that they wait for.

        If nothing travels during a product, those with adjacent rows are one: it packs the weights once.
        """
        turns = [(turn, *pair) for turn, pair in enumerate(_turns(self))]
        if self._engine.traits.overlaps_messages:
            return [[each] for each in turns]
        after = self.size - 1 - self.rank
        return [each for each in (turns[:after], turns[after:]) if each]

    def _gather(self, d: Array) -> None:
        """Send this rank's rows of D to all ranks, and receive theirs."""
        parts, total = self._parts, d
        if not d.flags.c_contiguous:
            total = self._operations.scratch("outgoing", d.shape, d.dtype)
            total[parts[self.rank]] = d[parts[self.rank]]
        _exchange_parts(self, total[parts[self.rank]], lambda source: total[parts[source]]).finish()
        if total is not d:
            d[...] = total


class MessageOutput(ParallelProduct):
    """GEMM + AllGather of the output, in panels of its columns: one is gathered while the next one is multiplied."""

    def _prepare(self) -> None:
        p = self.p
        self._parts = p.slices("outputs")
        tokens, widest = p.tokens[0], max(p.outputs)
        flops = 2 * tokens * widest * p.inputs[0] if self._engine.traits.overlaps_messages else 0
        worth = int(flops / self._operations.panel_flops)
        self._panels = max(1, min(_PANELS, widest // _PANEL, worth))
        self.path = f"panels of columns, each gathered while the next one is multiplied: {self._panels}"
        self.sent_bytes = self._sent()
        if p.size > 1:
            for rank, i in product(range(p.size), range(min(2, self._panels))):
                panel = -(-p.outputs[rank] // self._panels)
                self.own[f"panel{i}.{rank}"] = Memory(p.out_dtype, [(tokens, panel)])

    def _multiply(self, operands: Operands) -> None:
        x, c, d = operands.a, operands.c, operands.d
        if self.size == 1:
            self.whole(operands, x, c, d)
            return
        first = self._parts[self.rank].start
        under_way: list[tuple[Transfer, list[tuple[Array, slice]]]] = []
        for panel in range(self._panels):
            parts = {rank: self._panel(rank, panel, d.shape[0]) for rank in range(self.size)}
            part, columns = parts.pop(self.rank)
            here = slice(columns.start - first, columns.stop - first)
            self.whole(operands, x, None if c is None else c[:, columns], part, here)
            transfer = _exchange_parts(self, part, lambda source, parts=parts: parts[source][0])
            under_way.append((transfer, [(part, columns), *parts.values()]))
            if panel:
                self._place(*under_way.pop(0), d)
        self._place(*under_way.pop(), d)

    def _panel(self, rank: int, panel: int, tokens: int) -> tuple[Array, slice]:
        """Return the buffer for what ``rank`` computes of a panel, and which columns of D these are."""
        start, stop = self._parts[rank].start, self._parts[rank].stop
        cuts = [start + (stop - start) * i // self._panels for i in (panel, panel + 1)]
        (array,) = self.cut(self.memory(f"panel{panel % 2}.{rank}"), [(tokens, cuts[1] - cuts[0])])
        return array, slice(*cuts)

    @staticmethod
    def _place(transfer: Transfer, parts: list[tuple[Array, slice]], d: Array) -> None:
        """Write a panel that has arrived to its place in the result."""
        transfer.finish()
        for array, columns in parts:
            d[:, columns] = array


def _parts_of(operands: Operands, rows: slice) -> tuple[Array | None, Array]:
    """Return the same rows of C and of D, as one array if C is D."""
    c, part = operands.c, operands.d[rows]
    return (None if c is None else part if c is operands.d else c[rows]), part


def _exchange_parts(of: ParallelProduct, mine: Array, theirs: Any) -> Transfer:
    """Start sending this rank's part to all ranks, and receiving their parts into ``theirs(rank)``."""
    turns = _turns(of)
    return of._transport.start(
        [each for to, _ in turns for each in _some(mine, to)],
        [each for _, source in turns for each in _some(theirs(source), source)],
    )


def _counterparts(of: ParallelProduct) -> tuple[list[int], list[int]]:
    """Return the ranks of other nodes that get this rank's part for their node, and those whose parts it gets."""
    partners = Partners(of.rank, of._transport.nodes)
    return [rank for _, rank in partners.letters], [rank for _, rank in partners.boxes]


def _send_to_nodes(of: NodesInput | NodesOutput, parts: Any) -> None:
    """Send ``parts(rank)`` of this rank to each other node once, and receive others' for this one, in shared memory."""
    of._transport.start(
        [each for to in of._to for each in _some(parts(of.rank), to)],
        [each for source in of._of for each in _some(parts(source), source)],
    ).finish()


def _turns(of: ParallelProduct) -> list[tuple[int, int]]:
    """Return the pairs of ranks to send to and to receive from, in an order that spreads the receivers."""
    return list(zip(of.peers, reversed(of.peers), strict=True))


def _some(array: Array, peer: int) -> list[tuple[Array, int]]:
    """Return a list of one message, or an empty list if the message would be empty."""
    return [(array, peer)] if array.size else []


# -- the rows of the registry


def _sums_are_less(p: ParallelProblem, nodes: int, parts: int) -> bool:
    """Return whether a node receives fewer bytes of sums than of operands, if others send ``parts`` of each sum."""
    tokens, outputs, inputs = p.sizes
    sums = tokens * outputs * parts * accumulation_dtype(p.out_dtype).itemsize
    return sums < inputs * (outputs + tokens // nodes) * p.dtype.itemsize


class MessageMethod(TensorMethod):
    """By messages between all ranks, which overlap local products."""

    name = "push"

    def refusal(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        size = engine.transport.size
        if problem.size != size:
            return f"the operands are on {problem.size} ranks; this algorithm needs all {size}"
        why = follower_refusal(operands) or library_refusal(options, operands)
        if not why and problem.sums:
            travels = engine.transport.carries(problem.out_dtype, options.comm_dtype)
            why = travel_refusal(options.comm_dtype, travels)
        return why or engine.operations.refusal(problem.dtype, options.compute)

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        """Return less than the cost of gathering if messages travel on their own while a queued product runs.

        And less than the cost of slabs if a node then receives less: partial sums, not weights and tokens.
        """
        if engine.traits.overlaps_messages:
            return 2.5
        count = len(engine.transport.nodes)
        if problem.form != "matmul_reduce_scatter" or count == 1:
            return 5.0
        return 1.9 if _sums_are_less(problem, count, problem.size // count) else 5.0

    def prepare(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> ParallelProduct:
        kinds = {"allgather_matmul": MessageGather, "matmul_allgather": MessageOutput}
        return kinds.get(problem.form, MessageSum)(engine, problem, options)


MESSAGES = MessageMethod()


class PulledSum(TensorProduct[OperandsT]):
    """GEMM + ReduceScatter or AllReduce: every rank adds its rows of all partial products, in the order of the ranks.

    With AllReduce the others then copy these rows.
    """

    def _prepare(self) -> None:
        p = self.p
        shape = p.tokens[0], p.outputs[0]
        self.shared["parts"] = Memory(self.travels, [shape] * p.size)
        if self.everywhere:
            self.shared["sums"] = Memory(p.out_dtype, [shape] * p.size)

    def _multiply(self, operands: OperandsT) -> None:
        parts, c, out = self.everyones("parts"), operands.c, operands.d
        self.part(operands, operands.a, parts[self.rank])
        sums = self.everyones("sums") if self.everywhere else []
        self.meet()
        mine = self.added[self.rank]
        parts = [part[mine] for part in parts]
        if not sums:
            self.add(operands, parts, [out], c)
            return
        self.add(operands, parts, [out[mine], sums[self.rank][mine]], None if c is None else c[mine])
        self.meet()
        self.copy_all((out[self.added[rank]], sums[rank][self.added[rank]]) for rank in self.peers)


class _SharedSum(PulledSum[Operands], ParallelProduct):
    path = "partial products in memory that the ranks share, added by the rank that owns their rows"

    def _prepare(self) -> None:
        super()._prepare()
        mine = self.added[self.rank]
        row = self.p.outputs[0] * self.travels.itemsize
        self.copied_bytes = (mine.stop - mine.start) * row * (self.size - 1)


class NodesSum(ParallelProduct):
    """GEMM + ReduceScatter between nodes: a node adds up what its ranks have of a row, and sends that once."""

    path = "partial products added on each node, whose sums are added by the rank that owns their rows"

    def _prepare(self) -> None:
        p, nodes = self.p, self._transport.nodes
        self._here = next(ranks for ranks in nodes if self.rank in ranks)
        self._of, self._to = _counterparts(self)
        outputs, mine = p.outputs[0], p.rows[self.rank]
        self.shared["parts"] = Memory(self.travels, [(p.tokens[0], outputs)] * max(map(len, nodes)))
        self.own["outgoing"] = Memory(self.travels, [(sum(p.rows[rank] for rank in self._to), outputs)])
        self.own["incoming"] = Memory(self.travels, [(mine * len(self._of), outputs)])
        self.sent_bytes = self.own["outgoing"].nbytes
        self.copied_bytes = mine * outputs * self.travels.itemsize * (len(self._here) - 1)

    def _multiply(self, operands: Operands) -> None:
        p, transport, parts = self.p, self._transport, self.everyones("parts")[: len(self._here)]
        outputs, mine = p.outputs[0], self.added[self.rank]
        self.part(operands, operands.a, parts[self._here.index(self.rank)])
        self.meet()
        shapes = [(p.rows[rank], outputs) for rank in self._to]
        outgoing = self.cut(self.memory("outgoing"), shapes)
        incoming = self.cut(self.memory("incoming"), [(p.rows[self.rank], outputs)] * len(self._of))
        for rank, total in zip(self._to, outgoing, strict=True):
            rows = self.added[rank]
            total[...] = parts[0][rows]
            for part in parts[1:]:
                total += part[rows]
        transfer = transport.start(
            [each for to in zip(outgoing, self._to, strict=True) for each in _some(*to)],
            [each for of in zip(incoming, self._of, strict=True) for each in _some(*of)],
        )
        transfer.finish()
        self.add(operands, [*(part[mine] for part in parts), *incoming], [operands.d], operands.c)


class SharedInput(ParallelProduct):
    """AllGather + GEMM: every rank copies its tokens to shared memory, and multiplies all of them in one GEMM."""

    path = "every rank's part of X copied to memory that the ranks share, then one product"

    def _prepare(self) -> None:
        p, multiplied = self.p, self._operations.multiplies(self.p.dtype)
        self.shared["x"] = Memory(multiplied, [(sum(p.tokens), p.inputs[0])])
        self.copied_bytes = p.tokens[self.rank] * p.inputs[0] * multiplied.itemsize

    def _multiply(self, operands: Operands) -> None:
        everything = self.everyones("x")[self.rank]
        everything[self.p.slices("tokens")[self.rank]] = operands.a
        self.meet()
        if operands.gathered is not None:
            operands.gathered[...] = everything
        self.whole(operands, everything, operands.c, operands.d)


class NodesInput(SharedInput):
    """The same between nodes, each of which gets the tokens of each rank of the others once."""

    path = "every rank's part of X sent to each node once, to memory that its ranks share, then one product"

    def _prepare(self) -> None:
        p = self.p
        self.shared["x"] = Memory(p.dtype, [(sum(p.tokens), p.inputs[0])])
        self._to, self._of = _counterparts(self)
        self.copied_bytes = p.tokens[self.rank] * p.inputs[0] * p.dtype.itemsize
        self.sent_bytes = self.copied_bytes * len(self._to)

    def meet(self) -> None:
        """Wait until all tokens are here. Collective over the ranks."""
        everything, parts = self.everyones("x")[self.rank], self.p.slices("tokens")
        _send_to_nodes(self, lambda rank: everything[parts[rank]])
        super().meet()


class RingSum(ParallelProduct):
    """GEMM + ReduceScatter or AllReduce: every rank's GEMM adds in turn to a sum that the ranks share.

    In each of P steps every rank adds to different rows of the sum, in the last step to those that it owns.
    """

    path = "partial products added in turn to a sum that the ranks share"

    def _prepare(self) -> None:
        p = self.p
        self.shared["total"] = memory = Memory(self.travels, [(p.tokens[0], p.outputs[0])])
        self.copied_bytes = memory.nbytes if self.everywhere else memory.nbytes // p.size

    def _multiply(self, operands: Operands) -> None:
        x, c, exact = operands.a, operands.c, self.travels
        total = self.everyones("total")[self.rank]
        for step in range(self.size):
            rows = self.added[(self.rank + 1 + step) % self.size]
            if step == 0:
                self.part(operands, x[rows], total[rows])
            else:
                self.meet()
                self._accumulate(operands, x[rows], total[rows])
        mine = self.added[self.rank]
        own = total[mine]
        if c is not None:
            there = c[mine] if self.everywhere else c
            own += exact.type(self.options.beta) * there.astype(exact, copy=False)
        self._finish(operands, own, slice(None))
        if not self.everywhere:
            operands.d[...] = own
            return
        self.meet()
        operands.d[...] = total

    def _accumulate(self, operands: Operands, x: Array, target: Array) -> None:
        """Compute ``target += alpha x w``."""
        if self._float8:
            part = self._operations.scratch("piece", target.shape, target.dtype)
            self.part(operands, x, part)
            target += part
        elif self.options.alpha != 0:
            self._operations.gemm(
                self.options.alpha, self._tokens(x), operands.b, 1, target, self.options.compute
            )


class PulledOutput(TensorProduct[OperandsT]):
    """GEMM + AllGather of the output: every rank computes its columns into shared memory, and copies the others."""

    def _prepare(self) -> None:
        p = self.p
        self.shared["panels"] = Memory(p.out_dtype, [(p.tokens[0], outputs) for outputs in p.outputs])

    def _multiply(self, operands: OperandsT) -> None:
        panels, columns, c = self.everyones("panels"), self.p.slices("outputs"), operands.c
        mine = columns[self.rank]
        if self.p.outputs[self.rank]:
            self.whole(operands, operands.a, None if c is None else c[:, mine], panels[self.rank])
        self.meet()
        self.copy_all((operands.d[:, columns[rank]], panels[rank]) for rank in (*self.peers, self.rank))


class _SharedOutput(PulledOutput[Operands], ParallelProduct):
    path = "every rank's columns in memory that the ranks share, copied by each to its result"

    def _prepare(self) -> None:
        super()._prepare()
        self.copied_bytes = self.shared["panels"].nbytes


class NodesOutput(_SharedOutput):
    """The same between nodes, each of which gets the columns of each rank of the others once."""

    path = "every rank's columns sent to each node once, in memory that its ranks share, copied by each to its result"

    def _prepare(self) -> None:
        super()._prepare()
        p = self.p
        self._to, self._of = _counterparts(self)
        self.sent_bytes = p.tokens[0] * p.outputs[self.rank] * p.out_dtype.itemsize * len(self._to)

    def meet(self) -> None:
        """Wait until all columns are here. Collective over the ranks."""
        panels = self.everyones("panels")
        _send_to_nodes(self, lambda rank: panels[rank])
        super().meet()


# -- the rows of the registry


_ALONE = 9.0  # one rank has nothing to share
_AFTER_SLABS = (
    2.5  # slabs that a node shares come to it once, too, if the parts are equal; all others more often
)
_WORTH_A_TURN = 1 << 20  # bytes of a rank's rows of the sum from which on "ring" is the fastest


class SharedMemoryMethod(TensorMethod):
    """A tensor-parallel product on the ranks of one node.

    Args:
        kinds: its products by form; "between_nodes" is that of a form which several nodes have, too.
    """

    refuses_sizes = True

    def __init__(
        self,
        name: str,
        between_nodes: Mapping[str, type[ParallelProduct]] = {},
        **kinds: type[ParallelProduct],
    ) -> None:
        self.name, self.forms, self._kinds, self._between_nodes = name, tuple(kinds), kinds, between_nodes

    def refusal(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        """Return why shared memory cannot be used, or an empty string. Collective over the ranks."""
        transport = engine.transport
        if transport.why_not_shared:
            return transport.why_not_shared
        if len(transport.nodes) > 1 and problem.form not in self._between_nodes:
            return f"the ranks are on {len(transport.nodes)} nodes, which share no memory"
        if why := MESSAGES.refusal(engine, problem, options, operands):
            return why
        product = self.prepare(engine, problem, options, operands)
        if product.covered:
            return ""
        needed = sum(each.nbytes for each in product.shared.values())
        fits, limit = transport.fits(needed)
        return "" if fits else f"{needed} bytes of shared memory are needed, {limit} are available"

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        """Return for "ring" less than for the others if a rank adds many bytes. Local.

        Between nodes of several ranks, less than the cost of slabs that nodes share if these receive less, or else less
        than that of everything that comes to each rank.
        """
        if problem.size == 1:
            return _ALONE
        if (count := len(engine.transport.nodes)) > 1:
            if problem.size == count:
                return 5.5
            if problem.sums:
                return 1.8 if _sums_are_less(problem, count, 1) else _AFTER_SLABS
            return _AFTER_SLABS if problem.gathers and not problem.return_gathered else 1.8
        if self.name != "ring":
            return 1.5
        tokens, outputs, _ = problem.sizes
        mine = tokens * outputs * accumulation_dtype(problem.out_dtype).itemsize // problem.size
        return 1.4 if mine >= _WORTH_A_TURN else 1.7

    def prepare(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> ParallelProduct:
        kinds = self._kinds if len(engine.transport.nodes) == 1 else self._between_nodes
        return kinds[problem.form](engine, problem, options)


METHODS = (
    SharedMemoryMethod(
        "pull",
        {"allgather_matmul": NodesInput, "matmul_reduce_scatter": NodesSum, "matmul_allgather": NodesOutput},
        allgather_matmul=SharedInput,
        matmul_reduce_scatter=_SharedSum,
        matmul_allgather=_SharedOutput,
    ),
    SharedMemoryMethod("two_shot", matmul_allreduce=_SharedSum),
    SharedMemoryMethod("ring", matmul_reduce_scatter=RingSum, matmul_allreduce=RingSum),
    MESSAGES,
)
