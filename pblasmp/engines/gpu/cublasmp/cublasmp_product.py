# SPDX-License-Identifier: Apache-2.0
"""One product as cuBLASMp sees it: descriptors, attributes, workspace, the prepared call; cuBLASMp's algorithms."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ....bindings import (
    FUNCTIONS,
    MatmulAlgoType,
    MatmulAttribute,
    MatmulEpilogue,
    Operation,
    ctype,
    version_text,
)
from ....dtypes import accumulation_dtype, is_float8
from ....epilogue import bias_dtype
from ....errors import PblasmpError, UnsupportedError
from ....layout import ColumnMajorProduct, Level3Problem, MatmulProblem, ParallelProblem
from ....layout.problem import nearest_legal
from ...composite import MovedProduct
from ...product import Product
from ...protocol import Engine, Method
from ...request import AnyProblem, Operands, Options
from ..kernels.lt import SCALE_ALIGNED
from ..runtime.gpu_runtime import NO_MULTICAST
from ..session import session_of
from ..types import ALGO_TYPES, DATA_TYPES, MULTICAST, compute_type
from . import epilogues, faults
from .level3_calls import CublasmpLevel3, ScaledC, nearest_level3, symbol_of
from .library import Cublasmp
from .prepared_call import PreparedCall, columns

Array = Any


def automatic(problem: MatmulProblem, version: int) -> str:
    """Return the algorithm that ``algo="auto"`` may take, of those of cublasMpMatmul. Local.

    Of the schemes the one without overlap: what overlaps needs a barrier, and is not faster than pblasmp's own.
    """
    return (
        "default" if version < MatmulAlgoType.NO_OVERLAP.since or problem.scheme == "gemm" else "no_overlap"
    )


class CublasmpProduct(PreparedCall):
    """A product on this rank's part of D's grid. Making, growing and closing one is collective over the context."""

    def __init__(
        self, library: Cublasmp, problem: MatmulProblem, options: Options, operands: Operands, algo: str
    ) -> None:
        self._problem, self._options, self._algo = problem, options, algo
        self._descriptor_of_product = 0
        self._epilogue, self._scales = operands.epilogue, operands.scales
        self._copied_scales: dict[str, Any] = {}
        self._form = form = problem.column_major()
        self.holds_memory = form.conj_a or form.conj_b
        for x in (form.a, form.b, form.d):
            library.grid(x.grid)
        inside = library.runtime.rank < form.d.grid.size
        super().__init__(library, "Matmul", form.d.grid, operands, inside=inside)
        self.sent_bytes = received_bytes(form, problem, library.runtime.rank) if inside else 0
        if problem.scheme == "allgather_matmul":
            gathered = operands.a if form.swapped else operands.b
            self._notes.append(
                _gathered_note("A" if form.swapped else "B", library.share(gathered, form.d.grid))
            )
        if inside and faults.ends_before_peers_have_read(problem, algo):
            self._ends = library.barrier(form.d.grid)
            self._notes.append("a barrier follows each run: peers may still read what the next run replaces")
        self._prepare()

    @property
    def path(self) -> str:  # type: ignore[override]
        """What cuBLASMp has run according to its log; before the first run, what it is asked for."""
        return self._logged(self._algo)

    # -- making

    def _arguments_of_call(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        form, options, problem = self._form, self._options, self._problem
        scale = accumulation_dtype(form.d.dtype)
        self._alpha, self._beta = np.array(options.alpha, dtype=scale), np.array(options.beta, dtype=scale)
        descriptors = {
            name: self._descriptor(x, self._lld(array, x))
            for name, x, array in zip("abcd", (form.a, form.b, form.c, form.d), self._sources, strict=True)
            if x is not None and array is not None
        }
        if is_float8(form.d.dtype) and form.c is None:  # C has 16 bits, although there is none
            like_d = replace(form.d, dtype=bias_dtype(problem))
            descriptors["c"] = self._descriptor(like_d, self._lld(self._sources[3], form.d))
        if "c" not in descriptors and self._library.version < 800:  # C may not be NULL: pass D, not read
            self._pointers["c"], descriptors["c"] = self._pointers["d"], descriptors["d"]
        m, n = (problem.n, problem.m) if form.swapped else (problem.m, problem.n)
        p = self._pointers
        arguments = (
            self._library.handle, self._matmul_descriptor(), m, n, problem.k,
            self._alpha.ctypes.data, p["a"], 1, 1, descriptors["a"], p["b"], 1, 1, descriptors["b"],
            self._beta.ctypes.data, p["c"], 1, 1, descriptors.get("c"), p["d"], 1, 1, descriptors["d"],
        )  # fmt: skip
        return arguments, ()

    def _matmul_descriptor(self) -> int:
        form, lib, options, out = self._form, self._lib, self._options, ctypes.c_void_p()
        lib.cublasMpMatmulDescriptorCreate(ctypes.byref(out), compute_type(form.a.dtype, options.compute))
        self._closing.callback(lib.cublasMpMatmulDescriptorDestroy, out.value)
        attributes: dict[MatmulAttribute, int] = {
            MatmulAttribute.TRANSA: Operation[form.op_a],
            MatmulAttribute.TRANSB: Operation[form.op_b],
        }
        if ALGO_TYPES[self._algo] is not MatmulAlgoType.DEFAULT:
            attributes[MatmulAttribute.ALGO_TYPE] = ALGO_TYPES[self._algo]
        if options.comm_sms is not None:
            attributes[MatmulAttribute.COMMUNICATION_SM_COUNT] = options.comm_sms
        if self._problem.scheme == "matmul_allreduce":
            attributes[MatmulAttribute.EPILOGUE] = MatmulEpilogue.ALLREDUCE
        travels = self._communication_type()
        if travels is not None:
            attributes[MatmulAttribute.COMMUNICATION_TYPE] = DATA_TYPES[travels.name]
        attributes |= self._following()
        assert out.value is not None
        self._descriptor_of_product = out.value
        self._set(attributes)
        return out.value

    def _set(self, attributes: dict[MatmulAttribute, int]) -> None:
        for attribute, value in attributes.items():
            buffer = ctype(attribute.c_type)(value)
            size, at = ctypes.sizeof(buffer), ctypes.byref(buffer)
            self._lib.cublasMpMatmulDescriptorSetAttribute(self._descriptor_of_product, attribute, at, size)

    def _following(self) -> dict[MatmulAttribute, int]:
        """Return the attributes for epilogue and scales."""
        library, problem, found = self._library, self._problem, {}
        self._copied_scales.clear()
        if self._epilogue is not None:
            found = epilogues.attributes(
                self._epilogue, problem, library.version, library.runtime.rank, library.address
            )
        if self._scales is not None:
            found |= epilogues.scale_attributes(self._scales, problem, self._place)
        return found

    def _place(self, name: str, value: Any) -> int:
        """Return the device address of a scale: an array, or a number in memory that lasts as long as the product.

        If the library refuses the address of an array, its value is copied before each run.
        """
        number = isinstance(value, float)
        if not number:
            address = self._library.address(value)
            read = name != "amax" and self._scales is not None and self._scales.mode == "tensor"
            if not read or address % SCALE_ALIGNED == 0:
                return address
        import cupy

        name = f"scale {name}"
        if name not in self._temporaries:
            self._temporaries[name] = cupy.empty(1, np.float32)
        place = self._temporaries[name]
        if number:
            place.fill(value)
        else:
            self._copied_scales[name] = value
        return self._library.address(place)

    def _copy_scales(self) -> None:
        for name, value in self._copied_scales.items():
            self._temporaries[name][...] = value.reshape(1)

    def _communication_type(self) -> np.dtype | None:
        """Return the type in which partial sums travel, if that is not the library's own choice, float32."""
        if self._problem.scheme not in ("matmul_reduce_scatter", "matmul_allreduce"):
            return None
        asked = self._options.comm_dtype
        kind = self._form.d.dtype
        wanted = asked or (bias_dtype(self._problem) if is_float8(kind) else kind)
        if wanted == accumulation_dtype(kind):
            return None
        if self._library.version >= MatmulAttribute.COMMUNICATION_TYPE.since:
            return wanted
        if asked is not None:
            raise UnsupportedError(
                f"comm_dtype: cuBLASMp has it since 0.8, found {version_text(self._library.version)}"
            )
        self._notes.append("partial sums travel in float32: cuBLASMp can choose since 0.8")
        return None

    # -- running

    def _forget(self) -> None:
        super()._forget()
        self._sources: tuple[Any, ...] = ()
        self._epilogue = self._scales = None
        self._copied_scales.clear()

    def _point_at(self, operands: Operands) -> None:
        import cupy

        self._before = []
        form, problem = self._form, self._problem
        a, b, c, d = operands.a, operands.b, operands.c, operands.d
        factors = [columns(a, problem.a.order), columns(b, problem.b.order)]
        names = ["A", "B"]
        if form.swapped:
            factors, names = factors[::-1], names[::-1]
        for i, (x, conjugated) in enumerate(((form.a, form.conj_a), (form.b, form.conj_b))):
            if conjugated:
                why = "it is conjugated without a transpose"
                factors[i] = self._through(names[i], factors[i], x, cupy.conjugate, why)
        if self._options.beta == 0:
            c = None
        elif c is not None and c is not d and (form.copy_c or faults.needs_c_in_d(d)):
            c = self._into_d(c, d, cupy.positive)
        results = [None if x is None else columns(x, problem.d.order) for x in (c, d)]
        self._sources = (*factors, *results)
        for name, array in zip("abcd", self._sources, strict=True):
            self._point(name, array)
        epilogue = operands.epilogue
        changed = epilogue is not self._epilogue or operands.scales is not self._scales
        if self._descriptor_of_product and changed:
            self._epilogue, self._scales = epilogue, operands.scales
            self._set(self._following())
        if operands.scales is not None:
            self._before.append(self._copy_scales)
        if epilogue is not None and epilogue.activation == "relu" and epilogue.aux is not None:
            mask = epilogue.aux  # products of parts of D may write only some bits of a byte
            self._before.append(lambda: mask.fill(0))

    def _into_d(self, c: Array, d: Array, copy: Callable[..., Any]) -> Array:
        """Return D, to which C is copied before each run."""
        self._copies("C", c.nbytes, "its memory layout is not D's")
        self._before.append(lambda: copy(c, out=d))
        return d


