# SPDX-License-Identifier: Apache-2.0
"""Faults name the argument that the caller gave."""

import pytest

import pblasmp as pb


def empty(ctx, rows, cols, dtype="float64"):
    return ctx.empty(pb.MatrixDescriptor((rows, cols), 2, "1x1", dtype=dtype))


@pytest.mark.parametrize("given", ["c", "out"])
@pytest.mark.parametrize("routine", [pb.matmul, pb.blas.symm, pb.blas.syr2k], ids=lambda f: f.__name__)
def test_a_wrong_c_or_out(routine, given):
    with pb.Context(engine="host") as ctx:
        a, b, wrong = empty(ctx, 4, 4), empty(ctx, 4, 4), empty(ctx, 5, 5)
        with pytest.raises(pb.ArgumentError) as error:
            routine(a, b, **{given: wrong})
        first, *faults = str(error.value).split("\n  - ")
        faults = [first.partition(": ")[2], *faults]
        assert any(f"{given}: shape is 5x5" in fault or f"{given} is 5x5" in fault for fault in faults) or (
            routine is pb.blas.symm
            and all("result of 5x5" in fault or f"like {given}" in fault for fault in faults)
        )
        assert not any(fault.startswith("d:") or "like d" in fault for fault in faults)


def test_a_wrong_b_of_a_solve():
    with pb.Context(engine="host") as ctx, pytest.raises(pb.ArgumentError) as error:
        pb.blas.trsm(empty(ctx, 4, 4), empty(ctx, 4, 4, "float16"))
    assert "like b" in str(error.value)
    assert "like d" not in str(error.value)
