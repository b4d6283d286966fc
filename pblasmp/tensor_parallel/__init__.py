# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: the products of split torch.nn layers, on the row-major arrays that their users hold.

T tokens, K inputs, N outputs, P ranks. Each function takes this rank's arrays and returns this rank's result:

    y = pb.allgather_matmul(x, w, ctx)       # x (T/P, K), w (N/P, K): y (T, N/P)
    y = pb.matmul_reduce_scatter(x, w, ctx)  # x (T, K/P), w (N, K/P): y (T/P, N)
    y = pb.matmul_allreduce(x, w, ctx)       # x (T, K/P), w (N, K/P): y (T, N) on every rank
    y = pb.matmul_allgather(x, w, ctx)       # x (T, K), w (N/P, K): y (T, N) on every rank

docs/tensor-parallel.md derives the layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..errors import ArgumentError
from ..layout.axis import Axis
from ..layout.grid import integer
from .call import ParallelCall, multiply

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ..context import Context
    from ..epilogue import Scales
    from ..layout.schemes import Form

__all__ = [
    "allgather_matmul",
    "matmul_allgather",
    "matmul_allreduce",
    "matmul_reduce_scatter",
    "parallel_call",
    "shard",
]


def shard(n: int, ranks: int, rank: int) -> slice:
    """Return which of ``n`` indices a rank holds: the library's rule for who holds what. Local; 0-based.

    Blocks of ⌈n/ranks⌉, one per rank; if n does not divide evenly, the last ones are shorter or empty. Results are
    split by this rule. Inputs may be split otherwise, in rank order: each array says how many indices its rank has.

    Raises:
        ArgumentError: an argument is out of range.
    """
    axis = Axis.even(integer(n, "n", 0, ArgumentError), integer(ranks, "ranks", 1, ArgumentError))
    if integer(rank, "rank", 0, ArgumentError) >= ranks:
        raise ArgumentError(f"rank: expected 0 to {ranks - 1}, got {rank}")
    start = min(n, rank * axis.block)
    return slice(start, start + axis.count(rank))


def allgather_matmul(
    x: Any,
    w: Any,
    ctx: Context,
    *,
    transposed: bool = False,
    bias: Any = None,
    activation: Literal["relu", "gelu"] | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    c: Any = None,
    out: Any = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    x_dtype: DTypeLike | None = None,
    w_dtype: DTypeLike | None = None,
    return_gathered: bool = False,
    algo: str = "auto",
    compute: str | None = None,
    comm_sms: int | None = None,
) -> Any:
    """Return ``activation(alpha X Wᵀ + beta C + bias)``, gathering X along its first dimension.

    Collective over the context.

    Args:
        x: this rank's (T/P, ..., K), C-ordered: NumPy on the host engine, CuPy on cublasmp, PyTorch on either.
        w: this rank's (N/P, K), as torch.nn has it, in either memory order; ranks may have different N/P.
        ctx: the context.
        transposed: w is inputs × outputs, (K, N/P).
        bias: one value for each of this rank's outputs, of the result's type.
        activation: "relu", "gelu" (its tanh form) or None.
        alpha, beta: numbers; with ``beta == 0`` C is never read.
        c: like the result, and may be the result itself (``out=c``).
        out: where to write the result: (T, ..., N/P).
        dtype: type of the result: that of ``out``, else of x, by default; or float32 if that has 16 bits. With 8-bit
            floats bfloat16 by default, or float16, float32 or 8 bits: docs/products-with-more.md.
        scales: with 8-bit x and w, ``pblasmp.Scales`` (a: x's, b: w's, d: the result's, amax), the same on every rank.
        x_dtype, w_dtype: the 8-bit floats that bytes stand for (CuPy has no such type); with scales e4m3 by default.
        return_gathered: return X gathered, (T, ..., K), as well.
        algo, compute, comm_sms: as for ``pblasmp.matmul``.

    Returns:
        (T, ..., N/P), an array of x's library; with ``return_gathered`` a pair.

    Raises:
        ArgumentError: the arrays do not fit together, or one cannot be used in place.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
        ClosedError: the context is closed.

    Example:
        >>> x, w = np.ones((2, 3)), np.ones((4, 3))  # 2 tokens of each rank, 4 outputs of 3 inputs
        >>> pb.allgather_matmul(x, w, ctx).shape == (2 * ctx.size, 4)
        True

    See Also:
        matmul_reduce_scatter; pblasmp.torch has the same with gradients.
    """
    return multiply("allgather_matmul", **locals())[0]


