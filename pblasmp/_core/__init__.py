# SPDX-License-Identifier: Apache-2.0
"""The compiled core: what ranks that share memory do many times in each call, in C, called by ctypes.

It is plain C without Python's headers, so one build serves every Python of an architecture. It is compiled when pblasmp
is installed, if there is a C compiler. Without it everything works on one node as it does between nodes: by messages.
See ``meet.h`` for meetings of ranks, ``post.h`` for messages between nodes, ``wire.h`` for those without MPI,
``call.h`` for direct calls, ``arguments.h`` for those of PBLAS, and ``launch.h`` for repeated calls on GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sysconfig
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ArgumentError
from . import objects
from .build import BUILD, LIBRARY, digest

__all__ = [
    "BLAS", "BUILD", "COME", "FAILED", "LATE", "LIBRARY", "MATRIX", "PIVOTS", "QUEUED", "REQUEST", "ROUTINES",
    "SCRATCH", "STATUSES", "UNFIT_NOW", "UNLIKE", "UNREADY", "VALUES", "VOTE", "WAIT", "BoardState", "CallState",
    "Core", "LaunchState", "PostState", "SheetState", "TransferState", "load", "stale", "why_not",
]  # fmt: skip

VALUES = 7  # these two as in meet.h
VOTE = 3
QUEUED, UNFIT_NOW, LATE, UNLIKE, UNREADY = range(5)  # as in launch.h
FAILED = 1000

# In the order of call.h.
STATUSES = (
    "UNFIT", "BY_PYTHON", "DONE", "DONE_STAGED", "AWAIT_VOTE", "AWAIT_OTHERS", "AWAIT_SUMS", "NEEDS_ROOM", "BROKEN",
    "OK", "UNKNOWN",
)  # fmt: skip
ROUTINES = (
    "matmul", "trsm", "trmm", "symm", "hemm", "syrk", "herk", "syr2k", "her2k", "geadd",
    "scal", "swap", "dot", "dotc", "nrm2", "asum", "amax",
    "potrf", "posv", "getrf", "getrs", "gesv", "potrs", "trtrs", "getri", "potri", "trtri",
    "getrf getri", "potrf potri", "trtri laset", "gels", "geqrf", "orgqr", "ormqr",
)  # fmt: skip
BLAS = (
    "gemm", "gemv", "ger", "gerc", "axpy", "scal", "swap", "dot", "asum",
    "trsm", "trmm", "trsv", "trmv", "symm", "hemm", "hemv", "syrk", "herk", "syr2k", "her2k", "her", "her2",
    "potrf", "potrs", "potri", "getrf", "getrs", "getri", "trtrs", "trtri", "gels", "geqrf", "orgqr", "ormqr",
)  # fmt: skip
PIVOTS = 1024
SCRATCH = (1 << 19) + (1 << 18)  # bytes
COME = 0x5EA5  # as in call.h
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
_LETTERS = 4  # s, d, c, z
MATRIX = struct.Struct("=16q8s3q")
"""``matrix`` of call.h."""

REQUEST = struct.Struct("=3q8s4d31q")
"""What ``CallState`` calls the request: as ``call`` of call.h begins."""

_VARIABLE = "PBLASMP_CORE"


class BoardState(ctypes.Structure):
    """``board`` of meet.h."""

    _fields_ = (
        ("lines", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("mine", ctypes.c_int64 * VALUES),
        ("post", ctypes.c_void_p),
        ("moment", ctypes.c_int64),
    )


class SheetState(ctypes.Structure):
    """``sheet`` of post.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rank", "node")),
        ("head", ctypes.c_void_p),
        ("request", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("awaited", "begun")),
    )


class PostState(ctypes.Structure):
    """``post`` of post.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("isend", "irecv", "test", "byte", "comm")),
        *((name, ctypes.c_int64) for name in ("tag", "most")),
        *((name, ctypes.POINTER(SheetState)) for name in ("letters", "boxes")),
        *((name, ctypes.c_int64) for name in ("sends", "receives", "error")),
        *((name, ctypes.c_int64) for name in ("meetings", "exchanges", "sent_bytes")),
        ("rest", ctypes.c_int64 * 10),
    )


class TransferState(ctypes.Structure):
    """``transfer`` of wire.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("under_way", "socket", "receives", "done", "nbytes", "most")),
        ("data", ctypes.c_void_p),
    )


