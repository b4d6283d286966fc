# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmark times is what a plan calls; wheels bring what first calls need."""

from __future__ import annotations

import os
import re
import runpy
from itertools import product
from typing import Any
from unittest import mock

import pytest

import pblasmp as pb
from benchmarks.first_calls import TYPES, calls
from benchmarks.gpu_devices import c_call, gpu_machine
from tests.helpers import fakelapack
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import only_long
from tests.helpers.sources import ROOT

D = pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(1, 1))


def test_the_benchmark_makes_the_same_call(ctx, lib):
    """The bare call that benchmarks/gpu_matmul.py times next to a plan is the plan's."""
    with pb.plan(pb.matmul, ctx.empty(D), ctx.empty(D)) as plan:
        plan()
        c_call(plan)()
        planned, *bare = (call.arguments for call in lib.of("Matmul"))
        assert bare == [planned, planned]


@on_ranks(2)
def test_what_results_say_of_the_machine(comm: Any, path: str) -> None:
    """Two GPUs of one host are on one host, and a rank that is bound to a core is on a machine of more."""
    everything = os.sched_getaffinity(0)
    with machine(path, comm=comm), pb.Context(comm, engine="cublasmp") as ctx:
        os.sched_setaffinity(0, {min(everything)})
        try:
            found = gpu_machine(ctx)
        finally:
            os.sched_setaffinity(0, everything)
    assert found["hosts"] == 1, "hosts"
    assert not found.get("shared"), "GPUs of their own"
    assert found["cores"] == len(os.sched_getaffinity(1)), "cores"


MACHINES = {
    "80": (108, 166912),
    "89": (142, 101376),
    "90": (132, 232448),
    "100": (148, 232448),
    "120": (188, 101376),
}
"""Multiprocessors, and bytes of shared memory of a block: A100, L40S, H100 and H200, B200, RTX PRO 6000."""


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [("90", "float64"), ("90", "complex64"), ("80", "float32"), *only_long(*product(MACHINES, TYPES))],
)
@on_ranks(2)
def test_wheels_bring_what_first_calls_need(comm: Any, path: str, capability: str, dtype: str) -> None:
    """``.ci/kernels.txt`` has the kernels; a message has the lines that are missing there."""
    texts: dict[str, str] = {}

    def loaded(device: int, text: str, name: str, *how: Any, **more: Any) -> Any:
        texts[text] = name
        return real(device, text, name, *how, **more)

    real, (multiprocessors, shared_memory) = fakelapack.loaded, MACHINES[capability]
    how = {"multiprocessors": multiprocessors, "shared_memory": shared_memory, "capability": capability}
    with (
        machine(path, Multiplying, comm=comm, **how),
        mock.patch.object(fakelapack, "loaded", loaded),
        pb.Context(comm, engine="cublasmp") as ctx,
    ):
        for name, call in calls(ctx, 512, dtype, (64, 64, 64)):
            if "16" not in name:
                call()
    asked = set().union(*comm.allgather({*texts.values()}))
    assert asked >= {"look", "lu", "qr", "swap", "substitute", "invert", "triangles", "move"}
    missing = texts.keys() - set(runpy.run_path(str(ROOT / ".ci/kernels.py"))["listed"]())
    heads = [" ".join(re.findall(r"^#define (\w+ .*)$", text, re.MULTILINE)) for text in missing]
    assert not missing, "\n".join(f"{texts[text]}: {head}" for text, head in zip(missing, heads, strict=True))
