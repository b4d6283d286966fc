# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import pickle

import pytest

import pblasmp as pb
from pblasmp import errors

BUILT_IN = {
    "LayoutError": ValueError,
    "RankMismatchError": ValueError,
    "UnsupportedError": NotImplementedError,
    "LibraryNotFoundError": OSError,
    "StatusError": RuntimeError,
    "ClosedError": RuntimeError,
}


def test_the_tree_is_complete():
    assert set(errors.__all__) == {"PblasmpError", *BUILT_IN}
    assert errors.PblasmpError.__bases__ == (Exception,)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_error_is_also_the_built_in_it_resembles(name):
    error = getattr(errors, name)
    assert error.__bases__ == (errors.PblasmpError, BUILT_IN[name])
    assert getattr(pb, name) is error
    for caught in (error, errors.PblasmpError, BUILT_IN[name]):
        with pytest.raises(caught, match=r"^what was wrong$"):
            raise error("what was wrong")
    others = {x for x in BUILT_IN if x != name}
    assert not any(issubclass(error, getattr(errors, other)) for other in others)


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_travel_between_processes(name):
    error = getattr(errors, name)("line 1\nline 2: µs × 2")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(error, protocol))
        assert type(twin) is type(error)
        assert (str(twin), twin.args) == (str(error), error.args)
    assert str(copy.copy(error)) == str(error)
