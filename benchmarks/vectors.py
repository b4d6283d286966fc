# SPDX-License-Identifier: Apache-2.0
"""Time the routines of levels 1 and 2 next to Debian's ScaLAPACK: ``python benchmarks/vectors.py``.

It starts its own CPU ranks. The results on two copies of the local arrays are compared first. Then both compute on the
same arrays, in turns: a copy lies elsewhere in memory, where it may take longer to read. The functions of
``pblasmp.pblas`` are timed, with the arguments that ScaLAPACK is given: a number of calls in a row between two
barriers, as iterative methods make them. A call alone takes less time than the barriers do. The first call after a
barrier finds nothing in the caches and takes as long as twenty of the shortest: so many are timed that Debian's take
4 ms. The floor is the least that a call takes: pdscal of one element, with its way through Python and its vote.

Debian's is timed twice: called from Python like any Fortran routine, by ctypes, which turns the arguments into pointers
in each call; and with pointers made beforehand, which leaves about what a Fortran program waits for.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launches import Launches, add_options, is_rank
from benchmarks.ranks import as_nodes, interleaved, paired, share_cores
from reference.scalapack import ScaLAPACK

GRIDS = ("1x1", "1x2", "2x2")
FLOOR = "floor"  # pdscal of one element
PREPARED = "debian-prepared"  # pointers to its arguments are made beforehand
VOTE = "vote"  # all that ranks do together in a call of the floor
_ENOUGH = 4e-3  # seconds that the calls between two barriers take at least
_MOST = 400  # calls: pdtrmv doubles x each time
CASES = (
    ("pdgemv", {"trans": "N"}), ("pdgemv", {"trans": "T"}), ("pdsymv", {"uplo": "L"}),
    ("pdtrmv", {"uplo": "L", "trans": "N", "diag": "N"}), ("pdtrsv", {"uplo": "L", "trans": "N", "diag": "N"}),
    ("pdger", {}), ("pdsyr", {"uplo": "L"}), ("pdsyr2", {"uplo": "L"}), ("pddot", {}), ("pdnrm2", {}),
    ("pdasum", {}), ("pdamax", {}), ("pdaxpy", {}), ("pdscal", {}), ("pdcopy", {}), ("pdswap", {}),
)  # fmt: skip


def arguments(
    name: str, flags: dict[str, str], n: int, arrays: dict[str, Any], descs: dict[str, Any]
) -> list[Any]:
    """Return the arguments of a call in PBLAS's order; vectors are columns."""
    import numpy as np

    from pblasmp.pblas.vector_functions import ROUTINES

    routine = ROUTINES[name]
    scalars = {"alpha": np.array([1.0]), "beta": np.array([1.0])}
    known: dict[str, Any] = {**flags, "m": n, "n": n, **scalars, "incx": 1, "incy": 1}
    known |= {each: np.zeros(1, np.int32 if each == "indx" else np.float64) for each in routine.numbers}
    for x in "axy":
        known |= {x: arrays[x], f"i{x}": 1, f"j{x}": 1, f"desc{x}": descs[x]}
    return [known[each] for each in routine.names]


def grid_of(nranks: int, options: argparse.Namespace) -> str:
    """Return the grid of so many ranks."""
    return next(each for each in options.grids if ranks_of(each) == nranks)


def ranks_of(grid: str) -> int:
    """Return how many ranks a grid has."""
    nprow, npcol = map(int, grid.split("x"))
    return nprow * npcol


def votes(ictxt: int, *, is_floor: bool) -> dict[str, Callable[[], Any]]:
    """Return the vote of a grid's ranks as a contender of the floor; nothing of other cases, and of one rank."""
    from pblasmp.comm import vote_on
    from pblasmp.pblas.grids import of_number

    grid = of_number(ictxt)
    if not is_floor or grid is None or grid.context.size == 1:
        return {}
    return {VOTE: partial(vote_on, grid.context.control, "the benchmark's vote", 1)}


def in_a_row(comm: Any, call: Callable[[], Any], options: argparse.Namespace) -> int:
    """Return how many calls are made between two barriers. Collective over comm."""
    if options.quick:
        return int(options.calls)
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(options.calls):
        call()
    comm.Barrier()
    seconds = comm.bcast((time.perf_counter() - start) / options.calls)
    return min(max(options.calls, math.ceil(_ENOUGH / seconds)), _MOST)


