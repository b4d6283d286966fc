# SPDX-License-Identifier: Apache-2.0
"""Products for cuBLASLt: what decides their descriptors and algorithms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ....dtypes import DTYPES, FLOAT8, is_float8
from ....errors import ArgumentError, UnsupportedError
from .views import View

_ALIGNED = 256  # bytes; better alignment makes no difference

_FLOAT8_ALIGNED = 16

_ROWS = 128
"""Products that are queued once take the algorithm for a multiple of so many rows: to find one takes the host 330 µs.
On H200 they take 2 % longer in the median, 6 % on average."""


Op = Literal["N", "T", "C"]


@dataclass(slots=True, unsafe_hash=True)
class Fused:
    """The scales and the epilogue of a product: ``D = scale_d f(alpha (scale_x X) (scale_w W) + beta C + bias)``.

    Addresses of device memory, 0 for none.

    Args:
        activation: "relu" or "gelu".
        bias: a vector with an entry for every column of D.
        bias_dtype: its type, by default D's; bfloat16 or float16 with 8-bit operands.
        scale_x, scale_w, scale_d: one float32 each, with 8-bit matrices.
        amax: one float32, overwritten with the largest absolute value of an 8-bit D.
    """

    activation: str | None = None
    bias: int = 0
    bias_dtype: np.dtype | None = None
    scale_x: int = 0
    scale_w: int = 0
    scale_d: int = 0
    amax: int = 0

    @property
    def epilogue(self) -> str:
        """Name, in cuBLASLt, of the bias and the activation."""
        parts = [self.activation.upper() if self.activation else ""]
        parts += ["BIAS" if self.bias else ""]
        return "_".join(part for part in parts if part) or "DEFAULT"

    @property
    def pointers(self) -> dict[str, int]:
        """Attributes of a matmul descriptor for the given addresses; X is cuBLASLt's B, W its A."""
        given = {
            "BIAS_POINTER": self.bias,
            "A_SCALE_POINTER": self.scale_w,
            "B_SCALE_POINTER": self.scale_x,
            "D_SCALE_POINTER": self.scale_d,
            "AMAX_D_POINTER": self.amax,
        }
        return {name: address for name, address in given.items() if address}


PLAIN = Fused()


class Batch(NamedTuple):
    """Products of equal sizes at equal distances: how many, and the entries from one X, W, D and C to the next.

    The last one counts only if C is not D.
    """

    size: int
    x: int
    w: int
    d: int
    c: int


def fuses(dtype: np.dtype) -> bool:
    """Return whether cuBLASLt adds a bias and applies an activation in products of this type. Local."""
    return dtype.itemsize <= 2 or dtype == DTYPES["float32"]


def why_not_float8(x: View, w: View, d: View, op_x: Op = "N", op_w: Op = "T") -> str:
    """Return why cuBLASLt cannot multiply these 8-bit matrices on every GPU that has them; "" if it can. Local."""
    if (op_x, op_w) != ("N", "T"):
        return "8-bit products take X as tokens × inputs and W as outputs × inputs"
    if x.dtype == w.dtype == FLOAT8["float8_e5m2"]:
        return "X and W are both float8_e5m2: one of them must be float8_e4m3fn"
    for name, view in (("X", x), ("W", w), ("D", d)):
        apart = view.ld * view.dtype.itemsize
        if apart % _FLOAT8_ALIGNED or view.address % _FLOAT8_ALIGNED:
            return f"{name}: 8-bit products need rows that start at multiples of 16 bytes, they are {apart} apart"
    if x.cols % _FLOAT8_ALIGNED:
        return f"8-bit products need a multiple of 16 inputs, got {x.cols}"
    return ""


class LtOperand(NamedTuple):
    """A matrix as cuBLASLt is told of it: its type, and the entries from one of a batch to the next."""

    view: View
    dtype: np.dtype
    step: int


LtFields = tuple[View, View, View, View, Op, Op, bool, Fused, str | None, Batch | None]


