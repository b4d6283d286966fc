# SPDX-License-Identifier: Apache-2.0
"""Mutations: does a test fail if one expression of the package is wrong? What survives shows where tests are weak.

``python -m tests.mutations map`` runs each test file by itself and notes which lines of pblasmp/ it executes, on all
of its ranks (Python 3.12 or newer, about 10 minutes). ``python -m tests.mutations run`` then makes mutations, the same
ones for the same code, spread over the package, and runs the test files that execute each, until one fails. It writes
``tests/mutations.txt``: the commit, the day, and each mutation with the test that killed it.

To show that tests may go: ``run --tests FILES -o before.json`` finds what these kill, and
``run --again before.json --without FILES`` whether others kill it, too.

Tools such as mutmut and cosmic-ray follow one process; most of these tests start ranks, so that they would take most of
the package for code that no test reaches.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAP = ROOT / ".mutations"
"""Of each test file the lines that it executes, and how long it takes."""
RESULT = ROOT / "tests" / "mutations.txt"

# Runs in every Python: its first execution of a line in a function of the package is noted.
_SITE = """
import os, sys
if "PBLASMP_LINES" in os.environ and sys.monitoring.get_tool(4) is None:
    root, to = os.environ["PBLASMP_LINES_ROOT"], os.environ["PBLASMP_LINES"]
    def line(code, number, os=os, root=root, to=to, disable=sys.monitoring.DISABLE):
        if code.co_flags & 1 and code.co_filename.startswith(root):  # in a function
            fd = os.open(to, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.write(fd, f"{code.co_filename[len(root):]}:{number}\\n".encode())
            os.close(fd)
        return disable
    sys.monitoring.use_tool_id(4, "lines")
    sys.monitoring.register_callback(4, sys.monitoring.events.LINE, line)
    sys.monitoring.set_events(4, sys.monitoring.events.LINE)
"""


@dataclass
class Mutation:
    """One expression, replaced; and what came of it."""

    path: str
    line: int
    start: int
    end: int
    text: str
    outcome: str = ""

    def apply(self, source: str) -> str:
        """Return the source with it."""
        return source[: self.start] + self.text + source[self.end :]

    def shown(self, source: str) -> str:
        """Return a line that says what is changed."""
        return f"{self.path}:{self.line}: {source[self.start : self.end]} -> {self.text}"


_OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*",
    ast.Mod: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


def _replacements(node: ast.AST) -> Iterator[str]:
    """What an expression may be replaced by."""
    text = ast.unparse
    match node:
        case ast.Compare(left, [op], [right]):
            yield f"({text(left)} {_OTHER[type(op)]} {text(right)})"
        case ast.BinOp(left, op, right) if type(op) in _OTHER and not isinstance(right, ast.JoinedStr):
            yield f"(({text(left)}) {_OTHER[type(op)]} ({text(right)}))"
        case ast.BoolOp(op, values):
            yield "(" + f" {_OTHER[type(op)]} ".join(f"({text(each)})" for each in values) + ")"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({text(operand)})"
        case ast.IfExp(test, body, orelse):
            yield f"(({text(orelse)}) if ({text(test)}) else ({text(body)}))"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() as value):
            yield str(value + 1)


def _expressions(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions in functions; no annotations, no messages of errors."""

    def visit(node: ast.AST, inside: bool) -> Iterator[ast.expr]:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
            return
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.expr) and inside:
            yield node
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args", "type_params") and not (
                isinstance(node, ast.Call) and name == "args"
            ):
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inside or function)

    return visit(tree, False)


def mutations_of(path: str, source: str) -> list[Mutation]:
    """All mutations of a file of the package. Local."""
    starts = [0]
    for each in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(each))
    lines = source.splitlines()

    def offset(line: int, column: int) -> int:  # columns count bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node in _expressions(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        found += [Mutation(path, node.lineno, start, end, text) for text in _replacements(node)]
    return found


def _tests() -> list[str]:
    """The test files that need no GPU and no PyTorch."""
    files = ROOT.glob("tests/*/**/test_*.py")
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    return [name for name in names if not name.startswith(("tests/gpu/", "tests/mpi/torch/"))]


