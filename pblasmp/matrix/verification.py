# SPDX-License-Identifier: Apache-2.0
"""Whether a distributed product is right: Freivalds' test, in O(n²) on the local arrays, or element by element.

R. Freivalds, Probabilistic machines can use less running time, IFIP Congress 1977: D = op(A) op(B) is
checked on random vectors x of signs, D x = op(A) (op(B) x). A wrong D passes each check with probability at most 1/2.

NaN and infinities would spoil whole sums. The rows and columns of D that hold them are left out of the sums and
compared with what NumPy computes, as ``equal_nan`` does: all of them, or a random choice if there are many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import accumulation_dtype, double_dtype, element_type, scalar
from ..engines.local.extremes import largest, scale_by_power
from ..engines.local.finish import activate
from ..epilogue import Epilogue, Scales, along
from ..errors import ArgumentTypeError, UnsupportedError, short_repr
from ..layout import MatmulProblem, MatrixDescriptor
from ..runtime.interop import as_local
from ..runtime.matrix_calls import check_c
from ..runtime.reading import check_operands, context_of
from ..runtime.runtime import Runtime
from .distributed import DistributedMatrix
from .products import check, check_extras

if TYPE_CHECKING:
    from ..layout.schemes import Op, Scheme

_VECTORS = 8
_LINES = 32  # rows, and as many columns, with NaN or infinities that are recomputed
_CHUNK_BYTES = 1 << 24

Array = NDArray[Any]
_TRANSPOSED = {"N": "T", "T": "N", "C": "R"}  # the op of a transpose; R conjugates only


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether a product is right; true if it is. The same on every rank. Local.

    Attributes:
        error: the largest difference found between finite numbers, relative to
            ``|alpha op(A)| |op(B)| |x| + |beta C| |x|`` for vectors x; by the exact check, to the largest number.
        bound: the largest error that rounding explains; 0 for the exact check.
        nans, infinities: how many elements of D are NaN or infinite.
        wrong: how many elements were found that are of a different kind (NaN, infinite, finite) from NumPy's; by the
            exact check, how many differ.
    """

    error: float
    bound: float
    nans: int = 0
    infinities: int = 0
    wrong: int = 0

    @property
    def ok(self) -> bool:
        """Whether the product is right, within rounding."""
        return self.error <= self.bound and not self.wrong

    def __bool__(self) -> bool:
        return self.ok


def verify(
    a: DistributedMatrix,
    b: DistributedMatrix,
    c: DistributedMatrix | None,
    d: DistributedMatrix,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    op_a: Op = "N",
    op_b: Op = "N",
    epilogue: Epilogue | None = None,
    scales: Scales | None = None,
    scheme: Scheme = "gemm",
    exact: bool = False,
) -> Verification:
    """Return whether D is ``alpha op(A) op(B) + beta C``, without that product. Collective over the context.

    The check multiplies each matrix by 8 random vectors, which takes about as long as reading the matrices a few times:
    Freivalds' test. A wrong D passes with a probability of at most 1/256; the vectors are the same in every call.

        d = pb.matmul(a, b)
        assert pb.verify(a, b, None, d)

    Args:
        a, b: the operands, as they were when D was computed.
        c: the C that was added, or None. If D was written over it, pass a copy of what it was.
        d: the result, in any layout.
        alpha, beta, op_a, op_b, scheme: as for ``pb.matmul``.
        epilogue: a bias, "relu" or "gelu", as for ``pb.matmul``; ``aux`` is not checked. With an activation, which is
            not linear, 32 rows and as many columns, chosen at random, are computed again: a wrong element that is in
            none of them passes.
        scales: one for each matrix, as for ``pb.matmul``; ``amax`` is not checked. Numbers that are beyond the range of
            an 8-bit D differ; its rounding explains errors of a quarter of the sums of absolute values.
        exact: compare every element with NumPy's product on rank 0, in double precision, for equality: for integers,
            whose product is exact. Rank 0 needs memory for the whole matrices.

    Raises:
        LayoutError: sizes or types do not fit together.
        ArgumentError: another argument is wrong, or matrices are of different contexts.
        UnsupportedError: the epilogue has gradients, the scales are of blocks, or the scheme has an epilogue.
        RankMismatchError: the ranks gave different arguments.
    """
    ctx = context_of("verify", a, b, c, d)
    with ctx.agreement("verify") as facts:
        check_operands(ctx, "abd", {"a": a, "b": b, "c": c, "d": d})
        check_extras(epilogue, scales)
        if not isinstance(exact, (bool, np.bool_)):
            raise ArgumentTypeError(f"exact: expected True or False, got {short_repr(exact)}")
        of_c = None if c is None else c.descriptor
        problem = MatmulProblem(a.descriptor, b.descriptor, d.descriptor, op_a, op_b, of_c, scheme)
        alpha, beta = scalar(alpha, d.dtype, "alpha"), scalar(beta, d.dtype, "beta")
        facts.update(problem.facts(), alpha=alpha, beta=beta, exact=bool(exact))
        check(problem)
        check_c(problem, beta)
        facts.update(epilogue=epilogue and epilogue.facts(), scales=scales and scales.facts())
        after = _after(ctx, problem, epilogue, scales)
        facts["values of scales"] = after.of_operands, after.of_d
    with ctx.running("verify"), np.errstate(all="ignore"):  # NaN and overflow are expected here
        c = c if beta else None
        after = after.gathered(problem.d, ctx)
        alpha = alpha * after.of_operands
        if exact:
            return _exactly(ctx, problem, _Freivalds(a, b, c, d, alpha, beta, op_a, op_b, after))
        copies = [d] if scheme != "matmul_allreduce" else _copies(problem, d)
        cs = [c] * len(copies) if c is None or scheme != "matmul_allreduce" else _copies(problem, c)
        found = [
            _Freivalds(a, b, its_c, its_d, alpha, beta, op_a, op_b, after).verification()
            for its_c, its_d in zip(cs, copies, strict=True)
        ]
        told: Verification = ctx.comm.bcast(  # processors round differently
            Verification(
                max((each.error for each in found), key=lambda x: (math.isnan(x), x)), found[0].bound, *(
                    sum(getattr(each, name) for each in found) for name in ("nans", "infinities", "wrong")
                ),
            )
        )  # fmt: skip
        return told


