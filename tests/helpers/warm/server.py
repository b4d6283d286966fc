# SPDX-License-Identifier: Apache-2.0
"""The server: imports once, forks for each client. It ends with the process that started it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import io
import os
import re
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import warnings
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import threadpoolctl

from pblasmp import launch

from . import JOB, command

# What ranks of the tests import. None of it may start MPI or a thread, or keep what it finds in the environment.
_MODULES = (
    "numpy", "scipy.linalg.blas", "threadpoolctl", "pytest", "hypothesis", "click", "click.shell_completion",
    "rich.console", "pblasmp.context", "pblasmp.engines.host", "pblasmp.matrix.products", "pblasmp.blas.level3",
    "pblasmp.tensor_parallel", "pblasmp.pblas", "pblasmp.problems.files", "pblasmp.drawing", "pblasmp.cli.commands",
    "pblasmp.cli.bench", "pblasmp.cli.matmul", "pblasmp.cli.reports", "pblasmp.cli.run", "pblasmp.cli.bench",
    "tests.helpers.ranks.rank", "tests.helpers.fakegpu", "tests.helpers.fakelt", "tests.helpers.fakepeers",
)  # fmt: skip
# Variables that Python or a library reads as it starts. Where one differs, a fork is not what a new Python would be.
_READ_AT_START = re.compile(
    "PYTHON(?!PATH$)|PBLASMP_LOG|MPI4PY_|LD_|LC_|LANG|(OPENBLAS|OMP|MKL)_(?!NUM_THREADS$)|NPY_|UCX_|MALLOC_|GLIBC"
)
_FORKED, _REFUSED = b"f", b"r"  # answers to a client
_HIGH = 512  # above every descriptor here
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


class _Order(NamedTuple):
    """A process to be: what its launcher gave it."""

    argv: list[str]
    directory: str
    environ: dict[bytes, bytes]
    files: list[int]
    client: int  # its process


class _Command(NamedTuple):
    """What Python is asked to run."""

    kind: str  # "-c", "-m" or "file"
    what: str  # the text, the module or the file
    argv: list[str]
    strict: bool  # -W error
    unbuffered: bool  # -u


def _parse(argv: list[str]) -> _Command | None:
    """Return the command in the arguments of ``python``; None if they ask for something else."""
    strict = argv[:2] == ["-W", "error"]
    argv = argv[2 if strict else 0 :]
    unbuffered = argv[:1] == ["-u"]
    match argv[1 if unbuffered else 0 :]:
        case [("-c" | "-m") as kind, what, *rest]:
            return _Command(kind, what, rest, strict, unbuffered)
        case [what, *rest] if what.endswith(".py") and not what.startswith("-"):
            return _Command("file", what, rest, strict, unbuffered)
    return None


class _Fork(NamedTuple):
    """A fork that runs, and the client that waits for its end."""

    pid: int
    client: socket.socket


def serve(listener: socket.socket) -> _Order:
    """Fork for each client, and return in the fork. Each client is told of its fork's end."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    forks: dict[int, _Fork] = {}  # by a descriptor of the process
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client = listener.accept()[0]
                order, files = _receive(client)
                pid = _fork(order, client)
                if order and pid == 0:
                    selector.close()
                    for each in (listener, client, *(fork.client for fork in forks.values())):
                        each.close()
                    _take(order, files)
                    return order
                for fd in files:
                    os.close(fd)
                if pid is None:
                    client.close()
                    continue
                descriptor = os.pidfd_open(pid)
                forks[descriptor] = _Fork(pid, client)
                selector.register(descriptor, selectors.EVENT_READ)
                selector.register(client, selectors.EVENT_READ, pid)
            elif isinstance(key.fileobj, int):  # a fork has ended
                pid, client = forks.pop(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    client.send(status.to_bytes(4, sys.byteorder, signed=True))
                with contextlib.suppress(KeyError):
                    selector.unregister(client)
                selector.unregister(key.fd)
                os.close(key.fd)
                client.close()
            elif key.fileobj.fileno() >= 0:  # a client, whose fork has not ended just now
                number = _signal(key.fileobj)
                os.kill(key.data, number or signal.SIGKILL)
                if not number:
                    selector.unregister(key.fileobj)


def _receive(client: socket.socket) -> tuple[_Order | None, list[int]]:
    """Receive an order and its files; None from a client that was killed."""
    try:
        message, received, _, _ = socket.recv_fds(client, 1 << 20, 250)
    except OSError:
        return None, []
    if not message:
        return None, received
    numbers, directory, *texts = message.split(b"\0")
    arguments, *files = map(int, numbers.split())
    environ = dict(text.split(b"=", 1) for text in texts[arguments:] if b"=" in text)
    argv = [os.fsdecode(text) for text in texts[:arguments]]
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    process = int.from_bytes(credentials[:4], sys.byteorder)
    return _Order(argv, os.fsdecode(directory), environ, files, process), received


def _signal(client: socket.socket) -> int:
    """Receive a signal that the client passes on; 0 from one that was killed."""
    with contextlib.suppress(OSError):
        return int.from_bytes(client.recv(1), sys.byteorder)
    return 0


def _fork(order: _Order | None, client: socket.socket) -> int | None:
    """Fork, unless a new Python must be started; return None then."""
    if order is None:
        return None
    mine, its = os.environb, order.environ
    differing = [name for name in {*mine, *its} if mine.get(name) != its.get(name)]
    fit = (
        (asked := _parse(order.argv))
        and (asked.kind != "file" or Path(order.directory, asked.what).is_file())
        and not any(_READ_AT_START.match(os.fsdecode(name)) for name in differing)
    )
    with contextlib.suppress(OSError):  # it was killed: the fork will be
        client.send(_FORKED if fit else _REFUSED)
    return os.fork() if fit else None


def _take(order: _Order, received: list[int]) -> None:
    """In the fork: become the process that the launcher meant to start."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    _join_host(order.client)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in received]  # away from the numbers that they get
    os.closerange(0, _HIGH)
    for fd, number in zip(moved, order.files, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (_stream(fd) for fd in range(3))
    os.chdir(order.directory)
    os.environb.clear()
    os.environb.update(order.environ)
    # At its end, what was registered since runs, then these two and nothing more: PyTorch's destructors take 0.3 s.
    _libc.on_exit(_libc._exit, None)
    _libc.__cxa_atexit(_libc.fflush, None, None)
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    job = order.environ.get(b"PBLASMP_JOB", b"").ljust(len(JOB), b"0")
    ctypes.memmove(start + ctypes.string_at(start, end - start).index(JOB.encode()), job, len(job))


def _join_host(client: int) -> None:
    """Take the host name of the client, which a test of several nodes may have started under one of its own."""
    its = Path(f"/proc/{client}/ns/uts")
    if its.readlink() != Path("/proc/self/ns/uts").readlink():
        with its.open() as namespace:
            if _libc.setns(namespace.fileno(), 0):
                raise OSError("no access to the host name of the process that asks for a fork")


def _stream(fd: int) -> Any:
    """Open a standard stream as Python does; None if there is none."""
    mine = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[fd]
    unbuffered = fd > 0 and mine.write_through
    try:
        binary = os.fdopen(fd, "wb" if fd else "rb", 0 if unbuffered else -1, closefd=False)
    except OSError:
        return None
    (binary if unbuffered else binary.raw).name = mine.name
    lines = fd == 2 or os.isatty(fd)
    stream = io.TextIOWrapper(
        binary, mine.encoding, mine.errors, line_buffering=lines, write_through=unbuffered
    )
    stream.mode = mine.mode
    return stream


def _limit_threads() -> None:
    """Have the libraries that are loaded obey the number of threads, which torchrun and benchmarks set."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():
        threadpoolctl.threadpool_limits(int(threads))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(threads))