class LtProduct(NamedTuple):
    """A product for ``LocalProducts.multiply``: what decides its descriptors and its algorithm."""

    x: View
    w: View
    c: View
    d: View
    op_x: Op
    op_w: Op
    no_c: bool  # beta is 0
    finish: Fused
    compute: str | None
    batch: Batch | None

    @property
    def extents(self) -> tuple[int, int, int]:
        """Return m, n and k."""
        m, k = (self.x.rows, self.x.cols) if self.op_x == "N" else (self.x.cols, self.x.rows)
        return m, self.w.cols if self.op_w == "N" else self.w.rows, k

    @property
    def without_c(self) -> bool:
        """Whether cuBLASLt is given no address for C."""
        return self.no_c and is_float8(self.x.dtype) and is_float8(self.d.dtype)

    def of_rows(self, rows: int) -> LtProduct:
        """Return the product of so many rows of X, C and D. Local."""
        if rows == self.d.rows:
            return self
        return self._replace(**{name: replace(getattr(self, name), rows=rows) for name in "xcd"})

    def check(self) -> None:
        """Raise ArgumentError if the shapes do not fit, UnsupportedError if cuBLASLt lacks the product. Local."""
        (m, n, k), c, d = self.extents, self.c, self.d
        inner = self.w.rows if self.op_w == "N" else self.w.cols
        if (k, m, n) != (inner, d.rows, d.cols) or (c.rows, c.cols) != (d.rows, d.cols):
            raise ArgumentError(
                f"op(X) is {m} x {k}, op(W) {inner} x {n}, C {c.rows} x {c.cols}, D {d.rows} x {d.cols}: "
                "expected m x k, k x n, and m x n for C and D"
            )
        if not (m and n and k):
            raise ArgumentError(f"a product of {m} x {n} x {k}: there is nothing to multiply")
        if is_float8(self.x.dtype) and (why := why_not_float8(self.x, self.w, d, self.op_x, self.op_w)):
            raise UnsupportedError(why)

    def operands(self) -> dict[str, LtOperand]:
        """Return cuBLASLt's matrices by its letters: W is its A. D's layout stands for a C that is not read. Local."""
        x, w, c, d, batch = self.x, self.w, self.c, self.d, self.batch
        steps = Batch(1, 0, 0, 0, 0) if batch is None else batch
        c_dtype = c.dtype
        if self.no_c:  # an 8-bit D has a 16-bit C
            c, c_dtype = d, DTYPES["bfloat16"] if is_float8(d.dtype) else d.dtype
        return {
            "A": LtOperand(w, w.dtype, steps.w),
            "B": LtOperand(x, x.dtype, steps.x),
            "C": LtOperand(c, c_dtype, steps.d if self.no_c else steps.c),
            "D": LtOperand(d, d.dtype, steps.d),
        }

    def __str__(self) -> str:
        m, n, k = self.extents
        types = f"{self.x.dtype.name} {self.op_x} by {self.w.dtype.name} {self.op_w} to {self.d.dtype.name}"
        return f"a product of {m} x {n} x {k}, {types}, epilogue {self.finish.epilogue}"


def rows_to_ask(rows: int) -> int:
    """Return for how many rows of D an algorithm is looked for, for products of so many that come once. Local."""
    return -(-rows // _ROWS) * _ROWS if rows > _ROWS else (1 << max(0, rows - 1).bit_length()) * (rows > 0)


def key_of(asked: LtFields, rows: int) -> tuple[Any, ...]:
    """Return what a product's descriptors and algorithm depend on, if they are for so many rows of X, C and D. Local.

    Args:
        asked: the fields of an ``LtProduct``, in its order.
    """
    x, w, c, d, op_x, op_w, no_c, finish, compute, batch = asked
    more = rows - d.rows
    follows = None if finish is PLAIN else (finish.epilogue, finish.bias_dtype, *finish.pointers)
    return (
        op_x, op_w, no_c, compute, batch, follows,
        x.rows + more, x.cols, x.dtype, x.ld, w.rows, w.cols, w.dtype, w.ld, rows, d.cols, d.dtype, d.ld,
        *((alignment(x), alignment(w), alignment(d)) if batch is None else map(alignment, (x, w, d), batch[1:4])),
        None if c is d else (c.rows + more, c.cols, c.dtype, c.ld, alignment(c, 0 if batch is None else batch.c)),
    )  # fmt: skip


def alignment(view: View, step: int = 0) -> int:
    """Return the largest power of two, up to 256, that the address of every row of a view is a multiple of.

    ``step``: entries from one of a batch to the next.
    """
    size = view.dtype.itemsize
    together = _ALIGNED | view.address | step * size
    if view.rows > 1:
        together |= view.ld * size
    return together & -together
