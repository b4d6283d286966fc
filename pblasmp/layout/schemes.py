# SPDX-License-Identifier: Apache-2.0
"""The 1D layouts of AllGather + GEMM, GEMM + ReduceScatter and GEMM + AllReduce, as cuBLASMp requires them.

All F-ordered: D[m, n] = op(A) op(B) over P ranks. Source: NVIDIA's cuBLASMp documentation of tensor
parallelism and measurements with 0.7.0 and 0.10.0 (docs/schemes.md has the table).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..errors import LayoutError
from .descriptor import MatrixDescriptor
from .grid import Grid, integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike

__all__ = ["OPS", "SCHEMES", "Operands", "Scheme", "scheme_faults", "scheme_operands"]

Scheme = Literal["gemm", "ag", "rs", "ar"]
Operands = tuple[MatrixDescriptor, MatrixDescriptor, MatrixDescriptor]

SCHEMES: dict[str, str] = {
    "gemm": "GEMM on any 2D block-cyclic layout",
    "ag": "AllGather + GEMM",
    "rs": "GEMM + ReduceScatter",
    "ar": "GEMM + AllReduce",
}
OPS: dict[str, tuple[str, ...]] = {
    "ag": ("NN", "TN", "NT", "TT"),
    "rs": ("NN", "TN", "NT", "TT"),
    "ar": ("TN",),
}
"""The products that cuBLASMp has in each scheme, in column-major terms ("C" counts as "T")."""

_SHARDED = {"ag": "mn", "rs": "nk", "ar": "k"}


def scheme_faults(scheme: str, m: int, n: int, k: int, nranks: int, op_a: str, op_b: str) -> list[str]:
    """Return what keeps an F-ordered product of these extents and ops from being this scheme. Local."""
    ops = (op_a + op_b).replace("C", "T")
    faults = []
    if ops not in OPS[scheme]:
        faults.append(
            f"scheme {scheme!r}: {SCHEMES[scheme]} exists for {', '.join(OPS[scheme])} in column-major "
            f"terms, got {ops}"
        )
    extents = {"m": m, "n": n, "k": k}
    for name in _SHARDED[scheme]:
        if extents[name] % nranks:
            below = extents[name] // nranks * nranks
            nearest = f"{below} or {below + nranks}" if below else str(nranks)
            got = f"{name} = {extents[name]}"
            faults.append(
                f"scheme {scheme!r}: {got} must be divisible by {nranks} ranks (nearest: {nearest})"
            )
    return faults


def scheme_operands(
    scheme: str,
    m: int,
    n: int,
    k: int,
    nranks: int,
    op_a: str,
    op_b: str,
    dtype: DTypeLike,
    order: str = "F",
) -> Operands:
    """Return the descriptors of A, B and D of ``D[m, n] = op(A) op(B)`` in this scheme, in one memory order. Local.

    Raises:
        LayoutError: the scheme lacks these ops, or an extent is not divisible by the number of ranks.
    """
    if order == "C":  # the transpose of the F-ordered product, whose A is our B
        b, a, d = scheme_operands(scheme, n, m, k, nranks, op_b, op_a, dtype)
        return a.T, b.T, d.T
    if order != "F":
        raise LayoutError(f"order: expected 'C' or 'F', got {order!r}")
    for name, value, minimum in (("m", m, 0), ("n", n, 0), ("k", k, 0), ("nranks", nranks, 1)):
        integer(value, name, minimum)
    faults = scheme_faults(scheme, m, n, k, nranks, op_a, op_b)
    if faults:
        raise LayoutError("; ".join(faults))
    column, row = Grid(nranks, 1, "col"), Grid(1, nranks, "row")
    ms, ns, ks = (max(1, extent // nranks) for extent in (m, n, k))
    m1, n1, k1 = max(1, m), max(1, n), max(1, k)

    def matrix(shape: tuple[int, int], block: tuple[int, int], grid: Grid) -> MatrixDescriptor:
        return MatrixDescriptor(shape, block, grid, dtype=dtype, order="F")

    trans_a, trans_b = op_a != "N", op_b != "N"
    table: dict[str, Callable[[], Operands]] = {
        "ag": lambda: (
            matrix((k, m), (k1, ms), row) if trans_a else matrix((m, k), (ms, k1), column),
            matrix((n, k), (ns, k1), column) if trans_b else matrix((k, n), (k1, ns), row),
            matrix((m, n), (ms, ns), column),
        ),
        "rs": lambda: (
            matrix((k, m), (ks, m1), column) if trans_a else matrix((m, k), (m1, ks), row),
            matrix((n, k), (ns, ks), row) if trans_b else matrix((k, n), (ks, ns), column),
            matrix((m, n), (m1, ns), row),
        ),
        "ar": lambda: (
            matrix((k, m), (ks, m1), column),
            matrix((k, n), (ks, n1), column),
            matrix((m, n * nranks), (m1, n1), row),
        ),
    }
    return table[scheme]()
