# SPDX-License-Identifier: Apache-2.0
"""Plans of every function, algorithms by name at every entry point, and what ``pb.algorithms`` says of them."""

import gc
import weakref
from dataclasses import replace

import numpy as np

import pblasmp as pb
from pblasmp.layout import ParallelProblem
from tests.helpers import inside
from tests.helpers.cases import check_array, check_matrix, layout, numbers, refuses, scattered
from tests.helpers.mpi import on_ranks, run_on_one_node
from tests.helpers.slow import in_turn, only_long
from tests.helpers.tensor_cases import FORMS, Case

SLABS = ("shared", "gathered", "panels")
UPDATES = ("syrk", "herk", "syr2k", "her2k", "syrkx", "herkx")
ROUTINES = ("trsm", "trmm", "symm", "hemm", *UPDATES, "geadd", "tradd")
NAMES = {
    **dict.fromkeys(("matmul", "trmm", "trsm"), (*SLABS, "stationary")),
    **dict.fromkeys(("allgather_matmul", "matmul_reduce_scatter"), SLABS),
    **dict.fromkeys(("symm", "hemm"), (*SLABS, "stationary", "full")),
    **dict.fromkeys(UPDATES, ("summed", *SLABS, "full")),
    **dict.fromkeys(("geadd", "tradd"), ("moved",)),
    **dict.fromkeys(("allgather_matmul", "allgather_matmul"), (*SLABS, "pull", "push")),
    **dict.fromkeys(("matmul_reduce_scatter", "matmul_reduce_scatter"), (*SLABS, "pull", "ring", "push")),
    **dict.fromkeys(("matmul_allreduce", "matmul_allreduce"), ("sum", "two_shot", "ring", "push")),
    "matmul_allgather": ("pull", "push"),
}
"""The algorithms of the host by function, or scheme."""