def matmul_reduce_scatter(
    x: Any,
    w: Any,
    ctx: Context,
    *,
    transposed: bool = False,
    bias: Any = None,
    activation: Literal["relu", "gelu"] | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    c: Any = None,
    out: Any = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    x_dtype: DTypeLike | None = None,
    w_dtype: DTypeLike | None = None,
    comm_dtype: DTypeLike | None = None,
    algo: str = "auto",
    compute: str | None = None,
    comm_sms: int | None = None,
) -> Any:
    """Return this rank's part, by ``shard``, of ``activation(alpha X Wᵀ + beta C + bias)``, summed over ranks.

    Collective over the context.

    Args:
        x: this rank's (T, ..., K/P), C-ordered.
        w: this rank's (N, K/P), as torch.nn has it, in either memory order; the inputs may be split in any way.
        ctx: the context.
        transposed: w is inputs × outputs, (K/P, N).
        bias: N values, the same on every rank, added once.
        activation, alpha, beta, algo, compute, comm_sms: as for ``allgather_matmul``.
        c: like the result, and may be the result itself (``out=c``).
        out: where to write the result: (T/P, ..., N).
        dtype, scales, x_dtype, w_dtype: as for ``allgather_matmul``.
        comm_dtype: type in which partial sums travel (cublasmp), by default the result's.

    Returns:
        (T/P, ..., N), an array of x's library.

    Raises:
        ArgumentError, RankMismatchError, UnsupportedError, ClosedError: as ``allgather_matmul``.

    Example:
        >>> x, w = np.ones((2 * ctx.size, 3)), np.ones((4, 3))  # 3 inputs of each rank
        >>> y = pb.matmul_reduce_scatter(x, w, ctx)
        >>> y.shape, bool((y == 3 * ctx.size).all())
        ((2, 4), True)

    See Also:
        allgather_matmul, matmul_allreduce.
    """
    return multiply("matmul_reduce_scatter", **locals())[0]


def matmul_allreduce(
    x: Any,
    w: Any,
    ctx: Context,
    *,
    transposed: bool = False,
    bias: Any = None,
    activation: Literal["relu", "gelu"] | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    c: Any = None,
    out: Any = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    x_dtype: DTypeLike | None = None,
    w_dtype: DTypeLike | None = None,
    comm_dtype: DTypeLike | None = None,
    algo: str = "auto",
    compute: str | None = None,
    comm_sms: int | None = None,
) -> Any:
    """Return ``activation(alpha X Wᵀ + beta C + bias)``, summed over the ranks' inputs, on every rank.

    Collective over the context.

    Args:
        x: this rank's (..., K/P), C-ordered.
        w: this rank's (N, K/P), as torch.nn has it, in either memory order; the inputs may be split in any way.
        ctx: the context.
        transposed: w is inputs × outputs, (K/P, N).
        bias: N values, the same on every rank, added once.
        activation, alpha, beta, algo, compute, comm_sms: as for ``allgather_matmul``.
        c: like the result, the same on every rank; it may be ``out``.
        out: where to write the result: (..., N).
        dtype, scales, x_dtype, w_dtype, comm_dtype: as for ``matmul_reduce_scatter``.

    Returns:
        (..., N), an array of x's library.

    Raises:
        ArgumentError, RankMismatchError, UnsupportedError, ClosedError: as ``allgather_matmul``.

    Example:
        >>> x, w = np.ones((2, 3)), np.ones((4, 3))  # 3 inputs of each rank
        >>> bool((pb.matmul_allreduce(x, w, ctx) == 3 * ctx.size).all())
        True

    See Also:
        matmul_reduce_scatter.
    """
    return multiply("matmul_allreduce", **locals())[0]


def matmul_allgather(
    x: Any,
    w: Any,
    ctx: Context,
    *,
    transposed: bool = False,
    bias: Any = None,
    activation: Literal["relu", "gelu"] | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    c: Any = None,
    out: Any = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    x_dtype: DTypeLike | None = None,
    w_dtype: DTypeLike | None = None,
    algo: str = "auto",
    compute: str | None = None,
    comm_sms: int | None = None,
) -> Any:
    """Return ``activation(alpha X Wᵀ + beta C + bias)`` on every rank; each computes the columns of its weights.

    Collective over the context.

    Args:
        x: (..., K), the same on every rank, C-ordered.
        w: this rank's (N/P, K), as torch.nn has it, in either memory order; ranks may have different N/P.
        ctx: the context.
        transposed: w is inputs × outputs, (K, N/P).
        bias: one value for each of this rank's outputs, of the result's type.
        activation, alpha, beta: as for ``allgather_matmul``.
        c: like the result, and may be the result itself; each rank reads the columns that it computes.
        out: where to write the result: (..., N).
        dtype, scales, x_dtype, w_dtype, algo, compute, comm_sms: as for ``allgather_matmul``.

    Returns:
        (..., N), an array of x's library.

    Raises:
        ArgumentError, RankMismatchError, UnsupportedError, ClosedError: as ``allgather_matmul``.

    Example:
        >>> x, w = np.ones((2, 3)), np.ones((4, 3))  # 4 outputs of each rank
        >>> pb.matmul_allgather(x, w, ctx).shape == (2, 4 * ctx.size)
        True

    See Also:
        allgather_matmul.
    """
    return multiply("matmul_allgather", **locals())[0]


def parallel_call(
    form: Form,
    x: Any,
    w: Any,
    ctx: Context,
    *,
    bias: Any = None,
    c: Any = None,
    out: Any = None,
    scales: Scales | None = None,
    **options: Any,
) -> ParallelCall:
    """Return a call of the function of that name, for a plan. Local."""
    return ParallelCall(form, ctx, x, w, c, out, bias, scales, **options, for_plan=True)
