# SPDX-License-Identifier: Apache-2.0
"""pb.Epilogue as a plain value: what goes together, and the layouts of vectors and auxiliary arrays. No MPI."""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.epilogue import aux_layout, vector_length
from tests.helpers.epilogues import KINDS

V = np.zeros(3)


def made(kind: str, activation: str | None = None) -> pb.Epilogue:
    words = kind.split()
    if words[0] in ("relu", "gelu", "drelu", "dgelu"):
        activation, *words = words
    return pb.Epilogue(activation, **dict.fromkeys(words, V))


@pytest.mark.parametrize("kind", KINDS)
def test_every_epilogue_can_be_written_down(kind):
    epilogue = made(kind)
    assert epilogue.name == kind
    assert repr(epilogue) == f"Epilogue({kind})"


@pytest.mark.parametrize(
    ("activation", "arrays", "words"),
    [
        ("tanh", (), "activation is 'tanh', expected None, 'relu'"),
        (["relu"], (), "activation is ['relu'], expected None"),
        (None, ("aux",), "aux needs an activation"),
        (None, ("bias", "aux"), "aux needs an activation"),
        ("drelu", (), "'drelu' needs the aux that 'relu' wrote"),
        ("dgelu", ("bias_grad",), "'dgelu' needs the aux that 'gelu' wrote"),
        ("dgelu", ("aux", "bias"), "'dgelu' has no bias"),
        ("relu", ("bias_grad",), "bias_grad needs 'drelu' or 'dgelu'"),
        (None, ("bias_grad",), "bias_grad needs"),
        (None, ("bias", "bias_grad_a"), "bias_grad_a cannot be combined with anything else"),
        (None, ("bias_grad_a", "bias_grad_b"), "cannot be combined with anything else"),
        ("relu", ("bias_grad_b",), "bias_grad_b cannot be combined with anything else"),
    ],
)
def test_what_does_not_go_together(activation, arrays, words):
    with pytest.raises(pb.ArgumentError) as caught:
        pb.Epilogue(activation, **dict.fromkeys(arrays, V))
    assert words in str(caught.value)


def test_what_is_written():
    assert made("relu bias aux").outputs == ("aux",)
    assert made("dgelu aux bias_grad").outputs == ("bias_grad",)
    assert made("bias").outputs == ()
    assert made("bias_grad_b").outputs == ("bias_grad_b",)


def test_nothing_at_all():
    assert pb.Epilogue().name == ""


def test_it_is_frozen():
    with pytest.raises(AttributeError):
        pb.Epilogue("relu").activation = "gelu"


def test_vectors_across_what_is_scattered_are_whole():
    """GEMM + ReduceScatter of torch's y = x w^T: each rank has a part of y's rows, and all columns."""
    p = pb.MatmulProblem.matmul_reduce_scatter(12, 8, 16, 4, "N", "T", order="C", dtype="float32")
    assert p.d.local_shape(1) == (3, 8)
    names = ("bias", "bias_grad", "bias_grad_a", "bias_grad_b")
    assert [vector_length(name, p, 1) for name in names] == [8, 8, 12, 8]
    p = pb.MatmulProblem.allgather_matmul(12, 8, 16, 4, "N", "T", order="C", dtype="float32")
    assert [vector_length(name, p, 1) for name in names] == [2, 2, 12, 2]
    p = pb.MatmulProblem.matmul_allreduce(12, 8, 16, 4, "N", "T", order="C", dtype="float32")
    assert [vector_length(name, p, 1) for name in names] == [8, 8, 12, 8]


@pytest.mark.parametrize(
    ("width", "mask", "padded"), [(1, 16, 8), (8, 16, 8), (128, 16, 128), (129, 32, 136)]
)
def test_auxiliary_arrays_are_padded(width, mask, padded):
    d = pb.MatrixDescriptor((5, width), (5, width), pb.Grid(1, 1), dtype="float16")
    assert aux_layout(d, 0, "relu") == ((5, mask), mask, np.uint8)
    assert aux_layout(d, 0, "dgelu") == ((5, width), padded, np.float16)
    assert aux_layout(d.T, 0, "drelu") == ((mask, 5), mask, np.uint8)
    assert aux_layout(d.T, 0, "gelu") == ((width, 5), padded, np.float16)
