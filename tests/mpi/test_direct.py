# SPDX-License-Identifier: Apache-2.0
"""Direct calls: many calls on ever new sub-matrices, which need neither a plan nor details to agree on."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.engines.host.buffers import Buffers
from pblasmp.engines.host.direct import calls
from pblasmp.engines.host.direct import products as products_module
from tests.helpers.cases import agreed_error, first, unlike
from tests.helpers.mpi import run_mpi

N, NB = 40, 6


def _start(n):
    i, j = np.indices((n, n))
    return np.cos(i * 7.0 + j * 13) / n + np.eye(n) * 2


def _far(found, expected):
    """What is wrong unless all values are within a few roundings of the expected ones."""
    error = abs(found - expected).max()
    return None if error < 1e-12 else f"error {error}"


def _planned(ctx):
    """What plain calls left behind that were not direct."""
    return len(ctx.calls._known) + len(ctx.kept._plans)


def _steps(n, nb):
    for k in range(0, n, nb):
        w = min(nb, n - k)
        yield slice(k, k + w), slice(k + w, n)


def _factorise(matrix, diagonal, solve, update):
    """Replace the lower triangle by that of the Cholesky factor; what the functions do is the caller's."""
    for here, rest in _steps(N, NB):
        block = matrix[here, here]
        coords = matrix.context.coords(block.descriptor)
        if coords is not None and block.local.size:
            diagonal(block.local)
        if rest.start < N:
            solve(here, rest)
            update(here, rest)


def _cholesky_of(block):
    block[...] = np.tril(np.linalg.cholesky(np.tril(block) + np.tril(block, -1).T)) + np.triu(block, 1)