def matrix_calls(ctx, rng):
    """Every function on distributed matrices, each in a layout of its own: (name, function, arguments, keywords)."""
    values = [numbers(rng, (12, 12), "float64") for _ in range(3)]
    values.append(np.tril(values[0], -1) // 4 + np.eye(12))
    a, b, c, unit = (scattered(ctx, layout(rng, x.shape, ctx.size), x) for x in values)
    yield "matmul", pb.matmul, (a, b, c), {"alpha": 2, "beta": -1, "op_b": "T"}
    for name in ROUTINES:
        function = getattr(pb.blas, name)
        if name == "trsm":
            yield name, function, (unit, b), {"alpha": 2}
        elif name == "trmm":
            yield name, function, (a, b), {"uplo": "U", "side": "R"}
        elif name in ("syrk", "herk", "geadd", "tradd"):
            yield name, function, (a, c), {"beta": 2}
        else:
            yield name, function, (a, b, c), {"beta": 2}
    makers = (
        pb.MatmulProblem.allgather_matmul,
        pb.MatmulProblem.matmul_reduce_scatter,
        pb.MatmulProblem.matmul_allreduce,
    )
    for scheme, make in zip(
        ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"), makers, strict=True
    ):
        p = make(4 * ctx.size, 2 * ctx.size, 3 * ctx.size, ctx.size, "N", "T", order="C", dtype="float64")
        x, w = (scattered(ctx, e, numbers(rng, e.shape, "float64")) for e in (p.a, p.b))
        yield scheme, pb.matmul, (x, w), {"op_b": "T", "scheme": scheme}


def parallel_calls(ctx, rng):
    """Every tensor-parallel function: (name, function, arguments, keywords)."""
    for form in FORMS:
        case = Case(rng, ctx.comm, form, "float64", 4 * ctx.size, 2 * ctx.size, 3 * ctx.size)
        yield form, getattr(pb, form), (case.local_x, case.local_w, ctx), {"bias": case.local_bias}


def calls(ctx, rng):
    yield from matrix_calls(ctx, rng)
    yield from parallel_calls(ctx, rng)


def local(result):
    """This rank's part of a result, as it is now."""
    return np.array(getattr(result, "local", result))


@on_ranks(1, 3)
def test_every_function_is_planned(ctx):
    """Every function is planned, also by its name; what ``plan`` and ``tune`` refuse."""
    rng = np.random.default_rng(71)
    for name, function, args, how in calls(ctx, rng):
        expected = local(function(*args, **how))
        with pb.plan(function.__name__, *args, **how) as plan:
            check_array(local(plan()), expected, name)
            refuses(ctx, pb.UnsupportedError, ["a CUDA graph: the host engine has none"], plan.graph)
        words = ["unexpected keyword argument 'nonsense'"]
        refuses(ctx, TypeError, words, pb.plan, function, *args, **how, nonsense=1)
        refuses(ctx, TypeError, ["'"], pb.plan, function.__name__)

    def matmul(a, b):
        """Called like an algorithm of pblasmp."""

    a = ctx.zeros(pb.MatrixDescriptor((4, 4), (2, 2), pb.Grid(1, 1)))
    for wrong, got in (
        *((name, repr(name)) for name in ("gesv", "", "plan", 3, None, np.matmul)),
        (matmul, f"{__name__}.matmul"),
        (pb.plan, "pblasmp.planning.plan"),
    ):
        words = ["plan: expected one of the functions matmul, ", "trsm", "allgather_matmul", f"got {got}"]
        refuses(ctx, pb.ArgumentError, words, pb.plan, wrong, a, a)
    x, w, last = np.ones((4, 2)), np.ones((4, 2)), ctx.size - 1
    for call in ("plan", "tune"):
        function, begins = getattr(pb, call), f"{call}: "
        name = "matmull" if ctx.rank == last else "matmul"
        words = [begins + "expected one of the functions", "got 'matmull'"]
        refuses(ctx, pb.ArgumentError, words, function, name, a, a)
        name = "matmul_reduce" if ctx.rank == last else "matmul_allreduce"
        words = [begins + "expected one of the functions", "got 'matmul_reduce'"]
        refuses(ctx, pb.ArgumentError, words, function, name, x, w, ctx)
        how = {"nonsense": 1} if ctx.rank == last else {}
        words = [begins + "matmul: got an unexpected keyword argument 'nonsense'"]
        refuses(ctx, TypeError, words, function, "matmul", a, a, **how)
        for name, args, missing in (
            ("matmul", (), "a"),
            ("matmul_allreduce", (x, w), "ctx"),
            ("syrk", (), "a"),
        ):
            words = [f"{begins}{name}: missing a required argument: '{missing}'"]
            refuses(ctx, TypeError, words, function, name, *args)
    problem = pb.MatmulProblem.gemm(4, 4, 4, "1x1", 2)
    words = ["algorithms: missing a required argument: 'ctx'"]
    refuses(ctx, pb.ArgumentError, words, pb.algorithms, problem, *[ctx] * (ctx.rank < last))


@on_ranks(1, 4, runner=run_on_one_node)
def test_algorithms_by_name(ctx):
    """``algo=`` of every entry point takes every name, computes the same, and is what the report says."""
    rng = np.random.default_rng(72)
    for name, function, args, how in calls(ctx, rng):
        expected, algos = local(function(*args, **how)), NAMES[name]
        if name in ROUTINES and ctx.size > 1:  # routines alike take turns
            algos = in_turn(algos, keep=min(2, len(algos)), first=ROUTINES.index(name))
        for algo in algos:
            found = local(function(*args, **how, algo=algo))
            with pb.plan(function, *args, **how, algo=algo) as plan:
                check_array(found, expected, f"{name} {algo}")
                check_array(local(plan()), expected, f"{name} {algo} by a plan")
                report = plan.report()
            said = (report.algorithm, report.asked, report.algorithms[algo].why) == (algo, algo, "requested")
            listed = set(report.algorithms) == set(NAMES[name])
            assert said, f"{name} {algo}: {report}"
            assert listed, f"{name} {algo}: {report}"
        names = ", ".join(map(repr, ("auto", *NAMES[name])))
        words = [f"algo: the host engine has {names} here, got 'summa'"]
        how = {**how, "algo": "summa"}
        refuses(ctx, pb.UnsupportedError, words, function, *args, **how)
        refuses(ctx, pb.UnsupportedError, words, pb.plan, function, *args, **how)
        if ctx.size > 1:
            how["algo"] = "push" if ctx.rank else "auto"
            refuses(ctx, pb.RankMismatchError, ["rank 0"], function, *args, **how)


@on_ranks(1, 3, runner=run_on_one_node)
def test_refusals(comm, ctx):
    """Why an algorithm cannot be taken, in one text on every rank."""
    rng = np.random.default_rng(73)
    p = ctx.size
    for name, function, args, how in calls(ctx, rng):
        algo = NAMES[name][-1]
        if name in ("matmul", "allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", *FORMS):
            words = [f"algo {algo!r}: compute: the host engine takes only None, got 'tf32'"]
            how = {**how, "compute": "tf32", "algo": algo}
            refuses(ctx, pb.UnsupportedError, words, function, *args, **how)
            del how["algo"]
            words = [
                "no algorithm of the host engine takes this problem: compute: the host engine takes only None"
            ]
            refuses(ctx, pb.UnsupportedError, words, function, *args, **how)
    uneven = {form: Case(rng, comm, form, "float32", 2 * p + 1, 3 * p, 4 * p + 1) for form in FORMS}
    even = {form: Case(rng, comm, form, "float32", 2 * p, 3 * p, 4 * p) for form in FORMS}
    gathered = {"return_gathered": True}

    def three(n):
        """The first rank has more than the rule gives it."""
        return n + 1 if ctx.rank == 0 else n

    x, w = np.zeros((2, three(3)), "f4"), np.zeros((4, three(3)), "f4")
    for words, function, args, how in (
        ("algo 'gathered': it does not return the gathered X", pb.allgather_matmul,
         (even["allgather_matmul"].local_x, even["allgather_matmul"].local_w), {**gathered, "algo": "gathered"}),
        ("algo: the host engine has 'auto', 'pull', 'push' here, got 'sum'", pb.matmul_allgather,
         (even["matmul_allgather"].local_x, even["matmul_allgather"].local_w), {"algo": "sum"}),
        *(((f"algo 'sum': inputs are {[4, *[3] * (p - 1)]} on the ranks, expected",
            pb.matmul_allreduce, (x, w), {"algo": "sum"}),
           (f"algo 'shared': outputs are {[4, *[3] * (p - 1)]} on the ranks", pb.allgather_matmul,
            (np.zeros((2, 5), "f4"), np.zeros((three(3), 5), "f4")), {"algo": "shared"})) if p > 2 else ()),
    ):  # fmt: skip
        refuses(ctx, pb.UnsupportedError, [words], function, *args, ctx, **how)
    for form, case in uneven.items():
        check_array(case(ctx, algo="push"), case.expected(), f"{form} takes any split")
    d = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid.squarest(p))
    a = ctx.zeros(d)
    transport, sharing = ctx.engine.transport, ctx.engine.transport.why_not_shared
    transport.why_not_shared = "no memfd here"
    for function, args in (
        (pb.matmul, (a, a)),
        (pb.blas.trmm, (a, a)),
        (pb.blas.trsm, (a, a)),
        (pb.blas.herk, (a,)),
    ):
        words = ["algo 'shared': no memfd here"]
        refuses(ctx, pb.UnsupportedError, words, function, *args, algo="shared")
    transport.why_not_shared = sharing
    q = pb.MatmulProblem.allgather_matmul(2 * p, 2 * p, 2 * p, p, "T", "N", order="F", dtype="float32")
    x, w = ctx.zeros(q.a), ctx.zeros(q.b)
    q = pb.MatmulProblem.allgather_matmul(2 * p, 2 * p, 2 * p, p, "N", "T", order="F", dtype="float32")
    of_columns = ctx.zeros(q.a), ctx.zeros(q.b)
    how = {"op_b": "T", "scheme": "allgather_matmul", "algo": "push"}
    words = ["algo 'push': X is gathered by rows, which are not contiguous in memory"]
    refuses(ctx, pb.UnsupportedError, words, pb.matmul, *of_columns, **how)
    how = {"op_a": "T", "scheme": "allgather_matmul", "algo": "push"}
    check_matrix(pb.matmul(x, w, **how), np.zeros(q.d.shape, "f4"), "and these are")
    if p > 1:
        q = pb.MatmulProblem.matmul_allreduce(4, 4, 4 * (p - 1), p - 1, order="F", dtype="float32")
        x, w = ctx.zeros(q.a), ctx.zeros(q.b)
        how = {"op_a": "T", "scheme": "matmul_allreduce", "algo": "push"}
        words = [f"algo 'push': the operands are on {p - 1} ranks; this algorithm needs all {p}"]
        refuses(ctx, pb.UnsupportedError, words, pb.matmul, x, w, **how)


