# SPDX-License-Identifier: Apache-2.0
"""Names of ScaLAPACK and BLACS that are not here, and what to use."""

from __future__ import annotations

import re

__all__ = ["MISSING", "instead_of"]

MISSING = {
    "agemv, asymv, ahemv, atrmv": "products of absolute values: `abs(A)` first",
    "blacs_set, blacs_setup, blacs_abort, blacs_freebuff": "nothing to set: `gridexit` ends a grid",
    "sl_init": '`gridinit(None, "Row", nprow, npcol)`',
    "sl_gridreshape": "`blacs_gridmap`",
    "sys2blacs_handle, blacs2sys_handle, free_blacs_system_handle": "`gridinit` takes an mpi4py communicator",
    "slboot, slenable, sldisable, sltimer, slcombine, slinquire, dwalltime00, dcputime00": (
        "`time.perf_counter`, `time.process_time`, mpi4py's reductions"
    ),
    "gesd2d, gerv2d, trsd2d, trrv2d, gebs2d, gebr2d, trbs2d, trbr2d, gsum2d, gamx2d, gamn2d": "mpi4py's own calls",
    "pb_topget, pb_topset, pilaenv, pjlaenv": "nothing to tune: `algo=` takes another algorithm",
    "chk1mat, pchk1mat, pchk2mat, pxerbla": "every call here checks its arguments on all processes",
    "pielset, pielget, pigemr2d, pitrmr2d, pilaprnt": "integers: in float64 they are exact up to 2^53",
    "lamch": "`numpy.finfo`",
    "laread, lawrite": "`ctx.load`, `A.save`",
    "matadd": "`geadd`",
    "rscl, srscl, drscl": "`scal`",
    "elset2": "`elget`, then `elset`",
    "lanhs": "`lange`, with zeros below the subdiagonal",
    "lassq, lacon, laqge, laqsy, lacgv": "`A.norm()`; of the others ScaLAPACK's own",
    "gecon, pocon, trcon": "`pb.linalg.cond_estimate(a)`",
    "gesvx, posvx, gerfs, porfs, geequ, poequ": (
        "`pb.linalg.solve`, with refinement as in the example; ScaLAPACK's own"
    ),
    "gelqf, geqlf, gerqf, geqpf, tzrzf, ggqrf, ggrqf": "`pb.linalg.qr`, of `a` or `a.T`; others ScaLAPACK's own",
    "orglq, orgql, orgrq, unglq, ungql, ungrq": "with those: ScaLAPACK's own",
    "ormlq, ormql, ormrq, ormrz, ormbr, ormhr, ormtr, unmlq, unmql, unmrq, unmrz, unmbr, unmhr, unmtr": (
        "with those, and with reductions: ScaLAPACK's own"
    ),
    "lapiv, lapv2, laswp": "`pb.linalg.lu_solve((lu, piv), b)` exchanges rows itself",
    "gbtrf, gbtrs, gbsv, pbtrf, pbtrs, pbsv, dbtrf, dbtrs, dbsv, dttrf, dttrs, dtsv, pttrf, pttrs, ptsv": (
        "band matrices: ScaLAPACK's own"
    ),
    "gebrd, gehrd, gebal, sytrd, syntrd, syttrd, hetrd, hentrd, hettrd, sygst, syngst, hegst, hengst": (
        "reductions: ScaLAPACK's own"
    ),
    "hseqr, stebz, stedc, stein, trevc, trord, trsen": "eigenvalues of reduced matrices: ScaLAPACK's own",
}
"""Names of ScaLAPACK that are not here, without P and the letter of the type, and what to use."""

_PAGE = 'see "Porting from ScaLAPACK" (docs/porting.md)'


def instead_of(name: str) -> str:
    """Return what an error says of a name, in lower case, that is not here; "" if it is none of ScaLAPACK's. Local."""
    routine = re.fullmatch("p[sdcz]([a-z][a-z0-9]+)", name)
    message = re.fullmatch("[sdczi]([a-z]+2d)", name)  # of BLACS
    forms = {name, *(found[1] for found in (routine, message) if found)}
    for names, text in MISSING.items():
        if forms & {*names.split(", ")}:
            return f": {text.replace('`', '')}; {_PAGE}"
    return f": if ScaLAPACK has it, call ScaLAPACK's own on the same memory; {_PAGE}" if routine else ""
