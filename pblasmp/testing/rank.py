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
import importlib
import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import is_
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..comm import side_channel

__all__ = ["State", "run_function", "socket_path"]

_MISSING = object()
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
        if name.partition(".")[0] == "pblasmp" and not name.startswith(__package__)
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


_POLLS = 20  # of a wait for other ranks, before it sleeps: other worlds need the cores


@contextlib.contextmanager
def socket_path(directory: Path) -> Iterator[str]:
    """Give the socket in a directory a short path for a ``with`` block: systems take no more than 107 bytes. Local."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{number}/socket"
    finally:
        os.close(number)


def run_function(
    name: str, file: str, comm: Any, kwargs: dict[str, Any], done: Callable[[str], object] = str
) -> dict[str, Any]:
    """Run "module:function" and return what it returned or, for a generator, the cases that it yielded.

    Args:
        name: the function.
        file: where its module is, in case it cannot be imported by name.
        comm: its first argument.
        kwargs: its keyword arguments.
        done: called with the name of each case after it.
    """
    module, _, attribute = name.partition(":")
    function: Any = _import(module, file)
    for part in attribute.split("."):
        function = getattr(function, part)
    outcome: dict[str, Any]
    if inspect.isgeneratorfunction(function):
        cases = []
        for case, error in function(comm, **kwargs):
            cases.append((case, error))
            done(case)
        outcome = {"cases": True, "result": cases}
    else:
        outcome = {"cases": False, "result": function(comm, **kwargs)}
    whole: dict[str, Any] = json.loads(json.dumps(outcome, default=_plain))
    return whole


def _import(name: str, file: str) -> ModuleType:
    """Import a module by name, else from its file: pytest's import mode "importlib" leaves sys.path alone."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not file or not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain(value: Any) -> Any:
    """Turn NumPy values into JSON's."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a rank's result must be JSON, not {type(value).__name__}")


class _MpiWorld:
    """The ranks that mpirun started."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def leftovers(self) -> str:
        """Return which message has not been received, or ""; every rank has run its function. Local."""
        status = self._mpi.Status()
        for _ in range(3):  # a message may arrive while MPI looks for it
            if self.comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
                return f"a message from rank {status.source} with tag {status.tag} was never received"
        return ""


class _TorchWorld:
    """The ranks that torchrun started."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.comm = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def leftovers(self) -> str:
        """Return an empty string. Local."""
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
        self._world: _MpiWorld | _TorchWorld = _MpiWorld() if kind == "mpi" else _TorchWorld()
        rank, size = self._world.rank, self._world.size
        self._stack = (directory / f"stack{rank}").open("w")  # open until the process ends
        self._last = os.open(directory / f"case{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        gc.enable()
        faulthandler.register(signal.SIGUSR2, file=self._stack)
        hello: dict[str, Any] = {"rank": rank, "pid": os.getpid()}
        if size != nranks:
            hello["error"] = f"a world of {size} ranks, not {nranks}: mpirun and libmpi do not match"
        self._say(hello)
        side_channel.YIELDS = side_channel.SPINS = _POLLS
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
            _import(name.partition(":")[0], file)
            self._state = State()
            for variable, value in variables.items():
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value
            return run_function(name, file, self._world.comm, kwargs, self._note)
        except BaseException:  # noqa: BLE001 (whatever ends a function is what the report is about)
            return {"error": traceback.format_exc()}
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _tidy(self) -> dict[str, Any]:
        faults = self._state.restore() if self._state else []
        self._state = None
        faults += [fault] if (fault := self._world.leftovers()) else []
        return {"error": "\n".join(faults)} if faults else {}


def main(directory: str, nranks: str, kind: str) -> None:
    """Serve as a rank until there are no more orders.

    Args:
        directory: where the socket is, and where this rank's stack goes.
        nranks: how many ranks there should be.
        kind: "mpi" or "torch".
    """
    _Rank(Path(directory), int(nranks), kind).serve()
