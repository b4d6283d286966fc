# SPDX-License-Identifier: Apache-2.0
"""Ranks that live as long as a test session: one world per number of ranks, replaced when a call breaks it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pblasmp import launch
from pblasmp.launch import Job, Launcher, last_lines
from pblasmp.testing import RanksFailedError, import_path, named, results_of, story, write_stacks
from pblasmp.trust import private_folder

from .rank import socket_path

MOST_RANKS = 16  # most ranks that are kept: enough for worlds of 1, 2, 3, 4 and 6
GRACE_SECONDS = 1.0  # for ranks that are about to answer, once another one has failed
_LAUNCHER_SECONDS = 5.0  # for the launcher to end the job, once a rank is gone
_SHOWN_LINES = 40
_RANK = (  # a rank imports from where this process does
    "import gc, json, sys\n"
    "gc.disable()\n"  # imports leave no garbage
    "with open(sys.argv[1] + '/path.json') as file: sys.path[:] = json.load(file)\n"
    "from tests.helpers.ranks.rank import main\n"
    "main(*sys.argv[1:])"
)


@dataclass
class _RankConnection:
    """The connection to one rank, and what is known about the rank."""

    socket: socket.socket
    rank: int = -1
    pid: int = 0
    answer: dict[str, Any] | None = None
    unread: bytearray = field(default_factory=bytearray)


class World:
    """The ranks of one job, which run functions until they are asked to leave; a context manager. Local.

    Args:
        nranks: how many.
        launcher: what starts them, torchrun say; by default mpirun.

    Raises:
        LibraryNotFoundError: there is no launcher.
    """

    def __init__(self, nranks: int, launcher: Launcher | None = None) -> None:
        self.nranks = nranks
        self._environ = dict(os.environ)
        self._links: list[_RankConnection] = []
        with contextlib.ExitStack() as stack:
            self._directory = stack.enter_context(private_folder("pblasmp-test-"))
            (self._directory / "path.json").write_text(json.dumps(import_path()))
            self._server = stack.enter_context(socket.socket(socket.AF_UNIX))
            with socket_path(self._directory) as path:
                self._server.bind(path)
            self._server.listen(nranks)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._selector.register(self._server, selectors.EVENT_READ)
            command = [*launch.interpreter(), "-W", "error", "-c", _RANK, str(self._directory), str(nranks)]
            command.append("mpi" if launcher is None else launcher.kind)
            output = self._directory / "output"
            self._job = stack.enter_context(Job(command, nranks, output, launcher=launcher))
            self._resources = stack.pop_all()

    @property
    def alive(self) -> bool:
        """Whether the job runs."""
        return self._job.poll() is None

    def __enter__(self) -> World:  # noqa: PYI034 (typing.Self is newer than the oldest Python)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def dismiss(self) -> None:
        """Send the ranks their last order: to exit. Local."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)

    def wait(self, timeout: float) -> int | None:
        """Wait for the ranks to end and return the exit status, None if they did not end in time. Local."""
        return self._job.wait(timeout)

    def end(self) -> None:
        """End all ranks at once. Local."""
        self._resources.close()
        for link in self._links:
            link.socket.close()

    def call(self, name: str, file: str, kwargs: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Run "module:function" on every rank and return what each answered. Local.

        Raises:
            RanksFailedError: a rank failed; this world can then only be ended, with end().
        """
        __tracebackhide__ = True
        printed = self._printed.stat().st_size if self._printed.exists() else 0
        order = {
            "name": name,
            "file": file,
            "kwargs": kwargs,
            "directory": os.getcwd(),  # noqa: PTH109 (as chdir takes it)
            "path": import_path(),
            "variables": self._changed_variables(),
        }
        start = time.monotonic()
        deadline = start + timeout
        how = "failed"
        if (len(self._links) == self.nranks or self._gather(deadline)) and self._ask(order, deadline):
            answers = [link.answer or {} for link in self._links]
            if self._ask({}, deadline):
                return answers
            how = "left something behind"
        status = self._job.wait(0.1)
        if status is not None:
            how = f"ended with status {status}"
        elif time.monotonic() >= deadline:
            how = f"did not end in {timeout:g} s"
        seconds = time.monotonic() - start
        self._ask_for_stacks()
        title = f"{name} on {self.nranks} ranks ({self._job.launcher.kind}) {how} after {seconds:.1f} s"
        raise RanksFailedError(self.story(title, printed))

    def _changed_variables(self) -> dict[str, str | None]:
        """Return what has changed in the environment since the ranks started; None for a variable that is gone."""
        now = dict(os.environ)
        names = (now.keys() | self._environ.keys()) - {"PYTEST_CURRENT_TEST"}
        return {name: now.get(name) for name in sorted(names) if now.get(name) != self._environ.get(name)}

    def _ask(self, order: dict[str, Any], deadline: float) -> bool:
        """Send an order and wait for every rank's answer; return whether all are well."""
        line = json.dumps(order).encode() + b"\n"
        for link in self._links:
            link.answer = None
        for file in self._directory.glob("case*") if order else ():
            os.truncate(file, 0)
        for link in self._links:
            with contextlib.suppress(OSError):  # the rank is gone, which _gather will notice
                link.socket.sendall(line)
        return self._gather(deadline)

    def _gather(self, deadline: float) -> bool:
        """Wait for every rank's answer; return whether all are well. After a failure the others get a moment more."""
        failing: float | None = None  # until then
        while True:
            answers = [link.answer for link in self._links if link.answer is not None]
            failed = any("error" in answer for answer in answers)
            if len(answers) == self.nranks:
                return not failed
            gone = len(self._selector.get_map()) <= len(self._links)  # the server is one of them
            if (failed or gone) and failing is None:
                failing = time.monotonic() + (GRACE_SECONDS if failed else _LAUNCHER_SECONDS)
            left = min(deadline, failing or deadline) - time.monotonic()
            ended = not self.alive
            ready = self._selector.select(0 if ended else min(max(left, 0), 0.1))
            if (ended and not ready) or left <= 0:
                return False
            for key, _ in ready:
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        link = _RankConnection(self._server.accept()[0])
        self._links.append(link)
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _read(self, link: _RankConnection) -> None:
        try:
            data = link.socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(link.socket)
            return
        link.unread += data
        if b"\n" not in data:
            return
        *lines, link.unread = link.unread.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "pid" in said:
                link.rank, link.pid = said.pop("rank"), said.pop("pid")
                self._links.sort(key=lambda link: link.rank)
            link.answer = said

    def _ask_for_stacks(self) -> None:
        """Have the ranks that are still running write their stacks."""
        if self.alive:
            write_stacks([link.pid for link in self._links if link.answer is None and link.pid])

    def story(self, title: str, printed: int = 0) -> str:
        """Return the state of every rank, and the output: that of ranks without its first ``printed`` bytes. Local."""
        answers = {link.rank: link.answer for link in self._links}
        said = last_lines(self._printed, _SHOWN_LINES, printed)
        told = "\n".join([said, self._job.tail(_SHOWN_LINES)]).strip("\n")
        return story(title, self._directory, [answers.get(rank) for rank in range(self.nranks)], told)

    @property
    def _printed(self) -> Path:
        """What the ranks have printed; the job's own output is the launcher's."""
        return self._directory / "printed"


class Pool:
    """The worlds of this process, by number of ranks and launcher. Local.

    Attributes:
        keep: False starts new ranks for every call.
    """

    def __init__(self) -> None:
        self.keep = True
        self.worlds: OrderedDict[tuple[int, Launcher | None], World] = OrderedDict()

    def call(
        self,
        name: str,
        file: str,
        nranks: int,
        kwargs: dict[str, Any],
        timeout: float,
        launcher: Launcher | None = None,
    ) -> list[dict[str, Any]]:
        """Run a function on a kept world, or on a new one; a world on which it fails is ended. Local.

        Raises:
            RanksFailedError: a rank failed.
            LibraryNotFoundError: there is no launcher.
        """
        __tracebackhide__ = True
        key = nranks, launcher
        world = self.worlds.pop(key, None)
        if world is not None and not world.alive:
            world.end()
            world = None
        if world is None:
            while self.worlds and nranks + sum(each.nranks for each in self.worlds.values()) > MOST_RANKS:
                self.worlds.popitem(last=False)[1].end()
            world = World(nranks, launcher)
        try:
            answers = world.call(name, file, kwargs, timeout)
        except BaseException:
            world.end()
            raise
        self.worlds[key] = world
        return answers

    def close(self) -> None:
        """End all ranks. Local; idempotent."""
        worlds = list(self.worlds.values())
        self.worlds.clear()
        for world in worlds:
            world.dismiss()
        for world in worlds:
            world.wait(2.0)
            world.end()


pool = Pool()
atexit.register(pool.close)


def run(
    launcher: Launcher | None,
    function: Any,
    nranks: int,
    kwargs: dict[str, Any],
    *,
    timeout: float,
    launch: bool,
) -> list[Any]:
    """Do what ``pblasmp.testing.run_mpi`` does on kept ranks or, with ``launch`` or without a pool, new ones. Local.

    Args:
        launcher: what starts them; None: mpirun.
        function, nranks, kwargs, timeout: as there.
        launch: new ranks for this call alone, to test how ranks start and end, or what libraries read on loading.
    """
    __tracebackhide__ = True
    name, file = named(function, nranks)
    if pool.keep and not launch:
        return _results(name, pool.call(name, file, nranks, kwargs, timeout, launcher))
    with World(nranks, launcher) as world:
        answers = world.call(name, file, kwargs, timeout)
        world.dismiss()
        if (status := world.wait(timeout)) != 0:
            how = f"did not end in {timeout:g} s" if status is None else f"ended with status {status}"
            raise RanksFailedError(world.story(f"{name} returned on {nranks} ranks, but the job {how}"))
    return _results(name, answers)


def _results(name: str, answers: list[dict[str, Any]]) -> list[Any]:
    """Return every rank's result. In these tests an empty text is no error, as what many helpers return."""
    for answer in answers:
        if answer["cases"]:
            answer["result"] = [(case, error or None) for case, error in answer["result"]]
    return results_of(name, answers)