def _gathered_note(name: str, symmetric: bool) -> str:
    if symmetric:
        return f"{name}, which is gathered, is in symmetric memory"
    return (
        f"{name}, which is gathered, is copied first; from ctx.empty(..., symmetric=True) it is read in place"
    )


def received_bytes(form: ColumnMajorProduct, problem: MatmulProblem, rank: int) -> int:
    """Return the fewest bytes that a rank can get from others: its share of op(A) and op(B), or of partial sums."""
    if problem.scheme in ("matmul_reduce_scatter", "matmul_allreduce"):
        parts = form.d.grid.size
        rows, cols = form.d.local_shape(rank)
        return (parts - 1) * rows * cols * form.d.dtype.itemsize
    rows, cols = form.d.local_shape(rank)
    needed = (rows + cols) * problem.k
    held = [x.local_shape(rank) for x in (form.a, form.b)]
    return max(0, needed - sum(r * c for r, c in held)) * form.a.dtype.itemsize


# -- products


class MatmulMethod(Method):
    """An algorithm of cublasMpMatmul."""

    least = 1.0

    def __init__(self, name: str) -> None:
        self.name, self._since = name, ALGO_TYPES[name].since

    def serves(self, problem: AnyProblem) -> bool:
        if isinstance(problem, ParallelProblem):
            return problem.form != "matmul_allgather"
        return isinstance(problem, MatmulProblem)

    def view(self, problem: AnyProblem) -> AnyProblem | str:
        return problem.as_scheme() if isinstance(problem, ParallelProblem) else problem

    def refusal(
        self, engine: Engine, problem: MatmulProblem, options: Options, operands: Operands | None
    ) -> str:
        library, p = session_of(engine).cublasmp, problem
        if library.version < self._since:
            needed, found = version_text(self._since), version_text(library.version)
            return f"it needs cuBLASMp {needed}, found {found}"
        if library.why_no_memory:
            return library.why_no_memory
        if self.name in MULTICAST and not library.runtime.multicast:
            return f"it needs NVLink multicast, which {NO_MULTICAST} switches off"
        try:
            epilogues.check(
                p, None if operands is None else operands.scales, library.version, library.runtime.capability
            )
            _later(library, p, options, operands)
        except PblasmpError as error:
            return str(error)
        if _is_empty(p, options) and is_float8(p.d.dtype) and options.beta != 0:
            return "an 8-bit D = beta C: there is no product for cuBLASMp to compute"
        nearest, reasons = _taken(p, library.version)
        blocks = operands is not None and operands.scales is not None and operands.scales.mode == "block"
        if blocks and (nearest.a, nearest.b) != (p.a, p.b):
            return f"scales of mode 'block' need operands that are not moved: {'; '.join(reasons)}"
        return "; ".join(reasons) if options.algo == "auto" else ""  # if asked for by name, it moves operands

    def cost(self, engine: Engine, problem: MatmulProblem, options: Options) -> float:
        return self.least if automatic(problem, session_of(engine).cublasmp.version) == self.name else 9.0

    def prepare(
        self, engine: Engine, problem: MatmulProblem, options: Options, operands: Operands
    ) -> Product:
        why, reason = _later(session_of(engine).cublasmp, problem, options, operands)
        alone = replace(operands, epilogue=None) if why else operands
        product = _prepared(engine, problem, options, alone, self.name)
        if not reason:
            return product
        return epilogues.FinishedProduct(engine, product, problem, operands, why, reason)


