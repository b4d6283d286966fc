# SPDX-License-Identifier: Apache-2.0
"""pb.Epilogue as a plain value: what goes together, and the layouts of vectors and auxiliary arrays. No MPI."""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
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
