# SPDX-License-Identifier: Apache-2.0
"""What CUDA and its libraries refuse: rules that every simulator of GPUs holds its callers to.

``tests/unit/engines_gpu/test_simulators.py`` breaks each of them in each simulator that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pblasmp.dtypes import FLOAT8
from pblasmp.engines.gpu.kernels.views import Blocks

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes that a block of threads can have, by compute capability (CUDA C++ Programming Guide)."""
_THREADS = 2048  # of a multiprocessor
_KIB = 1 << 10
_LONGEST_PITCH = (1 << 31) - 1


def why_not_pitches(width: int, height: int, pitches: Sequence[int]) -> str:
    """Why CUDA refuses to copy ``height`` lines of ``width`` bytes: cudaErrorInvalidPitchValue; "" if it does not."""
    if max(pitches) > _LONGEST_PITCH or (height > 1 and min(pitches) < width):
        return (
            f"cudaErrorInvalidPitchValue: invalid pitch argument: {height} x {width} bytes, {pitches} apart"
        )
    return ""


def is_legal(b: Blocks) -> bool:
    """Return whether CUDA has a command that copies these blocks; a single line needs no pitch."""
    flat = b.height == 1 or not why_not_pitches(b.width, b.height, b.pitches)
    return flat and (
        b.depth == 1
        or all(s % p == 0 and s >= p * b.height for s, p in zip(b.slices, b.pitches, strict=True))
    )


def why_not_8_bits(
    capability: int, types: tuple[Any, ...], ops: Sequence[int], aligned: Sequence[int]
) -> str:
    """What cuBLASLt's documentation says of 8-bit products, of A in F order, its operands' addresses and pitches."""
    if capability < 89:
        return "no GPU before 8.9 has them"
    if types == (FLOAT8["float8_e5m2"],) * 2:
        return "A and B are both e5m2"
    if tuple(ops) != (1, 0):
        return f"A must be transposed, and B not: {ops}"
    wrong = [each for each in aligned if each % 16]
    return f"not multiples of 16 bytes: {wrong}" if wrong else ""


def why_no_room(room: int, shared_memory: int) -> str:
    """Why a kernel cannot have so many bytes of shared memory; "" if it can."""
    return (
        ""
        if room <= shared_memory
        else f"CUDA_ERROR_INVALID_VALUE: {room} bytes of shared memory of {shared_memory}"
    )


def blocks_at_once(multiprocessors: int, shared_memory: int, threads: int, room: int) -> int:
    """How many blocks of threads run at the same time: the most that may wait for each other.

    A multiprocessor has a KiB more than a block of threads can have, and each block takes one besides.
    """
    return multiprocessors * min(_THREADS // threads, (shared_memory + _KIB) // (room + _KIB))
