# SPDX-License-Identifier: Apache-2.0
"""What the tensor-parallel products have in common that are made of local GEMMs and copies between GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from ....dtypes import DTYPES, FLOAT8, is_float8
from ....errors import UnsupportedError
from ....layout import ParallelProblem
from ...product import Graphs, Workspace
from ...request import Operands, Options
from ...tensor.tensor_product import Memory, TensorProduct, row_major
from ..kernels.lt import WORKSPACE_BYTES
from ..kernels.lt_product import PLAIN, Fused, fuses
from ..kernels.views import View, whole_move, why_no_float8
from ..types import carried

if TYPE_CHECKING:
    from ..kernels.lt_product import Op
    from ..runtime.gpu import Gpu
    from ..session import Session

Array = Any
_AMAX = DTYPES["float32"]
STAGED = 16 << 20  # bytes whose copy takes less time than the host takes to queue a product without a graph


class Views:
    """The operands of a run as kernels see them.

    Args:
        gpu: the GPU on which scales that are numbers are stored.
        options: says whether C is read.

    Attributes:
        scaled: the scales of the operands alone: for products whose parts are added later.
    """

    def __init__(self, gpu: Gpu, p: ParallelProblem, options: Options, operands: Operands) -> None:
        as_given = not (p.turned or p.transposed or p.conjugated)
        run = operands if as_given else row_major(p, operands, options)
        c, e, scales, gathered = run.c, run.epilogue, run.scales, run.gathered
        if options.beta == 0:
            c = None
        a, b, d = run.a, run.b, run.d
        self.a = a if type(a) is View else View.of(a, p.dtype, "x")
        self.b = b if type(b) is View else View.of(b, p.w_dtype, "w")
        self.c = None if c is None else View.of(c, p.c_dtype or p.out_dtype, "c")
        self.d = d if type(d) is View else View.of(d, p.out_dtype, "out")
        self.gathered = None if gathered is None else View.of(gathered, p.dtype, "gathered X")
        bias = None if e is None else e.bias
        if bias is not None and type(bias) is not View:
            bias = View.of(bias.reshape(1, -1), name="bias")
        self.bias: View | None = bias
        self.activation = None if e is None else e.activation
        self.scale_x = self.scale_w = self.scale_d = self.amax = 0
        self.scaled = PLAIN
        if scales is not None:
            given = scales.a, scales.b, scales.d, scales.amax
            self.scale_x, self.scale_w, self.scale_d, self.amax = map(gpu.scalar, given)
            if self.scale_x or self.scale_w:
                self.scaled = Fused(scale_x=self.scale_x, scale_w=self.scale_w)


class CopyProduct(TensorProduct[Views]):
    """A tensor-parallel product from local GEMMs and copies. Making and running one is collective over the context.

    Making one reserves symmetric memory.

    Args:
        p: the product; the same on every rank.
        options: alpha, beta, types.

    Raises:
        UnsupportedError: ``why_not`` says why.
    """

    name: ClassVar[str] = ""
    needs_windows: ClassVar[bool] = True
    leaves_sms: ClassVar[bool] = False
    """Whether it leaves ``comm_sms`` multiprocessors to others."""
    ranks: ClassVar[int | None] = None
    """The number of ranks that it is for; None: any."""
    has_tables = False
    operand_at = View.at
    queues = True
    streams: tuple[str, ...] = ()
    """The streams that it forks from the main one."""
    lanes: ClassVar[int] = 1
    """How many products by cuBLASLt run at once, each with a workspace."""

    def __init__(self, session: Session, p: ParallelProblem, options: Options) -> None:
        gpu = session.gpu
        why = self.why_not(gpu, p, options)
        if why:
            raise UnsupportedError(f"algorithm {self.name!r} of {self.form}: {why}")
        self.gpu, self._session, self._alone = gpu, session, gpu.alone
        self._begin(p, options, gpu.rank, gpu.size)
        self.travels = carried(p.out_dtype, options.comm_dtype)
        self.op_w: Op = "T" if p.outputs_first else "N"
        self._fuses = fuses(p.dtype)
        self.path = f"{self.name}: {_first_sentence(type(self))}"
        self.replays = not p.conjugated
        self.first = partial(session.runtime.queueing, f"{p.form}: the first run")
        with gpu.agreement(f"{self.form}: preparing {self.name}"):
            self._size()
        for name, nbytes in self._sizes.items() if not self._alone else ():
            gpu.reserve(name, nbytes)

    def _size(self) -> None:
        self._nbytes = 0
        self._prepare()
        for name, memory in self.own.items():
            self._reserve(name, memory.nbytes)
        if is_float8(self.p.out_dtype):
            self._reserve("amax", _AMAX.itemsize)
        self._sizes = buffers = self.buffers()
        for name, nbytes in buffers.items() if self._alone else ():
            self.gpu.scratch(name, nbytes)

    @classmethod
    def why_not(cls, gpu: Gpu, p: ParallelProblem, options: Options) -> str:
        """Return why this algorithm cannot compute the product here, "" if it can; the same on every rank. Local."""
        if cls.ranks not in (None, gpu.size):
            return f"it is for {cls.ranks} GPUs, not {gpu.size}"
        if cls.needs_windows and gpu.why_no_windows:
            return gpu.why_no_windows
        if 0 in p.sizes or options.alpha == 0:
            return "there is nothing to multiply"
        if not is_float8(p.dtype):
            return ""
        return why_no_float8(gpu.capability) or _why_not_float8(p, options)

    @property
    def workspace(self) -> Workspace:  # type: ignore[override]
        """Memory that it needs on this rank."""
        return Workspace(self._nbytes + sum(self._sizes.values()) + self.lanes * WORKSPACE_BYTES, 0)

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """Bytes that this rank sends to other ranks in one run."""
        return self._sent()

    @property
    def covered(self) -> bool:
        if self._alone:
            return True
        bytes_of = self.gpu.symmetric_bytes
        return not [name for name, nbytes in self._sizes.items() if bytes_of(name) < nbytes]

    def run(self, operands: Operands) -> Any:
        """Queue it once, without what would run it on these arrays again. Collective over the context."""
        if self.first is not None:
            return super().run(operands)
        self._session.runtime.follow_stream()
        self._queue(operands)
        return None

    @cached_property
    def graphs(self) -> Graphs:
        return self._session.recordings()

    def why_no_graph(self) -> str:
        conjugated = "operands are conjugated first, and each run may put the result elsewhere"
        return conjugated if self.p.conjugated else ""

    def _reserve(self, name: str, nbytes: int) -> None:
        """Make this GPU's own buffer of that name large enough, before a graph records. Local."""
        self._nbytes += nbytes
        self.gpu.scratch(name, nbytes)

    def buffers(self) -> dict[str, int]:
        """Return the symmetric buffers and their sizes, the same on every rank. Local."""
        return {
            name: max([rows * cols for rows, cols in memory.shapes]) * memory.dtype.itemsize
            for name, memory in self.shared.items()
        }

    def _queue(self, operands: Operands) -> None:
        scales = operands.scales
        views = Views(self.gpu, self.p, self.options, operands)
        if scales is not None and scales.amax is not None:
            scales.amax.fill(0)
        self._start()
        self._multiply(views)
        self._end()
        if scales is not None and scales.amax is not None and self._shares_amax:
            self._session.nccl.take_largest(scales.amax)

    @property
    def _shares_amax(self) -> bool:
        return self.size > 1 and self.form in ("matmul_allreduce", "matmul_allgather")

    def _start(self) -> None:
        self.gpu.begin(*self.streams)

    def _end(self) -> None:
        self.gpu.end(*self.streams)

    # -- tools

    def plain(self, operands: Views) -> bool:
        """Return whether D is the product alone. Local."""
        follows = operands.c or operands.bias or operands.activation or operands.amax
        return not (follows or is_float8(self.p.out_dtype))

    def part(self, operands: Views, x: View, d: View, stream: str = "main") -> None:
        self.gpu.multiply(
            stream, x, operands.b, d,
            op_w=self.op_w, alpha=self.options.alpha, finish=operands.scaled, compute=self.options.compute,
            once=self.once,
        )  # fmt: skip

    def whole(
        self,
        operands: Views,
        x: View,
        c: View | None,
        d: View,
        stream: str = "main",
        *,
        beta: complex | None = None,
    ) -> None:
        """Queue a product complete with C, bias, activation and D's scale, with one rounding.

        ``beta`` is that of the options by default.

        cuBLASLt's epilogue does this if it has one for the type, otherwise a kernel; such types are not rounded in
        between. cuBLASLt overwrites the amax of an 8-bit D, but ``d`` may be one of several parts: a kernel takes the
        largest.
        """
        p, options = self.p, self.options
        inside = self._fuses
        bias = operands.bias
        largest = None
        if operands.amax and is_float8(p.out_dtype):
            largest = View(self.gpu.scratch("amax", _AMAX.itemsize), 1, 1, 1, _AMAX)
        finish = operands.scaled
        if (inside and (bias or operands.activation)) or operands.scale_d or largest:
            finish = Fused(
                activation=operands.activation if inside else None,
                bias=bias.address if inside and bias else 0,
                bias_dtype=bias.dtype if inside and bias else None,
                scale_x=operands.scale_x, scale_w=operands.scale_w, scale_d=operands.scale_d,
                amax=largest.address if largest else 0,
            )  # fmt: skip
        self.gpu.multiply(
            stream, x, operands.b, d, op_w=self.op_w, alpha=options.alpha, c=c,
            beta=(options.beta if beta is None else beta) if c else 0, finish=finish, compute=options.compute,
            once=self.once,
        )  # fmt: skip
        if largest:
            self.gpu.add(stream, [largest], [largest], amax=operands.amax)
        amax = 0 if largest else operands.amax
        if (not inside and (bias or operands.activation)) or amax:
            self.gpu.add(
                stream, [d], [d], bias=None if inside else bias,
                activation=None if inside else operands.activation, amax=amax,
            )  # fmt: skip

    def add(self, operands: Views, parts: Sequence[View], outs: Sequence[View], c: View | None) -> None:
        """Queue the sum of ``parts`` and C, finished and rounded once, by a kernel that no GEMM delays."""
        self.gpu.add("main", parts, outs, **self.finish(operands, c, outs[0]))

    def copy(self, to: View, of: View) -> None:
        """Queue a copy by a kernel."""
        self.gpu.copy("main", to, of)

    def copy_all(self, copies: Iterable[tuple[View, View]]) -> None:
        self.gpu.move("main", [whole_move(to, of) for to, of in copies])

    def memory(self, name: str) -> View:
        """Return this GPU's own matrix of that name. Local."""
        wanted = self.own[name]
        rows, cols = wanted.shapes[0]
        return View(self.gpu.scratch(name, wanted.nbytes), rows, cols, cols, wanted.dtype)

    def everyones(self, name: str) -> list[View]:
        return [*self.reached(name).values()]

    def reached(self, name: str) -> dict[int, View]:
        """Return by rank the matrices of the symmetric memory of that name that this rank reaches. Local."""
        shapes, dtype = self.shared[name].shapes, self.shared[name].dtype
        return {
            rank: View(at, *shapes[rank], shapes[rank][1], dtype)
            for rank, at in self.gpu.symmetric_of_all(name).items()
        }

    def at(self, name: str, rank: int) -> View:
        """Return a rank's matrix of the symmetric memory of that name. Local."""
        wanted = self.shared[name]
        rows, cols = wanted.shapes[rank]
        return View(self.gpu.symmetric(name, rank), rows, cols, cols, wanted.dtype)

    def meet(self) -> None:
        self.gpu.meet()

    def finish(self, operands: Views, c: View | None, out: View) -> dict[str, Any]:
        """Return the arguments of ``Gpu.add`` for what it does after adding the parts of ``out``."""
        return {
            "beta": self.options.beta if c else 0, "c": c, "bias": operands.bias, "activation": operands.activation,
            "scale": operands.scale_d if is_float8(out.dtype) else 0, "amax": operands.amax,
        }  # fmt: skip


