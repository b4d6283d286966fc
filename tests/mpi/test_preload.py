# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK programs with calls by pblasmp: the example in C and one that moves, on Debian's ScaLAPACK."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pblasmp.launch import find_launcher, interpreter
from reference.scalapack import PATIENT, locate
from tests.helpers.slow import only_long

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120
SAID = re.compile(
    r"pblasmp: (\d+ of \d+) calls computed by pblasmp in (\S+) s"
    r"(?:, after (\S+) s for grids)?(?:; the others in (\S+) s)?"
)


def shares(stderr):
    """Return what the last line says: how many calls; the seconds of pblasmp's, of grids and of others, or None."""
    counts, *seconds = SAID.fullmatch(stderr.splitlines()[-1]).groups()
    return counts, *(None if each is None else float(each) for each in seconds)


def compiled(source, folder):
    """Return the program that a source makes, linked to Debian's ScaLAPACK and to the MPICH of this environment."""
    scalapack, mpi = locate("debian"), Path(sys.prefix, "lib")
    if scalapack is None:
        assert os.environ.get("PBLASMP_SCALAPACK") != "required", "no ScaLAPACK (debian)"
        pytest.skip("no ScaLAPACK (debian): python -m benchmarks.fetch_scalapack fetches it")
    if shutil.which("cc") is None or not (mpi / "libmpi.so.12").exists():
        pytest.skip("it needs a C compiler and the wheel of MPICH")
    path = folder / "program"
    subprocess.run(
        [
            "cc", "-Wall", "-Werror", "-o", path, source,
            f"-I{Path(sys.prefix, 'include')}", f"-L{mpi}", "-Wl,--no-as-needed", "-l:libmpi.so.12",
            f"-L{scalapack}", "-l:libscalapack-mpich.so.2.2",
            "-Wl,--disable-new-dtags", f"-Wl,-rpath,{mpi}:{scalapack}", "-Wl,--unresolved-symbols=ignore-all", "-lm",
        ],
        check=True,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The compiled example."""
    return compiled(ROOT / "examples" / "scalapack_program.c", tmp_path_factory.mktemp("program"))


@pytest.fixture
def preloaded(tmp_path, preload_cache):
    """Run a program with calls of at least some size by pblasmp, and return what came out."""

    def run(program, ranks, least, *arguments):
        launcher = find_launcher()
        command = launcher.command(ranks, [str(program), *map(str, arguments)])
        environment = launcher.environment() | PATIENT | {
            "XDG_CACHE_HOME": str(preload_cache), "LD_LIBRARY_PATH": str(locate("debian")), "OMP_NUM_THREADS": "1",
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
    [*only_long((4, 100, "3 of 3"), (2, 0, "3 of 3")), (2, 100, "3 of 3"), (1, 1000, "0 of 11")],
)
def test_large_products_are_pblasmps(preloaded, program, ranks, least, counts):
    """Two products of 160 × 160 matrices and a factorization; eight calls more within ScaLAPACK's own."""
    done = preloaded(program, ranks, least, 160, 32)
    assert done.stdout == "info 0, worst entry of S - L L^T small\n", done.stderr
    found, seconds, grids, others = shares(done.stderr)
    assert found == counts
    assert (seconds > 0, grids is not None, others is None) == ((least < 1000,) * 3)
    assert (others or seconds + grids) < LIMIT
    assert done.returncode == 0


def test_illegal_arguments_are_left_to_the_programs_library(preloaded, program):
    """A block size of 0: descinit has refused it; p?gemm of ScaLAPACK reports it and ends the job."""
    done = preloaded(program, 2, 0, 16, -3)
    assert done.returncode != 0
    assert "pblasmp preload" not in done.stderr
    assert "parameter" in (done.stdout + done.stderr).lower()


@pytest.mark.parametrize(("least", "counts"), [(0, "2 of 2"), (1, "0 of 2")])
def test_moves_between_grids(preloaded, tmp_path, least, counts):
    """Some processes are in one of the grids only. Without a least size moves are pblasmp's; else ScaLAPACK's."""
    done = preloaded(compiled(Path(__file__).with_name("scalapack_moves.c"), tmp_path), 4, least)
    assert done.stdout == "0 wrong\n", done.stderr
    assert shares(done.stderr)[0] == counts
    assert done.returncode == 0


def test_open_grids_of_one_shape_share_communicators(preloaded, tmp_path):
    """MPICH has 2048: a program that makes a grid in every step and frees none is to end where it ends by itself."""
    done = preloaded(compiled(Path(__file__).with_name("scalapack_grids.c"), tmp_path), 2, 0)
    found = re.fullmatch(r"(\d+) wrong, (\d+) taken\n", done.stdout)
    assert found, done.stderr
    assert int(found[1]) == 0
    assert int(found[2]) <= 10  # two shapes, one made twice at most
    assert shares(done.stderr)[0] == "120 of 120"
    assert done.returncode == 0