def said_alike(found, reported):
    """Whether ``pb.algorithms`` says what a plan reports, but of algorithms that were not asked whether they apply."""
    asked = {name: verdict for name, verdict in reported.items() if verdict.applies is not None}
    unasked = [found[name] for name in reported if name not in asked]
    alike = {name: str(found[name]) for name in asked} == {name: str(each) for name, each in asked.items()}
    return alike and list(found) == list(reported) and not any(verdict.taken for verdict in unasked)


@on_ranks(1, 4)
def test_algorithms_are_told_as_plans_report_them(ctx):
    """``pb.algorithms`` says what plans report."""
    rng = np.random.default_rng(75)
    for name, function, args, how in calls(ctx, rng):
        scalars = {key: how[key] for key in ("alpha", "beta") if key in how}
        for algo in ("auto", NAMES[name][-1]):
            with pb.plan(function, *args, **how, algo=algo) as plan:
                reported = plan.report().algorithms
                problem = plan.problem
            found = pb.algorithms(problem, ctx, algo=algo, **scalars)
            called = pb.algorithms(function, *args, **how, algo=algo)
            case, taken = f"{name} {algo}: {found}, {reported}", [n for n, v in found.items() if v.taken]
            assert said_alike(found, reported), case
            assert said_alike(called, reported), case
            assert len(taken) == 1, case
            assert found[taken[0]], case
            assert algo in ("auto", taken[0]), case
    d = pb.MatrixDescriptor((12, 12), (3, 3), pb.Grid.squarest(ctx.size))
    elsewhere = replace(d, block=(5, 4))
    a, c = ctx.zeros(d), ctx.zeros(elsewhere)
    asked = pb.MatmulProblem(d, elsewhere, d)
    with pb.plan(pb.matmul, a, c) as plan:
        reported = plan.report().algorithms
    for found in (pb.algorithms(asked, ctx), pb.algorithms("matmul", a, c)):
        assert said_alike(found, reported), "other blocks"
    with pb.plan(pb.linalg.solve, a, a) as plan:
        reported = plan.report().algorithms
    found = pb.algorithms(pb.linalg.solve, a, a)
    assert said_alike(found, reported), f"a factorization: {found}, {reported}"
    if ctx.size > 1:
        b = a if ctx.rank else c
        refuses(ctx, pb.RankMismatchError, ["b"], pb.algorithms, pb.matmul, a, b)
    for kind, words, problem, how in (
        (pb.LayoutError, ["sizes: "], pb.MatmulProblem(d, replace(d, shape=(5, 12)), d), {}),
        (pb.ArgumentError, ["algorithms: expected a MatmulProblem, Level3Problem, ", "got 3"], 3, {}),
        (pb.UnsupportedError, ["got 'summa'"], pb.MatmulProblem(d, d, d), {"algo": "summa"}),
        (pb.ArgumentError, ["alpha: expected a number"], pb.MatmulProblem(d, d, d), {"alpha": "2"}),
        (pb.ArgumentError, [f"{ctx.size + 1} ranks"],
         pb.MatmulProblem.gemm(8, 8, 8, pb.Grid(1, ctx.size + 1), 2), {}),
        (pb.LayoutError, [f"problem: its layouts are on {ctx.size + 1} ranks, the context has {ctx.size}"],
         ParallelProblem.of_matmul(pb.MatmulProblem.matmul_allreduce(4, 4, 12 * (ctx.size + 1), ctx.size + 1)), {}),
        (pb.ArgumentError, ["c: beta is 2, expected a matrix"], pb.MatmulProblem(d, d, d), {"beta": 2}),
        (pb.ArgumentError, ["c: beta is 2, expected a matrix"], pb.Level3Problem("syrk", d, d),
         {"beta": 2}),
        (pb.ArgumentError, ["beta: trsm has no C to scale, expected 0, got 2"],
         pb.Level3Problem("trsm", d, d, d), {"beta": 2}),
        (pb.ArgumentError, ["c: beta is 2, expected an array"],
         ParallelProblem.of_matmul(pb.MatmulProblem.matmul_allreduce(4, 4, 12 * ctx.size, ctx.size)), {"beta": 2}),
    ):  # fmt: skip
        refuses(ctx, kind, words, pb.algorithms, problem, ctx, **how)
    if ctx.size > 1:
        mine = pb.MatmulProblem(d, d, d, "T" if ctx.rank else "N")
        refuses(ctx, pb.RankMismatchError, ["op_a", "N on rank 0"], pb.algorithms, mine, ctx)


