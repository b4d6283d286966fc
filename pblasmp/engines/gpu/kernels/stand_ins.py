# SPDX-License-Identifier: Apache-2.0
"""Addresses that stand in for real ones, so that work is prepared once and then placed wherever operands are.

A stand-in has the number of some memory in its highest byte, which no real address uses, and is as far behind the
stand-in of that memory's beginning as the real address is behind the real one.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIGNED = 16  # bytes: kernels that copy so many at a time are chosen by addresses
_SHIFT = 56
_OFFSET = (1 << _SHIFT) - 1


def stand_in(number: int, address: int = 0) -> int:
    """Return the stand-in for an address in memory ``number``, from 1 to 255, aligned alike. Local."""
    return (number << _SHIFT) + address % ALIGNED


def beginning(address: int) -> int:
    """Return the base with which a stand-in for an address is placed there. Local."""
    return address - address % ALIGNED


def is_stand_in(address: int) -> bool:
    """Return whether it is one. Local."""
    return address > _OFFSET


def placed(address: int, bases: Mapping[int, int]) -> int:
    """Return the real address, given the base of each memory by its number; a real one stays as it is. Local."""
    return address if address <= _OFFSET else bases[address >> _SHIFT] + (address & _OFFSET)
