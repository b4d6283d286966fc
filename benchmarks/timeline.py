# SPDX-License-Identifier: Apache-2.0
"""What all GPUs do in a call, on one clock: kernels and copies as CUDA's profiler sees them, through PyTorch.

Unlike events around what is queued, this also shows what a CUDA graph runs, and what runs at the same time. The clock
is the host's, so it is the same for all ranks of a host up to some microseconds.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ranks import agreed_start

__all__ = ["Span", "begin", "elapsed", "lines", "record", "rounds", "spans"]

_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_APART_SECONDS = 0.01  # between rounds, longer than any gap in one
_NAME = 60  # letters


class Span(NamedTuple):
    """A kernel or a copy on a GPU.

    Attributes:
        start, stop: microseconds.
        stream: number of its stream; of what a graph runs, CUDA's own.
        name: of the kernel, or the kind of copy.
        blocks: thread blocks of a kernel.
        threads: of each.
        nbytes: of a copy.
    """

    start: float
    stop: float
    stream: int
    name: str
    blocks: int = 0
    threads: int = 0
    nbytes: int = 0


def spans(trace: Mapping[str, Any]) -> list[Span]:
    """Return the spans of a trace that PyTorch's profiler has written, by their start. Local."""
    base, found = trace.get("baseTimeNanoseconds", 0) / 1e3, []
    for event in trace["traceEvents"]:
        if event.get("cat") not in _KINDS:
            continue
        about, start = event["args"], base + float(event["ts"])
        blocks, threads = (math.prod(about.get(name, (0,))) for name in ("grid", "block"))
        stop = start + float(event["dur"])
        nbytes = int(about.get("bytes", 0))
        found.append(Span(start, stop, int(about["stream"]), event["name"], blocks, threads, nbytes))
    return sorted(found)


def begin() -> None:
    """Start CUDA's profiler, which then also sees the nodes of graphs that are made from now on. Local."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # it stays on from here, also while graphs are made
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    _traced(lambda: None)


def _traced(run: Callable[[], None]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def record(comm: Any, run: Callable[[], Any], times: int) -> list[list[list[Span]]]:
    """Run a call some times; return each round's spans by rank. Collective over ``comm``, whose ranks are on one node.

    Args:
        comm: the ranks, each with its GPU.
        run: returns when the GPU has done the work.
        times: how often.
    """

    def all_rounds() -> None:
        for _ in range(times):
            time.sleep(_APART_SECONDS)
            agreed_start(comm)
            run()

    mine = rounds(spans(_traced(all_rounds)), times)
    return [list(each) for each in zip(*comm.allgather(mine), strict=True)]


def rounds(found: Sequence[Span], times: int) -> list[list[Span]]:
    """Divide spans where nothing ran for longest. Local."""
    ends, latest = [], float("-inf")
    for before, after in pairwise(found):
        latest = max(latest, before.stop)
        ends.append(after.start - latest)
    cuts = sorted(sorted(range(len(ends)), key=lambda i: -ends[i])[: times - 1])
    edges = [0, *(i + 1 for i in cuts), len(found)]
    parts = [list(found[start:stop]) for start, stop in pairwise(edges)]
    return parts + [[] for _ in range(times - len(parts))]


def elapsed(ranks: Sequence[Sequence[Span]]) -> float:
    """Return the microseconds from the first start to the last stop on any rank. Local."""
    everything = [span for spans in ranks for span in spans]
    if not everything:
        return 0.0
    return max(span.stop for span in everything) - min(span.start for span in everything)


def lines(ranks: Sequence[Sequence[Span]]) -> Iterator[str]:
    """Yield a round as text: a line for each span, in milliseconds since the first start on any rank. Local."""
    begun = min((spans[0].start for spans in ranks if spans), default=0.0)
    for rank, spans in enumerate(ranks):
        streams = {stream: i for i, stream in enumerate(sorted({span.stream for span in spans}))}
        for span in spans:
            start, stop = (f"{(each - begun) / 1e3:8.3f}" for each in (span.start, span.stop))
            what = f"{span.nbytes / 2**20:8.1f} MiB" if span.nbytes else f"{span.blocks:5d}x{span.threads:4d}"
            yield f"  rank {rank} stream {streams[span.stream]:2d} {start} -{stop} {what:>12}  {span.name[:_NAME]}"
