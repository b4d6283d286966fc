# SPDX-License-Identifier: Apache-2.0
"""Products with epilogues on any engine, compared with NumPy in float64; layouts of vectors and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import pblasmp as pb
from tests.helpers.gpu.products import place

TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
KINDS = (
    "bias", "relu", "relu bias", "relu aux", "relu bias aux", "gelu", "gelu bias", "gelu aux", "gelu bias aux",
    "drelu aux", "drelu aux bias_grad", "dgelu aux", "dgelu aux bias_grad", "bias_grad_a", "bias_grad_b",
)  # fmt: skip
"""Every epilogue, named by its activation and its arrays."""


@dataclass
class Followed:
    """A product and what follows it, whole matrices in float64.

    Attributes:
        kind: one of ``KINDS``.
        d: the result.
        vectors: what each vector of the epilogue must hold, whole.
        aux: what the activation was applied to, or what was remembered.
    """

    kind: str
    d: np.ndarray
    vectors: dict[str, np.ndarray]
    aux: np.ndarray | None


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def tanh_gelu_slope(x: np.ndarray) -> np.ndarray:
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return (1 + np.tanh(u)) / 2 + x / 2 / np.cosh(u) ** 2 * slope


def follow(
    kind: str,
    product: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    order: str,
    bias: np.ndarray | None = None,
    aux: np.ndarray | None = None,
) -> Followed:
    """Return what an epilogue makes of a product of op(A), ``left``, and op(B), ``right``, whose D is in ``order``."""
    activation, *arrays = (
        kind.split() if kind.split()[0][:2] in ("re", "ge", "dr", "dg") else ["", *kind.split()]
    )
    across = 0 if order == "C" else 1
    if "bias" in arrays:
        product = product + (bias[None, :] if order == "C" else bias[:, None])
    vectors = {"bias_grad_a": left.sum(1)} if kind == "bias_grad_a" else {}
    vectors |= {"bias_grad_b": right.sum(0)} if kind == "bias_grad_b" else {}
    if activation == "relu":
        return Followed(kind, np.maximum(product, 0), vectors, product)
    if activation == "gelu":
        return Followed(kind, tanh_gelu(product), vectors, product)
    if activation == "drelu":
        product = product * (aux > 0)
    if activation == "dgelu":
        product = product * tanh_gelu_slope(aux)
    if "bias_grad" in arrays:
        vectors["bias_grad"] = product.sum(across)
    return Followed(kind, product, vectors, aux)


def part(name: str, vector: np.ndarray, p: pb.MatmulProblem, rank: int) -> np.ndarray:
    """What ``rank`` has of an epilogue's vector that is ``vector`` as a whole."""
    if rank >= p.d.grid.size:
        return vector[:0]
    contiguous = 1 if p.d.order == "C" else 0
    axis = {"bias_grad_a": 0, "bias_grad_b": 1}.get(name, contiguous)
    if p.scheme == "matmul_allreduce" or (p.scheme == "matmul_reduce_scatter" and axis != contiguous):
        return vector
    return vector[p.d.global_indices(rank)[axis]]


def part_of_d(whole: np.ndarray, p: pb.MatmulProblem, rank: int) -> np.ndarray:
    """What ``rank`` has of D, or of a matrix with D's layout."""
    if rank >= p.d.grid.size:
        return whole[:0, :0]
    if p.scheme == "matmul_allreduce":
        return whole
    rows, cols = p.d.global_indices(rank)
    return whole[rows[:, None], cols]