class NcclProduct(CopyProduct):
    """One product, and one collective of NCCL before or after it.

    NCCL registers with a graph the memory that it works on. That of the user's arrays may be gone when a graph is
    replayed at their addresses: small arrays are copied from or to the engine's memory, so that repeated calls are
    replayed. Of large ones the host's time counts less than the copy, and what comes once is not replayed. Between
    nodes graphs have no work of NCCL's.
    """

    name = "nccl"
    needs_windows = False

    def _reach(self, nbytes: int) -> None:
        """Let NCCL work on a user's array of so many bytes unless that is small, and a graph has its work. Local."""
        pays = self._session.graphs_pay
        self.staged, self.registers = pays and nbytes <= STAGED, pays and nbytes > STAGED

    @property
    def one_stream(self) -> bool:  # type: ignore[override]
        """Whether graphs have pieces between NCCL's calls, which are on their stream."""
        return not self._session.graphs_pay

    @property
    def in_place(self) -> bool:
        """Whether NCCL works on the user's arrays in this run."""
        return self.once or not self.staged

    def all_gather(self, of: View, to: View, sizes: Sequence[int]) -> None:
        """Queue NCCL's AllGather of so many entries of each rank, or its Broadcasts if the sizes differ."""
        self.gpu.all_gather(of, to.address, [size * of.dtype.itemsize for size in sizes])


