# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp's routines as algorithms of the GPU engine."""

from __future__ import annotations

from dataclasses import replace

from ....bindings import FUNCTIONS, version_text
from ....dtypes import is_float8
from ....errors import PblasmpError, UnsupportedError
from ....layout import Level3Problem, MatmulProblem, ParallelProblem
from ....layout.problem import nearest_legal
from ...composite import MovedProduct
from ...product import Product
from ...protocol import Engine, Method
from ...request import AnyProblem, Operands, Options
from ..runtime.runtime import NO_MULTICAST
from ..session import session_of
from ..types import ALGO_TYPES, MULTICAST
from . import epilogues, faults
from .contracts import nearest_level3, symbol_of
from .level3 import CublasmpLevel3, ScaledC
from .library import Cublasmp
from .product import CublasmpProduct, automatic

# -- products


class MatmulMethod(Method):
    """An algorithm of cublasMpMatmul.

    Args:
        name: the algorithm.
    """

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
        return 1.0 if automatic(problem, session_of(engine).cublasmp.version) == self.name else 9.0

    def prepare(
        self, engine: Engine, problem: MatmulProblem, options: Options, operands: Operands
    ) -> Product:
        why, reason = _later(session_of(engine).cublasmp, problem, options, operands)
        alone = replace(operands, epilogue=None) if why else operands
        product = _prepared(engine, problem, options, alone, self.name)
        if not reason:
            return product
        return epilogues.FinishedProduct(engine, product, problem, operands, why, reason)


def _is_empty(problem: MatmulProblem, options: Options) -> bool:
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
        if 0 in (p.m, p.n, p.k) or options.alpha == 0:
            return ""
        why = faults.level3_is_wrong(p, options.alpha, library.version)
        if why:
            return why
        _, reasons = nearest_level3(p, library.version)
        # Other algorithms take the operands without moving them; if it is named, it moves them.
        return "; ".join(reasons) if options.algo == "auto" else ""

    def cost(self, engine: Engine, problem: Level3Problem, options: Options) -> float:
        return 9.0  # 3 to 11 times as slow as the others on four H200, in blocks of 256: benchmarks/results

    def prepare(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands
    ) -> Product:
        library, p = session_of(engine).cublasmp, problem
        if 0 in (p.m, p.n, p.k) or options.alpha == 0:
            return ScaledC(engine, p, options.beta)
        nearest, reasons = nearest_level3(p, library.version)
        if not reasons:
            return CublasmpLevel3(library, nearest, options, operands)
        return MovedProduct(
            engine, p, nearest, options, operands,
            lambda used: CublasmpLevel3(library, nearest, options, used), reasons,
        )  # fmt: skip


METHODS: tuple[Method, ...] = (*map(MatmulMethod, ALGO_TYPES), Level3Method())