def _pytest(root: Path, tests: list[str], limit: float, **environ: str) -> tuple[int, str]:
    """Run tests until one fails, in a checkout; return the status, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environ = {**os.environ, "PYTHONPATH": str(root), **environ}
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            command, cwd=root, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            status = -1
        out.seek(0)
        return status, out.read().decode(errors="replace")


def make_map(processes: int) -> None:
    """Note what each test file executes. Local."""
    assert sys.version_info >= (3, 12), "sys.monitoring is newer than this Python"
    shutil.rmtree(MAP, ignore_errors=True)
    MAP.mkdir()
    (MAP / "sitecustomize.py").write_text(_SITE)

    def one(test: str) -> tuple[str, float]:
        lines, start = MAP / (test.replace("/", "+") + ".lines"), time.monotonic()
        environ = {"PBLASMP_LINES": str(lines), "PBLASMP_LINES_ROOT": f"{ROOT}/"}
        environ["PYTHONPATH"] = f"{MAP}:{ROOT}"
        status, _ = _pytest(ROOT, [test], 900, **environ)
        found = sorted(set(lines.read_text().splitlines())) if lines.exists() else []
        lines.write_text("\n".join(line for line in found if line.startswith("pblasmp/")))
        print(f"{test}: {len(found)} lines, status {status}", flush=True)
        return test, round(time.monotonic() - start, 1)

    with ThreadPoolExecutor(processes) as pool:
        (MAP / "seconds.json").write_text(json.dumps(dict(pool.map(one, _tests())), indent=0))


def executed(allowed: Collection[str], limit: float) -> dict[str, list[str]]:
    """Of each line, as "path:number", those test files that execute it, the shortest first, of some seconds. Local."""
    known: dict[str, float] = json.loads((MAP / "seconds.json").read_text())
    seconds = {name: known[name] for name in known if name in allowed}
    found: dict[str, list[str]] = {}
    left: dict[str, float] = {}
    for test in sorted(seconds, key=lambda name: seconds[name]):
        for line in (MAP / (test.replace("/", "+") + ".lines")).read_text().splitlines():
            left[line] = left.get(line, limit) - seconds[test]
            if left[line] > 0 or line not in found:
                found.setdefault(line, []).append(test)
    return found


def chosen(count: int, seed: int, tests: dict[str, list[str]], parts: list[str]) -> list[Mutation]:
    """Mutations of lines that tests execute, spread evenly over the lines of the package. Local."""
    everything: list[Mutation] = []
    for path in sorted(ROOT.glob("pblasmp/**/*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith(tuple(parts)):
            found = mutations_of(name, path.read_text())
            everything += [each for each in found if f"{each.path}:{each.line}" in tests]
    rng = random.Random(seed)
    step = len(everything) / min(count, len(everything))
    found = [everything[int((i + rng.random()) * step)] for i in range(min(count, len(everything)))]
    rng.shuffle(found)  # so that those of a run that is ended early are spread, too
    return found


def run(mutations: list[Mutation], tests: dict[str, list[str]], processes: int) -> None:
    """Set the outcome of each: which test killed it. Local."""
    with tempfile.TemporaryDirectory(prefix="pblasmp-mutations-") as folder:
        checkouts = [Path(folder, str(number)) for number in range(processes)]
        for checkout in checkouts:
            ignored = shutil.ignore_patterns(".git", ".venv", ".mutations", "__pycache__", "_build")
            shutil.copytree(ROOT, checkout, ignore=ignored)
        free, tick = list(checkouts), iter(range(1, 1 << 30))
        now = int(time.time())

        def one(each: Mutation) -> None:
            files = tests.get(f"{each.path}:{each.line}", [])
            if not files:
                each.outcome = "not executed"
                return
            checkout = free.pop()
            path = checkout / each.path
            source = path.read_text()
            try:
                path.write_text(each.apply(source))
                os.utime(path, (now + next(tick),) * 2)  # what Python compiled goes by whole seconds
                status, out = _pytest(checkout, files, 1500)
                names = re.findall(r"^(?:FAILED|ERROR|SUBFAILED\S*) (tests/\S+)", out, re.MULTILINE)
                by = names[0] if names else "no end in time" if status == -1 else f"status {status}"
                each.outcome = "" if status == 0 else by
            finally:
                path.write_text(source)
                os.utime(path, (now + next(tick),) * 2)
                free.append(checkout)
            print(f"{each.shown(source)}: {each.outcome or 'SURVIVED'}", flush=True)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(one, mutations))


def _report(mutations: list[Mutation], seconds: float) -> str:
    """What came of it, as text."""
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    dead = [each for each in mutations if each.outcome]
    head = f"commit {commit.strip()}, {dt.datetime.now(dt.timezone.utc):%F}, {seconds:.0f} s: "
    lines = [f"{head}{len(dead)} of {len(mutations)} mutations killed"]
    for title, some in (("survived", [x for x in mutations if not x.outcome]), ("killed", dead)):
        lines += ["", f"{title}:"]
        for each in some:
            shown = re.sub(r"\s+", " ", each.shown((ROOT / each.path).read_text()))
            lines.append(f"  {shown[:160]}" + (f"\n      by {each.outcome}" if each.outcome else ""))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["map", "run"])
    parser.add_argument("parts", nargs="*", default=["pblasmp/"], help="files or folders to change")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=120, help="of tests for each mutation, on an idle machine"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--tests", nargs="+", help="only these test files; and mutations that they execute")
    parser.add_argument("--without", nargs="+", default=[], help="without these test files")
    parser.add_argument("--again", type=Path, help="the mutations of a result of -o that were killed")
    parser.add_argument("-o", "--output", type=Path, default=RESULT, help="text, or JSON if it ends so")
    given = parser.parse_args()
    if given.what == "map":
        make_map(given.processes)
        return
    start, allowed = time.monotonic(), set(given.tests or _tests()) - set(given.without)
    tests = executed(allowed, given.seconds)
    if given.again:
        mutations = [Mutation(**each) for each in json.loads(given.again.read_text()) if each["outcome"]]
    else:
        mutations = chosen(given.count, given.seed, tests, given.parts)
    run(mutations, tests, given.processes)
    if given.output.suffix == ".json":
        given.output.write_text(json.dumps([asdict(each) for each in mutations], indent=1))
    text = _report(mutations, time.monotonic() - start)
    print(text)
    if given.output == RESULT:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
