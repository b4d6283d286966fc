# SPDX-License-Identifier: Apache-2.0
"""Which grid, blocks and algorithm to choose on a machine, and what each choice costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from ..dtypes import as_dtype
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, short_repr
from ..layout import Grid, MatmulProblem, ParallelProblem
from ..layout.axis import Axis, even_counts
from ..layout.factor_problem import BY_NAME, FactorProblem
from ..layout.grid import integer
from ..layout.schemes import Form
from ..layout.value import time_text
from ..problems.files import load_model
from .machines import Machine, load_machine
from .predict import MOST_RANKS, Prediction, planned_ranks, predict, time_of_move
from .traffic import operands_bytes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ..layout import MatrixDescriptor

Where = str | PathLike[str] | Machine

_BLOCKS = (64, 128, 256, 512, 1024)
_ENOUGH = 1.03  # an imbalance that a smaller block need not improve
_HOST = ("shared", "gathered", "panels")
_IN_PANELS = 4  # grids
_LONG, _OF_LONG = 1 << 20, 3  # a longer k has many panels, each of which is counted: so many grids are tried


@dataclass(frozen=True, eq=False)
class Choice:
    """A problem in some layout, and what it takes. Local."""

    problem: MatmulProblem | FactorProblem
    prediction: Prediction

    @property
    def layout(self) -> MatrixDescriptor:
        """The layout of a product's result, or of the matrix that is factored."""
        return self.problem.d if isinstance(self.problem, MatmulProblem) else self.problem.a

    @property
    def label(self) -> str:
        """Grid, block and algorithm in words."""
        x = self.layout
        order = f" in {x.order} order" if isinstance(self.problem, FactorProblem) else ""
        return f"{x.grid.label} grid, blocks of {x.block[0]}{order}, {self.prediction.algorithm}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values. Local."""
        x = self.layout
        return {"grid": x.grid.label, "block": x.block[0], "order": x.order, **self.prediction.to_dict()}


