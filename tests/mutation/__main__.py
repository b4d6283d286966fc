# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.mutation record`` once, then ``python -m tests.mutation run pblasmp/comm/agreement.py``.

Sources are changed in copies only. A mutant's tests run in a process of their own, the fastest first, up to the first
that fails. A test counts once it has passed in the same way without a mutant.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.recording import RANKS, VARIABLE, Record

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get(VARIABLE) or Path(tempfile.gettempdir()) / "pblasmp-mutation")
THREADS = ("-p", "tests.mutation.as_threads")
TRACE = "import sys; sys.path.append({!r}); from tests.mutation import recording; recording.trace()\n"


def copy(name: str) -> Path:
    """Return a new copy of the working tree."""
    target = HOME / name
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for path in filter(None, listed.stdout.split("\0")):
        if (ROOT / path).exists():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target / path)
    return target


def environment(tree: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **more,
    }


def record(name: str, tests: list[str], ranks: bool) -> int:
    """Run tests in a copy that notes which test runs which lines."""
    tree = copy(f"{name}-record")
    package = tree / "pblasmp/__init__.py"
    head, future, rest = package.read_text().partition("from __future__ import annotations\n")
    package.write_text(head + future + "\n" + TRACE.format(str(tree)) + rest)
    log = HOME / name
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    (log / "test").write_bytes(bytes(4))
    if ranks:
        (log / RANKS).touch()
    how = () if ranks else THREADS
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=line",
        "-p",
        "tests.mutation.recording",
        *how,
        *tests,
    ]
    return subprocess.run(
        command, cwd=tree, env=environment(tree, **{VARIABLE: str(log)}), check=False
    ).returncode


