# SPDX-License-Identifier: Apache-2.0
"""Algorithm: what the tensor-parallel products on GPUs have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ....dtypes import DTYPES, FLOAT8, is_float8
from ....errors import UnsupportedError
from ..kernels.lt import PLAIN, Finish, fuses
from ..kernels.views import View
from .spec import Form, Spec

if TYPE_CHECKING:
    from ..kernels.lt import Op
    from ..runtime.gpu import Gpu

__all__ = ["Algorithm", "Call"]

Array = Any
_AMAX = DTYPES["float32"]


class Call:
    """The operands of a run, as views, and what follows the product.

    Args:
        gpu: the GPU on which scales that are numbers are stored.
        spec: the product.
        x, w, c, out, bias: CuPy arrays; 8-bit floats as arrays of bytes.
        scales: with ``a`` (X's), ``b`` (W's), ``d`` and ``amax``, as in ``Scales``; None: none.
        gathered: where to write all of X; None if it is not wanted.
    """

    def __init__(
        self,
        gpu: Gpu,
        spec: Spec,
        x: Array,
        w: Array,
        c: Array | None,
        out: Array,
        bias: Array | None,
        scales: Any,
        gathered: Array | None = None,
    ) -> None:
        self.x = View.of(x, spec.dtype, "x")
        self.w = View.of(w, spec.w_dtype, "w")
        self.out = View.of(out, spec.out_dtype, "out")
        self.c = None if c is None or spec.beta == 0 else View.of(c, spec.c_dtype, "c")
        self.gathered = None if gathered is None else View.of(gathered, spec.dtype, "gathered X")
        self.bias = None if bias is None else View.of(bias.reshape(1, -1), name="bias")
        self.scale_x, self.scale_w, self.scale_d, self.amax = (
            0 if scales is None else gpu.scalar(getattr(scales, name)) for name in ("a", "b", "d", "amax")
        )

    @property
    def scaled(self) -> Finish:
        """The scales of the operands alone: for products whose parts are added later."""
        return Finish(scale_x=self.scale_x, scale_w=self.scale_w) if self.scale_x or self.scale_w else PLAIN


class Algorithm:
    """One way to compute a tensor-parallel product. Making one is collective: it reserves symmetric memory.

    Args:
        gpu: this rank's.
        spec: the product; the same on every rank.

    Raises:
        UnsupportedError: ``why_not`` says why.

    Attributes:
        workspace: bytes of memory that it needs, symmetric and local to this GPU, shared with other products.
    """

    name: ClassVar[str] = ""
    form: ClassVar[Form]
    needs_windows: ClassVar[bool] = True
    ranks: ClassVar[int | None] = None
    """The number of ranks that it is for; None: any."""

    def __init__(self, gpu: Gpu, spec: Spec) -> None:
        why = self.why_not(gpu, spec)
        if why:
            raise UnsupportedError(f"algorithm {self.name!r} of {self.form}: {why}")
        self.gpu, self.spec = gpu, spec
        self.op_w: Op = "T" if spec.transposed else "N"
        self.rank, self.size = gpu.rank, gpu.size
        self.peers = [(gpu.rank + step) % gpu.size for step in range(1, gpu.size)]
        self.workspace = 0
        with gpu.agreement(f"{self.form}: preparing {self.name}"):
            self._prepare()
            if is_float8(spec.out_dtype):
                self._reserve("amax", _AMAX.itemsize)
        buffers = self._buffers()
        self.workspace += sum(buffers.values())
        for name, nbytes in buffers.items():
            gpu.reserve(name, nbytes)

    @classmethod
    def why_not(cls, gpu: Gpu, spec: Spec) -> str:
        """Return why this algorithm cannot compute the product here, "" if it can; the same on every rank. Local."""
        if spec.form != cls.form:
            return f"it is for {cls.form}"
        if cls.ranks not in (None, gpu.size):
            return f"it is for {cls.ranks} GPUs, not {gpu.size}"
        if cls.needs_windows and gpu.why_no_windows:
            return gpu.why_no_windows
        if 0 in (sum(spec.tokens), sum(spec.outputs), sum(spec.inputs)) or spec.alpha == 0:
            return "there is nothing to multiply"
        if is_float8(spec.dtype):
            return _why_not_float8(spec)
        return ""

    def _prepare(self) -> None:
        """Choose what depends only on the sizes, and reserve this GPU's own buffers. Local."""

    def _reserve(self, name: str, nbytes: int) -> None:
        """Make this GPU's own buffer of that name large enough, before a graph records. Local."""
        self.workspace += nbytes
        self.gpu.scratch(name, nbytes)

    def _buffers(self) -> dict[str, int]:
        """Return the symmetric buffers and their sizes, the same on every rank. Local."""
        return {}

    def run(
        self,
        x: Array,
        w: Array,
        c: Array | None,
        out: Array,
        bias: Array | None = None,
        scales: Any = None,
        gathered: Array | None = None,
    ) -> None:
        """Queue the product on CuPy's current stream. Local to queue, collective to run.

        Args:
            x, w, c, out: row-major CuPy arrays; 8-bit floats as bytes. ``out`` may be ``c``.
            bias: one entry for each output that this rank's D has.
            scales: see ``Scales``; ``amax`` is set to zero first.
            gathered: a contiguous array to which AllGather + GEMM writes all of X.
        """
        call = Call(self.gpu, self.spec, x, w, c, out, bias, scales, gathered)
        if call.amax:
            scales.amax.fill(0)
        self._queue(call)

    def _queue(self, call: Call) -> None:
        """Queue a run."""
        raise NotImplementedError

    # -- pieces of work

    def part(self, stream: str, call: Call, x: View, d: View) -> None:
        """Queue a product whose result is added to others: ``d = alpha x W``."""
        self.gpu.multiply(
            stream, x, call.w, d,
            op_w=self.op_w, alpha=self.spec.alpha, finish=call.scaled, compute=self.spec.compute,
        )  # fmt: skip

    def whole(
        self, stream: str, call: Call, x: View, c: View | None, d: View, *, beta: complex | None = None
    ) -> None:
        """Queue a product complete with C, bias, activation and D's scale, with one rounding.

        ``beta`` is the spec's by default.

        cuBLASLt's epilogue does this if it has one for the type, otherwise a kernel; such types are not rounded in
        between. cuBLASLt overwrites the amax of an 8-bit D, but ``d`` may be one of several parts: a kernel takes the
        largest.
        """
        spec = self.spec
        inside = fuses(spec.dtype)
        bias = call.bias
        largest = None
        if call.amax and is_float8(spec.out_dtype):
            largest = View(self.gpu.scratch("amax", _AMAX.itemsize), 1, 1, 1, _AMAX)
        finish = Finish(
            activation=spec.activation if inside else None,
            bias=bias.address if inside and bias else 0,
            bias_dtype=bias.dtype if inside and bias else None,
            scale_x=call.scale_x, scale_w=call.scale_w, scale_d=call.scale_d,
            amax=largest.address if largest else 0,
        )  # fmt: skip
        self.gpu.multiply(
            stream, x, call.w, d, op_w=self.op_w, alpha=spec.alpha, c=c,
            beta=(spec.beta if beta is None else beta) if c else 0, finish=finish, compute=spec.compute,
        )  # fmt: skip
        if largest:
            self.gpu.add(stream, [largest], [largest], amax=call.amax)
        amax = 0 if largest else call.amax
        if (not inside and (bias or spec.activation)) or amax:
            self.gpu.add(
                stream, [d], [d], bias=None if inside else bias,
                activation=None if inside else spec.activation, amax=amax,
            )  # fmt: skip

    def finish(self, call: Call, c: View | None, out: View) -> dict[str, Any]:
        """Return the arguments of ``Gpu.add`` for what it does after adding the parts of ``out``."""
        return {
            "beta": self.spec.beta if c else 0, "c": c, "bias": call.bias, "activation": self.spec.activation,
            "scale": call.scale_d if is_float8(out.dtype) else 0, "amax": call.amax,
        }  # fmt: skip


def _why_not_float8(spec: Spec) -> str:
    """Return why cuBLASLt cannot multiply these 8-bit floats on Hopper."""
    if not spec.transposed:
        return "8-bit products need W as outputs × inputs"
    if spec.dtype == spec.w_dtype == FLOAT8["float8_e5m2"]:
        return "X and W are both float8_e5m2"
    for name in ("inputs", "outputs"):
        odd = [n for n in getattr(spec, name) if n % 16]
        if odd:
            return f"8-bit products need multiples of 16 {name}, got {odd[0]}"
    if spec.travels not in (DTYPES["bfloat16"], DTYPES["float16"], DTYPES["float32"]):
        return f"8-bit products are not summed in {spec.travels.name}"
    return ""