@dataclass(frozen=True, eq=False)
class Advice:
    """Choices for one product or factorization, the best first. Local.

    Attributes:
        choices: all that were looked at: those that fit before those that do not, the fastest first.
        least_ranks: the fewest ranks, of powers of two, whose memory is enough; 0 if there is no such number.
    """

    choices: tuple[Choice, ...]
    least_ranks: int

    @property
    def best(self) -> Choice:
        """The best choice."""
        return self.choices[0]

    @property
    def why_not_second(self) -> str:
        """Why the second best choice is worse; empty if there is none."""
        if len(self.choices) < 2:
            return ""
        best, second = (each.prediction for each in self.choices[:2])
        label = self.choices[1].label
        if best.fits and not second.fits:
            return f"{label}: does not fit into memory"
        names = ("compute", "communication", "imbalance")
        worse = {
            name: getattr(second, f"{name}_seconds") - getattr(best, f"{name}_seconds") for name in names
        }
        most = max(worse, key=lambda name: worse[name])
        slower = second.seconds / best.seconds - 1
        if worse[most] <= 0:
            return f"{label}: as fast"
        return f"{label}: {100 * slower:.1f} % slower, {time_text(worse[most])} more {most}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values. Local."""
        return {
            "best": self.best.to_dict(), "why_not_second": self.why_not_second, "least_ranks": self.least_ranks,
            "extrapolated": list(remarks_of(each.prediction for each in self.choices)),
            "choices": [
                {"choice": each.label, "seconds": each.prediction.seconds, "fits": each.prediction.fits}
                for each in self.choices
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"best: {self.best.label}", str(self.best.prediction)]
        if self.why_not_second:
            lines.append(f"  second     {self.why_not_second}")
        if not self.best.prediction.fits:
            lines.append(f"  memory     does not fit below {self.least_ranks} ranks" if self.least_ranks else
                         "  memory     fits on no number of ranks that this machine has")  # fmt: skip
        return "\n".join(lines)


def advise(
    m: int | str,
    n: int,
    k: int | None = None,
    ranks: int | None = None,
    machine: Where | None = None,
    *,
    dtype: DTypeLike = "float64",
    order: str | None = None,
) -> Advice:
    """Return which layout and algorithm are best for a product, or a factorization. Local: needs no ranks, MPI or GPU.

    ``advise(m, n, k, ranks, machine)`` or ``advise("cholesky", n, ranks=ranks, machine=machine)``.

    Args:
        m, n, k: sizes of op(A) (m × k) and op(B) (k × n). Or m is "cholesky", "lu", "qr", "solve" or "lstsq" of an
            n × n matrix, and k the number of right-hand sides, as for ``FactorProblem.of``.
        ranks: number of ranks.
        machine: a name in descriptors/machines, a file, or a ``Machine``.
        dtype: type of A and B.
        order: memory order of all; by default "C" for products, and "F", which panels have, for factorizations.

    Returns:
        Choices, each with a ``problem`` that is legal and its ``prediction``; the best comes first.

    Raises:
        ArgumentError: a size makes no sense, or the machine is unknown or has too few ranks.

    Example:
        >>> pb.advise("lu", 20_000, ranks=8, machine="dgx-h100").best.layout.grid.shape
        (1, 8)

    See Also:
        predict.
    """
    if machine is None:
        raise ArgumentTypeError("machine: expected a machine's name or a file, got nothing")
    ranks, where = planned_ranks(ranks, "ranks"), load_machine(machine)
    wanted = _wanted(m, n, k, dtype, order)
    choices = sorted(
        _choices(wanted, ranks, where), key=lambda each: (not each.prediction.fits, each.prediction.seconds)
    )
    return Advice(tuple(choices), ranks if choices[0].prediction.fits else _least_ranks(wanted, ranks, where))


def scale(
    m: int | str, n: int, k: int | None, nodes: Sequence[int], machine: Where, **how: Any
) -> list[tuple[int, Advice]]:
    """Return the advice for each number of nodes, all of whose ranks take part. Local.

    Args:
        m, n, k, machine: as of ``advise``.
        nodes: numbers of nodes.
        **how: ``dtype`` and ``order``.

    Raises:
        ArgumentError: as ``advise``.
    """
    where = load_machine(machine)
    return [(count, advise(m, n, k, count * where.ranks_per_node, where, **how)) for count in nodes]


def perfect(advice: Sequence[tuple[int, Advice]]) -> tuple[int, float]:
    """Return the first number of nodes whose memory is enough, and its number of nodes times its seconds. Local."""
    nodes, first = next((each for each in advice if each[1].best.prediction.fits), advice[0])
    return nodes, nodes * first.best.prediction.seconds


class _Wanted(NamedTuple):
    """A product, a factorization or a solve of any layout.

    Attributes:
        on: returns it on a grid, with the best block.
        grids: returns those to try for so many ranks.
    """

    on: Callable[[Grid], MatmulProblem | FactorProblem]
    grids: Callable[[int], Iterable[Grid]]


def _wanted(m: object, n: object, k: object, dtype: DTypeLike, order: Any) -> _Wanted:
    """Return what advice is wanted for, or raise ArgumentError. Local."""
    if isinstance(m, str):
        name = m
        if name not in BY_NAME:
            raise ArgumentError(f"expected one of {', '.join(BY_NAME)}, or m, n and k, got {short_repr(m)}")
        size = integer(n, "n", 1, ArgumentError)
        right = None if k is None else integer(k, "k", 0, ArgumentError)

        def factored(grid: Grid) -> FactorProblem:
            block = _block(size, size, size, grid)
            return FactorProblem.of(name, size, grid, block, right=right, dtype=dtype, order=order or "F")

        # One row of processes, on which panels need not move, and the squarest grid: panels are dealt round the ranks
        # whatever the layout is, so others are no better.
        return _Wanted(factored, lambda ranks: dict.fromkeys((Grid(1, ranks), Grid.squarest(ranks))))
    m, n, k = (integer(x, name, 1, ArgumentError) for x, name in zip((m, n, k), "mnk", strict=True))

    def multiplied(grid: Grid) -> MatmulProblem:
        return MatmulProblem.gemm(m, n, k, grid, _block(m, n, k, grid), dtype=dtype, order=order or "C")

    return _Wanted(multiplied, partial(_grids, m, n, k))


def _choices(wanted: _Wanted, ranks: int, machine: Machine) -> Iterator[Choice]:
    """Yield every grid with its best block, of a product with each algorithm. Local.

    GPUs push operands within a node. Between nodes they gather them or take them in panels, which need less memory
    and arrive while those before are multiplied: panels are tried on the best grids, within a node if memory asks
    for it.
    """
    problems = [wanted.on(grid) for grid in wanted.grids(ranks)]
    multiplies = isinstance(problems[0], MatmulProblem)
    algorithms = _HOST if multiplies and machine.engine == "host" else ("auto",)
    found = [Choice(each, predict(each, machine, algorithm)) for each in problems for algorithm in algorithms]
    yield from found
    if not multiplies or machine.engine == "host":
        return
    enough = ranks <= machine.ranks_per_node and any(each.prediction.fits for each in found)
    whole = [] if enough else [each for each in found if each.prediction.algorithm != "panels"]
    for each in sorted(whole, key=lambda each: each.prediction.seconds)[:_IN_PANELS]:
        yield Choice(each.problem, predict(each.problem, machine, "panels"))


def _grids(m: int, n: int, k: int, ranks: int) -> list[Grid]:
    """Return the grids to try: all of them, or of a long k those with which the least is moved."""
    grids = [Grid(nprow, ranks // nprow) for nprow in range(1, ranks + 1) if ranks % nprow == 0]
    if k <= _LONG:
        return grids
    return sorted(grids, key=lambda grid: m / grid.nprow + n / grid.npcol)[:_OF_LONG]


def _block(m: int, n: int, k: int, grid: Grid) -> int:
    """Return the largest block that deals the matrices out evenly, or else the one that does so best."""

    def uneven(block: int) -> float:
        worst = 1.0
        for extent, count in ((m, grid.nprow), (n, grid.npcol), (k, max(grid.shape))):
            worst = max(worst, max(Axis(extent, block, 0, count).counts()) * count / extent)
        return worst

    sizes = [block for block in _BLOCKS if block <= max(1, min(m, n, k))] or [1]
    even = [block for block in sizes if uneven(block) <= _ENOUGH]
    return max(even) if even else min(sizes, key=uneven)


def _least_ranks(wanted: _Wanted, ranks: int, machine: Machine) -> int:
    """Return the fewest ranks that hold everything, of powers of two; 0 if the machine has no such number."""
    most = MOST_RANKS if machine.network is not None else machine.ranks_per_node
    count = 1 << ranks.bit_length()
    while count <= most:
        problem = wanted.on(Grid.squarest(count))
        algorithm = "panels" if isinstance(problem, MatmulProblem) else "auto"
        if operands_bytes(problem) <= machine.memory_bytes and predict(problem, machine, algorithm).fits:
            return count
        count *= 2
    return 0


@dataclass(frozen=True, eq=False)
class MoveAdvice:
    """Whether to keep given layouts or to move the matrices first. Local.

    Attributes:
        keep: the product as it is laid out.
        moved: the product in the best layouts on the same ranks.
        move_seconds: the time to move A and B there, and D back.
        break_even: with at least so many products it pays to move; 0 if it never does.
        extrapolated: what of all this is outside the measurements; empty if nothing is.
    """

    keep: Prediction
    moved: Choice
    move_seconds: float
    break_even: int
    extrapolated: tuple[str, ...]

    def __str__(self) -> str:
        there = f"{time_text(self.move_seconds)} to move, then {time_text(self.moved.prediction.seconds)} for each"
        pays = {0: "never pays", 1: "pays at once"}.get(
            self.break_even, f"pays from {self.break_even} products on"
        )
        lines = [
            f"keep: {time_text(self.keep.seconds)}",
            f"move: {there} ({self.moved.label}): {pays}",
            *(f"  extrapolated  {each}" for each in self.extrapolated),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values. Local."""
        return {
            "keep": self.keep.to_dict(), "moved": self.moved.to_dict(), "move_seconds": self.move_seconds,
            "break_even": self.break_even, "extrapolated": list(self.extrapolated),
        }  # fmt: skip


def advise_move(problem: MatmulProblem, machine: Where) -> MoveAdvice:
    """Return whether it pays to move the matrices of a product to the best layout on their ranks. Local."""
    where = load_machine(machine)
    keep = predict(problem, where)
    p = problem
    best = advise(p.m, p.n, p.k, keep.traffic.nranks, where, dtype=p.a.dtype, order=p.d.order).best
    q = best.problem
    assert isinstance(q, MatmulProblem)
    a, b = (x if op == "N" else replace(x.T, order=x.order) for x, op in ((p.a, p.op_a), (p.b, p.op_b)))
    moves = ((a, q.a), (b, q.b), (q.d, p.d))
    predicted = [time_of_move(x, y, where) for x, y in moves if not x.same_places(y)]
    move = sum(each.seconds for each in predicted)
    gain = keep.seconds - best.prediction.seconds
    return MoveAdvice(
        keep, best, move, math.ceil(move / gain) if gain > 0 else 0,
        remarks_of([keep, best.prediction, *predicted]),
    )  # fmt: skip


def remarks_of(predictions: Iterable[Prediction]) -> tuple[str, ...]:
    """Return what is extrapolated in any of some predictions, each once. Local."""
    return tuple(dict.fromkeys(remark for each in predictions for remark in each.extrapolated))


@dataclass(frozen=True, eq=False)
class LayerAdvice:
    """A layer of a model over different numbers of ranks. Local.

    Attributes:
        name: the layer.
        product: its tensor-parallel product.
        predictions: by number of ranks.
    """

    name: str
    product: Form
    predictions: dict[int, Prediction]

    @property
    def best(self) -> int:
        """The number of ranks that is the fastest."""
        return min(self.predictions, key=lambda ranks: self.predictions[ranks].seconds)

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """What is outside the measurements for any number of ranks; empty if nothing is."""
        return remarks_of(self.predictions.values())

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values. Local."""
        return {
            "name": self.name, "product": self.product, "best": self.best,
            "seconds": {ranks: each.seconds for ranks, each in self.predictions.items()},
            "extrapolated": list(self.extrapolated),
        }  # fmt: skip


def advise_layers(
    model: str, tokens: int, machine: Where, *, dtype: DTypeLike = "bfloat16"
) -> list[LayerAdvice]:
    """Return for each layer of a model how long it takes over 1, 2, 4, … ranks of a node. Local.

    The model is a name in descriptors/models; X has a row for each token.
    """
    where, kind = load_machine(machine), as_dtype(dtype)
    found = []
    for layer in load_model(model):
        predictions = {}
        for ranks in (1 << i for i in range(where.ranks_per_node.bit_length())):
            try:
                t, n, k = layer.shape(tokens, ranks)
            except LayoutError:
                continue
            predictions[ranks] = predict(_parallel(layer.product, t, n, k, ranks, kind), where)
        found.append(LayerAdvice(layer.name, layer.product, predictions))
    return found


def _parallel(form: Form, tokens: int, outputs: int, inputs: int, ranks: int, dtype: Any) -> ParallelProblem:
    """Return a product of T tokens, N outputs per rank if they are split, and K inputs."""
    t, k, n = ((each,) * ranks for each in (tokens, inputs, outputs))
    p = ParallelProblem(form, t, k, n, t, dtype, dtype, dtype)
    p = replace(p, tokens=even_counts(tokens, ranks)) if p.gathers else p
    p = replace(p, inputs=even_counts(inputs, ranks)) if p.sums else p
    return replace(p, rows=p.default_rows())
