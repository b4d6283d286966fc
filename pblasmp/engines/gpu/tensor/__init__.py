# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products on GPUs from local GEMMs and copies that overlap them."""

from .base import CopyProduct
from .copies import (
    NcclAllReduce,
    NcclGather,
    NcclGatheredOutput,
    NcclReduceScatter,
    OneShotAllReduce,
    PulledGather,
    PulledGatheredOutput,
    PulledReduceScatter,
    RingAllReduce,
    TwoShotAllReduce,
)
from .one_kernel_products import (
    OneKernelAllReduce,
    OneKernelGatheredOutput,
    OneKernelReduceScatter,
)
from .pushed import PushedAllReduce, PushedGather, PushedGatheredOutput, PushedReduceScatter

__all__ = ["PRODUCTS"]

PRODUCTS: tuple[type[CopyProduct], ...] = (
    NcclGather, PulledGather, PushedGather,
    NcclReduceScatter, PulledReduceScatter, PushedReduceScatter, OneKernelReduceScatter,
    NcclAllReduce, OneShotAllReduce, TwoShotAllReduce, PushedAllReduce, RingAllReduce, OneKernelAllReduce,
    NcclGatheredOutput, PulledGatheredOutput, PushedGatheredOutput, OneKernelGatheredOutput,
)  # fmt: skip
"""All of them; ``form`` and ``name`` say what each computes and what ``algo=`` calls it."""