def _is_empty(problem: MatmulProblem | Level3Problem, options: Options) -> bool:
    return 0 in (problem.m, problem.n, problem.k) or options.alpha == 0


def _taken(p: MatmulProblem, version: int) -> tuple[MatmulProblem, tuple[str, ...]]:
    """Return the product in layouts that cuBLASMp takes and computes without a known fault, and why operands are moved.

    Local. ``p`` itself if nothing must be moved.
    """
    legal = nearest_legal(p) if p.scheme == "gemm" else p
    nearest, reasons = faults.avoided(legal, version)
    broken = [] if legal == p else p.faults()
    return nearest, (*(f"cuBLASMp does not take these layouts: {fault}" for fault in broken), *reasons)


def _later(
    library: Cublasmp, problem: MatmulProblem, options: Options, operands: Operands | None
) -> tuple[str, str]:
    """Return why an epilogue is not fused, and why anything is computed after the product; empty strings if not."""
    e = None if operands is None else operands.epilogue
    why = ""
    if e is not None:
        why = epilogues.why_not_fused(e, problem, library.version)
        if not why and options.alpha == 0:
            why = "alpha is 0"
        if not why and _taken(problem, library.version)[0].d != problem.d:
            why = "D is moved after the product"
        if why and (e.fused or is_float8(problem.d.dtype)):
            kind = "" if e.fused else ", and by then an 8-bit D has been rounded"
            raise UnsupportedError(f"epilogue: {e.name} cannot be fused: {why}{kind}")
    s = None if operands is None else operands.scales
    amax = s is not None and s.amax is not None and not is_float8(problem.d.dtype)
    return why, why or ("cuBLASLt computes amax only for an 8-bit D" if amax else "")