class CallState(ctypes.Structure):
    """``call`` of call.h up to what is C's alone."""

    _fields_ = (
        ("request", ctypes.c_char * REQUEST.size),
        ("yields", ctypes.c_int64),
        ("unlike", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("capacity", "most")),
        ("votes", ctypes.c_void_p),
        ("meets", ctypes.c_void_p),
        ("ranks", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("nodes", ctypes.c_int64),
        ("node", ctypes.c_int64),
        ("node_of", ctypes.c_void_p),
        ("workers", ctypes.c_int64),
        ("alike", ctypes.c_int64),
        ("small_kernels", ctypes.c_int64),
        ("limits", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("waits", WAIT),
        ("functions", ctypes.c_void_p * len(BLAS) * _LETTERS),
        *((name, ctypes.c_int64) for name in ("number", "nbytes", "touched", "checksum", "told")),
        ("tells", ctypes.c_double * 4),
        ("factor", ctypes.c_void_p),
        ("factor_ld", ctypes.c_int64),
        ("numbers", ctypes.c_uint8 * (16 * PIVOTS)),
        ("info", ctypes.c_int32),
    )


class LaunchState(ctypes.Structure):
    """``launch`` of launch.h."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("context_of", "captures", "queue", "context", "graph")
    )


class Core(NamedTuple):
    """The functions of meet.h, wire.h, call.h, arguments.h and launch.h, under their names there.

    They have no prototypes, with which ctypes takes three times as long to call them. So an argument must be a Python
    integer of 32 bits, or have a type of ctypes: ``c_void_p`` or ``c_int64``.
    """

    board_arrive: Callable[..., int]
    board_bring: Callable[..., int]
    board_received: Callable[..., int]
    board_absent: Callable[..., int]
    board_voted: Callable[..., int]
    board_largest: Callable[..., int]
    board_gather: Callable[..., int]
    flag_raise: Callable[..., int]
    flag_is_up: Callable[..., int]
    wire_isend: Callable[..., int]
    wire_irecv: Callable[..., int]
    wire_test: Callable[..., int]
    call_size: Callable[..., int]
    arguments_know: Callable[..., int]
    arguments_learn: Callable[..., int]
    arguments_start: Callable[..., int]  # these two let others run once they have read
    asked_start: Callable[..., int]
    asked_look: Callable[..., int]
    part_copy: Callable[..., int]
    # Those that wait let other threads of Python run.
    board_meet: Callable[..., int]
    board_vote: Callable[..., int]
    board_sleep: Callable[..., int]
    flag_await: Callable[..., int]
    flag_sleep: Callable[..., int]
    call_start: Callable[..., int]
    call_go_on: Callable[..., int]
    launch_again: Callable[..., int]
    launch_now: Callable[..., int]


_WAITS = (
    *("board_meet", "board_vote", "board_sleep", "flag_await", "flag_sleep", "call_start", "call_go_on"),
    *("launch_again", "launch_now"),
)


@functools.cache
def _opened() -> Core | str:
    """Return the functions of the library, or why there are none."""
    if not LIBRARY.exists():
        return "no C compiler when pblasmp was installed"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python has no global lock, under which the core reads Python's objects"
    try:
        quick, waits = ctypes.PyDLL(str(LIBRARY)), ctypes.CDLL(str(LIBRARY))
    except OSError as error:  # of another architecture, perhaps
        return f"cannot load {LIBRARY}: {error}"
    quick.core_sources.restype = ctypes.c_char_p
    if quick.core_sources() != digest().encode():
        return f"{LIBRARY} was compiled from other sources: install pblasmp again, or run python {BUILD}"
    functions: dict[str, Any] = {name: getattr(quick, name) for name in Core._fields}
    core = Core(**functions | {name: getattr(waits, name) for name in _WAITS})
    if not objects.are_as_expected():
        return "Python's objects, or NumPy's arrays, have their fields elsewhere than the core reads them"
    core.arguments_know(objects.facts())
    return core


def _core() -> Core | str:
    given = os.environ.get(_VARIABLE, "")
    if given not in ("", "0", "1"):
        raise ArgumentError(f"{_VARIABLE}: expected 0 to do without the compiled core, or 1, got {given!r}")
    return f"{_VARIABLE}=0" if given == "0" else _opened()


def load() -> Core | None:
    """Return the core, None if there is none; ArgumentError if PBLASMP_CORE is neither 0 nor 1. Local."""
    core = _core()
    return None if isinstance(core, str) else core


def why_not() -> str:
    """Return why there is no core, an empty text if there is; raise as ``load``. Local."""
    core = _core()
    return core if isinstance(core, str) else ""


def stale() -> str:
    """Return why the compiled core is not used although nobody turned it off; "" otherwise. Local."""
    why = why_not()
    return why if LIBRARY.exists() and os.environ.get(_VARIABLE) != "0" else ""
