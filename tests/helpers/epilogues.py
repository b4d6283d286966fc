# SPDX-License-Identifier: Apache-2.0
"""Epilogues by NumPy in float64, and the vectors and masks that go with a part of D."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import pblasmp as pb

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
        aux: the mask (True and False) or the argument that was remembered.
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
        return Followed(kind, np.maximum(product, 0), vectors, product > 0)
    if activation == "gelu":
        return Followed(kind, tanh_gelu(product), vectors, product)
    if activation == "drelu":
        product = product * aux
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
    if p.scheme == "ar" or (p.scheme == "rs" and axis != contiguous):
        return vector
    return vector[p.d.global_indices(rank)[axis]]


def part_of_d(whole: np.ndarray, p: pb.MatmulProblem, rank: int) -> np.ndarray:
    """What ``rank`` has of D, or of a matrix that lies like it."""
    if rank >= p.d.grid.size:
        return whole[:0, :0]
    if p.scheme == "ar":
        return whole
    rows, cols = p.d.global_indices(rank)
    return whole[np.ix_(rows, cols)]


def packed(mask: np.ndarray, order: str) -> np.ndarray:
    """A part's mask as cuBLASLt has it: bits along the contiguous dimension, padded to a multiple of 128."""
    lines = mask if order == "C" else mask.T
    width = max(1, -(-lines.shape[1] // 128)) * 16
    out = np.zeros((lines.shape[0], width), np.uint8)
    bits = np.packbits(lines, axis=1, bitorder="little")
    out[:, : bits.shape[1]] = bits
    return out if order == "C" else out.T
