# SPDX-License-Identifier: Apache-2.0
"""Every sweep in descriptors/sweeps that fits the ranks, on cuBLASMp."""

from __future__ import annotations

import pblasmp as pb
from tests.helpers.gpu.products import everywhere
from tests.helpers.sweeps import cases, fault, label


def test_sweeps_on_gpus(ctx):
    faults, run = [], 0
    for nranks in range(1, ctx.size + 1):
        for case in cases(nranks):
            try:
                wrong = fault(ctx, *case)
            except pb.PblasmpError as error:
                faults.append(f"{label(*case)}: {type(error).__name__}: {error}")
                continue
            run += 1
            wrong = everywhere(ctx, wrong)
            if wrong:
                faults.append(f"{label(*case)}: {wrong}")
    assert run or ctx.size == 1, "no sweep fits these ranks"
    assert not faults, "\n".join(faults)