def cholesky(comm):
    values = _start(N)
    values = np.tril(values) + np.tril(values, -1).T
    expected = np.linalg.cholesky(values)
    rows = np.arange(N)
    lower = rows[:, None] >= rows
    for nprow in (p for p in range(1, comm.size + 1) if comm.size % p == 0):
        for order in "CF":
            with pb.Context(comm, engine="host") as ctx:
                grid = (nprow, comm.size // nprow)
                a = ctx.scatter(values, block=NB, grid=grid, order=order)

                def solve(here, rest, a=a):
                    pb.trsm(a[here, here], a[rest, here], side="R", op_a="T", out=a[rest, here])

                def update(here, rest, a=a):
                    pb.syrk(a[rest, here], a[rest, rest], alpha=-1, beta=1, out=a[rest, rest])

                _factorise(a, _cholesky_of, solve, update)
                wrong = first(
                    _far(np.where(lower, a.allgather(), 0), expected),
                    unlike(np.where(lower, 0, a.allgather()), np.where(lower, 0, values)),
                )
                planned = _planned(ctx)
                yield f"pb {grid} {order}", first(wrong, planned and f"{planned} calls needed a plan")
                if order == "C":
                    continue
                a = ctx.scatter(values, block=NB, grid=grid, order=order)
                ictxt = pblas.gridinit(ctx, "Row", *grid)
                local = a.local
                desc = pblas.descinit(N, N, NB, NB, 0, 0, ictxt, max(1, local.shape[0]))

                def solve(here, rest, x=local, desc=desc):
                    k, i, w = here.start + 1, rest.start + 1, here.stop - here.start
                    m = N - rest.start
                    pblas.pdtrsm("R", "L", "T", "N", m, w, 1.0, x, k, k, desc, x, i, k, desc)

                def update(here, rest, x=local, desc=desc):
                    k, i, w = here.start + 1, rest.start + 1, here.stop - here.start
                    m = N - rest.start
                    pblas.pdsyrk("L", "N", m, w, -1.0, x, i, k, desc, 1.0, x, i, i, desc)

                _factorise(a, _cholesky_of, solve, update)
                wrong = _far(np.where(lower, a.allgather(), 0), expected)
                planned = _planned(ctx)
                yield f"pblas {grid}", first(wrong, planned and f"{planned} calls needed a plan")


@pytest.mark.parametrize("nranks", [1, 2, 4, 6])
def test_cholesky_needs_no_plans(nranks):
    run_mpi(cholesky, nranks)


def products(comm):
    """Products and sums of growing sub-matrices at odd offsets: memory grows, and both sets of slabs are used."""
    rng = np.random.default_rng(5)
    with pb.Context(comm, engine="host") as ctx:
        x, y, z = (rng.integers(-4, 5, (90, 90)).astype(float) for _ in range(3))
        grid = pb.Grid.squarest(comm.size)
        a, b = (ctx.scatter(v, block=8, grid=grid, order=order) for v, order in ((x, "C"), (y, "F")))
        c = ctx.scatter(z, block=(5, 7), grid=grid)
        for i in range(1, 90, 7):
            rows, cols, k = slice(i // 2, i // 2 + i // 2 + 1), slice(i // 3, i), slice(0, i)
            pb.matmul(a[rows, k], b[k, cols], c[rows, cols], beta=2, out=c[rows, cols])
            z[rows, cols] = x[rows, k] @ y[k, cols] + 2 * z[rows, cols]
            pb.geadd(a[cols, rows], c[rows, cols], op_a="T", alpha=3, out=c[rows, cols])
            z[rows, cols] += 3 * x[cols, rows].T
            new = pb.matmul(a[rows, k].T, b[rows, cols])
            yield (
                f"{i}",
                first(unlike(c.allgather(), z), unlike(new.allgather(), x[rows, k].T @ y[rows, cols])),
            )
        yield "direct", (planned := _planned(ctx)) and f"{planned} calls needed a plan"


def long_sums(comm):
    """Products whose inner dimension is so long that their larger operand stays where it is, and partial sums move."""
    rng = np.random.default_rng(7)
    least, products_module._LEAST = products_module._LEAST, 0
    grid = pb.Grid.squarest(comm.size)
    try:
        with pb.Context(comm, engine="host") as ctx:
            for count, (op_a, op_b) in enumerate(("NN", "TN", "NT", "TT", "CN", "NC", "CT", "TC")):
                dtype = "complex128" if "C" in op_a + op_b else "float64"
                x, y = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((70, 70), (70, 70)))
                if dtype == "complex128":
                    x, y = x + 1j * y, y - 2j * x
                order = "FC"[count % 2] if "C" not in op_a + op_b else "F"
                a = ctx.scatter(x, block=(4, 5), grid=grid, order=order)
                b = ctx.scatter(y, block=(5, 3), grid=grid, order="F", source=(grid.nprow - 1, 0))
                c = ctx.full((40, 40), 2, block=(2, 1), grid=grid, dtype=dtype, order="F")
                for m, n in ((9, 4), (4, 9), (6, 6), (1, 5)):
                    i, k = slice(3, 3 + m), slice(1 + count, 61 + count)
                    j = slice(5, 5 + n)
                    of_a, of_b = (i, k) if op_a == "N" else (k, i), (k, j) if op_b == "N" else (j, k)
                    into = c[i, j]
                    op = {"N": lambda v: v, "T": lambda v: v.T, "C": lambda v: v.T.conj()}
                    expected = op[op_a](x[of_a]) @ op[op_b](y[of_b]) - into.allgather()
                    pb.matmul(a[of_a], b[of_b], into, op_a=op_a, op_b=op_b, beta=-1, out=into)
                    yield f"{op_a}{op_b} {m} {n}", unlike(into.allgather(), expected)
            yield "direct", (planned := _planned(ctx)) and f"{planned} calls needed a plan"
    finally:
        products_module._LEAST = least


@pytest.mark.parametrize("nranks", [4, 6])
def test_products_with_long_sums(nranks):
    run_mpi(long_sums, nranks)


@pytest.mark.parametrize("nranks", [1, 3, 4])
def test_products_of_growing_sub_matrices(nranks):
    run_mpi(products, nranks)


def mixed(comm):
    """Ranks that need a closer look at their arguments, and ranks that do not, make the same calls."""
    last = comm.rank == comm.size - 1
    rng = np.random.default_rng(6)
    with pb.Context(comm, engine="host") as ctx:
        x = rng.integers(-4, 5, (20, 20)).astype(float)
        a, c = (ctx.scatter(v, block=4, grid=pb.Grid.squarest(comm.size)) for v in (x, np.zeros((20, 20))))
        expected = 2 * x[:10] @ x
        for count in range(3):
            alpha = np.array(2.0) if last else 2
            pb.matmul(a[:10, :], a, out=c[:10, :], alpha=alpha)
            yield f"alpha as an array on one rank, {count}", unlike(c[:10, :].allgather(), expected)
            pb.syrk(a[4:8, :], out=c[4:8, 4:8], alpha=alpha)
            found = np.tril(c[4:8, 4:8].allgather())
            yield f"syrk, {count}", unlike(found, np.tril(2 * x[4:8] @ x[4:8].T))
        for name, call, words in (
            (
                "window",
                lambda: pb.matmul(a[: 10 + last, :], a),
                ["matmul: the ranks gave different", "\n  a:"],
            ),
            (
                "alpha",
                lambda: pb.matmul(a, a, alpha=-1 - last),
                ["\n  alpha:", "-1.0 on rank", "-2.0 on rank"],
            ),
            ("uplo", lambda: pb.syrk(a, uplo="UL"[last]), ["syrk: the ranks gave different", "\n  uplo:"]),
            ("call", lambda: pb.trmm(a, a) if last else pb.trsm(a, a), ["different calls", "trmm", "trsm"]),
            ("other call", lambda: a.norm() if last else a @ a, ["different calls", "norm", "matmul"]),
        ):
            yield name, agreed_error(ctx, pb.RankMismatchError, words, call)
        words, faulty = ["sizes", f"rank {comm.size - 1}"], a[:9, :] if last else a
        yield "fault", agreed_error(ctx, pb.LayoutError, words, pb.matmul, a, faulty)
        ictxt = pblas.gridinit(ctx, "Row", *pb.Grid.squarest(comm.size).shape)
        f = ctx.scatter(x, block=4, grid=pb.Grid.squarest(comm.size), order="F")
        g = ctx.zeros(f.descriptor)
        desc = pblas.descinit(20, 20, 4, 4, 0, 0, ictxt, max(1, f.local.shape[0]))
        m = np.int64(10) if last else 10

        def product(ja=1, desc=desc, descb=desc, m=m):
            pblas.pdgemm(
                "N", "T", m, 20, 20, 1.0, f.local, 1, ja, desc, f.local, 1, 1, descb, 0.0, g.local, 1, 1, desc
            )

        product()
        yield "pdgemm", unlike(g[:10, :].allgather(), x[:10] @ x.T)
        yield "ja", agreed_error(ctx, pblas.ParameterError, ["argument 9 (ja)"], product, 1 + last)
        for name, wrong in (("a number", 7), ("lists", [[1]] * 9), ("nothing", None), ("short", desc[:7])):
            given = wrong if last else desc
            yield (
                f"descb: {name}",
                agreed_error(ctx, pblas.ParameterError, ["(descb)"], product, descb=given, m=10),
            )
        product(descb=list(map(int, desc)) if last else desc)
        yield "descriptor as a list", unlike(g[:10, :].allgather(), x[:10] @ x.T)


@pytest.mark.parametrize("nranks", [2, 4])
def test_ranks_that_look_closer_and_ranks_that_do_not(nranks):
    run_mpi(mixed, nranks)


def triangles(comm):
    """Solves and products by triangles whose rows no process has all of, in place and into another matrix."""
    rng = np.random.default_rng(8)
    n = 29
    square = np.eye(n) * 9 + rng.integers(-4, 5, (n, n)) / 8
    grid = pb.Grid.squarest(comm.size)
    for dtype in ("float64", "complex128"):
        factor = 1 + (1j if dtype == "complex128" else 0)
        with pb.Context(comm, engine="host") as ctx:
            x, y, z = (
                ctx.scatter((v * factor).astype(dtype), block=block, grid=grid, source=source, order=order)
                for v, block, source, order in (
                    (square, (3, 5), (0, 0), "F"),
                    (rng.integers(-4, 5, (n, n)), (4, 3), (grid.nprow - 1, 0), "C"),
                    (np.zeros((n, n)), (4, 3), (grid.nprow - 1, 0), "C"),
                )
            )
            whole = x.allgather()
            for count, (side, uplo, op, diag) in enumerate(
                ("LLNN", "RLNN", "LUTN", "RUCU", "LLCU", "RUNN", "LLTU", "RLCN")
            ):
                i, k, other, j = 1 + count % 3, n - 4, 17 + count % 5, 2 + count
                a = x[i : i + k, i : i + k]
                m, w = (k, other) if side == "L" else (other, k)
                rows, cols = slice(1, 1 + m), slice(j % 3, j % 3 + w)
                triangle = np.tril(whole[i : i + k, i : i + k])
                if uplo == "U":
                    triangle = np.triu(whole[i : i + k, i : i + k])
                if diag == "U":
                    np.fill_diagonal(triangle, 1)
                t = {"N": triangle, "T": triangle.T, "C": triangle.conj().T}[op]
                how = {"side": side, "uplo": uplo, "op_a": op, "diag": diag}
                for name in ("trmm", "trsm"):
                    expected = y.allgather()
                    b = expected[rows, cols] * -0.5
                    if name == "trmm":
                        b = t @ b if side == "L" else b @ t
                    elif side == "L":
                        b = np.linalg.solve(t, b)
                    else:
                        b = np.linalg.solve(t.T, b.T).T
                    expected[rows, cols] = b
                    out = y if count % 2 else z
                    function = getattr(pb, name)
                    function(a, y[rows, cols], alpha=-0.5, out=out[rows, cols], **how)
                    found = z.allgather()[rows, cols] if out is z else y.allgather()
                    wanted = b if out is z else expected
                    yield (
                        f"{dtype} {name} {side}{uplo}{op}{diag}",
                        _far(found / abs(wanted).max(), wanted / abs(wanted).max()),
                    )
            yield "direct", (planned := _planned(ctx)) and f"{planned} calls needed a plan"


@pytest.mark.parametrize("nranks", [2, 4])
def test_triangles_over_several_processes(nranks):
    run_mpi(triangles, nranks)


def again(comm):
    """Programs that are kept know what changes between equal calls: values, alpha, memory, and what may be written."""
    rng = np.random.default_rng(9)
    with pb.Context(comm, engine="host") as ctx:
        grid = pb.Grid.squarest(comm.size)
        x = rng.integers(-4, 5, (24, 24)).astype(float)
        a, c = ctx.scatter(x, block=4, grid=grid), ctx.zeros((24, 24), block=4, grid=grid)
        for count in range(6):
            alpha = 1 + count // 3
            a.local[...] += 1
            x += 1
            pb.matmul(a[:9, :], a, out=c[:9, :], alpha=alpha)
            yield f"run {count}", unlike(c[:9, :].allgather(), alpha * x[:9] @ x)
        held = [weakref.ref(each.local) for each in (a, c)]
        del a, c
        yield "memory", any(each() is not None for each in held) and "a kept program keeps a matrix's memory"
        for count in range(3):  # likely at the same addresses
            b = ctx.scatter(x + count, block=4, grid=grid)
            c = ctx.zeros((24, 24), block=4, grid=grid)
            pb.matmul(b[:9, :], b, out=c[:9, :])
            yield f"new matrix {count}", unlike(c[:9, :].allgather(), (x + count)[:9] @ (x + count))
        c.local.flags.writeable = False
        yield (
            "read-only",
            agreed_error(ctx, pb.ArgumentError, ["read-only"], pb.matmul, b[:9, :], b, out=c[:9, :]),
        )


def bounded(comm):
    """Ever new calls are not kept, and repeated ones only as long as there is room, fit for direct calls or not."""
    with pb.Context(comm, engine="host") as ctx:
        layout = {"block": (4, 3), "grid": pb.Grid.squarest(comm.size)}
        a, c = (ctx.zeros((20, 20), **layout) for _ in range(2))
        y, z = (ctx.zeros((20, 20), **layout, dtype="complex64") for _ in range(2))
        direct = ctx.direct

        def kept():
            return sum(map(len, (*direct._programs, direct._reducers))), direct._steps

        def added_up(rows, cols):
            return pb.asum(a[cols.stop : cols.stop + rows.stop, :1])

        windows = [(slice(0, i), slice(0, j)) for i in range(1, 9) for j in range(1, 9)]
        for repeat in range(3):
            for here in windows:
                pb.geadd(a[here], c[here], beta=1, out=c[here])
                pb.matmul(
                    z[here].T, z[here[1], here[1]], op_a="C", out=y[here]
                )  # one rank cannot do that directly
                added_up(*here)
            if not repeat:
                yield "once", kept() != (0, 0) and f"{kept()} programs and steps are kept"
        yield "often", not kept()[0] and "nothing is kept"
        yield "reductions", len(direct._reducers) != len(windows) and f"{len(direct._reducers)} are kept"
        direct._forget()
        calls._KEPT_STEPS, before = 40, calls._KEPT_STEPS
        try:
            for here in windows * 3:
                pb.geadd(a[here], c[here], beta=1, out=c[here])
                pb.matmul(z[here].T, z[here[1], here[1]], op_a="C", out=y[here])
                added_up(*here)
                count, steps = kept()
                yield f"{here}", (count > 40 or steps > 50) and f"{count} programs of {steps} steps are kept"
        finally:
            calls._KEPT_STEPS = before


def crowded(comm):
    """A node that has no more shared memory: calls that need more are planned, those that fit go on as before."""
    rng = np.random.default_rng(77)
    with pb.Context(comm, engine="host") as ctx:
        x = rng.integers(-4, 5, (800, 400)).astype(float)
        a = ctx.scatter(x, block=16, grid=pb.Grid.squarest(comm.size))
        few, get = slice(0, 64), Buffers.get
        yield "before", unlike(pb.matmul(a[few, :], a[few, :].T).allgather(), x[few] @ x[few].T)
        programs = sum(map(len, ctx.direct._programs))

        def refuses(buffers, name, nbytes, *, shared):
            if name == "direct1":  # after the first of two has been replaced
                raise MemoryError
            return get(buffers, name, nbytes, shared=shared)

        Buffers.get = refuses
        try:
            found = pb.matmul(a, a.T)
        finally:
            Buffers.get = get
        yield (
            "refused",
            first(unlike(found.allgather(), x @ x.T), _planned(ctx) == 0 and "it was not planned"),
        )
        planned = _planned(ctx)
        for count in range(3):  # the first is the program from before, bound to the memory from before
            yield f"fits {count}", unlike(pb.matmul(a[few, :], a[few, :].T).allgather(), x[few] @ x[few].T)
        yield "still direct", _planned(ctx) != planned and "small calls are planned"
        yield "kept", sum(map(len, ctx.direct._programs)) < programs and "programs are gone"
        yield "large again", unlike(pb.matmul(a, a.T).allgather(), x @ x.T)


def test_without_more_shared_memory_calls_that_fit_stay_direct():
    run_mpi(crowded, 4)


@pytest.mark.parametrize("nranks", [1, 4])
def test_programs_take_little_memory(nranks):
    run_mpi(bounded, nranks)


@pytest.mark.parametrize("nranks", [1, 4])
def test_the_same_call_again(nranks):
    run_mpi(again, nranks)