@on_ranks(2)
def test_what_measure_would_take(comm, ctx, tuning_file):
    """With "measure" the verdicts are those of "auto", and say whether algorithms are yet to be timed."""
    a = ctx.full((12, 12), 2.0, block=3)
    for measured in (False, True):
        with pb.plan(pb.matmul, a, a, algo="measure" if measured else "auto") as plan:
            problem = plan.problem
        found, auto = (pb.algorithms(problem, ctx, algo=algo) for algo in ("measure", "auto"))
        for name, verdict in found.items():
            assert (verdict.applies, verdict.taken) == (auto[name].applies, auto[name].taken)
            if verdict.applies:
                assert verdict.why.endswith("would be timed first, and the fastest taken") != measured
            else:
                assert verdict == auto[name]


@on_ranks(1, 2)
def test_plain_calls_hold_nothing(ctx):
    """After a plain call the library refers to no array of the user's."""
    rng = np.random.default_rng(77)
    names = []
    for name, function, args, how in matrix_calls(ctx, rng):
        matrices = [x for x in args if x is not None]
        result = function(*matrices, **how)
        gone = [weakref.ref(x.local) for x in (*matrices, result)]
        names.append((name, gone))
    del matrices, result, args, how
    gc.collect()
    held = [name for name, gone in names if any(each() is not None for each in gone)]
    assert not held, f"matrices are let go: {held} are held"
    names = []
    for name, function, args, how in parallel_calls(ctx, rng):
        gone = [weakref.ref(x) for x in (*args[:2], how["bias"], function(*args, **how))]
        names.append((name, gone))
    del args, how
    gc.collect()
    held = [name for name, gone in names if any(each() is not None for each in gone)]
    assert not held, f"arrays are let go: {held} are held"


