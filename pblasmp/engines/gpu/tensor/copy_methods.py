# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products from local GEMMs and copies between GPUs, and all of these as algorithms of the GPU engine.

By NCCL's collectives, in symmetric memory that peers read, and in turn on two GPUs. A plan's second run records a CUDA
graph, and later ones replay it: then the host queues a single launch.
"""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import TYPE_CHECKING

from ....dtypes import DTYPES, accumulation_dtype, is_float8
from ....errors import PblasmpError
from ....layout import MatmulProblem, ParallelProblem
from ...method import follower_refusal, library_refusal
from ...product import Product
from ...protocol import Engine
from ...request import AnyProblem, Operands, Options
from ...tensor.algorithms import MESSAGES, PulledOutput, PulledSum
from ...tensor.tensor_product import FEW, HALVES, Memory, TensorMethod, offsets, pieces, waves
from ..kernels.lt_product import fuses
from ..kernels.views import View
from ..runtime.windows import PIECES
from ..session import session_of
from ..types import carried, compute_type
from . import one_kernel_products, pushed
from .base import CopyProduct, NcclProduct, NcclSum, Views
from .one_kernel_products import HOPPER, by_mma, pays_beside_others

if TYPE_CHECKING:
    from ..runtime.gpu import Gpu


class NcclGather(NcclProduct):
    """NCCL's AllGather (its Broadcasts if the ranks' tokens differ), then one product."""

    form = "allgather_matmul"

    def _prepare(self) -> None:
        p, inputs = self.p, self.p.inputs[0]
        gathered = Memory(p.dtype, [(sum(p.tokens), inputs)])
        self.own["shard"] = shard = Memory(p.dtype, [(p.tokens[self.rank], inputs)])
        self._reach((gathered if p.return_gathered else shard).nbytes)
        if self.staged or not p.return_gathered:
            self.own["gathered"] = gathered

    def _multiply(self, operands: Views) -> None:
        p, x = self.p, operands.a
        wanted = operands.gathered
        gathered = wanted if wanted and self.in_place else self.memory("gathered")
        if not (self.in_place and x.contiguous):
            x = self.memory("shard")
            self.copy(x, operands.a)
        self.all_gather(x, gathered, [tokens * p.inputs[0] for tokens in p.tokens])
        self.whole(operands, gathered, operands.c, operands.d)
        if wanted and wanted is not gathered:
            self.copy(wanted, gathered)


class PulledGather(CopyProduct):
    """Each rank's tokens copied to symmetric memory, then a kernel that collects them from there, then one product."""

    form = "allgather_matmul"
    name = "pull"

    def _prepare(self) -> None:
        p, inputs = self.p, self.p.inputs[0]
        self.shared["tokens"] = Memory(p.dtype, [(tokens, inputs) for tokens in p.tokens])
        if not p.return_gathered:
            self.own["gathered"] = Memory(p.dtype, [(sum(p.tokens), inputs)])

    def _multiply(self, operands: Views) -> None:
        shards, x, rows = self.everyones("tokens"), operands.a, self.p.slices("tokens")
        gathered = operands.gathered or self.memory("gathered")
        self.copy(shards[self.rank], x)
        self.meet()
        theirs = [(gathered[rows[rank]], shards[rank]) for rank in self.peers]
        self.copy_all([*theirs, (gathered[rows[self.rank]], x)])
        self.whole(operands, gathered, operands.c, operands.d)


class NcclReduceScatter(NcclSum):
    """One product, then NCCL's ReduceScatter (its Reduce to each rank if their tokens differ)."""

    form = "matmul_reduce_scatter"


class PulledReduceScatter(PulledSum[Views], CopyProduct):
    """One product into symmetric memory, then a kernel that reads its tokens' parts from all peers and adds them."""

    form = "matmul_reduce_scatter"
    name = "pull"


class NcclAllReduce(NcclSum):
    """One product, then NCCL's AllReduce."""

    form = "matmul_allreduce"


class OneShotAllReduce(CopyProduct):
    """One product into symmetric memory, then every rank reads all parts of all peers: for small results."""

    form = "matmul_allreduce"
    name = "one_shot"

    def _prepare(self) -> None:
        self.shared["parts"] = Memory(self.travels, [(self.p.tokens[0], self.p.outputs[0])] * self.size)

    def _multiply(self, operands: Views) -> None:
        parts = self.everyones("parts")
        self.part(operands, operands.a, parts[self.rank])
        self.meet()
        self.add(operands, parts, [operands.d], operands.c)


class TwoShotAllReduce(PulledSum[Views], CopyProduct):
    """One product into symmetric memory; every rank adds its share of the tokens; then each reads the others' sums."""

    form = "matmul_allreduce"
    name = "two_shot"


