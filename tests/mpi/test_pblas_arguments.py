# SPDX-License-Identifier: Apache-2.0
"""Arguments of the PBLAS names that are not legal: the same error on every rank, under PBLAS's number; and grids."""

import io

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from tests.helpers import inside
from tests.helpers.cases import refuses
from tests.helpers.mpi import on_ranks
from tests.helpers.prototypes import PROTOTYPES
from tests.helpers.slow import in_turn

TYPES = {"s": "float32", "d": "float64", "c": "complex64", "z": "complex128"}
LEGAL = {"side": "L", "uplo": "u", "diag": "Non-unit", "m": 8, "n": 8, "k": 8, "alpha": 2.0, "beta": 1}
LEGAL |= dict.fromkeys(("trans", "transa", "transb"), "no transpose")
LEGAL["info"] = None
ENTRIES = {1: 2, 2: 12345, 3: -1, 4: -1, 5: 0, 6: 0, 7: 2, 8: -1, 9: 0}
REPORTED = {7: 9, 8: 10, 9: 11}  # what PBLAS prints of RSRC_, CSRC_ and LLD_: it counts IMB_ and INB_ too
BAD = {**dict.fromkeys("mnk", -1), "alpha": "2", "beta": None, "ictxt": 12345}
BAD |= dict.fromkeys(("dot", "norm2", "asum", "amax", "indx"), 0.0) | dict.fromkeys(("incx", "incy"), 2)
BAD |= dict.fromkeys(("side", "uplo", "diag", "trans", "transa", "transb"), "x")


def legal(name, ictxt):
    """Arguments that are legal, by name: 8 x 8 matrices from (2, 2) on in 9 x 9 ones, in blocks of 2 x 2."""
    nprow, npcol, myrow, mycol = pblas.gridinfo(ictxt)
    rows, cols = pblas.numroc(9, 2, myrow, 0, nprow), pblas.numroc(9, 2, mycol, 0, npcol)
    known = {**LEGAL, "ictxt": ictxt}
    known |= dict.fromkeys(("dot", "norm2", "asum", "amax", "indx")) | dict.fromkeys(("incx", "incy"), 1)
    for x in "abcxy":
        known[x] = np.ones((rows, cols), TYPES[name[1]], order="F")
        known |= {f"i{x}": 2, f"j{x}": 2, f"desc{x}": pblas.descinit(9, 9, 2, 2, 0, 0, ictxt, rows)}
    return {each: known[each] for each in PROTOTYPES[name].lower().split()}


def raised(comm, name, known, info, words=()):
    """Fail unless the call raises the ParameterError with ``info`` on every rank, with one text; return what it did."""
    try:
        getattr(pblas, name)(*known.values())
    except pblas.ParameterError as error:
        told = (error.info, str(error))
    except Exception as error:  # noqa: BLE001 - distinguished below
        told = (0, f"{type(error).__name__}: {error}")
    else:
        told = (0, "no error")
    everyone = comm.allgather(told)
    assert len(set(everyone)) == 1, (name, everyone)
    assert told[0] == info, (name, told)
    for word in (*words, f"INFO = {info}"):
        assert word in told[1], name


