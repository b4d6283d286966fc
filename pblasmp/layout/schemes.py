# SPDX-License-Identifier: Apache-2.0
"""The four tensor-parallel products by name, and the 1D layouts of three of them as cuBLASMp requires them.

All F-ordered: D[m, n] = op(A) op(B) over P ranks. Source: NVIDIA's cuBLASMp documentation of tensor
parallelism and measurements with 0.7.0 and 0.10.0 (docs/tensor-parallel.md has the table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import ArgumentError, LayoutError, short_repr
from .descriptor import MatrixDescriptor
from .grid import Grid, integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike

Form = Literal["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"]
"""A tensor-parallel product, by the name of its public function."""


@dataclass(frozen=True, slots=True)
class FormNames:
    """What a tensor-parallel product is called.

    Attributes:
        short: a short form, with which names of files begin.
        title: as papers and cuBLASMp's documentation call it.
    """

    short: str
    title: str


FORMS: dict[Form, FormNames] = {
    "allgather_matmul": FormNames("ag", "AllGather + GEMM"),
    "matmul_reduce_scatter": FormNames("rs", "GEMM + ReduceScatter"),
    "matmul_allreduce": FormNames("ar", "GEMM + AllReduce"),
    "matmul_allgather": FormNames("ga", "GEMM + AllGather of the output"),
}
"""Every tensor-parallel product by its name."""


Op = Literal["N", "T", "C"]
Scheme = Literal["gemm", "allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"]
Operands = tuple[MatrixDescriptor, MatrixDescriptor, MatrixDescriptor]

SCHEMES: dict[str, str] = {
    "gemm": "GEMM on any 2D block-cyclic layout",
    **{name: names.title for name, names in FORMS.items() if name != "matmul_allgather"},
}
"""The schemes and their titles. GEMM + AllGather of the output has no layout of one matrix."""

OPS: dict[str, tuple[str, ...]] = {
    "allgather_matmul": ("NN", "TN", "NT", "TT"),
    "matmul_reduce_scatter": ("NN", "TN", "NT", "TT"),
    "matmul_allreduce": ("TN",),
}
"""The products that cuBLASMp has in each scheme, in column-major terms ("C" counts as "T")."""

_SHARDED = {"allgather_matmul": "mn", "matmul_reduce_scatter": "nk", "matmul_allreduce": "k"}


def scheme_ops(order: str) -> tuple[Op, Op]:
    """Return the ops of A and B that every scheme has in a memory order, "C" or "F". Local."""
    return ("T", "N") if order == "F" else ("N", "T")


def scheme_faults(
    scheme: str, m: int, n: int, k: int, nranks: int, op_a: str, op_b: str, names: str = "mnk"
) -> list[str]:
    """Return what keeps an F-ordered product of these extents and ops from being this scheme. Local.

    ``names`` are what messages call m, n and k.
    """
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
            got = f"{names['mnk'.index(name)]} = {extents[name]}"
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

    LayoutError if the scheme lacks these ops, or an extent is not divisible by the number of ranks.
    """
    if order not in ("C", "F"):
        raise ArgumentError(f"order: expected 'C' or 'F', got {short_repr(order)}")
    for name, value, minimum in (("m", m, 0), ("n", n, 0), ("k", k, 0), ("nranks", nranks, 1)):
        integer(value, name, minimum)
    if order == "C":  # the transpose of the F-ordered product, whose A is our B
        _require(scheme_faults(scheme, n, m, k, nranks, op_b, op_a, names="nmk"))
        b, a, d = scheme_operands(scheme, n, m, k, nranks, op_b, op_a, dtype)
        return a.T, b.T, d.T
    _require(scheme_faults(scheme, m, n, k, nranks, op_a, op_b))
    column, row = Grid(nranks, 1, "col"), Grid(1, nranks, "row")
    ms, ns, ks = (max(1, extent // nranks) for extent in (m, n, k))
    m1, n1, k1 = max(1, m), max(1, n), max(1, k)

    def matrix(shape: tuple[int, int], block: tuple[int, int], grid: Grid) -> MatrixDescriptor:
        return MatrixDescriptor(shape, block, grid, dtype=dtype, order="F")

    trans_a, trans_b = op_a != "N", op_b != "N"
    table: dict[str, Callable[[], Operands]] = {
        "allgather_matmul": lambda: (
            matrix((k, m), (k1, ms), row) if trans_a else matrix((m, k), (ms, k1), column),
            matrix((n, k), (ns, k1), column) if trans_b else matrix((k, n), (k1, ns), row),
            matrix((m, n), (ms, ns), column),
        ),
        "matmul_reduce_scatter": lambda: (
            matrix((k, m), (ks, m1), column) if trans_a else matrix((m, k), (m1, ks), row),
            matrix((n, k), (ns, ks), row) if trans_b else matrix((k, n), (ks, ns), column),
            matrix((m, n), (m1, ns), row),
        ),
        "matmul_allreduce": lambda: (
            matrix((k, m), (ks, m1), column),
            matrix((k, n), (ks, n1), column),
            matrix((m, n * nranks), (m1, n1), row),
        ),
    }
    return table[scheme]()


def _require(faults: list[str]) -> None:
    """Raise LayoutError if there are faults."""
    if faults:
        raise LayoutError("; ".join(faults))