def counted(ctx, function, *args, **how):
    """What a function returns, how many votes that took, and how many new plans."""
    votes, plans = inside.votes(ctx), inside.plans_made(ctx)
    return function(*args, **how), inside.votes(ctx) - votes, inside.plans_made(ctx) - plans


@on_ranks(1, 2, *only_long(4))
def test_repeated_calls(comm, ctx):
    """A call that all ranks make for the third time takes one vote and no new plan; one rank may need no vote."""
    rng = np.random.default_rng(79)
    for name, function, args, how in matrix_calls(ctx, rng):
        result = function(*args, **how)
        given = {"plain": {}, "out": {"out": result}}
        if name not in ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"):
            given["other number"] = {"alpha": 3}
        plans = {kind: pb.plan(function, *args, **{**how, **more}) for kind, more in given.items()}
        for turn in range(4):
            for kind, more in given.items():
                expected = local(plans[kind]())
                y, count, made = counted(ctx, function, *args, **{**how, **more})
                case = f"{name} {kind}, turn {turn}"
                check_array(local(y), expected, case)
                assert kind != "out" or y is result, case
                if turn > 1:
                    assert not made, f"{case}: {made} new plans"
                    assert count in ((0, 1) if comm.size == 1 else (1,)), f"{case}: {count} votes"
                if turn == 0 and kind == "plain":
                    new = y
                elif kind == "plain":
                    assert y is not new, f"{name}, turn {turn}: a new matrix"
            for x in args[1:]:
                x.local[...] += 1  # not the triangle of trsm, which stays regular
        for plan in plans.values():
            plan.close()