def variations(name, ictxt):
    """Calls with one illegal argument each: (arguments, INFO, words)."""
    numbers = {each: i + 1 for i, each in enumerate(PROTOTYPES[name].lower().split())}
    known = legal(name, ictxt)  # it stays as it is: these calls write nothing
    for each, number in numbers.items():
        if each in BAD:
            yield {**known, each: BAD[each]}, -number, [f"argument {number} ({each})"]
        elif each.startswith("desc"):
            moves, other = (name.endswith("2d"), {"a": "b" if "b" in known else "c"}.get(each[-1], "a"))
            for entry, value in ENTRIES.items():
                desc = known[each].copy()
                desc[entry - 1] = value
                word = f"entry {entry} (" if entry != 2 or moves or other else ""
                yield ({**known, each: desc}, -(100 * number + REPORTED.get(entry, entry)), [word])
            desc = known[each].copy()
            desc[2:4] = 0
            yield ({**known, each: desc}, -(100 * number + 3), ["entry 3 (M_)", "entry 4 (N_)"])
            yield {**known, each: known[each] + 0.5}, -number, ["nine integers"]
            yield {**known, each: known[each][:8]}, -number, ["nine integers"]
        elif each[0] in "ij" and each[1:] in known:
            for value in (0, 10 if each[1] in "xy" else 3):
                yield {**known, each: value}, -number, [f"({each})"]
        elif each in "abc" and name in ("pdgemm", "pcherk", "pdtrsm", "pctrmr2d"):
            x = known[each]
            small, wide = x[:-1], np.zeros((x.shape[0] + 3, x.shape[1]), x.dtype, order="F")
            for local, word in (
                (small, "shape is"),
                (wide, "columns are"),
                (x.reshape(-1, order="F")[:-1], "elements"),
                (np.zeros(4 * x.size, x.dtype)[::2], "not contiguous"),
                (np.ascontiguousarray(x), "order"),
                (x[None], "dimensions"),
                (np.zeros(x.shape, "float16"), "float16"),
                (x.tolist(), "list"),
            ):
                yield {**known, each: local}, -number, [word]


def longer(comm, ictxt):
    """Descriptors of eleven integers: what is illegal in them under its own number, and the same result."""

    def eleven(desc, **changed):
        _, context, m, n, mb, nb, *rest = desc.tolist()
        found = {"IMB_": mb, "INB_": nb, "MB_": mb, "NB_": nb} | changed
        return [2, context, m, n, *(found[each] for each in ("IMB_", "INB_", "MB_", "NB_")), *rest]

    known = legal("pdgemv", ictxt)
    for changed, entry in (
        ({"IMB_": 0}, 5), ({"INB_": -1}, 6), ({"MB_": 0}, 7), ({"NB_": 0}, 8), ({"IMB_": 1}, 5), ({"INB_": 3}, 6),
        ({"IMB_": 0, "MB_": 0}, 5),
    ):  # fmt: skip
        desc = eleven(known["desca"], **changed)
        raised(comm, "pdgemv", {**known, "desca": desc}, -(800 + entry), ["(desca)"])
    short = eleven(known["descx"])[:9]
    raised(comm, "pdgemv", {**known, "descx": short}, -1201, ["entry 1 (DTYPE_)"])
    out = []
    for form in (eleven, np.asarray):
        known = legal("pdgemv", ictxt)
        pblas.pdgemv(*(form(x) if name.startswith("desc") else x for name, x in known.items()))
        out.append(known["y"])
    written = any(comm.allgather(bool((out[0] != 1).any())))
    assert np.array_equal(*out)
    assert written