class RingAllReduce(CopyProduct):
    """On two GPUs: products of the peer's rows first, pushed to it; those of a rank's own rows add what came.

    Each rank adds half of the tokens, in cuBLASLt's epilogue instead of a kernel, and pulls the peer's half. Pieces
    alternate between two streams, so that one begins when the previous one leaves multiprocessors idle.
    """

    form = "matmul_allreduce"
    name = "ring"
    ranks = 2
    streams = ("gemm", "copy", "sum", "back", "pull")
    lanes = 2

    @classmethod
    def why_not(cls, gpu: Gpu, p: ParallelProblem, options: Options) -> str:
        if options.beta != 0:
            return "cuBLASLt adds the peer's part in place of C"
        if carried(p.out_dtype, options.comm_dtype) != p.out_dtype:
            return (
                f"cuBLASLt adds no {carried(p.out_dtype, options.comm_dtype).name} to a {p.out_dtype.name} D"
            )
        return super().why_not(gpu, p, options)

    def _prepare(self) -> None:
        halves = [(rows.stop - rows.start, self.p.outputs[0]) for rows in self.added]
        self.pieces = [self._pieces(rows) for rows, _ in halves]
        self.count = max(len(found) for found in self.pieces)
        (peer,) = self.peers
        self.own["partial"] = Memory(self.p.out_dtype, [halves[peer]])
        self.shared["parts"] = self.shared["sums"] = Memory(self.p.out_dtype, halves)

    def _pieces(self, rows: int) -> list[slice]:
        weights = FEW if self.once else HALVES
        sizes = pieces(rows, self.p.outputs[0], self.gpu.multiprocessors, weights)
        return [slice(start, stop) for start, stop in pairwise(offsets(sizes))]

    def _multiply(self, operands: Views) -> None:
        gpu, mine, (peer,) = self.gpu, self.rank, self.peers
        x, out = ([matrix[rows] for rows in self.added] for matrix in (operands.a, operands.d))
        partial, inboxes, sums = self.memory("partial"), self.everyones("parts"), self.everyones("sums")
        turns = cycle(("main", "gemm"))
        for piece, lines in enumerate(self.pieces[peer]):
            stream = next(turns)
            self.part(operands, x[peer][lines], partial[lines], stream)
            gpu.follow("copy", stream)
            gpu.push("copy", inboxes[peer][lines], partial[lines])
            gpu.raise_flag("copy", peer, PIECES.at(piece))
        for piece, lines in enumerate(self.pieces[mine]):
            stream = next(turns)
            gpu.await_flag(stream, peer, PIECES.at(piece))
            self.whole(operands, x[mine][lines], inboxes[mine][lines], sums[mine][lines], stream, beta=1)
            gpu.follow("back", stream)
            gpu.raise_flag("back", peer, PIECES.at(self.count + piece))
            gpu.follow("sum", stream)
            gpu.copy("sum", out[mine][lines], sums[mine][lines])
        for piece, lines in enumerate(self.pieces[peer]):
            gpu.await_flag("pull", peer, PIECES.at(self.count + piece))
            gpu.push("pull", out[peer][lines], sums[peer][lines])


class PulledGatheredOutput(PulledOutput[Views], CopyProduct):
    """One product into symmetric memory, then a kernel that copies every rank's columns from there to D."""

    form = "matmul_allgather"
    name = "pull"


class NcclGatheredOutput(NcclProduct):
    """One product, then NCCL's AllGather (or its Broadcasts, of unlike parts), and copies to the ranks' columns."""

    form = "matmul_allgather"

    def _prepare(self) -> None:
        p, tokens = self.p, self.p.tokens[0]
        self.own["partial"] = Memory(p.out_dtype, [(tokens, p.outputs[self.rank])])
        self.own["gathered"] = Memory(p.out_dtype, [(1, tokens * sum(p.outputs))])

    def _multiply(self, operands: Views) -> None:
        columns, shapes = self.p.slices("outputs"), [(self.p.tokens[0], cols) for cols in self.p.outputs]
        mine = columns[self.rank]
        part, gathered = self.memory("partial"), self.memory("gathered")
        if part.cols:
            self.whole(operands, operands.a, operands.c[:, mine] if operands.c else None, part)
        sizes = [rows * cols for rows, cols in shapes]
        self.all_gather(part, gathered, sizes)
        parts = [
            View(gathered.address + start * gathered.dtype.itemsize, rows, cols, cols, gathered.dtype)
            for start, (rows, cols) in zip(offsets(sizes), shapes, strict=False)
        ]
        self.copy_all((operands.d[:, place], part) for place, part in zip(columns, parts, strict=True))


