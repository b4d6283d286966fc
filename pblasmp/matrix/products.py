# SPDX-License-Identifier: Apache-2.0
"""Products of distributed matrices: check and agree, then a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ..dtypes import result_dtype
from ..engines.product import Product
from ..epilogue import Epilogue, Scales
from ..errors import ArgumentError, ArgumentTypeError, short_repr
from ..layout import MatmulProblem, MatrixDescriptor
from ..layout.grid import one_of
from ..layout.problem import nearest_legal
from ..layout.routines import GEMM
from ..layout.schemes import scheme_operands
from ..runtime.direct_forms import HandleForm, is_text
from ..runtime.handle import Handle, Matrix
from ..runtime.interop import as_local
from ..runtime.matrix_calls import MatrixCall
from ..runtime.reading import refuse
from ..runtime.runtime import Runtime
from .columns import by_column, is_vector

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ..layout.schemes import Op, Scheme


def matmul(
    a: Matrix,
    b: Matrix,
    c: Matrix | None = None,
    *,
    out: Matrix | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    op_a: Op = "N",
    op_b: Op = "N",
    epilogue: Epilogue | None = None,
    scales: Scales | None = None,
    algo: str = "auto",
    scheme: Scheme = "gemm",
    compute: str | None = None,
    comm_dtype: DTypeLike | None = None,
    comm_sms: int | None = None,
) -> Matrix:
    """Return ``alpha op(A) op(B) + beta C``. Collective over the context.

    Args:
        a, b: matrices of one context and one type, in any layouts; 16-bit types are summed in float32. One of them may
            be a vector: a NumPy array of one dimension that every rank has alike, which is converted to the matrix's
            type. Then so is the result.
        c: of the result's shape and type; None means zeros. Laid out otherwise it is moved first. With ``beta == 0``
            it is never read.
        out: where to write the result, which may be ``c``; by default a new matrix: blocks of op(A)'s rows and op(B)'s
            columns, on A's grid, in A's memory order.
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
        op_a, op_b: "N", "T" or "C" (conjugate transpose).
        epilogue: a bias, an activation or their gradients, applied to the product (``Epilogue``).
        scales: of 8-bit operands and results (``Scales``).
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.
        scheme: "gemm", or the tensor-parallel product in whose layouts A, B and D are: "allgather_matmul",
            "matmul_reduce_scatter" or "matmul_allreduce", as ``MatmulProblem`` makes them.
        compute: what products are summed in; None is the type itself, float32 for 16-bit types. cublasmp also has
            "tf32" and "bf16x9" (float32) and "fixedpoint" (float64).
        comm_dtype: type in which partial sums travel (cublasmp, schemes that sum); None is D's type.
        comm_sms: streaming multiprocessors left to communication (cublasmp); None leaves it to the library.

    Raises:
        LayoutError: sizes or types do not fit, or the layouts are not the scheme's; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
        ClosedError: the context is closed.

    Example:
        >>> a = ctx.scatter(np.array([[1.0, 2], [3, 4]]), block=1)
        >>> pb.matmul(a, a, op_b="T").allgather().tolist()
        [[5.0, 11.0], [11.0, 25.0]]

    See Also:
        plan, to prepare a product that is repeated; ``a @ b``.
    """
    plain = (
        epilogue is None and scales is None and compute is None and comm_dtype is None and comm_sms is None
    )
    done = None
    if plain and is_text(scheme, "gemm"):
        done = _FORM.run((a, b, c, out, alpha, beta, op_a, op_b, algo))
    if done:
        return cast("Matrix", out)
    how: dict[str, Any] = {"alpha": alpha, "beta": beta, "op_a": op_a, "op_b": op_b, "algo": algo}
    if not plain or not one_of(scheme, ("gemm",)):
        plain = False
        how.update(
            epilogue=epilogue, scales=scales, scheme=scheme, compute=compute, comm_dtype=comm_dtype, comm_sms=comm_sms
        )  # fmt: skip
    if is_vector(a) or is_vector(b):
        return cast("Matrix", _by_vector({"a": a, "b": b, "c": c, "out": out, **how}))
    product: Matrix = _call(a, b, c, out, how, plain).run(voted=done is False)
    return product


_FORM = HandleForm("matmul", GEMM, ("a", "b", "c", "out", "alpha", "beta", "op_a", "op_b", "algo"))


def _by_vector(arguments: dict[str, Any]) -> Any:
    """Return ``matmul`` of a matrix and a vector, or of a vector and a matrix, as a vector. Collective."""
    vector, matrix = ("b", arguments["a"]) if is_vector(arguments["b"]) else ("a", arguments["b"])
    op = arguments[f"op_{vector}"]
    if not one_of(op, ("N",)):
        error = (
            f"op_{vector}: {vector} is a vector, which has no transpose: expected 'N', got {short_repr(op)}"
        )
        refuse("matmul", ArgumentError(error), matrix)
    return by_column(matmul, matrix, arguments, vector)


def matmul_call(
    a: Matrix, b: Matrix, c: Matrix | None = None, *, out: Matrix | None = None, **how: Any
) -> MatrixCall:
    """Return a call of ``matmul`` with these arguments, all of which are given. Local."""
    return _call(a, b, c, out, how, direct=False)


def _call(a: Any, b: Any, c: Any, out: Any, how: dict[str, Any], direct: bool) -> MatrixCall:
    """Return a call of ``matmul``, of A rather than A.T. Local."""
    turned = ""
    if isinstance(a, Handle) and a._at[4]:
        given, (a, how["op_a"]) = a, _untransposed(a, how["op_a"])
        turned += "a" if a is not given else ""
    if isinstance(b, Handle) and b._at[4]:
        given, (b, how["op_b"]) = b, _untransposed(b, how["op_b"])
        turned += "b" if b is not given else ""
    call = _MatmulCall("matmul", "matmul", (a, b, c, out), how, direct)
    call.turned = turned
    return call


class _MatmulCall(MatrixCall):
    """A call of ``matmul``.

    Attributes:
        turned: those of A and B that were given as transposes.
    """

    turned = ""

    def replaced(self, given: Mapping[str, Any], product: Product) -> MatrixCall:
        """Return the call on other matrices in the layouts that were given, with the same result. Local."""
        matrices = {x: y.T if x in self.turned and isinstance(y, Handle) else y for x, y in given.items()}
        return super().replaced(matrices, product)

    def new(self) -> MatrixDescriptor:
        a, b, c, _ = self._given
        how = self._how
        scheme = how.get("scheme", "gemm")
        return _default_result(a.descriptor, b.descriptor, c, how["op_a"], how["op_b"], scheme)

    def validate(self, problem: MatmulProblem, facts: dict[str, Any]) -> None:
        _, _, c, out = self._given
        epilogue, scales = self._how.get("epilogue"), self._how.get("scales")
        check_extras(epilogue, scales)
        facts.update(epilogue=epilogue and epilogue.facts(), scales=scales and scales.facts())
        check(problem, "out" if out is not None else "c" if c is not None else "the result")

    def bind(self, problem: MatmulProblem) -> None:
        ctx, epilogue, scales = self.ctx, self._how.get("epilogue"), self._how.get("scales")
        self._epilogue = _epilogue(ctx, epilogue, problem, self._matrices)
        if scales is not None:
            self._scales = scales.bind(partial(as_local, ctx.engine, name="scales"), problem, ctx.rank)


def _untransposed(x: Any, op: Op) -> tuple[Any, Op]:
    """Return ``A, "T"`` for ``A.T, "N"``, and so for views of A.T: the result is then laid out as for A itself."""
    if not one_of(op, "NTC") or (op == "C" and x.dtype.kind == "c"):
        return x, op
    return x.T, "T" if op == "N" else "N"


def _default_result(
    a: MatrixDescriptor, b: MatrixDescriptor, c: Handle | None, op_a: str, op_b: str, scheme: str
) -> MatrixDescriptor:
    if c is not None:
        return replace(c.descriptor, ld=None)
    probe = MatmulProblem(a, b, a, op_a, op_b, scheme=scheme)  # type: ignore[arg-type]  # checks ops and scheme
    m, n, k = probe.m, probe.n, probe.k
    if scheme != "gemm":
        form = probe.column_major()
        if form.swapped:
            m, n = n, m
        d = scheme_operands(scheme, m, n, k, a.grid.size, form.op_a, form.op_b, result_dtype(a.dtype))[2]
        return d.T if form.swapped else d
    along = int(op_a != "N"), int(op_b == "N")
    block = a.block[along[0]], b.block[along[1]]
    source = (
        a.source[0] if op_a == "N" else 0,
        b.source[1] if op_b == "N" and b.grid.same_ranks(a.grid) else 0,
    )
    return MatrixDescriptor((m, n), block, a.grid, source, result_dtype(a.dtype), a.order)


def check(problem: MatmulProblem, result: str = "d") -> None:
    """Raise LayoutError if a product cannot be computed: by scheme "gemm" in any layouts, else in the scheme's. Local.

    Args:
        problem: the product.
        result: what messages call D.
    """
    (nearest_legal(problem) if problem.scheme == "gemm" else problem).validate(result)


def check_extras(epilogue: object, scales: object) -> None:
    """Raise ArgumentTypeError if what a product is given is no epilogue, or no scales. Local."""
    if not isinstance(epilogue, (Epilogue, type(None))):
        raise ArgumentTypeError(f"epilogue: expected an Epilogue, got {type(epilogue).__name__}")
    if not isinstance(scales, (Scales, type(None))):
        raise ArgumentTypeError(f"scales: expected Scales, got {type(scales).__name__}")


def _epilogue(
    ctx: Runtime[Any],
    epilogue: Epilogue | None,
    problem: MatmulProblem,
    matrices: Mapping[str, Handle | None],
) -> Epilogue | None:
    """Return an epilogue with the engine's arrays, None for one that does nothing."""
    if epilogue is None or not epilogue.name:
        return None
    fitted = epilogue.bind(partial(as_local, ctx.engine, name="epilogue"), problem, ctx.rank)
    for name in fitted.outputs:
        for letter, x in matrices.items():
            if x is not None and ctx.engine.overlap(getattr(fitted, name), x.local):
                raise ArgumentError(
                    f"epilogue: {name}: shares memory with {letter}; expected a separate array"
                )
    return fitted
