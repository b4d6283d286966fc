# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit floats on GPUs: what they need, and how cuBLASMp gets their scales.

Source: cublasmp.h of 0.10.0 and cuBLASMp's release notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....bindings import MatmulAttribute, MatrixScale, version_text
from ....dtypes import is_float8
from ....errors import UnsupportedError
from ....layout import MatmulProblem
from ....scales import Scales
from ..kernels.float8 import why_no_float8

__all__ = ["attributes", "check"]

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


def attributes(
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
