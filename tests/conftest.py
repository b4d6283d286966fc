# SPDX-License-Identifier: Apache-2.0
"""Settings of the whole suite."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from pblasmp import launch
from tests.helpers import warm
from tests.helpers.ranks.pool import pool
from tests.helpers.slow import choose_form, has_long_form

# Ctrl-C interrupts, also where the tests run in the background of a shell, which has it ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of OpenBLAS that have nothing to do sleep at once: else every process polls for 50 ms.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

# Ranks start faster where UCX, below MPICH, does not watch for memory that is unmapped: on one node nothing needs it.
os.environ.setdefault("UCX_MEM_EVENTS", "n")
os.environ.setdefault("UCX_TLS", "posix,self")

# What ranks free stays theirs: returned to the system, it would come back page by page for the next temporary array.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**27))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**28))

# No test reads or writes what this user has measured.
os.environ["PBLASMP_TUNING"] = str(
    Path(tempfile.gettempdir()) / f"pblasmp-tests-{os.getpid()}" / "tuning.json"
)

# No garbage collection until all tests have been collected: nearly everything that they import stays.
gc.disable()

# Start ranks from the preloaded fork server.
_interpreter = launch.interpreter = warm.Interpreter(os.environ)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--fresh-ranks``."""
    parser.addoption(
        "--fresh-ranks",
        action="store_true",
        help="start new ranks for every run_mpi, to see whether a test depends on earlier ones",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the form of the tests: ``-m slow`` asks for the long ones. Obey ``--fresh-ranks``."""
    pool.keep = not config.getoption("fresh_ranks")
    slow = config.getoption("markexpr") == "slow"
    choose_form(slow=slow)
    # No deadline: machines are shared. The examples are the same in every run.
    settings.register_profile("short", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile("slow", settings.get_profile("short"), max_examples=100)
    settings.load_profile("slow" if slow else "short")


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that have a long form."""
    for item in items:
        if isinstance(item, pytest.Function) and has_long_form(item.module):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A new directory, as a text: so it travels to the ranks. Under mpirun it is that of rank 0."""
    if launch.surroundings() is None:
        return str(tmp_path)
    from mpi4py import MPI

    return str(MPI.COMM_WORLD.bcast(str(tmp_path)))


@pytest.fixture
def tuning_file(directory: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where measured times are kept, as a text; there is no file yet."""
    monkeypatch.setenv("PBLASMP_TUNING", f"{directory}/tuning.json")
    return f"{directory}/tuning.json"


@pytest.fixture(scope="session")
def preload_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library for ScaLAPACK programs is compiled, once for all processes of the tests."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "preload"


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have the last of several processes import from the end: so they share the rewriting of assertions."""
    worker, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("", "_COUNT"))
    if worker == f"gw{int(workers or 1) - 1}" != "gw0":
        root = session.config.rootpath
        folders = (Path(session.config.invocation_params.dir, given) for given in session.config.args)
        for path in sorted({path for folder in folders for path in folder.rglob("test_*.py")}, reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # shown when it is collected
                importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Have no collection of garbage search what was imported and collected."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_unconfigure() -> None:
    """End ranks that were kept, and what starts them.

    Collect garbage once, so that pytest, which does so five times, finds nothing to search.
    """
    pool.close()
    _interpreter.close()
    gc.collect()
    gc.freeze()
