# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products on GPUs from local GEMMs and copies that overlap them."""

from .base import CopyProduct
from .copies import (
    NcclAllReduce,
    NcclGather,
    NcclGatheredOutput,
    NcclReduceScatter,
    OneShotAllReduce,
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
    NcclGather, PushedGather,
    NcclReduceScatter, PulledReduceScatter, PushedReduceScatter, OneKernelReduceScatter,
    NcclAllReduce, OneShotAllReduce, TwoShotAllReduce, PushedAllReduce, RingAllReduce, OneKernelAllReduce,
    NcclGatheredOutput, PushedGatheredOutput, OneKernelGatheredOutput,
)  # fmt: skip
"""All of them; ``form`` and ``name`` say what each computes and what ``algo=`` calls it."""
