# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products of 8-bit floats with scales on any engine, compared with NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import as_dtype, is_float8
from tests.helpers import epilogues
from tests.helpers.float8 import E4, E5, LARGEST, ROUNDING
from tests.helpers.tensor_cases import SPLITS, shard

TYPES = ((E4, E4, "bfloat16"), (E4, E5, "float16"), (E5, E4, "float32"), (E4, E4, E4), (E5, E4, E5))
"""Of x, w and the result."""

ALPHA, OF_X, OF_W = 1.5, 0.5, 0.25


def on_engine(ctx: pb.Context, values: np.ndarray) -> Any:
    """A C-ordered array of the context's engine."""
    array = ctx.engine.empty(values.shape, values.dtype, "C", max(1, values.shape[1]))
    ctx.engine.from_host(array, values)
    return array


def on_host(ctx: pb.Context, array: Any, name: str) -> np.ndarray:
    """The values of an array of type ``name``, in float64."""
    return ctx.engine.to_host(array).view(as_dtype(name)).astype(np.float64)


class Case:
    """One product: whole matrices on every rank, and this rank's parts as arrays of its engine."""

    def __init__(
        self, ctx: pb.Context, rng: np.random.Generator, form: str, types: tuple[str, str, str],
        t: int, n: int, k: int, *, beta: float = 0.0, activation: Any = None, overflow: bool = False,
        arrays: bool = False, split: Any = shard,
    ) -> None:  # fmt: skip
        """Draw X (t, k) and W (n, k). Scales are numbers or, with ``arrays``, arrays; ``overflow`` scales too much."""
        self.ctx, self.form, self.types, self.comm = ctx, form, types, ctx.comm
        x, w = (self._drawn(rng, (e, k), name) for e, name in ((t, types[0]), (n, types[1])))
        cut = {
            "t": (0, split(t, ctx)),
            "n": (0, split(n, ctx)),
            "k": (1, split(k, ctx)),
            "": (0, slice(None)),
        }
        of_x, of_w, of_y = SPLITS[form]
        self._part = (1, cut["n"][1]) if of_y == "n" else (0, shard(t, ctx) if of_y == "t" else slice(None))
        self.x, self.w = (on_engine(ctx, self._cut(e, *cut[of])) for e, of in ((x, of_x), (w, of_w)))
        self.whole_x = x
        self.how: dict[str, Any] = {"alpha": ALPHA, "dtype": types[2]}
        if ctx.engine.name != "host":  # e4m3 is the default
            self.how |= {f"{e}_dtype": name for e, name in zip("xw", types, strict=False) if name != E4}
        y = ALPHA * (OF_X * x.astype(np.float64)) @ (OF_W * w.astype(np.float64)).T
        self.arrays: dict[str, Any] = {}
        sixteen = "float16" if types[2] == "float16" else "bfloat16"
        if beta:
            c = self._drawn(rng, (t, n), sixteen if is_float8(as_dtype(types[2])) else types[2])
            y = y + beta * c.astype(np.float64)
            self.arrays["c"] = on_engine(ctx, self._cut(c, *self._part))
            self.how["beta"] = beta
        if activation is not None:
            bias = self._drawn(rng, (1, n), sixteen)
            y = y + bias.astype(np.float64)
            y = np.maximum(y, 0) if activation == "relu" else epilogues.tanh_gelu(y)
            self.arrays["bias"] = on_engine(ctx, bias[:, cut["n"][1]] if of_w == "n" else bias)[0]
            self.how["activation"] = activation
        self.y = self._cut(y, *self._part)
        self.amax = epilogues.placed(ctx, np.full(1, np.nan, np.float32))
        self.unit, limit = None, LARGEST.get(types[2])
        if limit is not None:
            self.unit = float(2.0 ** np.floor(np.log2(limit / max(1.0, np.abs(y).max(initial=0)))))
            self.unit *= 8 if overflow else 1
        self.scales = pb.Scales(
            *(epilogues.placed(ctx, np.full(1, s, np.float32))[0] if arrays else s for s in (OF_X, OF_W)),
            d=self.unit, amax=self.amax[0],
        )  # fmt: skip

    @staticmethod
    def _drawn(rng: np.random.Generator, shape: tuple[int, int], name: str) -> np.ndarray:
        return rng.standard_normal(shape).astype(as_dtype(name))

    @staticmethod
    def _cut(whole: np.ndarray, axis: int, where: slice) -> np.ndarray:
        return np.ascontiguousarray(whole[where] if axis == 0 else whole[:, where])

    def __call__(self, **how: Any) -> Any:
        """The product by the plain function."""
        product = getattr(pb, self.form)
        return product(self.x, self.w, self.ctx, scales=self.scales, **self.arrays, **self.how, **how)

    def plan(self, **how: Any) -> pb.Plan[Any]:
        """A plan of it."""
        plan: pb.Plan[Any] = pb.plan(
            self.form, self.x, self.w, self.ctx, scales=self.scales, **self.arrays, **self.how, **how
        )
        return plan

    def check(self, found: Any, case: str = "", *, tolerance: float = 2.0**-12, factor: float = 1.0) -> None:
        """Fail unless a result and amax are NumPy's. Local.

        Args:
            found: the result.
            case: what it is of.
            tolerance: besides its rounding, in units of its largest value.
            factor: by which scales differ from those of the case.
        """
        name, y = self.types[2], factor * self.y
        case = f"{case or self.form} {self.types} {self.how}"
        assert found.dtype == self.ctx.engine.operations.stored(as_dtype(name)), case
        assert found.shape == y.shape, case
        limit = LARGEST.get(name)
        top = np.abs(y).max(initial=0)
        amax = float(self.ctx.engine.to_host(self.amax)[0, 0])
        # of a result of 16 bits the largest value may be that of its rounded ones
        near = (tolerance + (ROUNDING[name] if limit is None else 0)) * max(top, 1)
        assert abs(amax - top) <= near, f"{case}: amax is {amax}, expected {top}"
        stored = y if limit is None else np.clip(y * self.unit, -limit, limit)
        allowed = ROUNDING[name] * np.abs(stored) + tolerance * np.abs(stored).max(initial=0) + 2.0**-16
        worst = float((np.abs(on_host(self.ctx, found, name) - stored) / allowed).max(initial=0))
        assert worst <= 1, f"{case}: off by {worst} times what rounding allows"
