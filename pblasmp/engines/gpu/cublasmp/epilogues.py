# SPDX-License-Identifier: Apache-2.0
"""Epilogues and scales as cuBLASMp takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ....bindings import MatmulAttribute, MatmulEpilogue, MatrixScale, ResultScheme, version_text
from ....dtypes import accumulation_dtype, is_float8
from ....epilogue import Epilogue, Scales, along, aux_layout, bias_dtype
from ....errors import ArgumentError, UnsupportedError
from ....layout import MatmulProblem
from ...composite import WrappedProduct
from ...local.finish import Finish
from ...product import Product
from ...protocol import Engine
from ...request import Operands
from ..kernels.views import why_no_float8
from ..types import DATA_TYPES

_BLOCK_SINCE = 100  # compute capability
_OUTPUT_SINCE = 800  # in earlier versions C may not be left out, and D cannot stand for it


def check(p: MatmulProblem, scales: Scales | None, version: int, capability: int) -> None:
    """Raise UnsupportedError if an 8-bit product cannot be computed. Local.

    Args:
        p: the product, of any type.
        scales: of the product, or None.
        version: cuBLASMp's.
        capability: the least compute capability of all ranks' GPUs, 90 for 9.0.
    """
    if not is_float8(p.a.dtype):
        return
    if why := why_no_float8(capability):
        raise UnsupportedError(why)
    if is_float8(p.d.dtype) and version < _OUTPUT_SINCE:
        raise UnsupportedError(
            f"an 8-bit D needs cuBLASMp {version_text(_OUTPUT_SINCE)}, found {version_text(version)}"
        )
    if is_float8(p.d.dtype) and p.scheme == "gemm" and p.d.grid.size > 1:
        raise UnsupportedError(  # cuBLASMp only fails in the run, when some GPUs already wait for others
            "cuBLASMp has an 8-bit D only on one GPU and in the layouts of a scheme"
        )
    if scales is None or scales.mode == "tensor":
        return
    if capability < _BLOCK_SINCE:
        here = f"found {capability // 10}.{capability % 10}"
        raise UnsupportedError(
            f"scales: mode {scales.mode!r} needs Blackwell GPUs (compute capability 10.0), {here}: use 'tensor'"
        )
    since = MatrixScale.VEC32_UE8M0.since
    if version < since:
        raise UnsupportedError(
            f"scales: mode {scales.mode!r} needs cuBLASMp {version_text(since)}, found {version_text(version)}"
        )


def scale_attributes(
    scales: Scales, p: MatmulProblem, place: Callable[[str, Any], int]
) -> dict[MatmulAttribute, int]:
    """Return the attributes of a matmul descriptor for the scales. Local.

    Args:
        p: the caller's product; a column-major A is the caller's B if D is in C order.
        place: returns the device address of the scale of a name, given as an array or a number.
    """
    letters = {"a": "B", "b": "A", "d": "D"} if p.d.order == "C" else {"a": "A", "b": "B", "d": "D"}
    found = {}
    for name, letter in letters.items():
        value = getattr(scales, name)
        if value is None:
            continue
        found[MatmulAttribute[f"{letter}_SCALE_POINTER"]] = place(name, value)
        if scales.mode == "block":
            found[MatmulAttribute[f"{letter}_SCALE_MODE"]] = int(MatrixScale.VEC32_UE8M0)
    if scales.amax is not None and is_float8(p.d.dtype):
        found[MatmulAttribute.AMAX_D_POINTER] = place("amax", scales.amax)
    return found


Array = Any

_SINCE = 700  # earlier release notes mention faults in AllGather + GEMM and GEMM + ReduceScatter
_DRELU_SINCE = 801
_ALIGNMENT = 16  # bytes


def why_not_fused(e: Epilogue, p: MatmulProblem, version: int) -> str:
    """Return why cuBLASMp does not compute ``e`` with the product, or an empty string. Local."""
    sums = any(name.startswith("bias_grad") for name in e.given)
    since = _DRELU_SINCE if e.activation == "drelu" else _SINCE
    if sums and p.scheme == "matmul_reduce_scatter":
        since = max(since, MatmulAttribute.BIAS_RESULT_SCHEME.since)
    if p.d.dtype.kind == "c":
        return "cuBLASMp has epilogues for real types only"
    if p.scheme == "matmul_allreduce":
        return "GEMM + AllReduce would sum the epilogues of the ranks' partial products"
    if p.scheme == "gemm" and p.d.grid.size > 1:
        return "cuBLASMp has epilogues only on one GPU and in the schemes that gather A or scatter D"
    if 0 in (p.m, p.n, p.k):
        return "there is nothing to multiply"
    if p.d.dtype == np.float64 and e.activation in ("gelu", "dgelu"):
        return f"cuBLASLt's {e.activation} of float64 is accurate to 8 digits only"
    if p.d.dtype == np.float64 and p.scheme == "matmul_reduce_scatter" and e.bias_grad is not None:
        return "cuBLASMp leaves it 0 for float64 in GEMM + ReduceScatter"
    if e.bias_grad_a is not None or e.bias_grad_b is not None:
        form = p.column_major()
        sums_b = _epilogue(e, swapped=form.swapped) is MatmulEpilogue.BGRADB
        if (form.op_b == "N") if sums_b else (form.op_a != "N"):
            name = "bias_grad_b" if e.bias_grad_b is not None else "bias_grad_a"
            return f"cuBLASLt has no {name} for ops {p.op_a}{p.op_b} in {p.d.order} order"
    if p.k == 1 and e.activation in ("drelu", "dgelu"):
        return f"cuBLASLt has no {e.activation} for k = 1"
    if version < since:
        return f"cuBLASMp has it since {version_text(since)}, found {version_text(version)}"
    return ""


def attributes(
    e: Epilogue, p: MatmulProblem, version: int, rank: int, address: Callable[[Array], int]
) -> dict[MatmulAttribute, int]:
    """Return the attributes of a matmul descriptor that ask for ``e``. Local.

    Args:
        p: the caller's product; a column-major A is the caller's B if D is in C order.
        address: the device address of an array.

    Raises:
        ArgumentError: an auxiliary array is not aligned.
    """
    found = {MatmulAttribute.EPILOGUE: int(_epilogue(e, swapped=p.d.order == "C"))}
    vectors = [name for name in e.given if name != "aux"]
    for name in vectors:
        found[MatmulAttribute.BIAS_POINTER] = address(getattr(e, name))
        found[MatmulAttribute.BIAS_DATA_TYPE] = DATA_TYPES[bias_dtype(p).name]
    if any(name != "bias" for name in vectors) and version >= MatmulAttribute.BIAS_RESULT_SCHEME.since:
        found[MatmulAttribute.BIAS_RESULT_SCHEME] = ResultScheme.FULL
    if e.aux is not None:
        at = address(e.aux)
        if at % _ALIGNMENT:
            raise ArgumentError(
                f"epilogue: aux: starts at {at:#x}, expected a multiple of {_ALIGNMENT} bytes"
            )
        found[MatmulAttribute.EPILOGUE_AUX_POINTER] = at
        mask = e.activation in ("relu", "drelu")
        _, ld, dtype = aux_layout(p.d, rank, e.activation or "")
        lines = 1 - along(p.d)
        if e.aux.shape[lines] > 1:
            ld = e.aux.strides[lines] // e.aux.itemsize
        found[MatmulAttribute.EPILOGUE_AUX_LD] = ld * 8 if mask else ld
        if not mask:
            found[MatmulAttribute.EPILOGUE_AUX_DATA_TYPE] = DATA_TYPES[dtype.name]
    return found


def _epilogue(e: Epilogue, *, swapped: bool) -> MatmulEpilogue:
    """Return cuBLASMp's number for ``e``; A and B have changed places if ``swapped``."""
    if e.bias_grad_a is not None or e.bias_grad_b is not None:
        return MatmulEpilogue.BGRADB if (e.bias_grad_b is not None) != swapped else MatmulEpilogue.BGRADA
    words = [(e.activation or "").upper()]
    if e.aux is not None and e.activation in ("relu", "gelu"):
        words.append("AUX")
    words += ["BIAS"] if e.bias is not None else []
    words += ["BGRAD"] if e.bias_grad is not None else []
    return MatmulEpilogue["_".join(word for word in words if word)]


