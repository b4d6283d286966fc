# SPDX-License-Identifier: Apache-2.0
"""ParallelProblem: a tensor-parallel product as a value, and the matrix product that it stands for.

T tokens, K inputs, N outputs, P ranks; ``Y[T, N] = X[T, K] W`` on row-major arrays, W as N × K or K × N.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..dtypes import is_float8
from ..errors import ArgumentError, counted, short_repr
from .axis import even_counts
from .descriptor import MatrixDescriptor
from .grid import Grid, one_of
from .problem import MatmulProblem
from .schemes import FORMS, Form
from .value import Problem, changed

if TYPE_CHECKING:
    from .schemes import Op, Scheme

_ALIGNMENT = 16  # bytes
_SHARES = ("tokens", "inputs", "outputs", "rows")
_TYPES = ("dtype", "w_dtype", "out_dtype", "c_dtype")
_OPTIONS = ("outputs_first", "inner", "return_gathered", "turned", "transposed", "conjugated")


@dataclass(frozen=True)
class ParallelProblem(Problem):
    """One of the four products of split layers, with what every rank holds. Local.

    Attributes:
        form: which one.
        tokens: rows of X on each rank.
        inputs: columns of X on each rank.
        outputs: outputs of each rank's weights.
        rows: rows of the result on each rank.
        dtype, w_dtype, out_dtype: types of X, W and the result.
        c_dtype: type of C; None if there is none (beta is 0).
        outputs_first: W is N × K in memory, otherwise K × N.
        inner: tokens in each index of X's first dimension, at whose boundaries tokens are split.
        return_gathered: the gathered X is wanted as well.
        row_bytes: by name, how many bytes the rows of "x", "w", "c" and "out" are apart on each rank.
        turned: the arrays of a run are those of the transposed product, whose operands are exchanged.
        transposed: operands of a run, of "x" and "w", whose arrays are transposed first; after ``turned``.
        conjugated: operands of a run, of "x" and "w", that are conjugated first.

    Raises:
        ArgumentError: the form is unknown, or ``transposed`` or ``conjugated`` names something else.
    """

    form: Form
    tokens: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rows: tuple[int, ...]
    dtype: np.dtype
    w_dtype: np.dtype
    out_dtype: np.dtype
    c_dtype: np.dtype | None = None
    outputs_first: bool = True
    inner: int = 1
    return_gathered: bool = False
    row_bytes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    turned: bool = False
    transposed: str = ""
    conjugated: str = ""

    def __post_init__(self) -> None:
        if not one_of(self.form, FORMS):
            raise ArgumentError(f"form: expected one of {', '.join(FORMS)}, got {short_repr(self.form)}")
        for name in ("transposed", "conjugated") if not self.transposed == self.conjugated == "" else ():
            if not one_of(getattr(self, name), ("", "x", "w", "xw")):
                given = short_repr(getattr(self, name))
                raise ArgumentError(f"{name}: expected '', 'x', 'w' or 'xw', got {given}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.tokens)

    @property
    def apart_from_tokens(self) -> tuple[object, ...]:
        """What products have in common that differ in nothing but how many tokens there are."""
        return (
            self.form, self.inputs, self.outputs, self.dtype, self.w_dtype, self.out_dtype, self.c_dtype,
            self.outputs_first, self.return_gathered, self.row_bytes, self.turned, self.transposed, self.conjugated,
        )  # fmt: skip

    @property
    def gathers(self) -> bool:
        """Whether X is gathered."""
        return self.form == "allgather_matmul"

    @property
    def sums(self) -> bool:
        """Whether partial products are summed over the ranks."""
        return self.form in ("matmul_reduce_scatter", "matmul_allreduce")

    def facts(self) -> dict[str, object]:
        """Return by name what must be the same on every rank. Local."""
        return {name: getattr(self, name) for name in ("form", *_SHARES, *_TYPES, *_OPTIONS[:3])}

    @property
    def flops(self) -> int:
        """Floating-point operations of all ranks together, four times as many for complex types."""
        tokens, outputs, inputs = self.sizes
        return 2 * tokens * outputs * inputs * (4 if self.dtype.kind == "c" else 1)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, outputs and inputs of all ranks together."""
        if self.sums:
            return self.tokens[0], self.outputs[0], sum(self.inputs)
        return sum(self.tokens) if self.gathers else self.tokens[0], sum(self.outputs), self.inputs[0]

    def slices(self, name: Literal["tokens", "outputs", "rows"]) -> list[slice]:
        """Return where each rank's part of "tokens", "outputs" or "rows" is in the whole. Local; 0-based."""
        counts: tuple[int, ...] = getattr(self, name)
        stops = list(accumulate(counts))
        return [slice(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]

    @property
    def _types(self) -> str:
        if is_float8(self.dtype):
            return f"{self.dtype.name} by {self.w_dtype.name} to {self.out_dtype.name}"
        return str(self.dtype.name)

    def __str__(self) -> str:
        tokens, outputs, inputs = self.sizes
        return f"{self._types} {self.form} of {tokens} x {outputs} x {inputs} on {counted(self.size, 'rank')}"

    def on_rank(self, rank: int) -> str:
        """Return the product as it looks on a rank, in words. Local."""
        inputs, outputs = self.inputs[rank], self.outputs[rank]
        w = f"{outputs} x {inputs}" if self.outputs_first else f"{inputs} x {outputs}"
        sizes = f"x {self.tokens[rank]} x {inputs}, w {w} in C order on this one"
        return f"{self._types} {self.form} on {counted(self.size, 'rank')}: {sizes}"

    # -- from and to tables

    def _keys(self) -> dict[str, Any]:
        shares = {name: list(getattr(self, name)) for name in _SHARES}
        kinds = {name: x.name for name in _TYPES if (x := getattr(self, name)) is not None}
        options = {name: x for name in _OPTIONS if (x := getattr(self, name)) != getattr(type(self), name)}
        apart = {name: list(each) for name, each in self.row_bytes}
        return {"form": self.form, **shares, **kinds, **options, **({"row_bytes": apart} if apart else {})}

    def default_rows(self) -> tuple[int, ...]:
        """Return how many rows of the result the ranks have, by the rule for who holds what. Local."""
        return self._rows_of(self.tokens, max(1, self.inner))

    def _rows_of(self, tokens: tuple[int, ...], inner: int) -> tuple[int, ...]:
        if self.form == "matmul_reduce_scatter":
            return tuple([inner * n for n in even_counts(tokens[0] // inner, len(tokens))])
        return (sum(tokens),) * len(tokens) if self.form == "allgather_matmul" else tokens

    def with_tokens(self, first: int, inner: int) -> ParallelProblem:
        """Return the product of as many tokens on each rank: X's first dimension, and the tokens in each index. Local.

        Rows of X and of the result stay as many bytes apart.
        """
        tokens = (first * inner,) * len(self.tokens)
        return changed(self, tokens=tokens, rows=self._rows_of(tokens, inner), inner=inner)

    def faults(self, result: str = "d") -> list[str]:  # noqa: ARG002
        """Return every reason why ranks cannot hold such parts; empty if they can. Local."""
        return [*self._uneven()] or [*self._inconsistent()]

    def _uneven(self) -> Iterator[str]:
        """Yield the lists that do not have a number for each rank."""
        lists = {name: getattr(self, name) for name in _SHARES}
        lists |= {f"row_bytes.{name}": each for name, each in self.row_bytes}
        for name, each in lists.items():
            if len(each) != self.size:
                yield f"{name}: has {len(each)} numbers, expected {self.size}, one for each rank, like tokens"

    def _inconsistent(self) -> Iterator[str]:
        """Yield what cannot be so in this form."""
        equal = ("tokens", "outputs") if self.sums else ("inputs",) if self.gathers else ("tokens", "inputs")
        for name in equal:
            if len(set(getattr(self, name))) > 1:
                given = short_repr(list(getattr(self, name)))
                yield f"{name}: expected the same number for each rank with form {self.form!r}, got {given}"
        if any(n % max(1, self.inner) for n in (*self.tokens, *self.rows)):
            yield f"inner: expected a divisor of tokens and rows, got {short_repr(self.inner)}"
        if self.form != "matmul_reduce_scatter" and self.rows != self.default_rows():
            yield f"rows: expected {short_repr(list(self.default_rows()))}, got {short_repr(list(self.rows))}"
        elif self.form == "matmul_reduce_scatter" and sum(self.rows) != self.tokens[0]:
            yield f"rows: expected {self.tokens[0]} in all, as many as tokens, got {list(self.rows)}"
        if self.return_gathered and not self.gathers:
            yield f"return_gathered: form {self.form!r} gathers no X"

    # -- from and to matrix products

    @classmethod
    def of_matmul(cls, p: MatmulProblem) -> ParallelProblem | str:
        """Return a product in the layouts of a scheme in this form, or why it has no such form. Local."""
        if p.scheme == "gemm":
            return "it is for the layouts of the schemes"
        turned = p.d.order == "F"
        q = p.T if turned else p
        size, (m, n, k) = q.d.grid.size, (q.m, q.n, q.k)
        if p.scheme == "allgather_matmul" and (q.op_a == "N") != (q.a.order == "C"):
            return "X is gathered by rows, which are not contiguous in memory"
        if p.scheme == "matmul_allreduce" and p.c is not None:
            return "C may differ from rank to rank, and this form adds one C for all of them"
        outputs_first = (q.op_b != "N") == (q.b.order == "C")
        if is_float8(q.a.dtype) and not outputs_first:
            return "8-bit weights are outputs x inputs in memory"
        tokens, inputs, outputs, rows = m, k // size, n, m // size
        if p.scheme == "allgather_matmul":
            tokens, inputs, outputs, rows = m // size, k, n // size, m
        elif p.scheme == "matmul_allreduce":
            rows = m
        flips = ("x", q.op_a != "N"), ("w", (q.op_b != "N") != outputs_first)
        transposed = "".join(name for name, flip in flips if flip)
        conjugated = "".join(
            name for name, op in (("x", q.op_a), ("w", q.op_b)) if op == "C" and q.a.dtype.kind == "c"
        )
        return cls(
            p.scheme,
            (tokens,) * size, (inputs,) * size, (outputs,) * size, (rows,) * size, q.a.dtype, q.b.dtype, q.d.dtype,
            None if q.c is None else q.c.dtype, outputs_first,
            turned=turned, transposed=transposed, conjugated=conjugated,
        )  # fmt: skip

    @lru_cache(64)  # noqa: B019 - of few problems, for which each algorithm asks
    def as_scheme(self) -> MatmulProblem | str:
        """Return the product in the 1D layouts of cuBLASMp's schemes, or why it has none. Local."""
        if self.form == "matmul_allgather":
            return "it has no scheme: every rank computes columns of the result and gets all of them"
        if self.return_gathered:
            return "it does not return the gathered X"
        maker = getattr(MatmulProblem, self.form)
        split = {"inputs": self.inputs} if self.sums else {"tokens": self.tokens, "outputs": self.outputs}
        if self.form == "matmul_reduce_scatter":
            split["tokens"] = self.rows
        for name, shards in split.items():
            if len(set(shards)) > 1:
                shares = f"{sum(shards)} {name} are {list(shards)} on the ranks"
                return f"{shares}: cuBLASMp has this form only for equal shares"
        if self.form == "matmul_allreduce" and not self.outputs_first:
            return (
                "weights are inputs x outputs in memory: cuBLASMp has GEMM + AllReduce only for the transpose"
            )
        if self.form == "matmul_allreduce" and self.c_dtype is not None and self.size > 1:
            return "C is added once: by the rank that sums"
        tokens, outputs, inputs = self.sizes
        op_b: Op = "T" if self.outputs_first else "N"
        p = maker(tokens, outputs, inputs, self.size, "N", op_b, dtype=self.dtype, order="C")
        p = self._typed(p)
        faults = [*map(self.named, p.faults()), *self.misaligned()] if is_float8(self.dtype) else []
        return f"cuBLASMp does not take it: {faults[0]}" if faults else p

    @lru_cache(64)  # noqa: B019 - likewise
    def as_gemm(self) -> MatmulProblem | str:
        """Return the product in layouts of equal blocks, the last ones shorter or empty, or why it has none. Local."""
        if self.form == "matmul_allgather":
            return "every rank gets all of the result, which is not a block-cyclic layout"
        if self.form == "matmul_allreduce":
            return "every rank gets all of the result: see the algorithms that sum partial products"
        if self.return_gathered:
            return "it does not return the gathered X"
        first, rows = (tuple(n // max(1, self.inner) for n in x) for x in (self.tokens, self.rows))
        split = {"inputs": self.inputs, "rows": rows}
        if self.gathers:
            split = {"tokens": first, "outputs": self.outputs}
        for name, shards in split.items():
            even = [*even_counts(sum(shards), self.size)]
            if list(shards) != even:
                return f"{name} are {list(shards)} on the ranks, expected {even}"
        down, across = Grid(self.size, 1), Grid(1, self.size)
        tokens, outputs, inputs = self.sizes
        if self.gathers:
            block = max(1, first[0]) * max(1, self.inner)
            a = self._matrix(tokens, inputs, block, inputs, down)
            b = self._matrix(outputs, inputs, self.outputs[0], inputs, down)
            d = self._matrix(tokens, outputs, block, self.outputs[0], across)
        else:
            a = self._matrix(tokens, inputs, self.rows[0], self.inputs[0], across)
            b = self._matrix(outputs, inputs, outputs, self.inputs[0], across)
            d = self._matrix(tokens, outputs, self.rows[0], outputs, down)
        return self._product(a, b, d, "gemm")

    def as_allreduce(self) -> MatmulProblem | str:
        """Return GEMM + AllReduce with K in equal blocks, the last ones shorter, or why it is not one. Local."""
        if self.form != "matmul_allreduce":
            return "its result is not the same on every rank"
        even = [*even_counts(sum(self.inputs), self.size)]
        if list(self.inputs) != even:
            return f"inputs are {list(self.inputs)} on the ranks, expected {even}"
        (tokens, outputs, inputs), across = self.sizes, Grid(1, self.size)
        a = self._matrix(tokens, inputs, tokens, even[0], across)
        b = self._matrix(outputs, inputs, outputs, even[0], across)
        d = self._matrix(tokens * self.size, outputs, tokens, outputs, Grid(self.size, 1))
        return self._product(a, b, d, "matmul_allreduce")

    def _matrix(self, rows: int, cols: int, mb: int, nb: int, grid: Grid) -> MatrixDescriptor:
        """Return a matrix in C order, in blocks of at least one row and column. Local."""
        return MatrixDescriptor((rows, cols), (max(1, mb), max(1, nb)), grid, dtype=self.dtype)

    def _product(
        self, a: MatrixDescriptor, w: MatrixDescriptor, d: MatrixDescriptor, scheme: Scheme
    ) -> MatmulProblem:
        """Return D = A Wᵀ of these operands' types, with W as it is in memory. Local."""
        if self.outputs_first:
            return self._typed(MatmulProblem(a, w, d, "N", "T", scheme=scheme))
        return self._typed(MatmulProblem(a, replace(w.T, order="C"), d, scheme=scheme))

    def _typed(self, p: MatmulProblem) -> MatmulProblem:
        """Return a product of these operands' types, with C if there is one."""
        d = replace(p.d, dtype=self.out_dtype)
        c = None if self.c_dtype is None else replace(d, dtype=self.c_dtype)
        return replace(p, b=replace(p.b, dtype=self.w_dtype), d=d, c=c)

    def misaligned(self) -> list[str]:
        """Return which rows are not aligned as 8-bit products need them. Local.

        Source: cuBLASLt's documentation of FP8 kernels.
        """
        return [
            f"{name}: rows are {max(apart)} bytes apart, expected a multiple of {_ALIGNMENT}"
            for name, apart in self.row_bytes
            if any(nbytes % _ALIGNMENT for nbytes in apart)
        ]

    @staticmethod
    def named(fault: str) -> str:
        """Return a fault of a matrix product in terms of this one: A is x, B is w, D is the result. Local."""
        names = {"a": "x", "b": "w", "d": "result"}
        return re.sub(r"\b[abd](?=[:,]|$)", lambda found: names[found[0]], fault)
