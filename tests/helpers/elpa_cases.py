# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues by ELPA beside NumPy's: cases for ranks; as a program, under the MPI that ELPA is built for."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

import pblasmp as pb
from tests.helpers import spectral_cases
from tests.helpers.factor_cases import TYPES, placed
from tests.helpers.spectral_cases import KINDS


def cases(ctx: pb.Context, rng: np.random.Generator, count: int) -> Iterator[tuple[str, str | None]]:
    """Yield cases at random, in layouts in which ELPA computes and in others, and the smallest matrices."""
    for i in range(count):
        dtype, kind = TYPES[i % len(TYPES)], KINDS[(i // len(TYPES) + i) % len(KINDS)]
        place = spectral_cases.good if rng.integers(2) else placed
        n = int(rng.integers(max(1, ctx.size), 50))
        yield spectral_cases.eigh(ctx, rng, dtype, n, "elpa", place=place, kind=kind)
    yield spectral_cases.eigh(ctx, rng, "complex128", 1, "elpa", kind="all")
    whole = np.diag(np.arange(8.0)) + 1
    for size in (1e-70, 1e-5, 1e70):
        w = pb.linalg.eigvalsh(ctx.scatter(whole * size, block=2), algo="elpa") / size
        yield f"{size}", None if np.allclose(w, np.linalg.eigvalsh(whole)) else f"{w}"
    w, v = pb.linalg.eigh(ctx.zeros((0, 0)), algo="elpa")
    yield "empty", None if w.shape == (0,) and v.shape == (0, 0) else f"{w} {v.shape}"


def main() -> None:
    """Run the cases on these ranks, and say on the first what is wrong."""
    from mpi4py import MPI

    wrong = []
    with pb.Context(MPI.COMM_WORLD, engine="host") as ctx:
        rng = np.random.default_rng(111)
        wrong = [f"{case}: {error}" for case, error in cases(ctx, rng, int(sys.argv[1])) if error]
        if ctx.rank == 0:
            print("\n".join(wrong) or "right", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
