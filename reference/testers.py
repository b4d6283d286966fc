# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's own testers, as Debian has compiled them, with pblasmp preloaded.

They check the PBLAS by itself, and ScaLAPACK's factorizations and solvers, which call it. Every product goes to pblasmp
(``--min 0``); what it leaves to ScaLAPACK is counted. Needs Linux on x86-64, ``apt-get``, a C compiler, the wheel of
MPICH, and Debian's ScaLAPACK: ``python -m benchmarks.fetch_scalapack --only debian``.

Debian compiles no drivers of the redistribution. Those are compiled here, from the directory of a ScaLAPACK source tree
that ``PBLASMP_SCALAPACK_SOURCE`` names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pblasmp import preload
from pblasmp.errors import LibraryNotFoundError
from pblasmp.launch import find_launcher
from reference.scalapack import PATIENT, cache, locate

__all__ = ["RESULTS", "SOURCE", "TESTERS", "Outcome", "Tester", "fetch", "run"]

RESULTS = Path(__file__).with_suffix(".json")
"""What ``python -m benchmarks.testers --save`` writes, and the docs show."""
RANKS = 4
_ENDLESS = 10**6  # larger than every matrix
SOURCE = "PBLASMP_SCALAPACK_SOURCE"
"""The variable that names a ScaLAPACK source tree."""
_PACKAGES = ("scalapack-mpi-test", "scalapack-test-common")
# MPICH's wheel has no Fortran, of which the testers use the clock.
_CLOCK = "double MPI_Wtime(void);\ndouble mpi_wtime_(void) { return MPI_Wtime(); }\n"


@dataclass(frozen=True, slots=True)
class Tester:
    """A tester and its input.

    Attributes:
        program: its name in Debian's folder.
        data: the name of its input file, as shipped.
        about: what it tests.
        estimates: whether it also tests condition estimates, in which ScaLAPACK itself may hang.
    """

    program: str
    data: str
    about: str
    estimates: bool = True

    @property
    def vectors(self) -> bool:
        """Whether it tests levels 1 and 2, which ScaLAPACK's own routines call on a part of the grid."""
        return self.about in ("level-1 PBLAS", "level-2 PBLAS")

    @property
    def driver(self) -> bool:
        """Whether it is a driver of the redistribution, which is compiled from its source."""
        return self.data.endswith("MR2D.dat")


TESTERS = (
    *(
        Tester(
            f"PBLAS/{letter}pb{level}tst",
            f"PBLAS/P{letter.upper()}BLAS{level}TST.dat",
            f"level-{level} PBLAS",
        )
        for level in (1, 2, 3)
        for letter in "sdcz"
    ),
    *(
        Tester(f"x{letter}{name}", f"{name.upper()}.dat", about, estimates=False)
        for name, about in (
            ("llt", "Cholesky factorization and solves"),
            ("lu", "LU factorization and solves"),
            ("qr", "QR and other orthogonal factorizations"),
            ("ls", "least squares"),
            ("inv", "inverses"),
        )
        for letter in "sdcz"
    ),
    Tester("xdtrd", "TRD.dat", "reduction to tridiagonal form"),
    *(Tester(program, "SEP.dat", "eigenvalues of symmetric matrices") for program in ("xdsep", "xdgsep")),
    Tester("xdsyevr", "SEPR.dat", "eigenvalues of symmetric matrices"),
    *(
        Tester(f"x{letter}{name}mr", f"{name.upper()}MR2D.dat", "moves from one grid to another")
        for name in ("ge", "tr")
        for letter in "sdcz"
    ),
)
"""What is run by default."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tester said, and who computed the products of its process 0.

    Attributes:
        program, about: of the tester.
        passed, total: tests, without those that it skips.
        by_pblasmp, by_library: calls.
        seconds, grid_seconds: what all these calls took, and pblasmp's grids.
    """

    program: str
    about: str
    passed: int
    total: int
    by_pblasmp: int
    by_library: int
    seconds: float
    grid_seconds: float


def fetch() -> Path:
    """Return the directory of Debian's testers, fetching and unpacking them if they are not in the cache.

    Raises:
        LibraryNotFoundError: there is no apt-get, or it does not have them.
    """
    place = cache() / "scalapack-testers"
    if not place.exists():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            work, tree = Path(scratch), Path(scratch, "tree")
            try:
                subprocess.run(
                    ["apt-get", "-q", "download", *_PACKAGES], cwd=work, check=True, capture_output=True
                )
                for package in work.glob("*.deb"):
                    subprocess.run(["dpkg", "-x", package, tree], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise LibraryNotFoundError(f"cannot fetch {' and '.join(_PACKAGES)}: {error}") from None
            (work / "clock.c").write_text(_CLOCK)
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-o", tree / "libclock.so", work / "clock.c"], check=True
            )
            tree.rename(place)
    return place


