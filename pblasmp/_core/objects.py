# SPDX-License-Identifier: Apache-2.0
"""Python's objects as the core reads them: see ``arguments.h``, whose structures are here under their names.

The core goes by where NumPy's C API says that an array has its fields, and by where CPython's objects have their types.
If that is not so here, there is no core.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

import numpy as np

PLACES = 1024
PLACES_SIZE = 2 * PLACES * 21 * 8  # bytes
BY_NONE, BY_LENGTH = -1, -2
SIZES = MATRICES = 4
NO_HANDLES = (0,) * 7
FORM = struct.Struct("=16s2q8s20s4x5q4q4qd32q4q5q7q")
"""``form``."""
ASKS, NUMBER, OFFSETS, BASES, PATTERN, LOOK = struct.Struct("=4q"), 4, 5, 9, 13, 59
"""How ``look`` begins; where the words of its other fields begin, and how many there are of all."""
PYTHON, ARRAY, DTYPE = struct.Struct("=23q"), struct.Struct("@PiPPPPi"), struct.Struct("@Pccc")
"""``python``, ``array_fields`` and ``dtype_fields``."""

_ELEMENTS = np.float32, np.float64, np.complex64, np.complex128
_INTEGERS = np.intc, np.dtype("l").type, np.longlong


class Arguments(ctypes.Structure):
    """``arguments``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("call", "form", "given", "places")),
        *((name, ctypes.c_int64) for name in ("held", "in_column", "start")),
    )


_FUNCTIONS = (
    "PyTuple_GetItem", "PyLong_AsLongLongAndOverflow", "PyFloat_AsDouble", "PyComplex_RealAsDouble",
    "PyComplex_ImagAsDouble", "PyUnicode_AsUTF8AndSize", "PyErr_Clear", "PyEval_SaveThread", "PyEval_RestoreThread",
)  # fmt: skip
HEAD = object.__basicsize__


def facts() -> bytes:
    """Return what the core must know of Python. Local."""
    types = None, np.ndarray, int, float, complex, str, *_ELEMENTS, *_INTEGERS
    places = (ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS)
    return PYTHON.pack(HEAD, *map(id, types), *places)


def are_as_expected() -> bool:
    """Return whether objects have their types, and arrays their fields, where the core looks for them. Local."""
    whole = np.zeros((4, 6))
    arrays = [whole, whole[1:3, ::2].T, np.zeros(3, ">i4"), np.arange(5, dtype=np.intc), np.zeros(0, "F")]
    arrays[0].flags.writeable = False
    others: list[Any] = [7, 1 << 80, 1.5, 2j, "N", True, np.float64(1), (1,)]
    if sys.implementation.name != "cpython":
        return False
    types_at = (ctypes.c_void_p.from_address(id(x) + HEAD - 8).value for x in (*arrays, *others))
    return [*types_at] == [id(type(x)) for x in (*arrays, *others)] and all(map(_has_its_fields, arrays))


def slot(of: type, name: str) -> int:
    """Return where objects of a type have a slot. Local."""
    found: Any = object.__new__(of)
    value = object()
    setattr(found, name, value)
    words = (ctypes.c_size_t * (of.__basicsize__ // 8)).from_address(id(found))
    return 8 * [*words].index(id(value))


def _has_its_fields(x: Any) -> bool:
    data, ndim, shape, strides, _, dtype, flags = ARRAY.unpack(ctypes.string_at(id(x) + HEAD, ARRAY.size))
    element, _, _, order = DTYPE.unpack(ctypes.string_at(id(x.dtype) + HEAD, DTYPE.size))
    pair = struct.Struct(f"={x.ndim}q")
    return (data, ndim, dtype, flags) == (
        x.__array_interface__["data"][0],
        x.ndim,
        id(x.dtype),
        x.flags.num,
    ) and (
        (pair.unpack(ctypes.string_at(shape, pair.size)), pair.unpack(ctypes.string_at(strides, pair.size)))
        == (x.shape, x.strides)
        and (element, order) == (id(x.dtype.type), x.dtype.byteorder.encode())
    )