class FinishedProduct(WrappedProduct):
    """A product, and what CuPy computes from its rounded result: an epilogue or amax.

    Args:
        product: the product alone.
        operands: the planned ones.
        why: why the library does not compute the epilogue; empty if it does.
        reason: the reason in the report.
    """

    def __init__(
        self, engine: Engine, product: Product, p: MatmulProblem, operands: Operands, why: str, reason: str
    ) -> None:
        e = operands.epilogue if why else None
        amax = operands.scales is not None and operands.scales.amax is not None and not is_float8(p.d.dtype)
        what = " and ".join([*([e.name] if e is not None else []), *(["amax"] if amax else [])])
        self._product, self._p, self._activates = product, p, e is not None
        self._finish = Finish(engine, p)
        self._note = f"{what} is computed after the product: {reason}"
        super().__init__(engine, operands)
        self.holds_memory = product.holds_memory

    def _add_steps(self, operands: Operands) -> None:
        self._add(self._product, lambda given: replace(given, epilogue=None) if self._activates else given)
        self._then(self._follow)

    def _follow(self, operands: Operands) -> None:
        """Queue the epilogue and amax. Collective over the context."""
        d, wide_dtype = operands.d, accumulation_dtype(self._p.d.dtype)
        wide = d.astype(wide_dtype) if d.dtype != wide_dtype else d
        amax = None if operands.scales is None else operands.scales.amax
        later = replace(operands, scales=None if amax is None else Scales(amax=amax))
        self._finish(wide, later, epilogue=self._activates)
        if wide is not d:
            d[...] = wide

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The notes of the product, and why the epilogue or amax is computed after it."""
        return (*self._product.notes, self._note)

    @property
    def queues(self) -> bool:
        """False: epilogues and amax allocate."""
        return False

    def why_no_graph(self) -> str:
        """Return why it cannot be recorded: an epilogue may copy indices from the host. Local."""
        return self._note
