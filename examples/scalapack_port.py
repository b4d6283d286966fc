# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/scalapack_port.py
"""A ScaLAPACK program ported line by line; docs/listings/triangular.f90 is the original.

Prints:
    L X = B holds
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pblasmp import pblas
from pblasmp.pblas import descinit, indxl2g, numroc

n, nrhs, nb = 400, 90, 32

ictxt = pblas.gridinit(None, "Row", 2, 2)
nprow, npcol, myrow, mycol = pblas.gridinfo(ictxt)
worst = 0.0
if myrow >= 0:
    np_ = numroc(n, nb, myrow, 0, nprow)
    nq = numroc(n, nb, mycol, 0, npcol)
    nqb = numroc(nrhs, nb, mycol, 0, npcol)
    lld = max(1, np_)
    desca = descinit(n, n, nb, nb, 0, 0, ictxt, lld)
    descb = descinit(n, nrhs, nb, nb, 0, 0, ictxt, lld)
    ig = indxl2g(np.arange(1, np_ + 1), nb, myrow, 0, nprow)[
        :, None
    ]  # arrays of indices: no loop over elements
    jg = indxl2g(np.arange(1, nq + 1), nb, mycol, 0, npcol)
    a = np.empty((lld, nq), order="F")
    a[:np_] = np.where(ig == jg, n, 1 / (ig + jg))
    b = np.ones((lld, nqb), order="F")
    x = b.copy(order="F")
    pblas.pdtrsm("L", "L", "N", "N", n, nrhs, 1.0, a, 1, 1, desca, x, 1, 1, descb)
    pblas.pdtrmm("L", "L", "N", "N", n, nrhs, 1.0, a, 1, 1, desca, x, 1, 1, descb)
    pblas.pdgeadd("N", n, nrhs, -1.0, b, 1, 1, descb, 1.0, x, 1, 1, descb)
    worst = np.abs(x).max()
    pblas.gridexit(ictxt)
worst = MPI.COMM_WORLD.allreduce(worst, op=MPI.MAX)
if MPI.COMM_WORLD.rank == 0:
    print("L X = B holds" if worst < 1e-12 else "L X /= B")
