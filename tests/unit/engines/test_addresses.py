# SPDX-License-Identifier: Apache-2.0
"""Addresses of NumPy's arrays, as direct calls read them (asked.py)."""

import gc

import numpy as np

from pblasmp.engines.direct import asked as addresses


def test_addresses_are_those_of_the_array_interface():
    whole = np.zeros((6, 7))
    for each in (
        whole,
        whole.T,
        whole[2:, 3:],
        whole[:0],
        np.empty(0),
        np.zeros((), "f4"),
        np.asfortranarray(whole),
    ):
        assert addresses.host_address(each) == each.__array_interface__["data"][0]


def test_the_address_is_that_of_now():
    """Of an array that has moved, and of one whose object is where another was."""
    array = np.zeros(8)
    for size in (8, 1 << 20, 8):
        array.resize(size, refcheck=False)
        assert addresses.host_address(array) == array.__array_interface__["data"][0]
    places = set()
    for size in range(1, 200):
        other = np.zeros(size)
        places.add(id(other))
        assert addresses.host_address(other) == other.__array_interface__["data"][0]
        del other
        gc.collect(0)
    assert len(places) < 199


def test_few_places_are_remembered(monkeypatch):
    monkeypatch.setattr(addresses, "_REMEMBERED", 4)
    arrays = [np.zeros(3) for _ in range(40)]
    assert all(addresses.host_address(each) == each.__array_interface__["data"][0] for each in arrays)
    assert len(addresses._fields) <= 4