class _After(NamedTuple):
    """What follows the product: a bias for every entry along an axis of D, an activation, scales.

    Attributes:
        bias: first this rank's part, then all of it; None for none.
        axis: of D, along which the bias has an entry for every index.
        activation: "relu", "gelu" or None.
        of_operands: what the product is multiplied by.
        of_d: what D is multiplied by before it is stored.
    """

    bias: Array | None = None
    axis: int = 1
    activation: str | None = None
    of_operands: float = 1.0
    of_d: float = 1.0

    def gathered(self, d: MatrixDescriptor, ctx: Runtime[Any]) -> _After:
        """Return it with all of the bias, on every rank. Collective over the context."""
        if self.bias is None:
            return self
        found = np.zeros((2, d.shape[self.axis]))  # the sum of all ranks' copies, and their number
        if ctx.rank < d.grid.size:
            at = d.global_indices(ctx.rank)[self.axis]
            found[0, at], found[1, at] = self.bias.astype(np.float64), 1
        ctx.comm.sum_into(found)
        return self._replace(bias=found[0] / np.maximum(found[1], 1))

    def entries(self, lines: NDArray[np.int64], axis: int) -> Array | float:
        """Return what is added to some rows (axis 0) or columns of D, which are columns here. Local."""
        if self.bias is None:
            return 0.0
        return self.bias[lines][None, :] if axis == self.axis else self.bias[:, None]

    def activated(self, x: Array) -> Array:
        """Return the activation of D's elements. Local."""
        if self.activation is not None:
            x = x.copy()
            activate(np, Epilogue(self.activation), x, None)  # type: ignore[arg-type]
        return x


def _after(
    ctx: Runtime[Any], problem: MatmulProblem, epilogue: Epilogue | None, scales: Scales | None
) -> _After:
    """Return the epilogue of a product, or raise what is wrong with it. Local."""
    take_over = partial(as_local, ctx.engine)
    bias = activation = None
    if epilogue is not None and epilogue.name:
        if (
            problem.scheme != "gemm"
            or {*epilogue.given} - {"bias", "aux"}
            or epilogue.activation in ("drelu", "dgelu")
        ):
            raise UnsupportedError("verify: epilogue: expected a bias or an activation, of scheme 'gemm'")
        bound = epilogue.bind(partial(take_over, name="epilogue"), problem, ctx.rank)
        bias, activation = bound.bias, bound.activation
    numbers = {"a": 1.0, "b": 1.0, "d": 1.0}
    if scales is not None:
        if scales.mode != "tensor":
            raise UnsupportedError(f"verify: scales: mode is {scales.mode!r}, expected 'tensor'")
        scales = scales.bind(partial(take_over, name="scales"), problem, ctx.rank)
        for name in numbers:
            value = getattr(scales, name)
            if value is not None:
                host = value if isinstance(value, float) else ctx.engine.to_host(value).reshape(-1)[0]
                numbers[name] = float(host)
    return _After(
        None if bias is None else ctx.engine.to_host(bias), along(problem.d), activation,
        numbers["a"] * numbers["b"], numbers["d"],
    )  # fmt: skip


