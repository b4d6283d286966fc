# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK programs with products by pblasmp: the example in C, on Debian's ScaLAPACK."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pblasmp.launch import find_launcher, interpreter
from reference.scalapack import locate

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The compiled example, linked to Debian's ScaLAPACK and to the MPICH of this environment."""
    scalapack, mpi = locate("debian"), Path(sys.prefix, "lib")
    if scalapack is None:
        assert os.environ.get("PBLASMP_SCALAPACK") != "required", "no ScaLAPACK (debian)"
        pytest.skip("no ScaLAPACK (debian): python -m benchmarks.fetch_scalapack fetches it")
    if shutil.which("cc") is None or not (mpi / "libmpi.so.12").exists():
        pytest.skip("it needs a C compiler and the wheel of MPICH")
    path = tmp_path_factory.mktemp("program") / "program"
    subprocess.run(
        [
            "cc", "-Wall", "-Werror", "-o", path, ROOT / "examples" / "scalapack_program.c",
            f"-L{mpi}", "-Wl,--no-as-needed", "-l:libmpi.so.12", f"-L{scalapack}", "-l:libscalapack-mpich.so.2.2",
            "-Wl,--disable-new-dtags", f"-Wl,-rpath,{mpi}:{scalapack}", "-Wl,--unresolved-symbols=ignore-all", "-lm",
        ],
        check=True,
    )  # fmt: skip
    return path


@pytest.fixture
def preloaded(program, tmp_path):
    """Run the example with pblasmp's products of at least some size, and return what came out."""

    def run(ranks, least, *arguments):
        launcher = find_launcher()
        command = launcher.command(ranks, [str(program), *map(str, arguments)])
        environment = launcher.environment() | {
            "XDG_CACHE_HOME": str(tmp_path), "LD_LIBRARY_PATH": str(locate("debian")), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        how = [*interpreter(), "-m", "pblasmp", "preload", f"--min={least}", "--engine=host", "--"]
        return subprocess.run(
            [*how, *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("ranks", "least", "counts"),
    [(4, 100, "3 of 3"), (2, 0, "3 of 3"), (1, 1000, "0 of 11")],
)
def test_large_products_are_pblasmps(preloaded, ranks, least, counts):
    """Two products of 160 × 160 matrices and a factorisation; eight calls more within ScaLAPACK's own."""
    done = preloaded(ranks, least, 160, 32)
    assert done.stdout == "info 0, worst entry of S - L L^T small\n", done.stderr
    assert done.stderr.splitlines()[-1] == f"pblasmp: {counts} calls computed by pblasmp"
    assert done.returncode == 0


def test_illegal_arguments_are_left_to_the_programs_library(preloaded):
    """A block size of 0: descinit has refused it; p?gemm of ScaLAPACK reports it and ends the job."""
    done = preloaded(2, 0, 16, -3)
    assert done.returncode != 0
    assert "pblasmp preload" not in done.stderr
    assert "parameter" in (done.stdout + done.stderr).lower()
