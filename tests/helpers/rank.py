# SPDX-License-Identifier: Apache-2.0
"""One rank of a job started by :func:`tests.helpers.mpi.run_mpi`; ``python -m tests.helpers.rank DIRECTORY``.

The directory holds orders.json when the rank starts, and takes, by rank: pid, case (the case just done),
rank.json (what the function returned, or the traceback) and stack (where the rank stood when it got SIGUSR2).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def run_function(
    name: str, comm: Any, kwargs: dict[str, Any], done: Callable[[str], None] = str
) -> dict[str, Any]:
    """Run "module:function" and return what it returned or, of a generator, the cases that it yielded.

    Args:
        name: the function.
        comm: its first argument.
        kwargs: its keyword arguments.
        done: called with the name of each case after it.
    """
    module, _, attribute = name.partition(":")
    function = importlib.import_module(module)
    for part in attribute.split("."):
        function = getattr(function, part)
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


def _plain(value: Any) -> Any:
    """Turn NumPy's values into JSON's."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a rank's result must be JSON, not {type(value).__name__}")


def _fail(directory: Path, rank: int, size: int) -> None:
    """Have the other ranks say where they stand, wait for those that are about to report, and end the job."""
    others = [r for r in range(size) if r != rank]
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not all((directory / f"rank{r}.json").exists() for r in others):
        time.sleep(0.02)
    for other in others:
        if not (directory / f"rank{other}.json").exists():
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((directory / f"pid{other}").read_text()), signal.SIGUSR2)
    time.sleep(0.2)


def _mpi_world() -> tuple[Any, int, int, Callable[[int], None]]:
    """Return all ranks, this one's number, how many there are, and what ends them."""
    from mpi4py import MPI

    return MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.COMM_WORLD.Abort


def _torch_world() -> tuple[Any, int, int, Callable[[int], None]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size(), os._exit


def main(directory: Path) -> None:
    """Run the orders on this rank."""
    orders = json.loads((directory / "orders.json").read_text())
    world, rank, size, abort = _torch_world() if orders["torch"] else _mpi_world()
    with (directory / f"stack{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR2, file=stack)
        (directory / f"pid{rank}").write_text(str(os.getpid()))
        try:
            if size != orders["nranks"]:
                raise RuntimeError(
                    f"a world of {size} ranks, not {orders['nranks']}: mpirun and libmpi do not match"
                )
            outcome = run_function(
                orders["function"],
                world,
                orders["kwargs"],
                lambda case: _write(directory / f"case{rank}", case),
            )
            _write(directory / f"rank{rank}.json", json.dumps(outcome))
        except BaseException:  # noqa: BLE001 (whatever ends a rank is what the report is about)
            _write(directory / f"rank{rank}.json", json.dumps({"error": traceback.format_exc()}))
            _fail(directory, rank, size)
            abort(1)
        faulthandler.unregister(signal.SIGUSR2)


def _write(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
