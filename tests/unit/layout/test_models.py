# SPDX-License-Identifier: Apache-2.0
"""Layers of models: every file loads, and shapes are those of one rank's product."""

import pytest

import pblasmp as pb
from pblasmp.problems import files
from pblasmp.problems.files import Layer, load_model


@pytest.mark.parametrize("file", files.find("models"), ids=lambda file: file.stem)
def test_every_model_loads(file):
    layers = load_model(file.stem)
    assert {layer.product for layer in layers} <= {
        "allgather_matmul",
        "matmul_reduce_scatter",
        "matmul_allreduce",
        "matmul_allgather",
    }
    for layer in layers:
        tokens, outputs, inputs = layer.shape(1024, 8)
        assert tokens == 1024
        parts = 8 if layer.product in ("allgather_matmul", "matmul_allgather") else 1
        assert outputs * parts == layer.outputs
        assert inputs == layer.inputs


def test_what_cannot_be_split_evenly():
    with pytest.raises(pb.LayoutError, match="qkv: 10 outputs cannot be split evenly over 4 ranks"):
        Layer("qkv", "allgather_matmul", 10, 8).shape(16, 4)
    with pytest.raises(pb.LayoutError, match="down: 10 inputs cannot be split evenly over 4 ranks"):
        Layer("down", "matmul_reduce_scatter", 8, 10).shape(16, 4)


def test_an_unknown_model():
    with pytest.raises(pb.ArgumentError, match="expected one of llama-70b, llama-8b, got 'gpt'"):
        load_model("gpt")
