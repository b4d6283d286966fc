# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products on GPUs from local GEMMs and copies that overlap them."""

from .allgather import NcclGather, PushedGather
from .allreduce import NcclAllReduce, OneShotAllReduce, PushedAllReduce, RingAllReduce, TwoShotAllReduce
from .base import CopyProduct
from .gathered_output import NcclGatheredOutput, PushedGatheredOutput
from .one_kernel import (
    OneKernelAllReduce,
    OneKernelGatheredOutput,
    OneKernelReduceScatter,
)
from .reduce_scatter import NcclReduceScatter, PulledReduceScatter, PushedReduceScatter

__all__ = ["PRODUCTS"]

PRODUCTS: tuple[type[CopyProduct], ...] = (
    NcclGather, PushedGather,
    NcclReduceScatter, PulledReduceScatter, PushedReduceScatter, OneKernelReduceScatter,
    NcclAllReduce, OneShotAllReduce, TwoShotAllReduce, PushedAllReduce, RingAllReduce, OneKernelAllReduce,
    NcclGatheredOutput, PushedGatheredOutput, OneKernelGatheredOutput,
)  # fmt: skip
"""All of them; ``form`` and ``name`` say what each computes and what ``algo=`` calls it."""
