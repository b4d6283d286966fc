# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues and singular values on CPU ranks, by ScaLAPACK and by LAPACK on one rank, beside NumPy's."""

import shutil
import subprocess

import numpy as np
import pytest
from scipy.linalg import block_diag

import pblasmp as pb
from pblasmp.engines.host import spectral_libraries
from pblasmp.engines.host.mpi_libraries import SCALAPACK, Scalapack
from tests.helpers import spectral_cases as cases
from tests.helpers.cases import refuses
from tests.helpers.factor_cases import TYPES, only, placed, positive
from tests.helpers.mpi import on_ranks, run_mpi, run_on_one_node
from tests.helpers.slow import draws, only_long
from tests.helpers.spectral_cases import KINDS, eigh_at_the_ends

la = pb.linalg


@pytest.mark.usefixtures("library")
@on_ranks(
    1, 2, 4, *only_long(3, 5, 6), runner=run_on_one_node
)  # between nodes some calls of Debian's wait for ever
def test_scalapack(comm):
    """Cases at random in unlike layouts; then "auto" at the ends of the types' ranges."""
    rng = np.random.default_rng(91 + comm.size)
    with pb.Context(comm, engine="host") as ctx, pytest.MonkeyPatch.context() as patch:
        for i in range(draws({1: 5, 2: 11}.get(comm.size, 3), long=60)):
            dtype, kind = TYPES[i % len(TYPES)], KINDS[(i // len(TYPES) + i) % len(KINDS)]
            place = cases.good if rng.integers(2) else placed
            n = int(rng.integers(1, 70))
            cases.eigh(ctx, rng, dtype, n, "scalapack", place=place, kind=kind)
            if i % 2:
                shape = int(rng.integers(1, 50)), int(rng.integers(max(3, ctx.size), 50))
                cases.svd(ctx, rng, dtype, shape, "scalapack", place=place)
        too_small(ctx)
        in_blocks(ctx, rng)
        if ctx.size != 2:
            return
        patch.setattr(spectral_libraries.METHODS[0], "most", 0)
        patch.setattr(spectral_libraries.METHODS[0], "singular", (0, 0))
        eigh_at_the_ends(ctx, rng, "complex128")
        cases.svd_at_the_ends(ctx, rng, "float32")
        whole = positive(rng, 30, "float64")
        with pb.plan(la.eigh, cases.good(ctx, rng, whole), subset_by_index=(0, 3)) as plan:
            said = str(plan.report())
            assert "scalapack" in said
            assert "p?syntrd" in said
            w, _ = plan()
            assert np.allclose(w, np.linalg.eigvalsh(whole)[:4]), "plan"
        patch.setattr(Scalapack, "call", lambda *_: 3)
        a = placed(ctx, rng, whole)
        words = ["eigh: the matrix has eigenvalues that the library does not find: INFO is 3"]
        refuses(ctx, pb.FactorizationError, words, la.eigh, a)
        words = ["svd: the matrix has singular values that the library does not find"]
        refuses(ctx, pb.FactorizationError, words, la.svd, a)


def in_blocks(ctx, rng):
    """A few eigenpairs of matrices that split into blocks, of which p?syevr finds others, or none for ever."""
    for equal in (False, True):
        parts = []
        for k in [1, 2, 3, 4] * 6:
            q, _ = np.linalg.qr(rng.standard_normal((k, k)))
            part = q * (np.ones(k) if equal else rng.standard_normal(k)) @ q.T
            parts.append((part + part.T) / 2)
        whole = block_diag(*parts)
        expected = np.linalg.eigvalsh(whole)
        for start in (0, 17, 46):
            a = ctx.scatter(whole, block=(7, 5))
            w, v = la.eigh(a, subset_by_index=(start, start + 12), algo="scalapack")
            right = np.allclose(w, expected[start : start + 13]) and pb.verify(la.eigh, a, found=(w, v))
            assert right, f"blocks {equal} from {start}: {w - expected[start : start + 13]}"


def too_small(ctx):
    """Matrices with fewer rows and columns than ranks, on which p?gesvd fails; the smallest that it takes."""
    for shape in ((1, 2), (2, 3), (1, 1), (3, 1), (4, 2), (2, 4)):
        whole = np.arange(1.0, 1 + np.prod(shape)).reshape(shape) ** 2
        a = ctx.scatter(whole, block=2)
        if (ctx.size > 1 and shape == (1, 2)) or (min(shape) > 1 and ctx.size > max(shape)):
            words = [
                "algo 'scalapack': p?gesvd fails, or never ends, on matrices with fewer rows and columns"
            ]
            refuses(ctx, pb.UnsupportedError, words, la.svd, a, algo="scalapack")
            continue
        u, s, vh = la.svd(a, algo="scalapack")
        assert np.allclose(u.allgather() * s @ vh.allgather(), whole), f"svd {shape}"


@pytest.mark.usefixtures("no_library")
@on_ranks(1, 3, *only_long(2, 4, 5, 6))
def test_lapack_without_a_library(ctx):
    """Small matrices without any library: the ends of the types' ranges, and what is wrong with arguments."""
    rng = np.random.default_rng(92)
    eigh_at_the_ends(ctx, rng, "complex64")
    cases.svd_at_the_ends(ctx, rng, "float64")
    small_and_near(ctx, rng, "lapack")
    without_elements(ctx)
    faults(ctx, rng)
    if ctx.size > 1:
        without_a_library(ctx)


def small_and_near(ctx, rng, algo):
    """A few eigenvalues near 0 of matrices whose elements are as small as those that LAPACK does not scale."""
    q, _ = np.linalg.qr(rng.standard_normal((21, 21)))
    of = np.logspace(-12, 0, 21)
    whole = q * of @ q.T
    for size in (1e-143, 1e-145):
        w = la.eigvalsh(ctx.scatter(whole * size, block=4), subset_by_index=(2, 4), algo=algo) / size
        assert abs(w - of[2:5]).max() < 1e-13, f"{algo} {size}"


def without_elements(ctx):
    a = ctx.zeros((6, 6), block=2)
    w, v = la.eigh(a[:0, :0])
    assert w.shape == (0,)
    assert v.shape == (0, 0)
    u, s, vh = la.svd(a[:4, :0])
    assert (u.shape, s.shape, vh.shape) == ((4, 0), (0,), (0, 0)), f"no columns: {u.shape} {vh.shape}"
    u, s, vh = la.svd(a[:4, :0], full_matrices=True)
    assert np.array_equal(u.allgather().T @ u.allgather(), np.eye(4)), "no columns, all of U"
    assert la.svdvals(a[:0, :]).shape == (0,) == la.eigvalsh(a[:0, :0]).shape, "no vectors: shapes"


def faults(ctx, rng):
    whole = positive(rng, 9, "float64")
    a, b = placed(ctx, rng, whole), placed(ctx, rng, np.diag([1.0] * 6 + [-1.0] * 3))
    upper = placed(ctx, rng, only("U", whole))
    w = np.linalg.eigvalsh(whole)
    with pb.plan(la.eigvalsh, upper, lower=False) as plan:
        assert np.allclose(plan(), w), "plan: a plan differs"
    found, (_, v) = la.eigvalsh(upper, uplo="U"), la.eigh(upper, b.H @ b, uplo="U")
    assert np.allclose(found, w)
    assert pb.verify(la.eigh, a, b.H @ b, found=(w, v))
    for value in (np.nan, np.inf):
        second = whole.copy()
        second[7, 5] = second[5, 7] = value
        found, v = la.eigh(a, placed(ctx, rng, second), subset_by_index=(1, 4), check=True)
        none = np.isnan(found).all() and np.isnan(v.allgather()).all() and v.shape == (9, 4)
        assert none, f"B with {value}: {found}"
        assert v.descriptor.block == a.descriptor.block, f"B with {value}: {found}"
    tall = placed(ctx, rng, whole[:, :4].copy())
    with pb.plan(la.svd, tall, full_matrices=True) as plan, pb.plan("svdvals", tall) as values:
        u, s, vh = plan()
        right = np.allclose(u.allgather()[:, :4] * s @ vh.allgather(), whole[:, :4]) and u.shape == (9, 9)
        assert right, f"plans of svd: {u.shape} {s}"
        assert np.allclose(values(), s), f"plans of svd: {u.shape} {s}"
    la.eigh(a), la.eigvalsh(a)  # for which no wrong call is taken
    argument = pb.ArgumentError
    for kind, words, function, args, how in (
        (argument, ["a: expected a square matrix, got 4 x 9"], la.eigh, (a[:4, :],), {}),
        (argument, ["lower: expected True or False, got 'X'"], la.eigh, (a,), {"lower": "X"}),
        (argument, ["uplo: expected 'L' or 'U', got 'l'"], la.eigh, (a,), {"uplo": "l"}),
        (argument, ["uplo: expected 'L' or 'U', got 3"], la.eigvalsh, (a, a), {"uplo": 3}),
        (argument, ["lower: expected True or False, got 3"], la.eigh, (a, b), {"lower": 3}),
        (argument, ["0 <= first <= last < 9, got (3, 9)"], la.eigh, (a,), {"subset_by_index": (3, 9)}),
        (argument, ["0 <= first <= last < 9, got (3, 2)"], la.eigvalsh, (a,), {"subset_by_index": [3, 2]}),
        (argument, ["subset_by_index: expected a pair of integers, got 3"], la.eigh, (a,),
         {"subset_by_index": 3}),
        (argument, ["expected a pair of integers, got (1.5, 2)"], la.eigh, (a, a),
         {"subset_by_index": (1.5, 2)}),
        (argument, ["uplo: expected 'L' or 'U', got 3"], la.eigvalsh, (a,), {"uplo": 3}),
        (argument, ["eigvals_only: expected True or False, got 'no'"], la.eigh, (a,), {"eigvals_only": "no"}),
        (argument, ["full_matrices: expected True or False, got 2"], la.svd, (a, 2), {}),
        (argument, ["b: expected 9 x 9 of float64, got 4 x 4 of float64"], la.eigh, (a, b[:4, :4]), {}),
        (argument, ["b: expected a DistributedMatrix, got"], la.eigh, (a, np.eye(9)), {}),
        (argument, ["a: expected one of", "got bfloat16"], la.svd, (a.astype("bfloat16"),), {}),
        (pb.UnsupportedError, ["'auto', 'lapack', 'elpa', 'scalapack' here, got 'mrrr'"], la.eigh, (a,),
         {"algo": "mrrr"}),
        (pb.FactorizationError, ["eigh: b: the matrix is not positive definite", "up to index 6"],
         la.eigh, (a, b), {}),
        (pb.UnsupportedError, ["a generalized problem is several calls"], pb.plan, (la.eigh, a, a), {}),
    ):  # fmt: skip
        refuses(ctx, kind, words, function, *args, **how)
    if ctx.size > 1:
        words = ["subset_by_index: expected a pair of integers, got a value of type Unreadable"]
        subset = (0, 3) if ctx.rank else Unreadable()
        refuses(ctx, argument, words, la.eigh, a, subset_by_index=subset)
        subset = (ctx.rank, 3)
        refuses(ctx, pb.RankMismatchError, ["first"], la.eigh, a, subset_by_index=subset)
        refuses(ctx, pb.RankMismatchError, [""], la.eigh, a, a if ctx.rank else None)


class Unreadable:
    """Raises what no caller expects."""

    def __iter__(self):
        raise RuntimeError

    __repr__ = __iter__


def without_a_library(ctx):
    """A large matrix, in an environment whose library is not there, or is for another MPI."""
    a = ctx.zeros((201, 201), block=32)
    words = [
        "scalapack: no ScaLAPACK at",
        "PBLASMP_SCALAPACK_LIBRARY names",
        "lapack: one rank would compute alone",
    ]
    refuses(ctx, pb.UnsupportedError, words, la.eigh, a)
    refuses(ctx, pb.UnsupportedError, words, la.svdvals, ctx.zeros((3, 2001)))
    assert ctx.size > 4 or (la.svdvals(a) == 0).all(), "none"
    w = la.eigvalsh(a, algo="lapack")
    assert (w == 0).all(), "by name"


SECOND = """

#include <stdlib.h>
#define ABORTS(name) int name(void) { abort(); }
ABORTS(MPI_Init) ABORTS(MPI_Initialized) ABORTS(MPI_Comm_rank) ABORTS(MPI_Comm_size) ABORTS(MPI_Comm_create)
ABORTS(MPI_Comm_group) ABORTS(MPI_Group_incl) ABORTS(MPI_Send) ABORTS(MPI_Isend) ABORTS(MPI_Recv) ABORTS(MPI_Bcast)
"""


def once(comm):
    rng = np.random.default_rng(93)
    with pb.Context(comm, engine="host") as ctx:
        cases.eigh(ctx, rng, "float64", 20, "scalapack", place=cases.good, kind="all")


def test_a_second_mpi_that_a_library_needs_is_not_called(library, tmp_path, monkeypatch):
    """That of a distribution's package beside the MPI of a wheel: what ScaLAPACK calls is the one of the process."""
    if shutil.which("cc") is None or not (library / "libmpich.so.12").exists():
        pytest.skip("no C compiler, or no ScaLAPACK of a distribution")
    for path in library.iterdir():
        (tmp_path / path.name).symlink_to(path)
    # Its own files: a library that is loaded already would be found by its inode.
    own = next(library.glob("libscalapack-mpich.so.*.*.*"))
    for path in tmp_path.glob("libscalapack-mpich.so*"):
        path.unlink()
    shutil.copy(own, tmp_path / "libscalapack-mpich.so.2.2")
    (tmp_path / "libmpich.so.12").unlink()
    (tmp_path / "second.c").write_text(SECOND)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libmpich.so.12", "-o", "libmpich.so.12", "second.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.setenv(SCALAPACK.environment, str(tmp_path))
    run_on_one_node(once, 2, launch=True)


def foreign(comm, wrong):
    with pb.Context(comm, engine="host") as ctx:
        a = ctx.eye(4)
        refuses(ctx, pb.UnsupportedError, wrong, la.eigh, a, algo="scalapack")


@pytest.mark.parametrize(
    "name", ["libscalapack-openmpi.so.2.2", "libscalapack.so", "libmkl_scalapack_lp64.so.2", ""]
)
def test_a_library_that_cannot_be_used(name, tmp_path, monkeypatch):
    """For another MPI, no library at all, MKL's without its BLACS, and an empty folder."""
    if name:
        contents = b"\0libmpi.so.40\0" if "openmpi" in name else b"nothing"
        (tmp_path / name).write_bytes(contents)
    monkeypatch.setenv(SCALAPACK.environment, str(tmp_path))
    words = {
        "libscalapack-openmpi.so.2.2": [
            "is built for Open MPI",
            "pip install",
            "scalapack]",
            "libscalapack-mpich2.2",
        ],
        "libscalapack.so": [f"{tmp_path}/libscalapack.so"],
        "libmkl_scalapack_lp64.so.2": ["has no BLACS for MPICH beside it", "pip install"],
        "": [f"no ScaLAPACK at {tmp_path}, which PBLASMP_SCALAPACK_LIBRARY names"],
    }[name]
    run_mpi(foreign, 2, wrong=words)