class Changing:
    """A number as a tensor of one number is: it can be a key, and be changed."""

    value = 0.0

    def __pos__(self):
        return self

    def __complex__(self):
        return complex(self.value)


@on_ranks(1, 2, *only_long(4))
def test_calls_that_some_ranks_repeat(comm, ctx):
    """Where one rank's call is another, all are read; no more than the last calls are remembered."""
    last = comm.rank == comm.size - 1
    a, b = (ctx.full((12, 12), 2.0, block=3) for _ in range(2))
    twelve = np.full(a.local.shape, 48.0)
    for turn in range(3):
        y = pb.matmul(a, b, alpha=1 if last else 1.0)  # equal, but not the same
        check_array(y.local, twelve, f"numbers of several types, turn {turn}")
    if comm.size > 1:
        words = ["the ranks gave different arguments", "alpha:"]
        refuses(ctx, pb.RankMismatchError, words, pb.matmul, a, b, alpha=2.0 if last else 1.0)
        words = [f"on rank {comm.size - 1}", "expected a DistributedMatrix"]
        refuses(ctx, pb.ArgumentError, words, pb.matmul, a, 3 if last else b)
    alpha, x = Changing(), np.ones((4, 4))
    for turn in range(4):
        alpha.value = float(turn)
        check_array(pb.matmul(a, b, alpha=alpha).local, turn * twelve, f"a number that changes, {turn}")
        total = np.full((4, 4), 4.0 * turn * comm.size)
        check_array(pb.matmul_allreduce(x, x, ctx, alpha=alpha), total, f"likewise, of arrays, {turn}")
    for _ in range(2):
        pb.matmul(a, b, out=y)
    out = b if last else y
    words = ["out: shares memory with b"]
    refuses(ctx, pb.ArgumentError, words, pb.matmul, a, b, out=out)
    y, count, made = counted(ctx, pb.matmul, a, b, out=y)
    few = (count, made) == (int(comm.size > 1), 0)
    check_array(y.local, twelve, "afterwards")
    assert few, f"afterwards: {count} votes"
    hits = ctx.kept.hits
    for turn in range(3):
        for i in range(40):
            y = pb.matmul(a, b, alpha=i, algo="gathered")
            check_array(y.local, i * twelve, f"{i} times, turn {turn}")
    hits = ctx.kept.hits - hits
    assert hits == 40, f"plans that are kept: {hits} of 40 were found again"
    for i in range(3):
        _, _, made = counted(ctx, pb.blas.symm, a, b, algo="full")
        assert made == 1, f"a plan that holds memory, {i}: {made} new plans"


@on_ranks(1, 2, launch=True)
def test_the_log_tells_what_was_chosen(comm):
    """PBLASMP_LOG=info tells the algorithm, debug why no other one was taken and what memory grew."""
    import io
    import logging

    from pblasmp.logs import show_logs

    stream = io.StringIO()
    show_logs(logging.StreamHandler(stream), "debug,all")
    with pb.Context(comm, engine="host") as ctx:
        d = pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(1, ctx.size))
        a = ctx.zeros(d)
        pb.matmul(a, a, algo="gathered")
    text = stream.getvalue()
    for words in ("engine host on", "NN product of 6 x 6 x 6", ": algorithm gathered", "algorithm panels: "):
        assert words in text, words
    assert comm.size == 1 or "grown to" in text, "memory"
