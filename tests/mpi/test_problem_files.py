# SPDX-License-Identifier: Apache-2.0
"""Every product in descriptors/problems, run on ranks and compared with NumPy; files take turns at the algorithms.

And what ``pblasmp run`` compares for level-3 routines, with each of their options.
"""

import io

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.cli.reports import Reporter
from pblasmp.cli.run import run_routine
from pblasmp.layout.routines import ROUTINES
from pblasmp.problems.files import find, load_problem_file
from tests.helpers.cases import SIZES, check_matrix, grids, layout, numbers, pick, product, scattered
from tests.helpers.level3 import legal_flags, shapes
from tests.helpers.mpi import run_mpi
from tests.helpers.slow import in_turn, only_long

DTYPES = ("float64", "float32", "complex64")
REST = (4, "float64"), (1, "float32"), (1, "complex64")


def run_files(comm, names):
    rng = np.random.default_rng(61)
    with pb.Context(comm, engine="host") as ctx:
        for turn, name in enumerate(names):
            file = load_problem_file(name)
            p = file.problem
            algo = "auto"
            if file.nranks == ctx.size < 6:
                algos = [each for each, verdict in pb.algorithms(p, ctx).items() if verdict]
                algo = algos[turn % len(algos)]
            wholes = {x: numbers(rng, d.shape, d.dtype) for x, d in file.parents.items()}
            parts = {x: whole[file.windows[x]] for x, whole in wholes.items()}
            expected = product(
                parts["a"], parts["b"], alpha=file.alpha, op_a=p.op_a, op_b=p.op_b, dtype=complex
            )
            if p.scheme == "matmul_allreduce":
                copies = p.d.grid.size
                expected = np.tile(expected, (1, copies) if p.d.order == "F" else (copies, 1))
            if file.beta:
                expected = expected + file.beta * parts["c"].astype(complex)
            parents = {x: scattered(ctx, file.parents[x], whole) for x, whole in wholes.items()}
            a, b, d = (parents[x][file.windows[x]] for x in "abd")
            c = parents["c"][file.windows["c"]] if "c" in parents else None
            kind = wholes["d"].dtype
            wholes["d"][file.windows["d"]] = (expected if kind.kind == "c" else expected.real).astype(kind)
            pb.matmul(
                a, b, c, out=d, alpha=file.alpha, beta=file.beta,
                op_a=p.op_a, op_b=p.op_b, scheme=p.scheme, algo=algo,
            )  # fmt: skip
            for x, whole in wholes.items():
                check_matrix(parents[x], whole, f"{name} {algo}: {x}")


def _names(nranks):
    """The files that need so many ranks; on six ranks all of them: those that need fewer leave some idle."""
    files = {path.stem: load_problem_file(path).nranks for path in find("problems")}
    return [name for name, needed in files.items() if needed == nranks or nranks == 6]


@pytest.mark.parametrize("nranks", SIZES)
def test_every_problem_file(nranks):
    names = _names(nranks)
    assert names, f"no file for {nranks} ranks"
    if nranks == 6:
        others = {name for size in SIZES if size < 6 for name in _names(size)}
        names = [*sorted({*names} - others), *in_turn(sorted(others), keep=6)]
    run_mpi(run_files, nranks, names=names)


def test_no_file_needs_more_ranks():
    assert len(_names(6)) == len(find("problems"))
    assert all(load_problem_file(path).nranks <= 6 for path in find("problems"))


def run_routines(comm, dtype, spoiled=None):
    """Every routine from files; the types take turns with its options.

    ``spoiled`` is an operand whose values change afterwards.
    """
    rng = np.random.default_rng(62)
    with pb.Context(comm, engine="host") as ctx:
        scatter = ctx.scatter
        for name, has in ROUTINES.items():
            every = legal_flags(name, dtype)
            keep = min(6 if ctx.size == 1 else 18, len(every))
            for flags in in_turn(every, keep=keep, first=DTYPES.index(dtype) + ctx.size):
                grid = pick(rng, grids(ctx.size))
                of = {
                    each: layout(rng, shape, ctx.size, grid=grid, dtype=dtype)
                    for each, shape in shapes(name, flags, 7, 5, 6).items()
                    if each in has.operands + "d" and (each != "c" or rng.integers(3))
                }
                found = load_problem_file(io.StringIO(pb.Level3Problem(name, **of, **flags).to_toml()))
                if spoiled is not None:
                    parents = iter(found.parents)

                    def changed(array, descriptor, parents=parents):
                        added = next(parents) == spoiled and array is not None
                        return scatter(array + 1 if added else array, descriptor)

                    ctx.scatter = changed
                _, wrong = run_routine(ctx, found, "auto", Reporter())
                wrong = comm.bcast(wrong)
                assert (wrong > 0) == (spoiled is not None), f"{name} {flags} {list(of)}"


@pytest.mark.parametrize(
    ("nranks", "dtype"), [(1, "float64"), (4, "float32"), (4, "complex64"), *only_long(*REST)]
)
def test_every_routine_as_a_file(nranks, dtype):
    run_mpi(run_routines, nranks, dtype=dtype)


def test_a_wrong_routine_is_found():
    run_mpi(run_routines, 2, dtype="float64", spoiled="a")
