# SPDX-License-Identifier: Apache-2.0
"""Short tests leave out what others try, and nothing where PBLASMP_TESTS says so."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.lengths import draws, in_turn, only_long

FACTORS = "abcd", "CFK", (1, 2, 3)


@pytest.mark.parametrize("keep", [2, 3])
def test_parts_are_disjoint_and_whole(keep, monkeypatch):
    monkeypatch.delenv("PBLASMP_TESTS", raising=False)
    parts = [list(in_turn(*FACTORS, keep=keep, first=first)) for first in range(keep)]
    assert sorted(itertools.chain(*parts)) == sorted(itertools.product(*FACTORS))


def test_every_combination_of_the_others_comes_with_one_value(monkeypatch):
    monkeypatch.delenv("PBLASMP_TESTS", raising=False)
    found = list(in_turn(*FACTORS, keep=3))
    assert sorted(each[:2] for each in found) == sorted(itertools.product(*FACTORS[:2]))
    for i, j in itertools.combinations(range(3), 2):  # and every two values come together
        pairs = {(each[i], each[j]) for each in found}
        assert pairs == set(itertools.product(FACTORS[i], FACTORS[j]))


def test_long(monkeypatch):
    monkeypatch.setenv("PBLASMP_TESTS", "long")
    assert list(in_turn(*FACTORS, keep=3)) == list(itertools.product(*FACTORS))
    assert draws(2, long=9) == 9
    assert [2, *only_long(3, 4)] == [2, 3, 4]
    monkeypatch.setenv("PBLASMP_TESTS", "")
    assert draws(2, long=9) == 2
    assert [2, *only_long(3, 4)] == [2]


def test_parts_of_the_files_try_all_in_turn(monkeypatch):
    tried = []
    for part in range(5):
        monkeypatch.setenv("PBLASMP_TESTS", f"{part}/5")
        tried.append((draws(2, long=9), len(only_long(3, 4)), len(list(in_turn(*FACTORS, keep=3)))))
    assert sorted(tried) == [(2, 0, 12)] * 4 + [(9, 2, 36)]
    monkeypatch.setenv("PBLASMP_TESTS", "0/1")
    assert draws(2, long=9) == 9


@pytest.mark.parametrize("asked", ["short", "5/5", "-1/5", "1", "1/x"])
def test_what_names_no_part_is_an_error(asked, monkeypatch):
    monkeypatch.setenv("PBLASMP_TESTS", asked)
    with pytest.raises(ValueError, match='PBLASMP_TESTS: expected "long" or PART/PARTS'):
        draws(2, long=9)