def tools(comm, ictxt):
    """Auxiliary routines that ScaLAPACK is no referee of: what they refuse, print and scale; grids of chosen ranks."""
    nprow, npcol, myrow, mycol = pblas.gridinfo(ictxt)
    whole = np.arange(1.0, 64).reshape(7, 9)
    places = [
        [pblas.indxl2g(i + 1, 2, at, 0, of) - 1 for i in range(pblas.numroc(n, 2, at, 0, of))]
        for n, at, of in ((7, myrow, nprow), (9, mycol, npcol))
    ]

    def local(x):
        return np.asfortranarray(x[np.ix_(*places)])

    desc = pblas.descinit(7, 9, 2, 2, 0, 0, ictxt, max(1, len(places[0])))
    same = pblas.descset(7, 9, 2, 2, 0, 0, ictxt, max(1, len(places[0])))
    assert np.array_equal(desc, same)
    assert desc.dtype == same.dtype
    a = local(whole)
    parts = {"G": whole, "U": np.triu(whole), "L": np.tril(whole), "H": np.triu(whole, -1)}
    for kind, part in parts.items():
        found = local(whole)
        info = pblas.pdlascl(kind, 4, 2, 7, 9, found, 1, 1, desc, None)
        good = info == 0 and np.array_equal(found, local(np.where(part != 0, whole / 2, whole)))
        assert good, f"lascl {kind}: {found}"
    tiny, huge = np.full_like(a, 1e-300), 1e300
    pblas.pdlascl("G", 1e-300, huge, 7, 9, tiny, 1, 1, desc, None)
    assert np.allclose(tiny, 1e300, rtol=1e-14), "lascl far"
    out = io.StringIO()
    pblas.pdlaprnt(2, 1, a, 3, 4, desc, 1, 0, "A", out, None)
    text = (
        "A(     3,     4)=      2.200000000000000000E+01\nA(     4,     4)=      3.100000000000000000E+01\n"
    )
    expected = text if (myrow, mycol) == (1, 0) else ""
    assert out.getvalue() == expected, "laprnt"
    for name, given, info in (
        ("pdlange", ("x", 7, 9, a, 1, 1, desc, None), -1),
        ("pdlange", ("M", 8, 9, a, 1, 1, desc, None), -5),
        ("pdlantr", ("M", "U", "x", 7, 9, a, 1, 1, desc, None), -3),
        ("pdlascl", ("G", 0, 1, 7, 9, a, 1, 1, desc, None), -2),
        ("pdlascl", ("G", 1, 1, 7, 9, a, 1, 1, desc, 0), -10),
        ("pdlascl", ("B", 1, 1, 7, 9, a, 1, 1, desc, None), -1),
        ("pdlaprnt", (7, 9, a, 1, 1, desc, 2, 0, "A", out, None), -7),
        ("pdelset", (a, 8, 1, desc, 1.0), -2),
        ("pdelget", ("x", " ", None, a, 1, 1, desc), -1),
        ("pdlaset", ("A", 7, 9, 1j, 0, a, 1, 1, desc), -4),
    ):
        raised(comm, name, dict(enumerate(given)), info)
    beyond, c = (a, 8, 1, desc, 1.0), a.astype(complex, order="F")
    raised(comm, "pdelset", dict(enumerate(beyond)), -2, ["(ia): expected at most 7, got 8"])
    her = dict(enumerate(("L", 3, 1j, c, 1, 1, desc, 1, np.ones_like(c), 1, 1, desc)))
    raised(comm, "pzher", her, -3, ["(alpha): expected a real number, got 1j"])
    with pytest.raises(TypeError, match="pdelset: missing"):
        pblas.pdelset(a, 8, 1, desc)
    me, size = pblas.blacs_pinfo()
    place = pblas.blacs_pcoord(ictxt, pblas.blacs_pnum(ictxt, myrow, mycol))
    outside = pblas.blacs_pnum(ictxt, 2, 0), *pblas.blacs_pcoord(ictxt, 99)
    good = (me, size, place, outside) == (comm.rank, comm.size, (myrow, mycol), (-1, -1, -1))
    assert good, f"numbers: {me}, {size}, {place}, {outside}"
    system = pblas.blacs_get(-1, 0)
    for given, usermap, more in (
        (None, [[3, 0, 1]], ()),
        (comm, [[3, 0, 1]], ()),
        (system, [3, 9, 0, 9, 1, 9], (2, 1, 3)),
    ):
        other = pblas.blacs_gridmap(given, usermap, *more, engine="host")
        expected = {3: 0, 0: 1, 1: 2}.get(comm.rank)
        seen = pblas.gridinfo(other)
        good = seen == ((-1,) * 4 if expected is None else (1, 3, 0, expected))
        if other != -1:
            x = np.array([[float(expected)]], order="F")
            d = pblas.descinit(1, 3, 1, 1, 0, 0, other, 1)
            good &= pblas.pdasum(3, None, x, 1, 1, d, 1) == 3
            pblas.gridexit(other)
        assert good, f"gridmap {usermap}: {seen}"
    for usermap, more in (([[0, 0]], ()), ([[0, 9]], ()), ("x", ()), ([0, 1], (1, 2, 2)), ([0, 1], ())):
        given = dict(enumerate((None, usermap, *more)))
        raised(comm, "blacs_gridmap", given, -4 if more == () and usermap == [0, 1] else -2)
    with pytest.raises(TypeError, match="comm: expected an mpi4py communicator"):
        pblas.blacs_gridmap("x", [[0]])
    for scope in ("All", "Row", "c"):
        pblas.blacs_barrier(ictxt, scope)
    raised(comm, "blacs_barrier", {0: ictxt, 1: "x"}, -2)
    found = pblas.iceil(7, 3), pblas.ilcm(4, 6), pblas.infog1l(7, 2, 2, 1, 0), pblas.infog1l(7, 2, 2, 0, 1)
    assert found == (3, 12, (3, 1), (3, 0)), "integers"


