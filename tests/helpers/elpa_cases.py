# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues by ELPA beside NumPy's: cases for ranks; as a program, under the MPI that ELPA is built for."""

from __future__ import annotations

import sys

import numpy as np

import pblasmp as pb
from tests.helpers import spectral_cases
from tests.helpers.factor_cases import TYPES, placed
from tests.helpers.spectral_cases import KINDS


def cases(ctx: pb.Context, rng: np.random.Generator, count: int) -> None:
    """Cases at random, in layouts in which ELPA computes and in others, and the smallest matrices."""
    for i in range(count):
        dtype, kind = TYPES[i % len(TYPES)], KINDS[(i // len(TYPES) + i) % len(KINDS)]
        place = spectral_cases.good if rng.integers(2) else placed
        n = int(rng.integers(max(1, ctx.size), 50))
        spectral_cases.eigh(ctx, rng, dtype, n, "elpa", place=place, kind=kind)
    spectral_cases.eigh(ctx, rng, "complex128", 1, "elpa", kind="all")
    whole = np.diag(np.arange(8.0)) + 1
    for size in (1e-70, 1e-5, 1e70):
        w = pb.linalg.eigvalsh(ctx.scatter(whole * size, block=2), algo="elpa") / size
        assert np.allclose(w, np.linalg.eigvalsh(whole)), f"{size}: {w}"
    w, v = pb.linalg.eigh(ctx.zeros((0, 0)), algo="elpa")
    assert (w.shape, v.shape) == ((0,), (0, 0))


def main() -> None:
    """Run the cases on these ranks; the first says that they are right."""
    from mpi4py import MPI

    with pb.Context(MPI.COMM_WORLD, engine="host") as ctx:
        cases(ctx, np.random.default_rng(111), int(sys.argv[1]))
        if ctx.rank == 0:
            print("right", flush=True)


if __name__ == "__main__":
    main()
