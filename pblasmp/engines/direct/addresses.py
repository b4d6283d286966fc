# SPDX-License-Identifier: Apache-2.0
"""Where the elements of NumPy's arrays are.

``__array_interface__`` and ``ctypes`` make several objects each time, which takes longer than a short call of the BLAS.
The address is the first field of NumPy's array object, after what all objects of Python begin with.

Source: NumPy's C API, ``PyArrayObject``.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

__all__ = ["host_address"]

_REMEMBERED = 4096  # places of array objects
_HEAD = object.__basicsize__


class _Fields(dict[int, "ctypes.c_size_t"]):
    """The address fields of array objects, by where these are. They are read only while there is an array."""

    def __missing__(self, place: int) -> ctypes.c_size_t:
        if len(self) >= _REMEMBERED:
            self.clear()
        field = self[place] = ctypes.c_size_t.from_address(place + _HEAD)
        return field


_fields = _Fields()


def _by_interface(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _by_field(array: Any) -> int:
    return _fields[id(array)].value


def _readable() -> bool:
    """Return whether arrays have their addresses where NumPy's C API says. Local."""
    if sys.implementation.name != "cpython":
        return False
    whole = np.zeros(8)
    return all(_by_field(each) == _by_interface(each) for each in (whole, whole[3:], np.zeros((3, 5)).T))


host_address = _by_field if _readable() else _by_interface
"""``host_address(array)`` returns the address of the first element of a NumPy array, which is no subclass's. Local."""