class Worker:
    """One copy of the working tree, in which mutants are tried one after the other."""

    def __init__(self, name: str) -> None:
        self.tree = copy(name)
        self._reliable: dict[str, bool] = {}
        compileall.compile_dir(self.tree, quiet=1)
        subprocess.run(  # which keeps the tests as pytest compiles them
            [sys.executable, "-m", "pytest", "-q", "--collect-only", *THREADS, "tests/unit", "tests/mpi"],
            cwd=self.tree, env=environment(self.tree), check=False, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._output = self.tree.with_suffix(".output")
        self._server = subprocess.Popen(
            [sys.executable, "tests/mutation/server.py"],
            cwd=self.tree, env=environment(self.tree), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def outcome(self, path: str, mutant: Mutant, known: Record, seconds: float) -> tuple[str, str]:
        """Return what became of a mutant, and the test that noticed; real ranks are started for what is left."""
        total = 0
        for on_ranks in (False, True):
            status, why, count = self._outcome(path, mutant, known, seconds, on_ranks)
            if status != "survived":
                return status, why
            total += count
        return "survived", f"{total} tests" if total else "no test runs it"

    def _outcome(
        self, path: str, mutant: Mutant, known: Record, seconds: float, on_ranks: bool
    ) -> tuple[str, str, int]:
        tests = chosen(known, path, mutant.lines, seconds, on_ranks)
        limit = 60 + 10 * sum(known.seconds[test] for test in tests)
        while True:
            tests = [test for test in tests if self._reliable.get(test, True)]
            if not tests:
                return "survived", "", 0
            status, why = self._tried(path, mutant, tests, limit, on_ranks)
            if why not in tests or why in self._reliable:
                return status, why, len(tests)
            self._reliable[why] = self._tried(path, None, [why], limit, on_ranks)[0] == "survived"

    def _tried(
        self, path: str, mutant: Mutant | None, tests: list[str], limit: float, on_ranks: bool
    ) -> tuple[str, str]:
        file = self.tree / path
        source = file.read_bytes()
        write(file, mutant.apply(source) if mutant else source)
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        order = (
            ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *(() if on_ranks else THREADS), *tests],
            str(self._output),
            mark,
            round(limit),
        )
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        child = int(self._server.stdout.readline())
        timer = threading.Timer(limit, os.kill, (child, signal.SIGKILL))
        timer.start()
        status = int(self._server.stdout.readline())
        timer.cancel()
        end(mark)
        write(file, source)
        if status == 0:
            return "survived", f"{len(tests)} tests"
        if status in (-signal.SIGKILL, -signal.SIGXCPU):
            return "timeout", f"{limit:.0f} s"
        for line in self._output.read_text(errors="replace").splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return "killed", line.split(" ", 1)[1].split(" - ")[0]
        return "killed", f"status {status}"


def write(file: Path, source: bytes) -> None:
    """Write a module, and delete what Python has compiled of it: both may be of one size and second."""
    file.write_bytes(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def end(mark: str) -> None:
    """End the processes that a mutant's tests have left."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if f"PBLASMP_MUTANT={mark}".encode() in (directory / "environ").read_bytes():
                os.kill(int(directory.name), signal.SIGKILL)


def chosen(known: Record, path: str, lines: range | None, seconds: float, on_ranks: bool) -> list[str]:
    """Return the tests that can see the lines, as many as are done in ``seconds``, and at least one."""
    tests, total = [], 0.0
    for test in known.tests(path, lines):
        if (test in known.on_ranks) != on_ranks:
            continue
        total += known.seconds[test]
        if tests and total > seconds:
            break
        tests.append(test)
    return tests


def run(arguments: argparse.Namespace) -> int:
    """Try a sample of the mutants of each file and print what became of them."""
    known = Record([path.parent for path in HOME.glob("*/tests") if path.is_file()])
    workers = [Worker(f"{arguments.name}-{i}") for i in range(arguments.processes)]
    free = list(workers)

    def outcome(path: str, mutant: Mutant) -> tuple[Mutant, str, str]:
        worker = free.pop()
        try:
            return (mutant, *worker.outcome(path, mutant, known, arguments.seconds))
        finally:
            free.append(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        for path in arguments.files:
            everything = mutants((workers[0].tree / path).read_bytes())
            drawn = random.Random(zlib.crc32(f"{arguments.seed} {path}".encode())).sample(
                everything, min(arguments.count, len(everything))
            )
            if arguments.line:
                drawn = [mutant for mutant in everything if mutant.line in arguments.line]
            counts = {"killed": 0, "timeout": 0, "survived": 0}
            start = time.monotonic()
            for mutant, status, why in pool.map(lambda m, p=path: outcome(p, m), drawn):
                counts[status] += 1
                if status != "killed" or arguments.verbose:
                    print(f"{path}:{mutant}  {status}: {why}", flush=True)
            score = ", ".join(f"{count} {status}" for status, count in counts.items())
            print(
                f"{path}: {score}; {len(drawn)} of {len(everything)} mutants, seed {arguments.seed}, "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="note which test runs which lines")
    recording.add_argument("tests", nargs="+")
    recording.add_argument("--name", default="all", help="of the record: several can be made side by side")
    recording.add_argument("--ranks", action="store_true", help="start real ranks, for tests that need them")
    recording.set_defaults(command=lambda a: record(a.name, a.tests, a.ranks))
    running = commands.add_parser("run", help="try mutants")
    running.add_argument("files", nargs="+")
    running.add_argument("--count", type=int, default=25, help="mutants of each file")
    running.add_argument("--seed", type=int, default=1)
    running.add_argument("--line", type=int, action="append", help="all mutants of this line instead")
    running.add_argument("--seconds", type=float, default=60, help="of tests for each mutant, as recorded")
    running.add_argument("--processes", type=int, default=2)
    running.add_argument("--name", default="worker", help="of the copies")
    running.add_argument("--verbose", action="store_true", help="print mutants that were killed, too")
    running.set_defaults(command=run)
    arguments = parser.parse_args()
    status: int = arguments.command(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
