# SPDX-License-Identifier: Apache-2.0
"""Time lines of all GPUs: what is read from a trace of CUDA's profiler, and what is printed of it (timeline.py)."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks import level3, timeline
from benchmarks.timeline import Span
from tests.helpers.machine import machine
from tests.helpers.mpi import run_mpi, starts_ranks


def kernel(ts: float, dur: float, name: str = "gemm", stream: int = 7) -> dict[str, Any]:
    about = {"stream": stream, "grid": [4, 2, 1], "block": [128, 1, 1]}
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": about}


COPY = {
    "cat": "gpu_memcpy",
    "name": "Memcpy PtoP",
    "ts": 2,
    "dur": 5,
    "args": {"stream": 9, "bytes": 1 << 20},
}
HOST = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1, "args": {}}


def test_kernels_and_copies_of_a_trace_on_the_clock_of_the_host():
    trace = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [kernel(10, 4), HOST, COPY]}
    assert timeline.spans(trace) == [
        Span(1002, 1007, 9, "Memcpy PtoP", nbytes=1 << 20),
        Span(1010, 1014, 7, "gemm", 8, 128),
    ]


def test_rounds_are_divided_where_nothing_runs():
    long, within, after = Span(0, 100, 1, "a"), Span(10, 20, 2, "b"), Span(101, 102, 2, "c")
    second = Span(200, 210, 1, "a")
    assert timeline.rounds([long, within, after, second], 2) == [[long, within, after], [second]]
    assert timeline.rounds([], 2) == [[], []]


def test_a_round_takes_from_the_first_start_to_the_last_stop_on_any_rank():
    ranks = [[Span(5, 9, 1, "a")], [], [Span(7, 30, 1, "b")]]
    assert timeline.elapsed(ranks) == 25
    assert timeline.elapsed([[], []]) == 0


def test_a_line_for_each_span():
    ranks = [[Span(1000, 2000, 21, "gemm", 8, 128)], [Span(1500, 1750, 3, "copy", nbytes=3 << 20)]]
    assert [line.split() for line in timeline.lines(ranks)] == [
        ["rank", "0", "stream", "0", "0.000", "-", "1.000", "8x", "128", "gemm"],
        ["rank", "1", "stream", "0", "0.500", "-", "0.750", "3.0", "MiB", "copy"],
    ]


def printed_timelines(comm: Any, path: str) -> Any:
    """Rank 0 prints the fastest and the slowest round of all ranks: here rank 1's gets slower."""

    def traced(run: Callable[[], None]) -> dict[str, Any]:
        run()
        return {"traceEvents": [kernel(1000 * i, 10 * (1 + i * comm.rank)) for i in range(3)]}

    options = argparse.Namespace(
        n=8, block=2, grid="1x2", width=[0], only=["syrkx"], algo=["panels"], pairs=3
    )
    with (
        machine(path, comm=comm),
        mock.patch.object(timeline, "_traced", traced),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        level3.print_timelines(comm, options)
    text = out.getvalue()
    times, slowest = "all rounds, ms:    0.01    0.02    0.03", "rank 1 stream  0    0.000 -   0.030"
    wanted = times in text and slowest in text if comm.rank == 0 else not text
    yield "printed", None if wanted else text


@starts_ranks
def test_level3_prints_the_fastest_and_the_slowest_round(stand_in):
    run_mpi(printed_timelines, 2, path=stand_in(1000))
