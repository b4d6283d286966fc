# SPDX-License-Identifier: Apache-2.0
"""Fetch the ScaLAPACKs that the benchmarks compare with, and check them: ``python -m benchmarks.fetch_scalapack``.

MKL's comes from its wheel, Debian's from the distribution's packages, as does ELPA with its Open MPI. Nothing is
installed: the shared objects are unpacked into $PBLASMP_CACHE (~/.cache/pblasmp).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from benchmarks.ranks import on_ranks, run_ranks  # noqa: E402
from reference.elpa import locate_elpa  # noqa: E402
from reference.scalapack import Flavor, ScaLAPACK, cache, locate  # noqa: E402

_DEBIAN = ("libscalapack-mpich2.2", "libopenblas0-pthread", "libgfortran5", "libquadmath0")
_MKL = (
    "rt",
    "core",
    "sequential",
    "intel_lp64",
    "scalapack_lp64",
    "blacs_intelmpi_lp64",
    "blacs_openmpi_lp64",
)
_MKL_KERNELS = ("def", "mc3", "avx2", "avx512", "avx10")

# Debian's ScaLAPACK asks for a library called libmpich.so.12; wheels call theirs libmpi.so.12. This one
# stands in for it, and being loaded first it also answers PBLAS's question for its logical block.
_SHIM = """
int logical_block = 32;
int pilaenv_(const int *context, const char *precision) { return logical_block; }
"""


def fetch_mkl(target: Path, work: Path) -> None:
    """Download MKL's wheel with pip and unpack the sequential layer, ScaLAPACK and BLACS."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "-d", work, "mkl"], check=True)
    with zipfile.ZipFile(next(work.glob("mkl-*.whl"))) as wheel:
        for member in wheel.namelist():
            name = Path(member).name
            if name.partition(".so")[0].removeprefix("libmkl_") in (*_MKL, *_MKL_KERNELS):
                with wheel.open(member) as source, (target / name).open("wb") as file:
                    shutil.copyfileobj(source, file)


def fetch_debian(target: Path, work: Path) -> None:
    """Download Debian's packages with apt-get and unpack their libraries; build the stand-in for MPICH."""
    subprocess.run(["apt-get", "download", *_DEBIAN], cwd=work, check=True, stdout=subprocess.DEVNULL)
    for package in sorted(work.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, work / "x"], check=True)
    for path in (work / "x").rglob("*.so*"):
        shutil.copy2(path, target / path.name, follow_symlinks=False)
    source = work / "shim.c"
    source.write_text(_SHIM)
    library = ["-shared", "-fPIC", "-Wl,-soname,libmpich.so.12"]
    subprocess.run(["cc", *library, "-o", target / "libmpich.so.12", source], check=True)


def fetch_elpa(target: Path, work: Path) -> None:
    """Download Debian's ELPA and Open MPI with apt-get, and what of theirs is not installed, and unpack all."""
    asked = [
        "apt-get",
        "install",
        "-s",
        "--no-install-recommends",
        "libelpa19",
        "openmpi-bin",
        "libopenblas0-pthread",
    ]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    packages = [line.split()[1] for line in told.splitlines() if line.startswith("Inst ")]
    subprocess.run(["apt-get", "download", *packages], cwd=work, check=True, stdout=subprocess.DEVNULL)
    for package in sorted(work.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, target], check=True)


def fetch(flavor: Flavor | Literal["elpa"]) -> Path:
    """Return the directory of this library, fetching it first where it is missing."""
    found = locate_elpa() if flavor == "elpa" else locate(flavor)
    if found is not None:
        return found
    print(f"fetching {flavor} into {cache()} ...", file=sys.stderr, flush=True)
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache(), prefix="fetch-") as scratch:
        target, work = Path(scratch, flavor), Path(scratch, "work")
        target.mkdir()
        work.mkdir()
        {"mkl": fetch_mkl, "debian": fetch_debian, "elpa": fetch_elpa}[flavor](target, work)
        target.rename(cache() / flavor)
    return cache() / flavor


def check(flavor: Flavor) -> None:
    """Compare p?gemm with NumPy: types, ops, ragged blocks, sources. Collective over four ranks."""
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    slk = ScaLAPACK(flavor, comm)
    context = slk.grid(2, 2)
    place = divmod(comm.rank, 2)
    m, n, k = 117, 89, 111

    def distribute(x: np.ndarray, block: tuple[int, int], source: tuple[int, int]) -> tuple:
        mine = [
            np.flatnonzero((np.arange(extent) // nb + first) % 2 == here)
            for extent, nb, first, here in zip(x.shape, block, source, place, strict=True)
        ]
        local = np.asfortranarray(x[np.ix_(*mine)])
        return local, slk.descriptor(context, x.shape, block, source, max(1, len(mine[0]))), np.ix_(*mine)

    for dtype in ("float32", "float64", "complex64", "complex128"):
        for op_a, op_b in ("NN", "TN", "CN", "NT", "TT"):
            rng = np.random.default_rng(7)
            op = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.T.conj()}
            x, y, z = (
                (rng.integers(-4, 5, s) + 1j * rng.integers(-4, 5, s)).astype(dtype)
                if dtype[0] == "c"
                else rng.integers(-4, 5, s).astype(dtype)
                for s in ((m, k) if op_a == "N" else (k, m), (k, n) if op_b == "N" else (n, k), (m, n))
            )
            a, desc_a, _ = distribute(x, (17, 13), (1, 0))
            b, desc_b, _ = distribute(y, (19, 11), (0, 1))
            c, desc_c, mine = distribute(z, (7, 23), (1, 1))
            slk.gemm(op_a, op_b, m, n, k, 2, a, desc_a, b, desc_b, -1, c, desc_c)
            expected = 2 * (op[op_a](x) @ op[op_b](y)) - z
            if not np.array_equal(c, expected[mine]):
                raise SystemExit(f"ScaLAPACK ({flavor}) {dtype} {op_a}{op_b}: wrong on rank {comm.rank}")
    slk.gridexit(context)
    if comm.rank == 0:
        print(f"ScaLAPACK ({flavor}): p?gemm right in 4 types x 5 op pairs on 2x2 ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["mkl", "debian", "elpa"], help="one of them; ELPA only so")
    only = parser.parse_args().only
    for flavor in (only,) if only else ("mkl", "debian"):
        if on_ranks():
            check(flavor)
        else:
            print(f"{flavor}: {fetch(flavor)}")
            if flavor != "elpa":
                run_ranks("benchmarks.fetch_scalapack", ["--only", flavor], 4)


if __name__ == "__main__":
    main()