def packed(mask: np.ndarray, order: str) -> np.ndarray:
    """A part's mask as cuBLASLt has it: bits along the contiguous dimension, padded to a multiple of 128."""
    lines = mask if order == "C" else mask.T
    width = max(1, -(-lines.shape[1] // 128)) * 16
    out = np.zeros((lines.shape[0], width), np.uint8)
    bits = np.packbits(lines, axis=1, bitorder="little")
    out[:, : bits.shape[1]] = bits
    return out if order == "C" else out.T


def masked(bits: np.ndarray, shape: tuple[int, int], order: str) -> np.ndarray:
    """The mask of a part of this shape, from what ``packed`` makes."""
    lines, count = (bits, shape[1]) if order == "C" else (bits.T, shape[0])
    mask = np.unpackbits(np.ascontiguousarray(lines), axis=1, bitorder="little")[:, :count].astype(bool)
    return mask if order == "C" else mask.T


OPS = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.T}


def matrix(
    ctx: pb.Context, whole: np.ndarray, d: pb.MatrixDescriptor
) -> tuple[pb.DistributedMatrix, np.ndarray]:
    """``whole``, which every rank has, as a matrix in the layout ``d``; and its values rounded to d's type."""
    rounded = whole.astype(d.dtype)
    return place(ctx, rounded, d), rounded.astype(np.float64)


def placed(ctx: pb.Context, values: np.ndarray) -> Any:
    """A vector as an array of the context's engine; see ``read``."""
    array = ctx.engine.empty((1, values.size), values.dtype, "C", max(1, values.size))
    ctx.engine.from_host(array, values[None])
    return array


def check_within(name: str, got: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Fail if two arrays differ by more than ``tolerance`` times the largest value. Local."""
    assert got.shape == expected.shape, name
    error = np.abs(got.astype(np.float64) - expected).max(initial=0)
    scale = max(1.0, np.abs(expected).max(initial=0))
    assert error <= tolerance * scale, f"{name}: off by {error} at a scale of {scale}"


def check_epilogue(
    ctx: pb.Context,
    rng: np.random.Generator,
    p: pb.MatmulProblem,
    kind: str,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    tolerance: float | None = None,
    reports: list[Any] | None = None,
    fused: bool = False,
    **how: Any,
) -> None:
    """Run the product ``p`` with an epilogue; fail, after the last collective call, if this rank's part is wrong.

    Args:
        tolerance: of D, in units of its largest value; by default as a sum in float32, or float64, has it.
        reports: where the plan's report goes.
        fused: insist on it.
        **how: of ``matmul``.
    """
    tolerance = tolerance or TOLERANCES[p.a.dtype.name]
    a, left = matrix(ctx, rng.standard_normal(p.a.shape), p.a)
    b, right = matrix(ctx, rng.standard_normal(p.b.shape), p.b)
    left, right = OPS[p.op_a](left), OPS[p.op_b](right)
    product, c = alpha * (left @ right), None
    if beta:
        c, added = matrix(ctx, rng.standard_normal(p.d.shape), p.d)
        product = product + beta * added
    bias = rng.standard_normal(p.n if p.d.order == "C" else p.m).astype(p.d.dtype)
    remembered = rng.standard_normal((p.m, p.n)).astype(p.d.dtype)
    whole = follow(
        kind, product, left, right, p.d.order, bias.astype(np.float64), remembered.astype(np.float64)
    )
    arrays = _arrays(ctx, p, whole, bias, remembered)
    activation = kind.split()[0] if "lu" in kind else None
    given = {name: array if name == "aux" else array[0] for name, array in arrays.items()}
    epilogue = pb.Epilogue(activation, **given, fused=fused)  # type: ignore[arg-type]
    with pb.plan(
        pb.matmul, a, b, c, out=ctx.allocate(p.d), alpha=alpha, beta=beta, op_a=p.op_a, op_b=p.op_b,
        scheme=p.scheme, epilogue=epilogue, **how,
    ) as plan:  # fmt: skip
        result = plan()
        if reports is not None:
            reports.append(plan.report())
    if ctx.rank >= p.d.grid.size:
        return
    case = f"{kind}, alpha {alpha}, beta {beta}, {how}, {p}"
    got = {name: ctx.engine.to_host(array) for name, array in arrays.items()}
    d = ctx.engine.to_host(result.local)
    check_within(f"{case}: D", d, part_of_d(whole.d, p, ctx.rank), tolerance)
    for name, vector in whole.vectors.items():
        check_within(f"{case}: {name}", got[name][0], part(name, vector, p, ctx.rank), 8 * tolerance)
    if "aux" in got and activation in ("relu", "gelu"):
        expected = part_of_d(whole.aux, p, ctx.rank)
        if activation == "gelu":
            check_within(f"{case}: aux", got["aux"], expected, tolerance)
        else:
            differs = masked(got["aux"], expected.shape, p.d.order) != (expected > 0)
            close = np.abs(expected) <= tolerance * max(1.0, np.abs(expected).max(initial=0))
            assert not (differs & ~close).any(), (
                f"{case}: the mask differs in {(differs & ~close).sum()} bits"
            )


def _arrays(
    ctx: pb.Context, p: pb.MatmulProblem, whole: Followed, bias: np.ndarray, remembered: np.ndarray
) -> dict[str, Any]:
    """The arrays of an epilogue on this rank: what is read holds this rank's part, what is written NaN or anything."""
    arrays: dict[str, Any] = {}
    activation = whole.kind.split()[0]
    for name in whole.kind.split():
        if name == "bias":
            arrays[name] = placed(ctx, part(name, bias, p, ctx.rank))
        elif name == "aux":
            arrays[name] = ctx.empty_aux(p.d, activation)
            if activation in ("drelu", "dgelu") and ctx.rank < p.d.grid.size:
                values = part_of_d(remembered, p, ctx.rank)
                ctx.engine.from_host(
                    arrays[name], packed(values > 0, p.d.order) if activation == "drelu" else values
                )
        elif name in whole.vectors:
            length = part(name, whole.vectors[name], p, ctx.rank).size
            arrays[name] = placed(ctx, np.full(length, np.nan, p.d.dtype))
    return arrays