def time_case(
    comm: Any, slk: ScaLAPACK, name: str, flags: dict[str, str], n: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Compare the results of one case, then time both. Collective over comm."""
    import numpy as np

    from pblasmp import pblas
    from pblasmp.pblas.vector_functions import ROUTINES

    grid = tuple(map(int, grid_of(comm.size, options).split("x")))
    own, theirs = pblas.gridinit(None, "Row", *grid, engine="host"), slk.grid(*grid)
    nprow, npcol, myrow, mycol = pblas.gridinfo(own)
    rng, block = np.random.default_rng(comm.rank), options.block
    arrays, descs = {}, {}
    for x, width in (("a", n), ("x", 1), ("y", 1)):
        rows, cols = pblas.numroc(n, block, myrow, 0, nprow), pblas.numroc(width, block, mycol, 0, npcol)
        arrays[x] = np.asfortranarray(rng.standard_normal((max(1, rows), cols)) / n)
        descs[x] = [pblas.descinit(n, width, block, block, 0, 0, each, max(1, rows)) for each in (own, own)]
        descs[x][1][1] = theirs
    for i in range(0, n, block):  # so that systems can be solved
        if (i // block) % nprow == myrow and (i // block) % npcol == mycol:
            down, across = (i // block) // nprow * block, (i // block) // npcol * block
            part = arrays["a"][down : down + block, across : across + block]
            part[np.diag_indices(min(part.shape))] = 2
    mine, other = ({x: array.copy(order="F") for x, array in arrays.items()} for _ in range(2))
    size = 1 if name == FLOOR else n
    name = "pdscal" if name == FLOOR else name
    given = arguments(name, flags, size, mine, {x: each[0] for x, each in descs.items()})
    like = arguments(name, flags, size, other, {x: each[1] for x, each in descs.items()})
    given = [
        each.item() if isinstance(each, np.ndarray) and each.shape == (1,) and each[0] == 1 else each
        for each in given
    ]
    calls: dict[str, Callable[[], Any]] = {
        "pblasmp": partial(getattr(pblas, name), *given),
        "debian": partial(slk.call, f"{name}_", *like),
    }
    for call in calls.values():
        call()
    for x in ROUTINES[name].written:
        if not np.allclose(mine[x], other[x], rtol=0, atol=1e-12):
            raise SystemExit(f"{name}: the results differ on rank {comm.rank}")
    numbers = zip(given, like, strict=True)
    for found, expected in ((a, b) for a, b in numbers if isinstance(a, np.ndarray) and a.shape == (1,)):
        if not np.allclose(found, expected, rtol=1e-12, atol=0):
            raise SystemExit(f"{name}: {found} on rank {comm.rank}, ScaLAPACK has {expected}")
    like = arguments(name, flags, size, mine, {x: each[1] for x, each in descs.items()})
    del other
    calls["debian"], calls[PREPARED] = partial(slk.call, f"{name}_", *like), slk.prepare(f"{name}_", *like)
    calls |= votes(own, is_floor=size != n)
    count = in_a_row(comm, calls["debian"], options)

    def run(contender: str) -> None:
        for x in "xy":  # else they would grow or vanish
            mine[x][...] = arrays[x]
        call = calls[contender]
        for _ in range(count):
            call()

    contenders = {each: partial(run, each) for each in calls}
    seconds = interleaved(comm, contenders, options.pairs, settle=0, check=lambda *_: None)
    seconds = {each: [taken / count for taken in found] for each, found in seconds.items()}
    pblas.gridexit(own)
    slk.gridexit(theirs)
    about = {
        "routine": name if size == n else FLOOR,
        "options": "".join(flags.values()),
        "n": size,
        "grid": grid_of(comm.size, options),
        "block": block,
    }
    ratios = {each: paired(seconds, each, "pblasmp") for each in ("debian", PREPARED)}
    return {"case": about, "seconds": seconds, "ratios": ratios}


def rank_main(options: argparse.Namespace) -> None:
    """Time every case; rank 0 prints a row for each. Collective over COMM_WORLD."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    share_cores(comm)
    slk, rows = ScaLAPACK("debian", comm), []
    if comm.rank == 0:
        print(
            f"\n{grid_of(comm.size, options)}, blocks of {options.block}; Debian's time / pblasmp's, {options.pairs} "
            f"pairs of at least {options.calls} calls"
        )
        print("routine            n    pblasmp     debian   ratio   prepared   ratio")
    for n in options.n:
        for name, flags in (*CASES, (FLOOR, {})):
            if name == FLOOR:
                if n != options.n[-1]:
                    continue
            elif options.only and name not in options.only:
                continue
            row = time_case(comm, slk, name, flags, n, options)
            rows.append(row)
            if comm.rank == 0:
                words = f"{name:8} {''.join(flags.values()):4} {n:7d}"
                for each, seconds in row["seconds"].items():
                    words += f" {1e6 * median(seconds):8.0f}us"
                    words += f" {row['ratios'][each]:7.2f}" if each in row["ratios"] else ""
                print(words, flush=True)
    if comm.rank == 0:
        print(summary(rows))
        options.rows.write_text(json.dumps(rows))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return in how many rows pblasmp is not slower, and in how many even a call of one element would be."""
    *timed, floor = rows
    found, prepared = ([row["ratios"][each] for row in timed] for each in ("debian", PREPARED))
    ahead, still = (sum(ratio >= 1 for ratio in ratios) for ratios in (found, prepared))
    least = min(floor["seconds"]["pblasmp"])
    below = sum(median(row["seconds"][PREPARED]) < least for row in timed)
    return (
        f"pblasmp is not slower in {ahead} of {len(found)}, median {median(found):.2f}; prepared in {still}, "
        f"{median(prepared):.2f}; a call of one element takes at least {1e6 * least:.0f} us, Debian's prepared one "
        f"{1e6 * min(floor['seconds'][PREPARED]):.1f} us, and its whole call less than that floor in {below} rows"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=[256, 1024, 4096], help="orders of the matrices")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--calls", type=int, default=5, help="calls in a row, at least")
    add_options(parser, pairs=15)
    parser.add_argument("--nodes", type=int, default=1, help="simulated ones that the ranks are on")
    parser.add_argument("--only", nargs="+", help="routines to time")
    options = parser.parse_args()
    if options.quick:
        options.n, options.block, options.calls = [96], 16, 2
    if is_rank(parser, options):
        rank_main(options)
    else:
        launches = Launches("benchmarks.vectors", options)
        name = "vectors" if options.nodes == 1 else f"nodes-{options.nodes}-vectors"
        for grid in options.grids:
            ranks = ranks_of(grid)
            launches.run("debian", ranks, name, as_nodes(ranks, options.nodes))


if __name__ == "__main__":
    main()