def _prepared(engine: Engine, p: MatmulProblem, options: Options, operands: Operands, name: str) -> Product:
    """Return a product without known faults, of copies in other layouts if necessary."""
    library = session_of(engine).cublasmp
    if _is_empty(p, options):
        return ScaledC(engine, p, options.beta)
    nearest, reasons = _taken(p, library.version)
    if all(getattr(nearest, name) == getattr(p, name) for name in "abcd"):
        return CublasmpProduct(library, nearest, options, operands, name)
    return MovedProduct(
        engine, p, nearest, options, operands,
        lambda used: CublasmpProduct(library, nearest, options, used, name), reasons,
    )  # fmt: skip


# -- level 3


class Level3Method(Method):
    """cuBLASMp's routine of level 3, if it has one."""

    name = "cublasmp"
    least = 9.0  # 3 to 11 times as slow as the others on four H200, in blocks of 256: benchmarks/results

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, Level3Problem) and symbol_of(problem) in FUNCTIONS

    def refusal(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands | None
    ) -> str:
        library, p = session_of(engine).cublasmp, problem
        if library.why_no_memory:
            return library.why_no_memory
        try:
            library.c.raw(symbol_of(p))  # this version may lack the function
        except PblasmpError as error:
            return str(error)
        if _is_empty(p, options):
            return ""
        why = faults.level3_is_wrong(p, options.alpha, library.version)
        if why:
            return why
        _, reasons = nearest_level3(p, library.version)
        # Other algorithms take the operands without moving them; if it is named, it moves them.
        return "; ".join(reasons) if options.algo == "auto" else ""

    def prepare(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands
    ) -> Product:
        library, p = session_of(engine).cublasmp, problem
        if _is_empty(p, options):
            return ScaledC(engine, p, options.beta)
        nearest, reasons = nearest_level3(p, library.version)
        if not reasons:
            return CublasmpLevel3(library, nearest, options, operands)
        return MovedProduct(
            engine, p, nearest, options, operands,
            lambda used: CublasmpLevel3(library, nearest, options, used), reasons,
        )  # fmt: skip


METHODS: tuple[Method, ...] = (*map(MatmulMethod, ALGO_TYPES), Level3Method())
