# SPDX-License-Identifier: Apache-2.0
"""What a trial run works on, and how often it is timed (measure.py)."""

from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm.choice import Serial
from pblasmp.engines.request import Operands, Options, Task
from pblasmp.tuning import measure as tuning

ENGINE = SimpleNamespace(
    xp=np,
    empty=lambda shape, dtype, order, ld: (
        np.empty((shape[0], ld), dtype)[:, : shape[1]]
        if order == "C"
        else np.empty((ld, shape[1]), dtype, order="F")[: shape[0]]
    ),
)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 5)),
        np.zeros((3, 5), order="F"),
        np.zeros((3, 9), np.float32)[:, :5],
        np.zeros((9, 5), order="F")[:3],
        np.zeros((3, 1), np.float32),
        np.zeros((4, 2)),
        np.zeros(7),
    ],
)
def test_scratch_lies_as_the_callers_array_does(array):
    new = tuning._like(ENGINE, array)
    assert (new.shape, new.strides, new.dtype) == (array.shape, array.strides, array.dtype)
    assert not np.shares_memory(new, array)


@pytest.mark.parametrize("in_place", [False, True])
def test_trials_write_nothing_of_the_callers(in_place):
    a, b, d = (np.full((3, 3), value) for value in (1.0, 2.0, 3.0))
    c = d if in_place else np.full((3, 3), 4.0)
    scratch, restore = tuning._scratch(ENGINE, Operands(a=a, b=b, c=c, d=d), "d")
    assert scratch.a is a
    assert scratch.b is b
    assert not np.shares_memory(scratch.d, d)
    assert scratch.c is (scratch.d if in_place else c)
    if in_place:
        assert np.array_equal(scratch.d, d)
        scratch.d[...] = 7
        restore()
        assert np.array_equal(scratch.d, d)
    assert np.all(d == 3)
    factored, restore = tuning._scratch(ENGINE, Operands(a=a, b=None, c=a, d=d, pivots=np.arange(3)), "abcd")
    assert factored.c is factored.a is not a  # the factors take A's place in both
    factored.a[...] = factored.d[...] = 7
    restore()
    assert [x.min() for x in (a, factored.a, factored.d)] == [1, 1, 3]
    assert factored.pivots.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("best", "runs"), [(0.0, True), (1e-3, False)])
def test_what_is_hopelessly_slow_is_not_timed_again(best, runs, monkeypatch):
    asked = []

    def samples(engine, comm, run, count, restore):
        asked.append(count)
        return [tuning._HOPELESS * 1e-3 * 1.5] * count

    monkeypatch.setattr(tuning, "samples", samples)
    found = tuning._time(ENGINE, None, None, None, best)
    assert found == pytest.approx(tuning._HOPELESS * 1e-3 * 1.5)
    assert asked[:2] == [2, tuning._SAMPLES[0]]
    assert (len(asked) == 3) == runs


class Timed:
    """An algorithm that takes so many seconds, more if something else uses the machine."""

    def __init__(self, name, seconds, closed):
        self.name, self.seconds, self._closed = name, seconds, closed

    def bind(self, operands):
        return self

    def run(self):
        pass

    def close(self):
        self._closed.append(self.name)


@pytest.mark.parametrize("room", [3, 1])
def test_the_fastest_take_turns(room, monkeypatch):
    """The machine is twice as slow now and then: whichever was timed then may still be the fastest."""
    alone = {"a": 1e-3, "b": 1.1e-3, "c": 1.2e-3}
    closed, queue, clock = [], [], iter(range(1000))

    def samples(engine, comm, run, count, restore):
        slow = 2 if next(clock) < 9 else 1
        queue.append(run.__self__.name)
        return [slow * run.__self__.seconds] * count

    def prepared(name):
        if len(queue) >= room:
            raise pb.UnsupportedError("no memory")
        return Timed(name, alone[name], closed)

    monkeypatch.setattr(tuning, "samples", samples)
    monkeypatch.setattr(tuning, "is_agreed", lambda error, comm: True)
    engine = SimpleNamespace(synchronize=lambda: closed.append("synchronize"))
    monkeypatch.setattr(tuning, "_scratch", lambda engine, operands, written: (operands, None))
    trials = tuning._Trials(engine, Serial(), Task(None, Options()), None)
    monkeypatch.setattr(trials, "_prepared", prepared)
    found = trials.time_in_turns("abc")
    if room == 1:
        assert found == {}
        assert closed == ["synchronize", "a"]
        return
    assert found == pytest.approx(alone)
    assert closed == ["synchronize", "c", "b", "a"]
    assert queue == list("abc" + ("abc" + "bca" + "cab") * 3 + "abc")
    alone.update(a=1.0, b=1.1, c=1.2)
    queue.clear()
    trials.time_in_turns("abc")
    assert queue == list("abc" + "abc" + "bca" + "cab" + "abc" + "bca")  # what takes long has fewer turns
