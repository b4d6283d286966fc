# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks against ScaLAPACK share: their options, the launches of ranks, and files of results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.fetch_scalapack import fetch
from benchmarks.ranks import SETTLE_SECONDS, machine, on_ranks, print_facts, run_ranks, versions
from reference.scalapack import ScaLAPACK

__all__ = ["Launches", "NotFetchedError", "add_options", "is_rank", "variants"]


class NotFetchedError(SystemExit):
    """A ScaLAPACK that could not be fetched."""


def add_options(parser: argparse.ArgumentParser, *, pairs: int, settles: bool = False) -> None:
    """Add ``--pairs``, ``--quick``, ``--results``, ``--settle`` if asked to, and what a launch tells its ranks."""
    parser.add_argument("--pairs", type=int, default=pairs, help="measured rounds per case")
    if settles:
        parser.add_argument(
            "--settle", type=float, default=SETTLE_SECONDS, metavar="SECONDS",
            help="how long ranks sleep before each run; less is enough with a core to spare for each rank",
        )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small matrices: does it run?")
    results.add_option(parser)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # where a launch leaves its rows
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)


def is_rank(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Return whether this process is a rank of a launch; end if it is one of the user's."""
    if on_ranks() and not options.rank_of:
        parser.error("it starts its ranks itself: leave mpirun out")
    return on_ranks()


class Launches:
    """Runs a benchmark on ranks, once per ScaLAPACK and number of ranks, and writes what they measured.

    Args:
        module: the benchmark.
        options: the command line's.
    """

    def __init__(self, module: str, options: argparse.Namespace) -> None:
        self._module, self._options = module, options
        self._about = {"machine": machine(), "versions": versions()}
        print_facts(*self._about.values())
        self._directory = results.directory_of(options)

    def run(
        self, launch: str, nranks: int, benchmark: str, environ: Mapping[str, str] | None = None, **how: Any
    ) -> None:
        """Run one launch, and save its rows with the other cases of an earlier run that was like it.

        Args:
            launch: "debian", "mkl", or another name, which needs no ScaLAPACK.
            nranks: number of ranks.
            benchmark: name of the file of results.
            environ: more variables for the ranks.
            how: ``reference``, ``sample`` and ``options`` of ``results.Run``.

        Raises:
            NotFetchedError: the ScaLAPACK could not be fetched.
        """
        variables = {**_environment(launch), **(environ or {})}
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch, "rows.json")
            given = [*sys.argv[1:], "--rows", str(output), "--rank-of", launch]
            run_ranks(self._module, given, nranks, variables)
            rows = json.loads(output.read_text())
        if self._directory is not None:
            run = results.Run(
                benchmark=benchmark, date=results.today(), commit=results.this_commit(), ranks=nranks, gpus=0,
                **self._about, rows=rows,
                **{"reference": "pblasmp", "sample": "all", "options": results.options_of(self._options), **how},
            )  # fmt: skip
            run = results.with_earlier(run, self._directory)
            print(f"\nall times: {results.save(run, self._directory)}")


def _environment(launch: str) -> dict[str, str]:
    """Fetch a ScaLAPACK, and return the variables with which its ranks start."""
    if launch not in ("debian", "mkl"):
        return {}
    try:
        libraries = fetch(launch)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotFetchedError(f"{launch}: its ScaLAPACK could not be fetched: {error}") from None
    return {"PBLASMP_BLAS": "mkl", "LD_LIBRARY_PATH": str(libraries)} if launch == "mkl" else {}


def variants(slk: ScaLAPACK, call: Callable[[], Any]) -> Mapping[str, Callable[[], Any]]:
    """Return what a call of ScaLAPACK contends as: Debian's as shipped, and with PBLAS's logical block raised."""
    if slk.flavor == "mkl":
        return {"mkl": call}

    def with_block(block: int) -> Any:
        slk.logical_block = block
        return call()

    return {"debian": lambda: with_block(32), "debian-256": lambda: with_block(256)}
