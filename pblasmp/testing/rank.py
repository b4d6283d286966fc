# SPDX-License-Identifier: Apache-2.0
"""One rank that runs a function for a test: what ``runner.run_mpi`` starts.

In the directory that it is given it finds the call, and leaves its number, its answer, its last case and, at SIGUSR2,
its stack. A rank that has failed waits for its end: the others are still to say where they are.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["import_module", "main", "run_function", "world_of"]


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
    function: Any = import_module(module, file)
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


def import_module(name: str, file: str) -> ModuleType:
    """Import a module by name, else from its file: pytest's import mode "importlib" leaves sys.path alone. Local."""
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


def world_of(kind: str) -> tuple[Any, int, int]:
    """Return the communicator of all ranks, this rank and how many there are. Collective over all ranks.

    Args:
        kind: "torchrun", or a launcher of MPI.
    """
    if kind == "torchrun":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    from mpi4py import MPI

    return MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def main(folder: str, kind: str) -> None:
    """Run the call in a directory on this rank. Collective over all ranks.

    Args:
        folder: the directory.
        kind: as of ``world_of``.
    """
    directory = Path(folder)
    call = json.loads((directory / "call").read_text())
    comm, rank, size = world_of(kind)
    stack = (directory / f"stack{rank}").open("w")  # open until the process ends
    faulthandler.register(signal.SIGUSR2, file=stack)
    (directory / f"pid{rank}").write_text(str(os.getpid()))
    last = os.open(directory / f"case{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    left: list[str] = []
    sys.unraisablehook = lambda x: left.append(f"{x.err_msg or 'ignored'}: {x.exc_value!r}")
    gc.enable()
    try:
        if size != call["nranks"]:
            raise RuntimeError(
                f"a world of {size} ranks, not {call['nranks']}: mpirun and libmpi do not match"
            )
        # the name of a case is written over that of the one before
        answer = run_function(
            call["name"], call["file"], comm, call["kwargs"],
            lambda case: os.pwrite(last, f"{case!r}\n".encode(), 0),
        )  # fmt: skip
        gc.collect()
        if left:
            answer = {"error": "\n".join(left)}
    except BaseException:  # noqa: BLE001 (whatever ends a function is what the report is about)
        answer = {"error": traceback.format_exc()}
    sys.stdout.flush()
    sys.stderr.flush()
    made = directory / f"made{rank}"
    made.write_text(json.dumps(answer))
    made.rename(directory / f"answer{rank}")
    while "error" in answer:
        signal.pause()
