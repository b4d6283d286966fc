# SPDX-License-Identifier: Apache-2.0
"""Waiting until another process changes a word of shared memory: Linux's futex, as x86-64 has it.

A rank polls, then yields its core, then sleeps; at once if other programs need the cores.

Source: futex(2) in the Linux manual.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["BUSY_SECONDS", "NAP_SECONDS", "POLLS", "sleep_while", "wake"]

POLLS = 60  # before a wait also looks for notes of other ranks
BUSY_SECONDS = 1e-3  # that a wait only yields the core
NAP_SECONDS = 0.01  # longest sleep of a rank that nobody wakes: notes may have to be read

_NUMBER = 202  # of the system call
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the lower 32 bits at ``address`` are those of ``value``, for at most ``seconds``. Local.

    May also return when a signal arrives, or for no reason.
    """
    _function()(_NUMBER, address, _WAIT, value & 0xFFFFFFFF, _time(seconds))


def wake(address: int) -> None:
    """Wake all processes that sleep on the number at ``address``. Local."""
    _function()(_NUMBER, address, _WAKE, _EVERYONE, None)


@functools.cache
def _function() -> Callable[..., int]:
    function = ctypes.CDLL(None).syscall
    function.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Time)]
    function.restype = ctypes.c_long
    return function


@functools.lru_cache(8)
def _time(seconds: float) -> ctypes._Pointer[_Time]:
    return ctypes.pointer(_Time(int(seconds), int(seconds % 1 * 1e9)))
