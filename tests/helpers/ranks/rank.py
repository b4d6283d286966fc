# SPDX-License-Identifier: Apache-2.0
"""One rank that runs functions for a test session: what :class:`~.pool.World` starts.

It connects to the socket in the directory and says which rank it is. Then it gets orders, one JSON object per line, and
answers each: to run a function; or to undo what the function changed, once all ranks have run it. Between orders it
sleeps. Its output goes to a file in the directory, its last case to another one and, at SIGUSR2, its stack to a third.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import reprlib
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from functools import lru_cache
from operator import is_
from pathlib import Path
from types import ModuleType
from typing import Any

from _pytest.assertion import install_importhook
from _pytest.config import get_config

from pblasmp.comm import polling
from pblasmp.testing import import_module, run_function, world_of

install_importhook(get_config())  # assertions of test modules show their values here, too

_MISSING = object()
_SHOWN = str, int, float, complex, bool, tuple, list, dict
_known: dict[Any, dict[str, Any]] = {}
"""The attributes of modules and classes, copied again only where something has changed."""


class State:
    """The state of this process now, to which :meth:`restore` returns. Local.

    Working directory, environment, warning filters, import path, cores, exception hooks; and, in modules of pblasmp,
    attributes of modules and classes that a test assigned to.
    """

    def __init__(self) -> None:
        self._directory = os.getcwd()  # noqa: PTH109 (as chdir takes it)
        self._environ = dict(os.environ)
        self._filters = list(warnings.filters)
        self._path = list(sys.path)
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self._hooks = sys.excepthook, sys.unraisablehook
        self._owners = _owners(_modules())
        for owner in self._owners:
            if owner not in _known or len(vars(owner)) != len(_known[owner]):
                _known[owner] = vars(owner).copy()
        self._unraisable: list[str] = []
        sys.unraisablehook = self._note
        gc.freeze()  # objects that exist now stay: restore() need not search them

    def restore(self) -> list[str]:
        """Restore everything; return the warnings about what was left open. Local."""
        gc.collect()
        os.chdir(self._directory)
        if os.environ != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        sys.path[:] = self._path
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)
        sys.excepthook, sys.unraisablehook = self._hooks
        for owner in self._owners:
            if not _restore(owner, _known[owner]):
                del _known[owner]
        return self._unraisable

    def _note(self, unraisable: Any) -> None:
        self._unraisable.append(f"{unraisable.err_msg or 'ignored'}: {unraisable.exc_value!r}")


def _modules() -> tuple[ModuleType, ...]:
    """Return the loaded modules of pblasmp."""
    return tuple(
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "pblasmp" and not name.startswith("pblasmp.testing")
    )


@lru_cache(maxsize=1)
def _owners(modules: tuple[ModuleType, ...]) -> list[Any]:
    """Return these modules and the classes that they define."""
    classes = [
        value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [*modules, *classes]


def _restore(owner: Any, attributes: dict[str, Any]) -> bool:
    """Give ``owner`` its earlier attributes back; attributes that it has gained since stay.

    Returns:
        whether nothing had changed.
    """
    now = vars(owner)
    if len(now) == len(attributes) and all(map(is_, now.values(), attributes.values())):
        return True  # as good as always, and quickly seen: a name does not change alone, in its place
    for name, value in attributes.items():
        if not name.startswith("__") and now.get(name, _MISSING) is not value:
            setattr(owner, name, value)
    return False


def _values(error: BaseException) -> str:
    """Return what variables of tests are where an error was raised, or called what raised it: simple ones, in short."""
    lines = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        path, told = Path(frame.f_code.co_filename), []
        for name, value in frame.f_locals.items() if "tests" in path.parts and path != Path(__file__) else ():
            if type(value) in _SHOWN and name.isidentifier():
                with contextlib.suppress(Exception):  # integers may be too large to print
                    told.append(f"{name} = {reprlib.repr(value)}")
        lines += [f"{path.name}:{number}: {', '.join(told)}"] if told else []
    return "\n".join(lines)


_POLLS = 20  # of a wait for other ranks, before it sleeps: other worlds need the cores


@contextlib.contextmanager
def socket_path(directory: Path) -> Iterator[str]:
    """Give the socket in a directory a short path for a ``with`` block: systems take no more than 107 bytes. Local."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{number}/socket"
    finally:
        os.close(number)


def _left_behind(comm: Any) -> str:
    """Return which message of MPI has not been received, or ""; every rank has run its function. Local."""
    if "mpi4py.MPI" not in sys.modules or not hasattr(comm, "Iprobe"):
        return ""
    from mpi4py import MPI

    status = MPI.Status()
    for _ in range(3):  # a message may arrive while MPI looks for it
        if comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            return f"a message from rank {status.source} with tag {status.tag} was never received"
    return ""


class _Rank:
    """This rank's side of the conversation."""

    def __init__(self, directory: Path, nranks: int, kind: str) -> None:
        printed = os.open(directory / "printed", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for stream in (1, 2):  # at once: through the launcher it would arrive later
            os.dup2(printed, stream)
        self._socket = socket.socket(socket.AF_UNIX)
        with socket_path(directory) as path:
            self._socket.connect(path)
        self._comm, rank, size = world_of(kind)
        self._stack = (directory / f"stack{rank}").open("w")  # open until the process ends
        self._last = os.open(directory / f"case{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        gc.enable()
        faulthandler.register(signal.SIGUSR2, file=self._stack)
        hello: dict[str, Any] = {"rank": rank, "pid": os.getpid()}
        if size != nranks:
            hello["error"] = f"a world of {size} ranks, not {nranks}: mpirun and libmpi do not match"
        self._say(hello)
        polling.YIELDS = polling.SPINS = _POLLS
        self._state: State | None = None

    def serve(self) -> None:
        """Carry out orders until there are no more."""
        for line in self._socket.makefile():
            order = json.loads(line)
            self._say(self._run(**order) if order else self._tidy())

    def _say(self, words: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(words).encode() + b"\n")

    def _note(self, case: str) -> None:
        """Write the name of the case that has just ended over that of the previous one, for reports."""
        os.pwrite(self._last, f"{case!r}\n".encode(), 0)

    def _run(
        self,
        name: str,
        file: str,
        kwargs: dict[str, Any],
        directory: str,
        path: list[str],
        variables: dict[str, str | None],
    ) -> dict[str, Any]:
        try:
            os.chdir(directory)
            sys.path[:] = path
            import_module(name.partition(":")[0], file)
            self._state = State()
            for variable, value in variables.items():
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value
            return run_function(name, file, self._comm, kwargs, self._note)
        except BaseException as error:  # noqa: BLE001 (whatever ends a function is what the report is about)
            return {"error": traceback.format_exc() + _values(error)}
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _tidy(self) -> dict[str, Any]:
        faults = self._state.restore() if self._state else []
        self._state = None
        faults += [fault] if (fault := _left_behind(self._comm)) else []
        return {"error": "\n".join(faults)} if faults else {}


def main(directory: str, nranks: str, kind: str) -> None:
    """Serve as a rank until there are no more orders.

    Args:
        directory: where the socket is, and where this rank's stack goes.
        nranks: how many ranks there should be.
        kind: of the launcher.
    """
    _Rank(Path(directory), int(nranks), kind).serve()