def _copies(problem: MatmulProblem, d: DistributedMatrix) -> list[DistributedMatrix]:
    """Return each rank's whole result, of GEMM + AllReduce: side by side, or in C order one below the other."""
    m, n = problem.m, problem.n
    if problem.d.order == "F":
        return [d[:, n * i : n * (i + 1)] for i in range(problem.d.grid.size)]
    return [d[m * i : m * (i + 1), :] for i in range(problem.d.grid.size)]


def _exactly(ctx: Runtime[Any], problem: MatmulProblem, asked: _Freivalds) -> Verification:
    """Compare every element with NumPy's on rank 0. Collective over the context."""
    wholes = [None if x is None else x.gather() for x in (asked.a, asked.b, asked.c, asked.d)]
    found = None
    with ctx.agreement("verify: comparing"):
        if ctx.rank == 0:
            a, b, c, d = (
                None if x is None else x.astype(double_dtype(asked.d.dtype, x.dtype)) for x in wholes
            )
            assert a is not None
            assert b is not None
            assert d is not None
            expected: Array = asked.alpha * (_op(a, asked.op_a) @ _op(b, asked.op_b))
            if problem.scheme == "matmul_allreduce":
                copies = problem.d.grid.size
                expected = np.tile(expected, (1, copies) if problem.d.order == "F" else (copies, 1))
            if c is not None:
                expected = expected + asked.beta * c
            after = asked.after
            if after.bias is not None:
                expected = expected + (after.bias if after.axis else after.bias[:, None])
            expected = after.of_d * after.activated(expected)
            expected = expected.astype(asked.d.dtype).astype(d.dtype)
            differ = ~((d == expected) | (np.isnan(d) & np.isnan(expected)))
            finite = np.isfinite(expected) & np.isfinite(d)
            largest = np.max(np.abs(expected), where=finite, initial=0.0)
            error = np.max(np.abs(d - expected), where=finite, initial=0.0) / (largest or 1.0)
            nans = int(np.count_nonzero(np.isnan(d)))
            infinities = int(np.count_nonzero(~np.isfinite(d))) - nans
            found = Verification(float(error), 0.0, nans, infinities, int(np.count_nonzero(differ)))
    told: Verification = ctx.comm.bcast(found)
    return told


def _op(x: Array, op: str) -> Array:
    return x if op == "N" else x.T if op == "T" else x.conj().T


