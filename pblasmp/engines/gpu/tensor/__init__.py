# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products on GPUs from local GEMMs and copies that overlap them: a table of algorithms by form."""

from .allgather import NcclGather, PushedGather
from .allreduce import NcclAllReduce, OneShotAllReduce, PushedAllReduce, RingAllReduce, TwoShotAllReduce
from .base import CopyProduct
from .gathered_output import NcclGatheredOutput, PushedGatheredOutput
from .one_kernel import (
    OneKernelAllReduce,
    OneKernelGatheredOutput,
    OneKernelReduceScatter,
)
from .reduce_scatter import NcclReduceScatter, PulledReduceScatter, PushedReduceScatter, StoredReduceScatter

__all__ = ["PRODUCTS"]

PRODUCTS: dict[str, dict[str, type[CopyProduct]]] = {
    "allgather_matmul": {"nccl": NcclGather, "push": PushedGather},
    "matmul_reduce_scatter": {
        "nccl": NcclReduceScatter,
        "pull": PulledReduceScatter,
        "store": StoredReduceScatter,
        "push": PushedReduceScatter,
        "one_kernel": OneKernelReduceScatter,
    },
    "matmul_allreduce": {
        "nccl": NcclAllReduce,
        "one_shot": OneShotAllReduce,
        "two_shot": TwoShotAllReduce,
        "push": PushedAllReduce,
        "ring": RingAllReduce,
        "one_kernel": OneKernelAllReduce,
    },
    "matmul_allgather": {
        "nccl": NcclGatheredOutput,
        "push": PushedGatheredOutput,
        "one_kernel": OneKernelGatheredOutput,
    },
}
"""The products of each form, by the names that ``algo=`` takes."""
