# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's TOOLS: descriptors, and the place of an index. 1-based, as in ScaLAPACK; processes count from 0."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import short_repr
from ..layout import numroc as _numroc
from ..layout.descriptor import is_integer
from .arguments import Faults
from .grids import gridinfo

_INT32_MAX = 2**31 - 1


def descinit(
    m: int, n: int, mb: int, nb: int, irsrc: int, icsrc: int, ictxt: int, lld: int
) -> NDArray[np.int32]:
    """Return the descriptor of an ``m`` × ``n`` matrix, nine integers (int32). Local.

    Errors count the arguments as ScaLAPACK does, whose first argument is the descriptor: ``m`` has number 2. On a
    process outside the grid (``ictxt`` is -1) the descriptor says so, and only the sizes are checked.

    Args:
        m: rows.
        n: columns.
        mb: rows of a block.
        nb: columns of a block.
        irsrc: process row that has the first row.
        icsrc: process column that has the first column.
        ictxt: the grid's context.
        lld: leading dimension of this process's local array: at least its number of rows, and at least 1.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, DESCINIT.
    """
    faults = Faults("descinit", ["desc", "m", "n", "mb", "nb", "irsrc", "icsrc", "ictxt", "lld"])
    m, n = faults.integer("m", m, 0), faults.integer("n", n, 0)
    mb, nb = faults.integer("mb", mb, 1), faults.integer("nb", nb, 1)
    irsrc, icsrc = faults.integer("irsrc", irsrc, 0), faults.integer("icsrc", icsrc, 0)
    lld = faults.integer("lld", lld, 1)
    nprow, npcol, myrow, _ = gridinfo(ictxt)
    if nprow == -1 and not (is_integer(ictxt) and ictxt == -1):
        faults.no_context("ictxt", ictxt)
    if nprow != -1:
        for name, source, extent in (("irsrc", irsrc, nprow), ("icsrc", icsrc, npcol)):
            if source >= extent:
                faults.add(name, f"expected less than {extent}, got {source}")
        if not faults and lld < (rows := _numroc(m, mb, myrow, irsrc, nprow)):
            faults.add("lld", f"expected at least {rows}, the rows of this process, got {lld}")
    faults.check()
    for name, value in (("m", m), ("n", n), ("mb", mb), ("nb", nb), ("lld", lld)):
        if value > _INT32_MAX:
            faults.add(name, f"a descriptor holds 32-bit integers, got {value}")
    faults.check()
    return np.array([1, ictxt, m, n, mb, nb, irsrc, icsrc, lld], dtype=np.int32)


def descset(
    m: int, n: int, mb: int, nb: int, irsrc: int, icsrc: int, ictxt: int, lld: int
) -> NDArray[np.int32]:
    """Return the descriptor of an ``m`` × ``n`` matrix as ``descinit`` does, without checking anything. Local.

    Args:
        m: rows.
        n: columns.
        mb: rows of a block.
        nb: columns of a block.
        irsrc: process row that has the first row.
        icsrc: process column that has the first column.
        ictxt: the grid's context.
        lld: leading dimension of the local array.

    Source: ScaLAPACK TOOLS, DESCSET.
    """
    return np.array([1, ictxt, m, n, mb, nb, irsrc, icsrc, lld], dtype=np.int32)


