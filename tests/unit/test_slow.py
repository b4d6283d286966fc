# SPDX-License-Identifier: Apache-2.0
"""Short forms leave out what others try, long ones nothing; the marker says which tests have one."""

import itertools
import os
from types import ModuleType, SimpleNamespace

import pytest

from tests.helpers import factor_cases, layouts
from tests.helpers.pairs import pairs
from tests.helpers.slow import (
    choose_form,
    draws,
    fewer,
    has_long_form,
    in_turn,
    only_long,
    thinned,
    with_new_values,
)

FACTORS = "abcd", "CFK", (1, 2, 3)


@pytest.fixture(autouse=True)
def _short_at_first(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    choose_form(slow=False)


@pytest.mark.parametrize("keep", [2, 3])
def test_values_take_turns(keep):
    parts = [in_turn("abcdefg", keep=keep, first=first) for first in range(keep, 2 * keep)]
    assert sorted(itertools.chain(*parts)) == list("abcdefg")


def test_pairs():
    found = list(pairs(*FACTORS, "xy"))
    assert found == list(pairs(*FACTORS, "xy"))  # in every run
    assert len(found) < 72 // 4
    for (i, one), (j, other) in itertools.combinations(enumerate((*FACTORS, "xy")), 2):
        assert {(each[i], each[j]) for each in found} == set(itertools.product(one, other))


def test_forms():
    assert draws(2, long=9) == 2
    assert [2, *only_long(3, 4)] == [2]
    choose_form(slow=True)
    assert in_turn("abc", keep=3) == [*"abc"]
    assert list(map(tuple, pairs(*FACTORS))) == list(itertools.product(*FACTORS))
    assert draws(2, long=9) == 9
    assert [2, *only_long(3, 4)] == [2, 3, 4]


def test_few_cases(monkeypatch):
    assert thinned(20) == 20
    assert fewer("abc", 4) == "abc"
    monkeypatch.setenv("PBLASMP_TESTS", "few")
    choose_form(slow=False)
    assert [thinned(count) for count in (20, 8, 1)] == [3, 1, 1]
    assert draws(17, long=90) == 3
    assert [*fewer("abc", 4)] == ["b"]
    assert in_turn("abcdef", keep=2, first=1) == ["b", "f"]
    choose_form(slow=True)
    assert thinned(20) == 20
    assert draws(17, long=90) == 90


def item(nodeid, /, *marks, **params):
    """A case of pytest's, with the names of each mark "parametrize"."""
    found = SimpleNamespace(
        nodeid=nodeid, iter_markers=lambda _: [SimpleNamespace(args=(names,)) for names in marks]
    )
    if params:
        found.callspec = SimpleNamespace(params=params)
    return found


def test_every_value_has_a_case():
    alone = [item("t.py::one"), item("t.py::two")]
    marks = ("form, name", ["dtype"])
    crossed = [
        item(f"t.py::three[{form}-{name}-{dtype}-{way}]", *marks, form=form, name=name, dtype=dtype, way=way)
        for form, name in (("sum", "push"), ("sum", "nccl"), ("gather", "push"))
        for dtype in ("d", "s")
        for way in (1, 2)  # a fixture's
    ]
    left, out = with_new_values(alone + crossed)
    assert [each.nodeid for each in left[:2]] == ["t.py::one", "t.py::two"]
    assert [tuple(each.callspec.params.values()) for each in left[2:]] == [
        ("sum", "push", "d", 1), ("sum", "push", "d", 2), ("sum", "push", "s", 1), ("sum", "nccl", "d", 1),
        ("gather", "push", "d", 1),
    ]  # fmt: skip
    assert len(left) + len(out) == len(alone + crossed)


def module_with(**names):
    found = ModuleType(f"with {sorted(names)}")
    vars(found).update(names)
    return found


def test_which_modules_have_a_long_form():
    assert has_long_form(module_with(number=3, draws=draws))
    assert has_long_form(module_with(cases=factor_cases.CASES, helper=factor_cases))
    assert has_long_form(module_with(one=factor_cases.least_squares_at_the_ends))  # a helper's function
    assert has_long_form(module_with(pairs=pairs))
    assert not has_long_form(module_with(number=3, layouts=layouts))


def test_marker(request):
    assert request.node.get_closest_marker("slow")
