# SPDX-License-Identifier: Apache-2.0
"""Ranges of indices in direct calls: axes in their simplest form, and where their indices go in other ones."""

from dataclasses import replace

import numpy as np

from pblasmp.engines.direct.asked import Axes, span_of, whole_span
from pblasmp.layout.axis import Axis
from pblasmp.layout.intersection import intersect


def _random(rng, extent):
    """An axis, a window of it of that extent, in its simplest form, too."""
    block, nprocs = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    source, lead, start = int(rng.integers(nprocs)), int(rng.integers(block)), int(rng.integers(0, 20))
    whole = Axis(start + extent + int(rng.integers(0, 9)), block, source, nprocs, lead)
    return whole.window(start, start + extent), span_of(Axes(block, nprocs, source, lead, 0), start, extent)


def test_counts_and_places_are_those_of_the_axis():
    rng = np.random.default_rng(0)
    for _ in range(400):
        extent = int(rng.integers(1, 40))
        axis, span = _random(rng, extent)
        assert span.on_one == axis.on_one == (max(axis.counts()) == extent)
        for p in range(axis.nprocs):
            mine = axis.globals(p)
            assert span.count(p) == len(mine)
            stop = int(rng.integers(0, extent + 1))
            assert span.below(stop, p) == np.count_nonzero(mine < stop)
            assert span.globals(p).tolist() == mine.tolist()


def test_every_index_goes_somewhere_once():
    rng = np.random.default_rng(1)
    for _ in range(600):
        extent = int(rng.integers(1, 40))
        (of, from_), (to, onto) = _random(rng, extent), _random(rng, extent)
        if rng.random() < 0.3:
            onto, to = whole_span(extent), Axis(extent, extent)
        if rng.random() < 0.3:
            turn = int(rng.integers(from_.nprocs))
            onto, to = replace(from_, source=turn), None
        parts = {q: np.full(onto.count(q), -1) for q in range(onto.nprocs)}
        for p in range(of.nprocs):
            mine = of.globals(p)
            for q, s in ((to_, s) for to_ in range(onto.nprocs) for s in intersect(from_, p, onto, to_)):
                for i in range(s.repeat):
                    src, dst = s.src + i * s.src_step, s.dst + i * s.dst_step
                    assert (parts[q][dst : dst + s.length] == -1).all()
                    parts[q][dst : dst + s.length] = mine[src : src + s.length]
        if to is None:
            to = onto
        for q in range(to.nprocs):
            assert np.array_equal(parts[q], to.globals(q))