PRODUCTS: tuple[type[CopyProduct], ...] = (
    NcclGather, PulledGather, pushed.PushedGather,
    NcclReduceScatter, PulledReduceScatter, pushed.PushedReduceScatter,
    one_kernel_products.OneKernelReduceScatter,
    NcclAllReduce, OneShotAllReduce, TwoShotAllReduce, pushed.PushedAllReduce,
    RingAllReduce, one_kernel_products.OneKernelAllReduce,
    NcclGatheredOutput, PulledGatheredOutput, pushed.PushedGatheredOutput,
    one_kernel_products.OneKernelGatheredOutput,
)  # fmt: skip
"""All of them; ``form`` and ``name`` say what each computes and what ``algo=`` calls it."""


class CopyMethod(TensorMethod):
    """A tensor-parallel product from local GEMMs and copies between GPUs."""

    def __init__(self, kind: type[CopyProduct]) -> None:
        self.name, self.forms, self._kind = kind.name, (kind.form,), kind
        self.least = {"one_kernel": _FASTEST, "ring": _RING}.get(kind.name, _BEST)
        self.refuses_sizes = kind.name == "one_kernel"  # beside other communicators

    def view(self, problem: AnyProblem) -> AnyProblem | str:
        """Return a problem as a tensor-parallel product with row-major X, or why it is not one."""
        if isinstance(problem, MatmulProblem) and problem.scheme != "gemm":
            q = problem.T if problem.d.order == "F" else problem
            if (q.op_a == "N") != (q.a.order == "C"):
                return "the rows of X are not contiguous in memory"
        return super().view(problem)

    def refusal(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        why = self._refusal_alone(engine, problem, options, operands)
        if not why and self._yields(problem, options) and session_of(engine).runtime.beside_others():
            why = "PyTorch has other process groups: comm_sms= says how many multiprocessors to leave to them"
        return why

    def fits(self, engine: Engine, problem: ParallelProblem, options: Options) -> bool:
        """Return whether it may be taken for other sizes than before; "one_kernel" beside others for small ones."""
        if self.name != "one_kernel":
            return True
        beside = self._yields(problem, options) and session_of(engine).runtime.others_of_late
        return not (beside or self._refusal_alone(engine, problem, options, None))

    def _yields(self, problem: ParallelProblem, options: Options) -> bool:
        """Return whether the rule does not take it beside other communicators on the GPU. Local."""
        by_rule = options.algo == "auto" and options.comm_sms is None
        return self.name == "one_kernel" and by_rule and not pays_beside_others(problem)

    def _refusal_alone(
        self, engine: Engine, p: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        """Return why it cannot compute a product, whoever else uses the GPU. Local."""
        session, kind = session_of(engine), self._kind
        if p.size != session.runtime.size:
            return f"the operands are on {p.size} ranks; this algorithm needs all {session.runtime.size}"
        why = (
            library_refusal(options, operands, leaves_sms=kind.leaves_sms)
            or follower_refusal(operands, fuses=not p.sums and fuses(p.dtype))
            or _type_refusal(p, options)
        )
        if why:
            return why
        try:
            compute_type(DTYPES["bfloat16"] if is_float8(p.dtype) else p.dtype, options.compute)
            return kind.why_not(session.gpu, p, options)
        except PblasmpError as error:
            return str(error)

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        gpu = session_of(engine).gpu
        return cost_by_rule(
            self.name, problem, gpu.multiprocessors, len(gpu.domains), capability=gpu.capability
        )

    def prepare(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands
    ) -> Product:
        return self._kind(session_of(engine), problem, options)


class PushTensorMethod(CopyMethod):
    """By copies, or by messages if GPUs do not reach each other's memory."""

    def refusal(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        why = super().refusal(engine, problem, options, operands)
        unsent = why and MESSAGES.refusal(engine, problem, options, operands)
        return f"{why}; by messages: {unsent}" if unsent else ""

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        refused, kind = session_of(engine).refused, (0 in problem.tokens, options, *problem.apart_from_tokens)
        found = refused.get(kind)
        if found is None:
            if len(refused) >= _MOST_KINDS:
                refused.clear()
            refused[kind] = found = bool(super().refusal(engine, problem, options, None))
        if found:
            return MESSAGES.cost(engine, problem, options)
        return super().cost(engine, problem, options)

    def prepare(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands
    ) -> Product:
        why = super().refusal(engine, problem, options, operands)
        if not why:
            return super().prepare(engine, problem, options, operands)
        product = MESSAGES.prepare(engine, problem, options, operands)
        product.notes += (f"by messages: {why}",)
        return product


def _type_refusal(p: ParallelProblem, options: Options) -> str:
    """Return why cuBLASLt has no product of these types, or of 8-bit floats of these sizes. Local."""
    if is_float8(p.dtype):
        return next(iter(p.misaligned()), "")
    known, summed = (p.dtype, accumulation_dtype(p.dtype)), carried(p.out_dtype, options.comm_dtype)
    if p.out_dtype in known and summed in known:
        return ""
    return f"cuBLASLt has no product of {p.dtype.name} in {summed.name} for {p.out_dtype.name}"


# -- rules, from measurements on two and four GPUs of plans and repeated calls, which replay graphs, if nothing was
# measured on this machine: benchmarks/results

_MOST_KINDS = 256  # of products of which is remembered whether copies compute them
_FASTEST, _RING, _BEST = 0.3, 0.4, 0.5  # costs
_PAIR = 2
_HIDES_COPIES = 1e10  # operations of all ranks that hide the extra cost of copies in pieces over NCCL's
# inputs per peer, with which computing an output takes as long as sending it to all peers
_HIDES_SENDING = 2000
_PIECES_WAVES = 3  # from which on gathered outputs are cut into pieces: one travels during the next product
_HIDES_SUMS = 4e11  # operations per rank that hide, on more than two ranks, most of an AllReduce in pieces
_PULLS = 2.5e10  # operations per rank below which GEMM + ReduceScatter is one GEMM and one sum
_ONE_SHOT_BYTES = 512 << 10  # results that more than two ranks add one by one
_ONE_SHOT_WAVES = 4
MEASURED = {2: (2, 4), 1: (2,)}
"""On how many GPUs the rules were measured, by the bytes of an entry of X."""
_ONE_KERNEL = {2: 2e12, 4: 4e12}
"""By the ranks: operations of all of them up to which one kernel is the fastest.

Measured on two H100 and H200 and on four H200, in 8 bits on two H200. On four, gathered outputs of 4096 tokens and
16,384 inputs take 4 % longer than by "push"; of 8192 tokens and inputs "push" takes 25 to 42 % longer. Of three ranks
as of two, of more than four as of four: not measured, the limits grow with the ranks.
"""
_BY_MMA = 4e9
"""Operations of all ranks up to which the kernel for GPUs other than Hopper's is the fastest, on two H200.

As many operations as in a product of order 2048 take it as long as NCCL and cuBLAS.
"""
_RING_WAVES = 3  # waves from which on two GPUs add in the product's epilogue, if they can


def cost_by_rule(
    name: str, p: ParallelProblem, multiprocessors: int, domains: int = 1, *, capability: int = HOPPER
) -> float:
    """Return the cost of an algorithm by rule: 0.5 for the best one, 0.6 for NCCL's, more for the others.

    "one_kernel" and "ring" get less than the best one if they are faster: they cannot compute every product.
    """
    if name == "one_kernel":
        most = _ONE_KERNEL[4 if p.size > 3 else _PAIR]
        return _FASTEST if p.flops < (_BY_MMA if by_mma(capability) else most) else 0.8
    if name == "ring":
        return _RING if waves(p.tokens[0], p.outputs[0], multiprocessors) >= _RING_WAVES else 0.7
    if name == (_best_between(p, domains) if domains > 1 else _best(p, multiprocessors)):
        return _BEST
    return 0.6 if name == "nccl" else 0.7


def _best_between(p: ParallelProblem, domains: int) -> str:
    """Return the best one between nodes: with several GPUs in each, NCCL's collectives send more from node to node."""
    return "push" if p.size > domains and p.flops >= _HIDES_COPIES else "nccl"


def _best(p: ParallelProblem, multiprocessors: int) -> str:
    if p.form == "allgather_matmul":
        return "push" if p.size == _PAIR or p.flops >= _HIDES_COPIES else "nccl"
    if p.form == "matmul_allgather":
        hides = p.inputs[0] >= _HIDES_SENDING * (p.size - 1)
        if p.size == _PAIR:
            hides = waves(p.tokens[0], max(p.outputs), multiprocessors) >= _PIECES_WAVES
        return "push" if hides and p.flops >= _HIDES_COPIES else "pull"
    if p.form == "matmul_reduce_scatter":
        return "pull" if p.flops < _PULLS * p.size else "push"
    nbytes = p.tokens[0] * p.outputs[0] * p.out_dtype.itemsize
    if waves(p.tokens[0], p.outputs[0], multiprocessors) < _ONE_SHOT_WAVES:
        return "one_shot" if p.size == _PAIR or nbytes <= _ONE_SHOT_BYTES else "two_shot"
    return "push" if p.size == _PAIR or p.flops >= _HIDES_SUMS * p.size else "nccl"


METHODS = tuple((PushTensorMethod if kind.name == "push" else CopyMethod)(kind) for kind in PRODUCTS)