def run(argv: list[str], path: list[str]) -> None:
    """Run what ``python`` runs when it gets these arguments; ``path`` is where it looks for modules. Local."""
    asked = _parse(argv)
    assert asked is not None
    _limit_threads()
    if asked.strict:
        sys.warnoptions.append("error")
        warnings.simplefilter("error")
    if asked.unbuffered:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.reconfigure(write_through=True)
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_file = asked.kind == "file"
    first = {"-c": "", "-m": str(Path.cwd()), "file": str(Path(asked.what).resolve().parent)}[asked.kind]
    sys.path[:] = [*added, *path]
    if any(Path(entry, "sitecustomize.py").exists() for entry in added):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    sys.path.insert(0, first)
    sys.argv[:] = [asked.what if is_file else asked.kind, *asked.argv]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if asked.kind == "-m":
        runpy._run_module_as_main(asked.what)  # type: ignore[attr-defined]
        return
    text: str | bytes = asked.what
    name = "<string>"
    if is_file:
        name = main.__file__ = str(Path.cwd() / asked.what)
        text = Path(name).read_bytes()
    exec(compile(text, name, "exec"), vars(main))


def run_and_exit(argv: list[str], path: list[str]) -> None:
    """Run it and end as Python does, except that modules are not taken apart: that would copy most of the memory."""
    status = 0
    try:
        run(argv, path)
    except SystemExit as error:
        if isinstance(error.code, int):
            status = error.code & 0xFF
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException as error:  # noqa: BLE001 (it ends this process)
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    ctypes.PyDLL(None).exit(status)  # with what libraries do at the end, MPICH for one, and with the GIL


def _load_mpi() -> None:
    """Load the MPI that pip has installed, if mpi4py can take no other. Most of a start of MPI is loading."""
    libraries = {path.resolve() for path in Path(sys.prefix, "lib").glob("libmpi.so.*")}
    if len(libraries) == 1 and "MPI4PY_LIBMPI" not in os.environ:
        ctypes.CDLL(str(*libraries))


def main(listener: int, address: str) -> None:
    """Import, serve at the address where a socket listens, and in a fork run its command."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored; clients know what they pass on
    path = [entry for entry in sys.path if entry != str(Path.cwd())]
    for name in _MODULES:
        importlib.import_module(name)
    if importlib.util.find_spec("torch"):
        importlib.import_module("pblasmp.torch")
        importlib.import_module("torch._dynamo")  # 1.3 s, as soon as an optimizer takes a step
        inspect.stack()  # torchrun asks for it, and the first time takes 1 s
    _load_mpi()
    threadpoolctl.threadpool_info()  # so that it knows whose libraries have threads
    for finalizer in list(weakref.finalize._registry):  # PyTorch's take 0.1 s at the end of each fork
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    launch.interpreter = lambda: command(address, sys.executable)  # of the ranks that a fork starts
    order = serve(socket.socket(fileno=listener))
    run_and_exit(order.argv, path)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