@on_ranks(4)
def test_illegal_arguments(comm, ctx):
    ictxt = pblas.gridinit(ctx, "r", 2, 2)
    for number, name in enumerate(name for name, words in PROTOTYPES.items() if "INFO" not in words):
        found = list(variations(name, ictxt))
        for known, info, words in in_turn(found, keep=16, first=number):
            raised(comm, name, known, info, words)
    known = legal("pdgemm", ictxt)
    known |= {"descc": np.full(9, -5), "ib": -1, "m": -2}
    raised(comm, "pdgemm", known, -3, ["3 faults", "argument 12 (ib)"])
    for number, each in enumerate(("uplo", "diag"), 1):
        known = legal("pctrmr2d", ictxt) | {each: np.zeros(2) if comm.rank == 1 else LEGAL[each]}
        raised(comm, "pctrmr2d", known, -number, [f"({each})", "array("])
    known = legal("pdgemm", ictxt)
    if comm.rank == 3:
        known["descb"][8] = 1
    raised(comm, "pdgemm", known, -1411, ["(on rank 3)", "entry 9 (LLD_)"])
    known = legal("pdgemm", ictxt)
    known |= {"desca": [*known["desca"][:8], 1], "jc": 9}
    raised(comm, "pdgemm", known, -1011, ["2 faults", "argument 18 (jc)"])
    known = legal("pdgemm", ictxt)
    known |= {"descb": [1, -1, *known["descb"][2:]], "jb": 9}
    raised(comm, "pdgemm", known, -1402, ["argument 14 (descb)"])
    known = legal("pdgemm", ictxt)
    known |= {"k": 0, "a": np.zeros(1), "desca": [*known["desca"][:8], 1], "ib": 99, "beta": 3.0}
    c, (_, _, *place) = known["c"], pblas.gridinfo(ictxt)
    inside = (
        [pblas.indxl2g(i + 1, 2, at, 0, 2) > 1 for i in range(n)]
        for n, at in zip(c.shape, place, strict=True)
    )
    expected = 1 + 2 * np.logical_and.outer(*inside)
    pblas.pdgemm(*known.values())
    assert np.array_equal(c, expected), "A and B without elements"
    known = legal("pdsyrk", ictxt)
    known["c"].flags.writeable = False
    raised(comm, "pdsyrk", known, -11, ["read-only"])
    known = legal("pzsyrk" if "pzsyrk" in PROTOTYPES else "pzher2k", ictxt)
    raised(comm, "pzher2k", {**known, "beta": 1j}, -14, ["real number"])
    raised(comm, "pzher2k", {**known, "trans": "T"}, -2, ["N, C"])
    known = legal("pdgemr2d", ictxt)
    raised(comm, "pdgemr2d", {**known, "b": known["a"]}, -7, ["shares memory"])
    for odd in ({}, "description", 3.0, None):
        given = {**known, "descb": odd if comm.rank == comm.size - 1 else known["descb"]}
        raised(comm, "pdgemr2d", given, -10, ["(descb)"])
    for name, info in (("pdsyrk", -11), ("pdtrsm", -12), ("pdgemm", -16)):
        known = legal(name, ictxt)
        known["c" if "c" in known else "b"] = known["a"]
        raised(comm, name, known, info, ["shares memory with that of A"])
    longer(comm, ictxt)
    tools(comm, ictxt)
    known = legal("pzswap", ictxt)
    raised(comm, "pzswap", {**known, "y": known["x"]}, -2, ["memory with that of Y"])
    known = legal("pzswap", ictxt) | {"ix": 3, "iy": 2, "incx": 9, "incy": 9}
    known["y"] = known["x"]
    pblas.pzswap(*known.values())  # two rows of one array share no element
    contexts_of_one_rank(comm, ictxt)
    for each, other in (("ia", 1), ("jb", 1), ("desca", [1, -1, *legal("pdgemr2d", ictxt)["desca"][2:]])):
        known = legal("pdgemr2d", ictxt) | ({each: other} if comm.rank == 1 else {})
        refuses(ctx, pb.RankMismatchError, ["matrices"], pblas.pdgemr2d, *known.values())
    other = pblas.gridinit(ctx, "c", 1, 4)
    known = legal("pdgemm", ictxt)
    known["descb"][1] = other
    raised(comm, "pdgemm", known, -1402, ["context of the other"])
    known = legal("pdgemm", ictxt)
    known["n"] += comm.rank // 3
    known["jb"] = known["jc"] = 1
    with pytest.raises(pb.RankMismatchError, match="n:"):
        pblas.pdgemm(*known.values())
    pblas.gridexit(other)
    stale = legal("pdgemm", ictxt)
    for each in ("desca", "descb", "descc"):
        stale[each][1] = other
    if (
        comm.rank == 0
    ):  # the processes of the grid that is open do not make this call: they are not waited for
        with pytest.raises(pblas.ParameterError, match="not a context"):
            pblas.pdgemm(*stale.values())
    pblas.gridexit(ictxt)
    text = f"{ictxt} is not a context of this process"  # handles are each process's own
    with pytest.raises(pblas.ParameterError, match=text) as error:
        pblas.pdgemm(*legal_closed(known, ictxt).values())
    assert error.value.info == -1002


