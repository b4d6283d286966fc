# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/scalapack_solve.py
"""A program written for ScaLAPACK's pdgesv and pdposv: with these names from pblasmp.pblas nothing else changes.

Prints:
    pdgesv: INFO 0, A X = B holds
    pdposv: INFO 0, A X = B holds
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pblasmp import pblas
from pblasmp.pblas import descinit, indxl2g, numroc, pdgemm, pdgesv, pdposv

n, nrhs, nb = 300, 5, 32

ictxt = pblas.gridinit(None, "Row", 2, 2)
nprow, npcol, myrow, mycol = pblas.gridinfo(ictxt)
info = np.zeros(1, np.int32)
worst, infos = [0.0, 0.0], [0, 0]
if myrow >= 0:
    np_, nq = numroc(n, nb, myrow, 0, nprow), numroc(n, nb, mycol, 0, npcol)
    nqb = numroc(nrhs, nb, mycol, 0, npcol)
    lld = max(1, np_)
    desca = descinit(n, n, nb, nb, 0, 0, ictxt, lld)
    descb = descinit(n, nrhs, nb, nb, 0, 0, ictxt, lld)
    i = indxl2g(np.arange(1, np_ + 1), nb, myrow, 0, nprow)[:, None]
    j = indxl2g(np.arange(1, nq + 1), nb, mycol, 0, npcol)
    general = np.asfortranarray(np.cos(i * j) + 2.0 * (i == j))
    positive = np.asfortranarray(np.exp(-abs(i - j) / 10.0))
    b = np.asfortranarray(np.sin(i + np.arange(nqb)))
    for k, given in enumerate((general, positive)):
        a, x, residual = given.copy(order="F"), b.copy(order="F"), b.copy(order="F")
        if k == 0:
            ipiv = np.zeros(np_ + nb, np.int32)
            pdgesv(n, nrhs, a, 1, 1, desca, ipiv, x, 1, 1, descb, info)
        else:
            pdposv("L", n, nrhs, a, 1, 1, desca, x, 1, 1, descb, info)
        infos[k] = int(info[0])
        pdgemm("N", "N", n, nrhs, n, -1.0, given, 1, 1, desca, x, 1, 1, descb, 1.0, residual, 1, 1, descb)
        worst[k] = abs(residual).max(initial=0)
    pblas.gridexit(ictxt)
worst = [MPI.COMM_WORLD.allreduce(each, op=MPI.MAX) for each in worst]
if MPI.COMM_WORLD.rank == 0:
    for k, name in enumerate(("pdgesv", "pdposv")):
        print(f"{name}: INFO {infos[k]}, A X = B {'holds' if worst[k] < 1e-10 else 'does not hold'}")
