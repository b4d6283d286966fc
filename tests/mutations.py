# SPDX-License-Identifier: Apache-2.0
"""Mutations: does a test fail if one expression of the package is wrong? What survives shows where tests are weak.

``python -m tests.mutations map`` notes which lines of pblasmp/ each test executes, on all of its ranks (Python 3.12 or
newer). ``python -m tests.mutations run`` then makes mutations, the same ones for the same code, spread over the
package, and runs the tests that execute each, the shortest first, until one fails. ``tests/mutations.txt`` has what
came of it; say why below a survivor. Both go on where they were ended. ``run --gone TESTS`` is for tests that are to
go: it shows what they kill and others do not.

mutmut and cosmic-ray follow one process: what only ranks execute, which most tests start, has no test for them.
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
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MAP, RESULT = ROOT / ".mutations", ROOT / "tests/mutations.txt"

# Runs in every Python: in each test, the first execution of a line of the package's functions is noted.
_SITE = f"""
import os, sys
if "PBLASMP_MAP" in os.environ and sys.monitoring.get_tool(4) is None:
    def line(code, number, os=os, disable=sys.monitoring.DISABLE):
        if code.co_flags & 1 and code.co_filename.startswith("{ROOT}/pblasmp/") and "PBLASMP_MAPPED" in os.environ:
            fd = os.open(os.environ["PBLASMP_MAP"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            name = code.co_filename[len("{ROOT}/"):]
            os.write(fd, f"{{os.environ['PBLASMP_MAPPED']}} {{name}}:{{number}}\\n".encode())
            os.close(fd)
        return disable
    def next_test(event, arguments):
        if event == "os.putenv" and arguments[0] == b"PBLASMP_MAPPED":
            sys.monitoring.restart_events()
    sys.addaudithook(next_test)
    sys.monitoring.use_tool_id(4, "lines")
    sys.monitoring.register_callback(4, sys.monitoring.events.LINE, line)
    sys.monitoring.set_events(4, sys.monitoring.events.LINE)
"""
_seconds: Counter[str] = Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell the processes of a test, also ranks that are kept, which one it is."""
    os.environ["PBLASMP_MAPPED"] = item.nodeid.partition("[")[0]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up how long each test takes."""
    _seconds[report.nodeid.partition("[")[0]] += report.duration


def pytest_sessionfinish() -> None:
    """Leave that where the lines are."""
    Path(os.environ["PBLASMP_MAP"]).with_suffix(".json").write_text(json.dumps(_seconds))


def run_tests(root: Path, *arguments: str, limit: float, **environ: str) -> tuple[int, str]:
    """Run tests in a checkout; return the status, -1 without an end in time, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environ = {**os.environ, "PYTHONPATH": f"{MAP}:{root}", **environ}
    with tempfile.TemporaryFile() as out:
        with subprocess.Popen(
            command, cwd=root, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        ) as process:
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.terminate()
                status = -1
        out.seek(0)
        return status, out.read().decode(errors="replace")


def make_map() -> None:
    """Note what each test executes, of all that need no GPU and no PyTorch."""
    MAP.mkdir(exist_ok=True)
    (MAP / "sitecustomize.py").write_text(_SITE)
    for path in sorted(ROOT.glob("tests/*/**/test_*.py")):
        name = str(path.relative_to(ROOT))
        lines = MAP / (name.replace("/", "+") + ".lines")
        if (
            not name.startswith(("tests/gpu/", "tests/mpi/torch/"))
            and not lines.with_suffix(".json").exists()
        ):
            lines.write_text("")
            status, _ = run_tests(ROOT, "-p", "tests.mutations", name, limit=900, PBLASMP_MAP=str(lines))
            found = set(lines.read_text().splitlines())
            lines.write_text("\n".join(sorted(found)))
            print(f"{name}: {len(found)} lines, status {status}", flush=True)


def executed(gone: tuple[str, ...]) -> dict[str, list[tuple[float, str]]]:
    """Of each line, as "path:number", the tests that execute it, the shortest first, with their seconds."""
    seconds: dict[str, float] = {}
    for path in MAP.glob("*.json"):
        seconds |= json.loads(path.read_text())
    found: dict[str, list[tuple[float, str]]] = {}
    for path in MAP.glob("*.lines"):
        for test, line in map(str.split, path.read_text().splitlines()):
            found.setdefault(line, []).append((seconds.get(test, 0.0), test))
    return {line: sorted(tests) for line, tests in found.items() if any(x.startswith(gone) for _, x in tests)}


_OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*",
    ast.Mod: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


def replacement(node: ast.AST) -> str | None:
    """What an expression is replaced by, if it is."""
    text = ast.unparse
    match node:
        case ast.Compare(left, [op], [right]):
            return f"({text(left)} {_OTHER[type(op)]} {text(right)})"
        case ast.BinOp(left, op, right) if type(op) in _OTHER and not isinstance(right, ast.JoinedStr):
            return f"(({text(left)}) {_OTHER[type(op)]} ({text(right)}))"
        case ast.BoolOp(op, values):
            return "(" + f" {_OTHER[type(op)]} ".join(f"({text(each)})" for each in values) + ")"
        case ast.UnaryOp(ast.Not(), operand):
            return f"({text(operand)})"
        case ast.IfExp(test, body, orelse):
            return f"(({text(orelse)}) if ({text(test)}) else ({text(body)}))"
        case ast.Constant(bool() as value):
            return str(not value)
        case ast.Constant(int() as value):
            return str(value + 1)
    return None


def expressions(node: ast.AST, inside: bool = False) -> Iterator[ast.expr]:
    """Expressions in functions; no annotations, no messages of errors."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert, ast.arguments)):
        return
    if isinstance(node, ast.expr) and inside:
        yield node
    function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    value = [node.value] if isinstance(node, ast.AnnAssign) and node.value else ast.iter_child_nodes(node)
    for child in node.body if function else value:  # type: ignore[attr-defined]
        yield from expressions(child, inside or function or isinstance(node, ast.Lambda))


class Mutation(NamedTuple):
    """Some bytes of a file, replaced."""

    path: str
    line: int
    start: int
    end: int
    text: str
    said: str

    def __str__(self) -> str:
        return self.said


def mutations_of(path: str) -> Iterator[Mutation]:
    """All mutations of a file of the package."""
    source = (ROOT / path).read_bytes()
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    for node in expressions(ast.parse(source)):
        if (text := replacement(node)) is not None:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            at = slice(
                starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            )
            said = re.sub(r"\s+", " ", f"{path}:{node.lineno}: {source[at].decode()} -> {text}")[:160]
            yield Mutation(path, node.lineno, at.start, at.stop, text, said)


def killer(mutation: Mutation, tests: list[tuple[float, str]], limit: float, checkout: Path) -> str:
    """Return the test that fails with a mutation, among those of so many seconds; "" if none does."""
    spent = accumulate(seconds for seconds, _ in tests)
    taken = [
        test for (_, test), until in zip(tests, spent, strict=True) if until < limit or test == tests[0][1]
    ]
    path = checkout / mutation.path
    source = path.read_bytes()
    path.write_bytes(source[: mutation.start] + mutation.text.encode() + source[mutation.end :])
    status, out = run_tests(checkout, "-x", *taken, limit=300 + 10 * limit) if taken else (0, "")
    path.write_bytes(source)
    names = re.findall(r"^(?:FAILED|ERROR|SUBFAILED\S*) (tests/\S+)", out, re.MULTILINE)
    return (
        "" if status == 0 else names[0] if names else "no end in time" if status == -1 else f"status {status}"
    )


def run(mutations: list[Mutation], limit: float, gone: tuple[str, ...]) -> dict[str, str]:
    """Return, by mutation, what killed it or ""; of what has to go only kills are told that others do not make."""
    tests, outcomes = executed(gone), MAP / ("outcomes" if gone == ("",) else "gone")
    known: dict[str, str] = json.loads(outcomes.read_text()) if outcomes.exists() else {}
    with tempfile.TemporaryDirectory(prefix="pblasmp-mutations-") as folder:
        ignored = shutil.ignore_patterns(".git", ".venv", ".mutations", "__pycache__", "_build")
        checkout = shutil.copytree(ROOT, Path(folder, "checkout"), ignore=ignored)
        for each in mutations:
            if str(each) not in known:
                of_line = tests[f"{each.path}:{each.line}"]
                going = [test for test in of_line if test[1].startswith(gone)]
                by = killer(each, going, limit, checkout)
                if by and going != of_line:
                    others = killer(each, [test for test in of_line if test not in going], limit, checkout)
                    by = others or f"LOST with {by}"
                known[str(each)] = by
                outcomes.write_text(json.dumps(known, indent=0))
            print(f"{each}: {known[str(each)] or 'SURVIVED'}", flush=True)
    return {str(each): known[str(each)] for each in mutations}


def report(found: dict[str, str]) -> str:
    """Return what came of it, as text; below each survivor what the last report says of it."""
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    said = re.findall(r"^  (pblasmp/.*)\n((?: {6}.*\n)+)", RESULT.read_text(), re.MULTILINE)
    dead = sum(map(bool, found.values()))
    text = (
        f"commit {commit}, {dt.datetime.now(dt.timezone.utc):%F}: {dead} of {len(found)} mutations killed\n"
    )
    for title in ("survived", "killed"):
        text += f"\n{title}:\n"
        for each, by in found.items():
            if bool(by) == (title == "killed"):
                text += f"  {each}\n" + (f"      by {by}\n" if by else dict(said).get(each, ""))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["map", "run"])
    parser.add_argument("parts", nargs="*", default=["pblasmp/"], help="files or folders to change")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each mutation")
    parser.add_argument("--gone", nargs="+", default=[""], help="tests that are to go: FILE or FILE::NAME")
    given = parser.parse_args()
    if given.what == "map":
        make_map()
        return
    lines, gone = executed(tuple(given.gone)), tuple(given.gone)
    paths = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("pblasmp/**/*.py"))
    every = [x for path in paths if path.startswith(tuple(given.parts)) for x in mutations_of(path)]
    every = [each for each in every if f"{each.path}:{each.line}" in lines]
    rng, count = random.Random(given.seed), min(given.count, len(every))
    spread = [every[int((i + rng.random()) * len(every) / count)] for i in range(count)]  # evenly
    rng.shuffle(spread)  # so that a run that is ended early has them spread, too
    found = run(spread, given.seconds, gone)
    if gone == ("",):
        RESULT.write_text(report(found))


if __name__ == "__main__":
    main()