def contexts_of_one_rank(comm, ictxt):
    """One process has no context in its descriptors: it can be in one grid only, whose processes all hear of it."""
    for name, info in (("pdgemm", -1002), ("pdnrm2", -602), ("pdpotrf", -602), ("pdgemv", -802)):
        for wrong in (12345, None):
            known = legal(name, ictxt)
            for each in [each for each in known if each.startswith("desc")] if comm.rank == 2 else []:
                known[each] = None if wrong is None else [1, wrong, *known[each][2:]]
            number = info if wrong else -(-info // 100)
            raised(comm, name, known, number)
    known = legal("pdgemr2d", ictxt)
    known["ictxt"] += 100 * (comm.rank == 2)
    raised(comm, "pdgemr2d", known, -11, ["not a context"])


def legal_closed(known, ictxt):
    """The arguments of a call on a grid that is no more."""
    return {name: value for name, value in known.items() if ictxt != -1}


@on_ranks(4)
def test_grids(comm):
    """Grids smaller than the world, of an engine's choice, from a communicator; processes outside them."""
    ictxt = pblas.gridinit(comm, "Row-major", 1, 3, engine="host")
    expected = (1, 3, 0, comm.rank) if comm.rank < 3 else (-1, -1, -1, -1)
    assert pblas.gridinfo(ictxt) == expected, "gridinfo"
    assert (ictxt == -1) == (comm.rank == 3), "number"
    if ictxt != -1:
        a = np.full((2, 2), comm.rank + 1.0, order="F")
        desc = pblas.descinit(2, 6, 2, 2, 0, 0, ictxt, 2)
        c = np.zeros((2, 2), order="F")
        pblas.pdgemm("T", "N", 2, 6, 2, 1.0, a, 1, 1, desc, a, 1, 1, desc, 0.0, c, 1, 1, desc)
        assert np.array_equal(c, np.full((2, 2), 2.0 * (comm.rank + 1))), "product"
    else:
        desc, x = pblas.descinit(2, 6, 2, 2, 0, 0, ictxt, 2), np.zeros((2, 2), order="F")
        with pytest.raises(pblas.ParameterError) as raised:
            pblas.pdgemm("T", "N", 2, 6, 2, 1.0, x, 1, 1, desc, x, 1, 1, desc, 0.0, x, 1, 1, desc)
        assert (raised.value.info, desc[1]) == (-1002, -1)
    pblas.gridexit(ictxt)
    gone = (-1, -1, -1, -1)
    assert pblas.gridinfo(ictxt) == gone, "gone"
    for arguments, info in (
        (("Row", 3, 2), -3),
        (("Row", 0, 2), -3),
        (("Row", 1, 2.5), -4),
        (("x", 1, 1), -2),
    ):
        assert not refused_grid(comm, arguments, info), f"{arguments}"


def refused_grid(comm, arguments, info):
    try:
        pblas.gridinit(comm, *arguments, engine="host")
    except pblas.ParameterError as error:
        return None if error.info == info else str(error)
    return "no error"


@on_ranks(4)
def test_grids_close_with_their_context(comm):
    """A grid over part of a context is closed with it."""
    with pb.Context(comm, engine="host") as ctx:
        ictxt = pblas.gridinit(ctx, "Col", 2, 1)
        inner = ictxt != -1 and pblas.grids.of_number(ictxt).context
        assert pblas.gridinfo(ictxt)[0] == (2 if comm.rank < 2 else -1), "open: not 2 x 1"
    assert pblas.gridinfo(ictxt)[0] == -1
    assert not (inner and inside.is_open(inner))


@on_ranks(4)
def test_matrices(comm, ctx):
    """What to_scalapack and from_scalapack refuse, on every rank; leading dimensions that differ from rank to rank."""
    grid = pb.Grid(2, 2)

    def taken(local, desc, grid=grid):
        return ctx.from_scalapack(local, desc, grid)

    x, desc = np.ones((6, 5), order="F"), [1, 0, 10, 9, 3, 2, 0, 0, 6]
    rows, cols = pb.MatrixDescriptor((10, 9), (3, 2), grid, order="F").local_shape(comm.rank)
    for words, arguments in (
        (["shape is"], (x[:3], desc)),
        (["strides"], (np.ones((6, 5)), desc)),
        (["columns are"], (x, [*desc[:8], 7])),
        (["elements"], (np.ones(7), desc)),
        (["list"], (x.tolist(), desc)),
        (["int64"], (x.astype("int64"), desc)),
        (["desc[8]"], (x, [*desc[:8], 0])),
        (["9 integers"], (x, desc[:8])),
        (["source"], (x, [*desc[:6], -1, 0, 6])),
        (["needs 5 ranks"], (x, desc, pb.Grid(1, 5))),
        (["grid: expected a Grid, got 4"], (x, desc, 4)),
        (["desc: expected nine integers, got None"], (x, None)),
    ):
        refuses(ctx, pb.ArgumentError, words, taken, *arguments)
    moved = [1, 0, 10, 9, 3, 2, 0, comm.rank // 3, 6]
    refuses(ctx, pb.RankMismatchError, ["descriptor"], taken, x, moved)
    own = rows + comm.rank
    local = np.full((own, cols), comm.rank + 1.0, order="F")
    a = taken(local, [*desc[:8], own])
    back = a[1:, 2:].to_scalapack(context=5)
    assert back.local is not local
    assert back.desc.tolist() == [1, 5, *desc[2:8], own]
    assert (back.ia, back.ja) == (2, 3), "place"
    words = ["context: expected an integer, got 'x'"]
    refuses(ctx, pb.ArgumentError, words, a.to_scalapack, context="x")
    for descriptor, word in (
        (pb.MatrixDescriptor((4, 4), (2, 2), grid), "F order"),
        (pb.MatrixDescriptor((4, 4), (2, 2), grid, dtype="float16", order="F"), "float16"),
    ):
        refuses(ctx, pb.ArgumentError, [word], ctx.zeros(descriptor).to_scalapack)


@on_ranks(4)
def test_descriptions(comm, ctx):
    """Moves whose processes describe a matrix in different ways, or of which some are missing."""
    everybody, part = pblas.gridinit(ctx, "Row", 1, 4), pblas.gridinit(ctx, "Row", 1, 2)
    x, y = np.ones((2, 2), order="F"), np.zeros((2, 2), order="F")
    desc = [1, part, 2, 4, 2, 2, 0, 0, 2]
    target = [1, everybody, 2, 8, 2, 2, 0, 0, 2]

    def move(desc):
        pblas.pdgemr2d(2, 4, x, 1, 1, desc, y, 1, 1, target, everybody)

    shifted = [*desc[:7], int(comm.rank == 1), 2]
    refuses(ctx, pb.RankMismatchError, ["A: ", "in 2 ways"], move, shifted)
    absent = [1, -1 if comm.rank == 1 else part, *desc[2:]]
    refuses(ctx, pb.RankMismatchError, ["A: 1 of the 2"], move, absent)
    nobody = [1, -1, *desc[2:]]
    words = ["entry 2 (CTXT_) of argument 6 (desca)", "-1 on every process", "INFO = -602"]
    refuses(ctx, pblas.ParameterError, words, move, nobody)
    move(desc)
    assert np.array_equal(y, np.full((2, 2), comm.rank < 2)), "all is well"


@on_ranks(2)
def test_a_process_without_elements_may_give_any_array(comm, ctx):
    """A process with rows but no columns may have LLD_ = 1, and any array; so may one with columns but no rows."""
    for shape, wide in (((5, 1), (1, 2)), ((1, 5), (2, 1))):  # C is on process 0 alone
        ictxt = pblas.gridinit(ctx, "Row", *wide)
        mine = comm.rank == 0
        a = np.ones(shape if mine else (0, 0), order="F")
        nothing = {"LLD x 0": (1, 0), "0 x 0": (0, 0), "flat": 0, "0 x 1": (0, 1), "1 x 1": (1, 1), "two": 2}
        for case, empty in nothing.items():
            c = np.zeros(shape if mine else empty, order="F")
            desc = [1, ictxt, *shape, 1, 5, 0, 0, shape[0] if mine else 1]
            if wide == (1, 2):
                desc[4:6] = 5, 1
            pblas.pdgeadd("N", *shape, 2.0, a, 1, 1, desc, 0.0, c, 1, 1, desc)
            whole = ctx.from_scalapack(c, desc, pb.Grid(*wide)).gather()
            right = np.array_equal(whole, np.full(shape, 2.0)) if mine else not c.any()
            assert right, f"{case} {wide}: {c} {whole}"
        desc[8] = 0
        known = {
            "trans": "N",
            "m": shape[0],
            "n": shape[1],
            "alpha": 2.0,
            "a": a,
            "ia": 1,
            "ja": 1,
            "desca": desc,
        }
        known |= {"beta": 0.0, "c": c, "ic": 1, "jc": 1, "descc": desc}
        raised(comm, "pdgeadd", known, -811)
        pblas.gridexit(ictxt)