def run(
    tester: Tester,
    ranks: int = RANKS,
    limit: float = 600,
    grids: int | None = None,
    *,
    by_library: bool = False,
) -> Outcome:
    """Run a tester with all calls preloaded, and return what came out. Local; starts ranks.

    Args:
        tester: which one.
        ranks: how many.
        limit: seconds.
        grids: how many of its process grids are tested, the first ones; by default all.
        by_library: leave all calls to ScaLAPACK, and only take their time.

    Raises:
        LibraryNotFoundError: a part that it needs is missing.
        RuntimeError: it does not come to its end.
    """
    scalapack, mpi = locate("debian"), Path(sys.prefix, "lib", "libmpi.so.12")
    if scalapack is None or not mpi.exists():
        raise LibraryNotFoundError("the testers need Debian's ScaLAPACK and the wheel of MPICH")
    place = fetch()
    source = os.environ.get(SOURCE)
    if tester.driver and not source:
        raise LibraryNotFoundError(f"{tester.program}: {SOURCE} names no ScaLAPACK source tree")
    drivers = Path(source or "", "REDIST", "TESTING")
    text = ((drivers if tester.driver else place / "usr/share/scalapack") / tester.data).read_text()
    text = re.sub(r"(?m)^T(\s+logical flag, T to test error)", r"F\1", text)  # errors are the library's own
    if not tester.estimates:
        text = re.sub(r"(?m)^T(\s+\(T or F\))", r"F\1", text)
    if grids is not None:
        text = re.sub(r"(?m)^\s*\d+(\s+[nN]umber of process(or)? grids)", rf"{grids}\1", text)
    launcher = find_launcher()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, Path(tester.data).name).write_text(text)
        variables = launcher.environment() | preload.environment(_ENDLESS if by_library else 0, "host")
        if tester.vectors and not by_library:
            variables[preload.VECTORS] = "1"
        counts = variables[preload.COUNTS] = str(Path(folder, "counts"))
        loaded = f"{variables.pop('LD_PRELOAD')}:{place / 'libclock.so'}:{mpi}"
        variables |= {"LD_LIBRARY_PATH": str(scalapack), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        variables |= PATIENT  # some grids leave processes out, which wait in MPI for the next one
        program = place / "usr/lib/x86_64-linux-gnu/scalapack/mpich-tests" / tester.program
        if tester.driver:
            program = _compiled(drivers / f"p{tester.program[1:]}drv.c", Path(folder), scalapack)
        done = subprocess.run(
            launcher.command(ranks, ["env", f"LD_PRELOAD={loaded}", str(program)]),
            cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, errors="replace",
            timeout=limit, check=False,
        )  # fmt: skip
        ended = re.search(r"END OF TESTS", done.stdout, re.IGNORECASE) or tester.driver
        if done.returncode or not ended:
            raise RuntimeError(
                f"{tester.program}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )
        calls = preload.Calls.read(Path(counts))
    seconds = calls.pblasmp_seconds + calls.library_seconds
    return Outcome(
        tester.program, tester.about, *_tests(done.stdout), calls.by_pblasmp, calls.by_library, seconds,
        calls.grid_seconds,
    )  # fmt: skip


def _compiled(source: Path, folder: Path, scalapack: Path) -> Path:
    """Return the program that a driver's source makes."""
    program, library = folder / source.stem, next(scalapack.glob("libscalapack-mpich.so*"))
    options = ["-std=gnu89", "-w", "-DAdd_", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(["cc", *options, "-o", program, source, library, "-lm"], check=True)
    return program


def _tests(text: str) -> tuple[int, int]:
    """Return how many tests passed, and how many were run."""
    if planned := re.search(r"/+ (\d+) tests", text):
        return text.count("TEST PASSED OK"), int(planned[1])
    if rows := re.findall(r"^\s*\|\s+P\w+\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s*$", text, re.MULTILINE):
        total, passed, _, skipped = (sum(int(row[i]) for row in rows) for i in range(4))
        return passed, total - skipped
    counted = {
        word: int(count) for count, word in re.findall(r"(\d+) tests completed and (passed|failed)", text)
    }
    return counted.get("passed", 0), counted.get("passed", 0) + counted.get("failed", 0)
