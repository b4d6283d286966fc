# SPDX-License-Identifier: Apache-2.0
"""Time the examples of the page on whole problems: ``python -m benchmarks.whole_problems gaussian_process muon``.

Each runs as its docstring says for a large size, or with what follows ``--``. The times are those that it prints, and
the docs' table is made of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from benchmarks.ranks import ROOT, on_ranks, run_ranks
from pblasmp import launch

PROBLEMS = ("gaussian_process", "kohn_sham", "muon", "natural_gradient_jax")
_LARGE = re.compile(r"mpirun -n (\d+) python examples/\w+\.py (.+)")
_TIMES = re.compile(r"(?:^|[,;] )(?:the )?([a-zA-Z ]+?)(?: took)? (\d+\.\d+) (m?s)\b", re.MULTILINE)


def large(problem: str) -> tuple[int, list[str]]:
    """Return how many ranks the docstring of an example asks for, and its arguments."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{problem}.py").read_text())) or ""
    found = _LARGE.search(text)
    if found is None:
        raise SystemExit(f"{problem}: its docstring has no command of a large size")
    return int(found[1]), found[2].split()


def times(printed: str) -> dict[str, list[float]]:
    """Return by name the seconds that an example has printed."""
    return {
        name: [float(number) / (1e3 if unit == "ms" else 1)] for name, number, unit in _TIMES.findall(printed)
    }


def timed(problem: str, nranks: int, arguments: list[str]) -> dict[str, list[float]]:
    """Run an example, and return the seconds that it prints."""
    argv = [*launch.interpreter(), f"examples/{problem}.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = launch.find_launcher().command(nranks, argv)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(f"{problem} {' '.join(arguments)}, {nranks} ranks\n{done.stdout}", flush=True)
    if done.returncode:
        raise SystemExit(f"{problem} ended with status {done.returncode}")
    return times(done.stdout)


def facts(file: Path) -> None:
    """Write what a context says of its machine. Collective."""
    import pblasmp as pb

    with pb.Context() as ctx:
        gpus = ctx.size if ctx.engine.device is not None else 0
        found = {**results.facts(ctx), "ranks": ctx.size, "gpus": gpus}
        if ctx.rank == 0:
            found["machine"]["load"] = os.getloadavg()[0]
            file.write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=", ".join(PROBLEMS))
    parser.add_argument("--ranks", type=int, help="instead of those of the docstrings")
    parser.add_argument("--facts", type=Path, help=argparse.SUPPRESS)
    results.add_option(parser)
    before, _, after = "\0".join(sys.argv[1:]).partition("\0--\0")
    options = parser.parse_args([each for each in before.split("\0") if each])
    if unknown := {*options.problems} - {*PROBLEMS}:
        parser.error(f"expected {', '.join(PROBLEMS)}, got {', '.join(sorted(unknown))}")
    if on_ranks():
        facts(options.facts)
        return
    for problem in options.problems or PROBLEMS:
        nranks, arguments = large(problem)
        nranks, arguments = options.ranks or nranks, after.split("\0") if after else arguments
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "facts")
            run_ranks("benchmarks.whole_problems", ["--facts", str(file)], nranks)
            about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        case = {"problem": problem, "arguments": " ".join(arguments)}
        row = {"case": case, "seconds": timed(problem, nranks, arguments)}
        run = results.Run(
            benchmark=f"whole_problems-{problem}", date=results.today(), commit=results.this_commit(), **about,
            options={}, reference="", sample="one run", rows=[row],
        )  # fmt: skip
        results.save(run, results.directory_of(options) or Path())


if __name__ == "__main__":
    main()