def _some(lines: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the lines, or a random choice of them, in batches."""
    if lines.size > _LINES:
        lines = np.sort(np.random.default_rng(21).choice(lines, _LINES, replace=False))
    return [lines[start : start + _VECTORS] for start in range(0, lines.size, _VECTORS)]


class _Freivalds(NamedTuple):
    """The matrices, scalars and ops of the product."""

    a: DistributedMatrix
    b: DistributedMatrix
    c: DistributedMatrix | None
    d: DistributedMatrix
    alpha: complex
    beta: complex
    op_a: str
    op_b: str
    after: _After = _After()

    def verification(self) -> Verification:
        """Check D on random vectors. Collective."""
        k = self.a.shape[1 if self.op_a == "N" else 0]
        rounding = element_type(accumulation_dtype(self.d.dtype)).roundoff
        bound = 8 * math.sqrt(max(k, 1)) * rounding + 4 * element_type(self.d.dtype).roundoff
        spoiled, counts = self.spoiled()
        error, wrong = 0.0, 0
        if self.after.activation is None:
            error = self.error_of_sums(spoiled)
        else:  # sums say nothing: some lines do
            spoiled = np.ones(self.d.shape[0], bool), np.ones(self.d.shape[1], bool)
        for axis in (0, 1):
            for lines in _some(np.flatnonzero(spoiled[axis])):
                one, others = self.error_of_lines(lines, axis, bound)
                error, wrong = max(error, one), wrong + others
        return Verification(error, bound, *counts, wrong)

    def _tainted(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows of op(A) and which columns of op(B) hold NaN or infinities. Collective."""
        if not self.alpha:  # nothing is read
            m, n = self.d.shape
            return np.zeros(m, bool), np.zeros(n, bool)
        a, b = _not_finite(self.a), _not_finite(self.b)
        rows, cols = (a.rows if self.op_a == "N" else a.cols), (b.cols if self.op_b == "N" else b.rows)
        return rows > 0, cols > 0

    def spoiled(self) -> tuple[tuple[NDArray[np.bool_], NDArray[np.bool_]], tuple[int, int]]:
        """Return the rows and columns of D to leave out of sums, and how many NaN and infinities D has. Collective."""
        rows, cols = self._tainted()
        m, n = self.d.shape
        found = _not_finite(self.d)
        if m and n:
            rows, cols = rows | (found.rows == n), cols | (found.cols == m)
        rows = rows | (found.rows > np.count_nonzero(cols))  # single elements: from overflow, or from C
        if self.c is not None:
            rows = rows | (_not_finite(self.c).rows > 0)
        return (rows, cols), (found.nans, int(found.rows.sum()) - found.nans)

    def error_of_sums(self, spoiled: tuple[NDArray[np.bool_], NDArray[np.bool_]]) -> float:
        """Return the largest difference of random sums over all but the spoiled rows and columns. Collective."""
        rows, cols = spoiled
        n = self.d.shape[1]
        step = 0.5 ** math.ceil(math.log2(2 * n + 2))  # so that sums of large numbers stay finite
        x = np.random.default_rng(20).choice([-step, step], (n, _VECTORS))
        x[cols] = 0
        ones = np.where(cols, 0, step)
        of_b = min(
            0, _exponent(self.b)
        )  # products of denormal numbers and the small vectors would lose digits
        bx, bx_size = apply(self.b, self.op_b, x, ones, exponent=of_b)
        abx, abx_size = apply(self.a, self.op_a, bx, bx_size)
        for each in (abx, abx_size):
            scale_by_power(each, of_b)
        dx, _ = apply(self.d, "N", x, ones)
        of_d, bias = self.after.of_d, self.after.bias
        difference, size = dx / of_d - self.alpha * abx, abs(self.alpha) * abx_size
        if bias is not None and self.after.axis:
            difference, size = difference - bias @ x, size + np.abs(bias) @ ones
        elif bias is not None:
            difference, size = difference - np.outer(bias, x.sum(axis=0)), size + np.abs(bias) * ones.sum()
        if self.c is not None:
            cx, cx_size = apply(self.c, "N", x, ones)
            difference, size = difference - self.beta * cx, size + abs(self.beta) * cx_size
        # below this, results are rounded to multiples of the smallest number
        smallest = element_type(self.d.dtype).smallest / element_type(self.d.dtype).roundoff / abs(of_d)
        size = size + smallest * (max(n, 1) * step)
        # Where sums overflow on the way, rounding explains any difference.
        comparable = ~rows & np.isfinite(size)
        return float(np.max((np.abs(difference) / size[:, None])[comparable], initial=0.0))

    def error_of_lines(self, lines: NDArray[np.int64], axis: int, bound: float) -> tuple[float, int]:
        """Compare some rows (axis 0) or columns of D with what they must be. Collective.

        Return the largest relative difference of finite elements, and how many elements are of a different kind.
        """
        got = _lines(self.d, "N", lines, axis) / self.after.of_d
        first, last = (
            ((self.b, self.op_b), (self.a, self.op_a)) if axis else ((self.a, self.op_a), (self.b, self.op_b))
        )
        expected: Array = np.zeros_like(got)
        size = np.zeros(got.shape)
        row_taint, col_taint = self._tainted()
        tainted = (row_taint[:, None] | col_taint[lines]) if axis else (col_taint[:, None] | row_taint[lines])
        if self.alpha:
            part = _lines(*first, lines, axis)
            matrix, op = last
            product, sizes = apply(
                matrix, op if axis else _TRANSPOSED[op], part, np.abs(part), all_of_it=True
            )
            expected, size = self.alpha * product, abs(self.alpha) * sizes
        if self.c is not None:
            c = _lines(self.c, "N", lines, axis)
            expected, size = expected + self.beta * c, size + abs(self.beta) * np.abs(c)
            tainted = tainted | ~np.isfinite(c)
        expected = expected + self.after.entries(lines, axis)
        size = size + np.abs(self.after.entries(lines, axis))
        expected = self.after.activated(expected)
        smallest = element_type(self.d.dtype).smallest / element_type(self.d.dtype).roundoff
        size = size + smallest / abs(self.after.of_d)
        finite = np.isfinite(got)
        error = np.abs(got - expected) / size
        may_overflow = ~(size * (1 + bound) * abs(self.after.of_d) < element_type(self.d.dtype).largest)
        close = finite & (error <= bound)
        plain = ~tainted & finite & np.isfinite(error)
        wrong = np.where(tainted, ~_same_kind(got, expected), ~finite & ~may_overflow)
        wrong &= ~close
        return float(np.max(error[plain], initial=0.0)), int(np.count_nonzero(wrong))


def _same_kind(got: Array, expected: Array) -> NDArray[np.bool_]:
    """Return where both arrays are NaN, both infinite with the same sign, or both finite."""
    if got.dtype.kind == "c":  # libraries differ in the other part of an infinite complex number
        return np.asarray(np.isfinite(got) == np.isfinite(expected))
    both_infinite = np.isinf(got) & (got == expected)
    return np.asarray(
        both_infinite | (np.isnan(got) & np.isnan(expected)) | (np.isfinite(got) & np.isfinite(expected))
    )


class _NonFiniteCounts(NamedTuple):
    """How many NaN and infinities each row and each column has, and how many NaN there are in total."""

    rows: Array
    cols: Array
    nans: int


def _not_finite(matrix: DistributedMatrix) -> _NonFiniteCounts:
    """Count the NaN and infinities of a matrix. Collective."""
    comm, (m, n) = matrix.context.comm, matrix.shape
    counts = np.zeros(m + n + 1)
    local = matrix.on_host()
    if local.size:
        rows, cols = matrix.descriptor.global_indices(comm.rank)
        spoiled = ~np.isfinite(local)
        if spoiled.any():
            counts[rows] = np.count_nonzero(spoiled, axis=1)
            counts[m + cols] = np.count_nonzero(spoiled, axis=0)
            counts[-1] = np.count_nonzero(np.isnan(local))
    comm.sum_into(counts)
    return _NonFiniteCounts(counts[:m], counts[m:-1], int(counts[-1]))


def _exponent(matrix: DistributedMatrix) -> int:
    """Return the exponent of a power of two as large as the largest finite number of a matrix. Collective."""
    local = matrix.on_host()
    sizes = matrix.context.comm.allgather(largest(np, [local[np.isfinite(local)]]))
    return math.frexp(max(sizes))[1]


def _lines(matrix: DistributedMatrix, op: str, lines: NDArray[np.int64], axis: int) -> Array:
    """Return rows (axis 0) or columns of op(M), as columns in double precision, the same on every rank. Collective."""
    descriptor, comm = matrix.descriptor, matrix.context.comm
    along = axis if op == "N" else 1 - axis
    found = np.zeros((descriptor.shape[1 - along], lines.size), double_dtype(descriptor.dtype))
    local = matrix.on_host()
    if local.size:
        indices = descriptor.global_indices(comm.rank)
        at = np.minimum(np.searchsorted(lines, indices[along]), lines.size - 1)
        mine = lines[at] == indices[along]
        part = local[:, mine] if along else local[mine].T
        found[np.ix_(indices[1 - along], at[mine])] = part.astype(found.dtype)
        if op == "C":
            np.conjugate(found, out=found)
    comm.sum_into(found)
    return found


def apply(
    matrix: DistributedMatrix,
    op: str,
    x: Array,
    size: Array,
    *,
    all_of_it: bool = False,
    kept: Callable[[Array, Array], Array] | None = None,
    exponent: int = 0,
) -> tuple[Array, Array]:
    """Return ``op(M) x`` and ``|op(M)| size`` in double precision, the same on every rank. Collective.

    NaN and infinities of M count as zero unless ``all_of_it``; so do elements of op(M) for whose rows and columns
    ``kept`` is False. M is divided by 2 to the power of ``exponent``.
    """
    descriptor, comm = matrix.descriptor, matrix.context.comm
    transposed = op in ("T", "C")
    length = descriptor.shape[1 if transposed else 0]
    y = np.zeros((length, x.shape[1]), double_dtype(descriptor.dtype, x.dtype))
    y_size = np.zeros((length, *size.shape[1:]))
    local = matrix.on_host()
    if local.size:
        rows, cols = descriptor.global_indices(comm.rank)
        if transposed:
            local, rows, cols = local.T, cols, rows
        step = max(1, _CHUNK_BYTES // (local.shape[1] * y.itemsize))
        for start in range(0, len(rows), step):
            part = local[start : start + step].astype(y.dtype)
            if op in ("C", "R"):
                np.conjugate(part, out=part)
            scale_by_power(part, -exponent)
            if not all_of_it:
                part[~np.isfinite(part)] = 0
            if kept is not None:
                part[~kept(rows[start : start + step, None], cols)] = 0
            y[rows[start : start + step]] = part @ x[cols]
            y_size[rows[start : start + step]] = np.abs(part) @ size[cols]
    comm.sum_into(y)
    comm.sum_into(y_size)
    return y, y_size