class NcclSum(NcclProduct):
    """GEMM + ReduceScatter, or + AllReduce: one product, then its sum over the ranks."""

    def _prepare(self) -> None:
        p = self.p
        self.own["partial"] = sums = Memory(self.travels, [(p.tokens[0], p.outputs[0])])
        if not self.everywhere:
            self.own["sums"] = sums = Memory(self.travels, [(p.rows[self.rank], p.outputs[0])])
        self._reach(sums.nbytes)

    def _multiply(self, operands: Views) -> None:
        out = operands.d
        straight = self.in_place and self.plain(operands) and out.contiguous and out.dtype == self.travels
        partial = out if straight and self.everywhere else self.memory("partial")
        self.part(operands, operands.a, partial)
        if self.everywhere:
            sums = partial
            self.gpu.all_reduce(sums)
        else:
            sums = out if straight else self.memory("sums")
            self.gpu.reduce_scatter(partial, sums, self.p.rows)
        if not straight:
            self.add(operands, [sums], [out], operands.c)


def _first_sentence(kind: type) -> str:
    text = (kind.__doc__ or "").split(".")[0]
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _why_not_float8(p: ParallelProblem, options: Options) -> str:
    """Return why cuBLASLt cannot multiply these 8-bit floats on every GPU that has them. Local."""
    if not p.outputs_first:
        return "8-bit products need W as outputs × inputs"
    if p.dtype == p.w_dtype == FLOAT8["float8_e5m2"]:
        return "X and W are both float8_e5m2"
    for name, counts in (("inputs", p.inputs), ("outputs", p.outputs)):
        odd = [n for n in counts if n % 16]
        if odd:
            return f"8-bit products need multiples of 16 {name}, got {odd[0]}"
    summed = carried(p.out_dtype, options.comm_dtype)
    if summed not in (DTYPES["bfloat16"], DTYPES["float16"], DTYPES["float32"]):
        return f"8-bit products are not summed in {summed.name}"
    return ""
