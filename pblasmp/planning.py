# SPDX-License-Identifier: Apache-2.0
"""``pb.plan`` and ``pb.algorithms``: plans of any public function, and the algorithms for a problem."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from . import linalg, tensor_parallel
from .blas import level3, vectors
from .blas.vector_calls import VectorCall
from .context import Context
from .engines.method import Verdict, survey
from .engines.request import AnyProblem, Options, Problem
from .errors import ArgumentError, ArgumentTypeError, LayoutError, short_repr
from .layout import Level3Problem, MatmulProblem, ParallelProblem
from .layout.factor_problem import FactorProblem
from .layout.level3_problem import with_c_like_d
from .layout.routines import ROUTINES, VECTOR_ROUTINES
from .layout.schemes import FORMS
from .linalg import CALLS
from .linalg.former import Former
from .matrix import products
from .runtime.matrix_calls import as_read, check_c
from .runtime.planned import prepare, reading
from .runtime.reading import refuse
from .runtime.runtime import Runtime
from .runtime.user_call import UserCall
from .tensor_parallel.call import check_context
from .tuning.measure import LIMIT, Tuned, measure

if TYPE_CHECKING:
    from .runtime.plans import Plan

_FORMER_NAMES = {"lu": "lu_factor"}  # as plain strings, which have no module


def _vector_call(name: str, **given: Any) -> VectorCall:
    return VectorCall(name, given)


_PLANNED: dict[str, tuple[Callable[..., Any], Callable[..., UserCall[Any]]]] = {
    "matmul": (products.matmul, products.matmul_call),
    **{name: (getattr(level3, name), partial(level3.routine_call, name)) for name in ROUTINES},
    **{
        name: (getattr(vectors, name), partial(_vector_call, name))
        for name, row in VECTOR_ROUTINES.items()
        if row.twin
    },
    **{
        name: (getattr(tensor_parallel, name), partial(tensor_parallel.parallel_call, name)) for name in FORMS
    },
    **{name: (getattr(linalg, name), call) for name, call in CALLS.items()},
}
"""The public functions that have plans, each with what makes a call of it, by name."""


def plan(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Plan[Any]:
    """Prepare ``function(*args, **kwargs)``, to run it any number of times. Collective over the context.

    ``pb.plan(pb.blas.syrk, a, c, uplo="U", beta=1, out=c)``, say, or ``pb.plan("matmul_allreduce", x, w, ctx)``.

    Args:
        function: ``pb.matmul``, a routine of level 2 or 3, a vector's that returns one, a factorization or a
            tensor-parallel function, or its name.
        *args, **kwargs: its arguments; a vector as a matrix of one column, where calls also take a NumPy array. The x
            of a tensor-parallel function may be a shape.

    Returns:
        A plan: ``plan()`` runs it on the operands' current values, ``plan(c=other)`` on other operands like them.
        Without ``out`` every run writes to the same new result.

    Raises:
        ArgumentError: there is no such function to plan.
        TypeError: the function has no such argument, or one is missing.
        Exception: what the function raises for these arguments.

    Example:
        >>> a = ctx.eye((4, 4), block=2)
        >>> with pb.plan(pb.matmul, a, a) as product:
        ...     float(product().trace())
        4.0

    See Also:
        tune, algorithms.
    """
    return prepare(_call("plan", function, args, kwargs))


def tune(
    function: Callable[..., Any] | str,
    *args: Any,
    limit: float = LIMIT,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Tuned:
    """Time every algorithm for ``function(*args, **kwargs)`` on this machine; "auto" takes the fastest from then on.

    Collective over the context. Results go to scratch memory: none of the caller's arrays is written. The times are
    kept in a file of the user's, ``pblasmp/tuning.json`` in XDG_CACHE_HOME or ``~/.cache``, or the one that
    PBLASMP_TUNING names, which later contexts on such a machine read. "auto" also uses them for sizes up to about four
    times as large or as small, if all else is alike: types, options, and how each operand is dealt out. Small calls
    that need no plan are computed as before: no algorithm is as fast.

    Args:
        function, *args, **kwargs: as for ``pb.plan``; ``algo`` is ignored.
        limit: seconds after which no further algorithm is started.
        progress: called on this rank with (algorithms done, algorithms in total).

    Returns:
        What was measured: ``best``, ``seconds`` (of a plan's run, by algorithm) and ``refused``.

    Raises:
        ArgumentError: there is no such function, ``limit`` is not a positive number, or ``progress`` no function.
        UnsupportedError: no algorithm can compute it.
        Exception: what the function raises for these arguments, or ``progress`` on any rank; raised on every rank.

    Example:
        >>> a = ctx.eye((64, 64), block=16)
        >>> tuned = pb.tune(pb.matmul, a, a, limit=1.0)
        >>> tuned.best in tuned.seconds
        True

    See Also:
        algorithms, which says what is taken and why; plan; ``pblasmp tune`` in a terminal.
    """
    with prepare(_call("tune", function, args, kwargs), "tune") as planned:
        ctx = planned._ctx
        with ctx.agreement("tune") as facts:
            facts["limit"] = limit
            number: object = limit
            if not isinstance(number, (int, float)) or not number > 0:
                raise ArgumentError(f"limit: expected a positive number of seconds, got {short_repr(limit)}")
            if not (progress is None or callable(progress)):
                raise ArgumentTypeError(
                    f"progress: expected a function of two numbers, got {short_repr(progress)}"
                )
        assert planned._bound is not None
        operands = planned._bound.operands
        with ctx.engine.on_device():
            return measure(ctx.engine, ctx.comm, planned._task, operands, limit=limit, progress=progress)


def _call(
    asked: str, function: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> UserCall[Any]:
    """Return the call of a public function; ``asked`` begins its errors. Collective over the context if it raises."""
    try:
        name, bound = _bound(asked, function, args, kwargs)
    except ArgumentError as error:  # other ranks may have found no fault
        refuse(asked, error, *args, *kwargs.values(), waits_in="")  # others wait in the function's name
    bound.apply_defaults()
    given = bound.arguments
    if asked == "tune" and "algo" in given:
        given["algo"] = "auto"
    return _PLANNED[name][1](**given)


def _bound(
    call: str, function: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, inspect.BoundArguments]:
    """Return the name of a public function, and the arguments as it takes them, or raise. Local."""
    if isinstance(function, Former):
        try:
            args, kwargs = function.translate(*args, **kwargs)
        except TypeError as error:
            raise ArgumentTypeError(f"{call}: {error}") from None
        function = function.successor
    name = function if isinstance(function, str) else str(getattr(function, "__name__", ""))
    name = _FORMER_NAMES.get(name, name) if isinstance(function, str) else name
    found = _PLANNED.get(name, (None,))[0] or (getattr(vectors, name) if name in VECTOR_ROUTINES else None)
    if found is None or not (isinstance(function, str) or function is found):
        known = ", ".join(_PLANNED)
        given = f"{function.__module__}.{name}" if inspect.isfunction(function) else short_repr(function)
        expected = f"one of the functions {known}, or its name"
        if call == "algorithms":
            expected = f"a MatmulProblem, Level3Problem, ParallelProblem or FactorProblem, {expected}"
        raise ArgumentError(f"{call}: expected {expected}, got {given}")
    if name not in _PLANNED:
        raise ArgumentError(f"{call}: {name} is computed at once: it has neither a plan nor algorithms")
    try:
        return name, inspect.signature(found).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(f"{call}: {name}: {error}") from None


def algorithms(
    problem: AnyProblem | Callable[..., Any] | str, *args: Any, **kwargs: Any
) -> dict[str, Verdict]:
    """Return by name whether each algorithm can compute a call, without a plan. Collective over the context.

    ``pb.algorithms(pb.matmul, a, b)`` takes what ``pb.plan`` does. ``pb.algorithms(problem, ctx)`` needs no arrays.

    Args:
        problem: a function, as for ``pb.plan``. Or a product, a level-3 routine, a tensor-parallel product or a
            factorization as a value, or the ``problem`` of a plan: of a vector's function that is the level-3 routine
            of one column.
        *args, **kwargs: the function's arguments. After a value: ``ctx``, the context in which it would be computed,
            and as keywords ``algo``, ``compute``, ``alpha`` and ``beta``, as for ``pb.matmul``.

    Returns:
        By name: ``applies`` says whether the algorithm can be taken, ``taken`` whether it would be, and ``why`` gives
        the reason. A verdict is true if the algorithm applies. With ``algo="measure"`` they are those of "auto"; if
        algorithms are yet to be timed, ``why`` says so.

    Raises:
        ArgumentError: there is no such function; the problem is not legal, is not for as many ranks as the context has,
            or has no C for ``beta``.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: there is no algorithm called ``algo`` for this problem.
        Exception: what the function raises for these arguments.

    Example:
        >>> a = ctx.eye((4, 4), block=2)
        >>> "gathered" in pb.algorithms(pb.matmul, a, a)
        True
        >>> problem = pb.MatmulProblem.gemm(4, 4, 4, a.descriptor.grid, 2)
        >>> "gathered" in pb.algorithms(problem, ctx)
        True

    See Also:
        plan, whose ``report()`` says the same; tune.
    """
    if isinstance(problem, (MatmulProblem, Level3Problem, ParallelProblem, FactorProblem)):
        try:
            inspect.signature(_of_problem).bind(problem, *args, **kwargs)
        except TypeError as error:
            refuse("algorithms", ArgumentTypeError(f"algorithms: {error}"), *args, *kwargs.values())
        return _of_problem(problem, *args, **kwargs)
    call = _call("algorithms", problem, args, kwargs)
    with reading(call, "algorithms"):
        task = call.task()
        return _surveyed(call.ctx, task.computed, task.options)


def _of_problem(
    problem: AnyProblem,
    ctx: Context,
    *,
    algo: str = "auto",
    compute: str | None = None,
    alpha: complex = 1,
    beta: complex = 0,
) -> dict[str, Verdict]:
    check_context(ctx, "algorithms")
    with ctx.agreement("algorithms") as facts:
        facts.update(problem.facts())
        dtype = problem.out_dtype if isinstance(problem, ParallelProblem) else problem.a.dtype
        if isinstance(problem, (MatmulProblem, Level3Problem)):
            dtype = problem.d.dtype
        options = Options.of(dtype, alpha=alpha, beta=beta, algo=algo, compute=compute)
        facts.update(options.facts())
        if not isinstance(problem, FactorProblem):
            check_c(problem, beta)
            problem = _nearest(problem, options, ctx)
    return _surveyed(ctx, problem, options)


def _surveyed(ctx: Runtime[Any], problem: AnyProblem, options: Options) -> dict[str, Verdict]:
    """Return the verdicts on all algorithms for what the ranks have agreed on. Collective over the context."""
    with ctx.agreement("algorithms: asking"):
        if options.algo != "measure" or isinstance(problem, FactorProblem):
            return survey(ctx.engine, problem, options)
        options = replace(options, algo="auto")
        found = survey(ctx.engine, problem, options)
        if ctx.engine.measured.knows(problem, options):
            return found
        first = "; all that apply would be timed first, and the fastest taken"
        return {
            name: replace(verdict, why=verdict.why + first) if verdict else verdict
            for name, verdict in found.items()
        }


def _nearest(problem: Problem, options: Options, ctx: Runtime[Any]) -> Problem:
    """Return the problem that is computed for this one, or raise ArgumentError if it is not legal. Local."""
    if isinstance(problem, ParallelProblem):
        if problem.size != ctx.size:
            raise LayoutError(f"problem: its layouts are on {problem.size} ranks, the context has {ctx.size}")
        return problem
    nearest: MatmulProblem | Level3Problem
    if isinstance(problem, Level3Problem):
        problem.validate()
        nearest = with_c_like_d(problem if options.beta != 0 else replace(problem, c=None))
    else:
        products.check(problem)
        nearest = with_c_like_d(as_read(problem, options.beta))
    for x in (problem.a, problem.b, problem.c, problem.d):
        if x is not None:
            ctx.check_descriptor(x)
    return nearest