def iceil(inum: int, idenom: int) -> int:
    """Return ``inum / idenom``, rounded up. Local.

    Args:
        inum: a number, at least 0.
        idenom: a number, at least 1.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, ICEIL.
    """
    faults = Faults("iceil", ["inum", "idenom"])
    inum, idenom = faults.integer("inum", inum, 0), faults.integer("idenom", idenom, 1)
    faults.check()
    return -(-inum // idenom)


def ilcm(m: int, n: int) -> int:
    """Return the least common multiple. Local.

    Args:
        m: a number, at least 1.
        n: another one.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, ILCM.
    """
    faults = Faults("ilcm", ["m", "n"])
    m, n = faults.integer("m", m, 1), faults.integer("n", n, 1)
    faults.check()
    return math.lcm(m, n)


Integers = int | NDArray[np.int64]
"""An integer, or an array of them from arrays or sequences of integers."""


def numroc(n: Any, nb: int, iproc: Any, isrcproc: int, nprocs: int) -> Any:
    """Return how many of ``n`` rows or columns, in blocks of ``nb``, process ``iproc`` has. Local.

    Of arrays, which are broadcast, it returns an array.

    Args:
        n: extent, or an array of them.
        nb: block size.
        iproc: the process asked about, or an array of them.
        isrcproc: the process that has the first block.
        nprocs: number of processes.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, NUMROC.
    """
    plain = type(n) is type(nb) is type(iproc) is type(isrcproc) is type(nprocs) is int
    if not plain or n < 0 or nb < 1 or not (0 <= iproc < nprocs and 0 <= isrcproc < nprocs):
        faults = Faults("numroc", ["n", "nb", "iproc", "isrcproc", "nprocs"])
        n, nb = _integers(faults, "n", n, 0), faults.integer("nb", nb, 1)
        iproc, (isrcproc, nprocs) = (
            _integers(faults, "iproc", iproc, 0),
            _processes(faults, ["isrcproc", "nprocs"], [isrcproc, nprocs], raises=False),
        )
        if (largest := int(np.max(iproc, initial=0))) >= nprocs:
            faults.add("iproc", f"expected less than {short_repr(nprocs)}, got {short_repr(largest)}")
        faults.check()
    turn = (iproc - isrcproc) % nprocs
    blocks, rest = divmod(n, nb)
    rounds, extra = divmod(blocks, nprocs)
    if isinstance(n, int) and isinstance(iproc, int):
        return rounds * nb + (nb if turn < extra else rest if turn == extra else 0)
    return rounds * nb + np.where(turn < extra, nb, np.where(turn == extra, rest, 0))


def _integers(faults: Faults, name: str, value: Any, minimum: int) -> Integers:
    """Return an integer, or an array or sequence of them as an array; note what is wrong with it. Local."""
    if type(value) is int or not isinstance(value, (np.ndarray, list, tuple, range)) or np.ndim(value) == 0:
        return faults.integer(name, value, minimum)
    found = np.asarray(value)
    if found.size and found.dtype.kind not in "iu":
        faults.add(name, f"expected integers, got an array of {found.dtype}")
        return np.full(found.shape, minimum)
    found = found.astype(np.int64, copy=False)
    if found.size and (least := int(found.min())) < minimum:
        faults.add(name, f"expected at least {minimum}, got {least}")
    return found


def _processes(
    faults: Faults, names: Sequence[str], values: Sequence[Any], *, raises: bool = True
) -> list[int]:
    """Return process numbers, the last being how many there are; raise what is wrong with any argument, or note it."""
    *numbers, count = [
        faults.integer(name, value, 1 if name == names[-1] else 0)
        for name, value in zip(names, values, strict=True)
    ]
    for name, number in zip(names, numbers, strict=False):
        if number >= count:
            faults.add(name, f"expected less than {short_repr(count)}, got {short_repr(number)}")
    if raises:
        faults.check()
    return [*numbers, count]


def indxg2p(indxglob: Any, nb: int, iproc: int, isrcproc: int, nprocs: int) -> Any:  # noqa: ARG001
    """Return the process that has global index ``indxglob`` (from 1). Local.

    Args:
        indxglob: the index, or an array of them: then an array is returned.
        nb: block size.
        iproc: not used; the other tools have it.
        isrcproc: the process that has the first block.
        nprocs: number of processes.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, INDXG2P.
    """
    faults = Faults("indxg2p", ["indxglob", "nb", "iproc", "isrcproc", "nprocs"])
    indxglob, nb = _integers(faults, "indxglob", indxglob, 1), faults.integer("nb", nb, 1)
    isrcproc, nprocs = _processes(faults, ["isrcproc", "nprocs"], [isrcproc, nprocs])
    return (isrcproc + (indxglob - 1) // nb) % nprocs


def indxg2l(indxglob: Any, nb: int, iproc: int, isrcproc: int, nprocs: int) -> Any:  # noqa: ARG001
    """Return the local index (from 1) of global index ``indxglob`` (from 1) on the process that has it. Local.

    Args:
        indxglob: the index, or an array of them: then an array is returned.
        nb: block size.
        iproc: not used; the other tools have it.
        isrcproc: not used.
        nprocs: number of processes.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, INDXG2L.
    """
    faults = Faults("indxg2l", ["indxglob", "nb", "iproc", "isrcproc", "nprocs"])
    indxglob, nb = _integers(faults, "indxglob", indxglob, 1), faults.integer("nb", nb, 1)
    (nprocs,) = _processes(faults, ["nprocs"], [nprocs])
    return nb * ((indxglob - 1) // (nb * nprocs)) + (indxglob - 1) % nb + 1


def indxl2g(indxloc: Any, nb: int, iproc: int, isrcproc: int, nprocs: int) -> Any:
    """Return the global index (from 1) of local index ``indxloc`` (from 1) of process ``iproc``. Local.

    Args:
        indxloc: the index, or an array of them: then an array is returned.
        nb: block size.
        iproc: the process.
        isrcproc: the process that has the first block.
        nprocs: number of processes.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, INDXL2G.
    """
    faults = Faults("indxl2g", ["indxloc", "nb", "iproc", "isrcproc", "nprocs"])
    indxloc, nb = _integers(faults, "indxloc", indxloc, 1), faults.integer("nb", nb, 1)
    iproc, isrcproc, nprocs = _processes(faults, ["iproc", "isrcproc", "nprocs"], [iproc, isrcproc, nprocs])
    turn = (iproc - isrcproc) % nprocs
    return nprocs * nb * ((indxloc - 1) // nb) + (indxloc - 1) % nb + turn * nb + 1


def infog1l(gindx: int, nb: int, nprocs: int, myroc: int, isrcproc: int) -> tuple[int, int]:
    """Return ``(lindx, rocsrc)``: where the part of one dimension from ``gindx`` on begins. Local.

    The first is the local index (from 1) at which this process's part of it begins, which may be one past the end; the
    second the process that has index ``gindx``.

    Args:
        gindx: global index, from 1.
        nb: block size.
        nprocs: number of processes.
        myroc: the process asked about.
        isrcproc: the process that has the first block.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, INFOG1L.
    """
    faults = Faults("infog1l", ["gindx", "nb", "nprocs", "myroc", "isrcproc"])
    gindx, nb = faults.integer("gindx", gindx, 1), faults.integer("nb", nb, 1)
    myroc, isrcproc, nprocs = _processes(faults, ["myroc", "isrcproc", "nprocs"], [myroc, isrcproc, nprocs])
    return _begin(gindx - 1, nb, isrcproc, nprocs, myroc)


def infog2l(
    grindx: int, gcindx: int, desc: Sequence[int], nprow: int, npcol: int, myrow: int, mycol: int
) -> tuple[int, int, int, int]:
    """Return ``(lrindx, lcindx, rsrc, csrc)``: where the sub-matrix from (grindx, gcindx) begins. Local.

    The first two are the local row and column (from 1) at which this process's part of it begins, which may be one
    past the end of the local array; the last two the process that has its first element.

    Args:
        grindx: global row, from 1.
        gcindx: global column, from 1.
        desc: the matrix's descriptor.
        nprow: process rows of its grid.
        npcol: process columns of its grid.
        myrow: process row asked about.
        mycol: process column asked about.

    Raises:
        ParameterError: an argument is illegal.

    Source: ScaLAPACK TOOLS, INFOG2L.
    """
    faults = Faults("infog2l", ["grindx", "gcindx", "desc", "nprow", "npcol", "myrow", "mycol"])
    grindx, gcindx = faults.integer("grindx", grindx, 1), faults.integer("gcindx", gcindx, 1)
    mb, nb, rsrc, csrc = _layout(faults, desc)
    (myrow, nprow), (mycol, npcol) = (
        _processes(faults, ["myrow", "nprow"], [myrow, nprow]),
        _processes(faults, ["mycol", "npcol"], [mycol, npcol]),
    )
    for entry, source, extent in ((7, rsrc, nprow), (8, csrc, npcol)):
        if source >= extent:
            faults.add("desc", f"expected less than {extent}, got {source}", entry)
    faults.check()
    lrindx, rsrc = _begin(grindx - 1, mb, rsrc, nprow, myrow)
    lcindx, csrc = _begin(gcindx - 1, nb, csrc, npcol, mycol)
    return lrindx, lcindx, rsrc, csrc


def _layout(faults: Faults, desc: Sequence[int]) -> tuple[int, int, int, int]:
    """Return MB, NB, RSRC and CSRC of a descriptor; note what is wrong with them."""
    try:
        mb, nb, rsrc, csrc = (operator.index(value) for value in list(desc)[4:8])
    except (TypeError, ValueError):
        faults.add("desc", f"expected nine integers, got {short_repr(desc)}")
        return 1, 1, 0, 0
    for entry, value, minimum in ((5, mb, 1), (6, nb, 1), (7, rsrc, 0), (8, csrc, 0)):
        if value < minimum:
            faults.add("desc", f"expected at least {minimum}, got {value}", entry)
    return max(1, mb), max(1, nb), rsrc, csrc


def _begin(start: int, block: int, source: int, nprocs: int, process: int) -> tuple[int, int]:
    """Return the local index (from 1) at which indices from ``start`` (from 0) begin on ``process``, and its owner."""
    owner = (source + start // block) % nprocs
    return _numroc(start, block, process, source, nprocs) + 1, owner
