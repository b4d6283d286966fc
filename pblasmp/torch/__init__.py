# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel layers for PyTorch over the four 1D products, with gradients.

    import pblasmp as pb
    import pblasmp.torch as pt

    with pb.Context() as ctx:                                # under mpirun, or under torchrun with a process group
        up = pt.ColumnParallelLinear(512, 2048, ctx=ctx, sequence_parallel=True)
        down = pt.RowParallelLinear(2048, 512, ctx=ctx, sequence_parallel=True)
        y = down(torch.relu(up(x)))                          # x, y: this rank's part of the tokens

Importing this module imports PyTorch; pblasmp itself never does.
"""

from __future__ import annotations

from ..errors import install

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"pblasmp.torch needs PyTorch ({error}): {install('torch')}", name=error.name
    ) from None

from .functions import allgather_matmul, matmul_allgather, matmul_allreduce, matmul_reduce_scatter
from .linear import ColumnParallelLinear, FusedColumnParallelLinear, RowParallelLinear
from .meshes import init_process_group, to_dtensor
from .parameters import initialize
from .regions import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .scaling import DelayedScaling
from .styles import ColwiseParallel, RowwiseParallel, SequenceParallel
from .vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "DelayedScaling",
    "FusedColumnParallelLinear",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "VocabParallelEmbedding",
    "allgather_matmul",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "init_process_group",
    "initialize",
    "matmul_allgather",
    "matmul_allreduce",
    "matmul_reduce_scatter",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "to_dtensor",
    "vocab_parallel_cross_entropy",
]
