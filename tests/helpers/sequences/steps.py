# SPDX-License-Identifier: Apache-2.0
"""Steps of a sequence: public calls by name, with parameters that are plain data, and how they are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st

import pblasmp as pb
from tests.helpers.gpu.moves import CONVERTS, grids

SLOTS = 6  # places for matrices, for plans, for files
TYPES = ("float64", "float64", "float32", "complex128", "complex64", "float16", "bfloat16")
MATRICES = "scatter", "from_function", "from_local", "create"  # they make matrices
BEGIN = (*MATRICES, "random_numbers", "prepare", "followed", "scaled")  # they need nothing that is there
EXTENTS = (1, 7, 24, 24, 40, 40, 96)  # those of many matrices, so that some fit each other

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Step:
    """A call by the name of its function, and its parameters: numbers, texts, lists and dicts."""

    name: str
    given: Mapping[str, Any]

    def __str__(self) -> str:
        return f"[{self.name!r}, {dict(self.given)!r}]"


def steps_of(data: Iterable[Sequence[Any]]) -> list[Step]:
    """Return the steps that lists of names and parameters stand for, such as JSON has."""
    return [Step(name, given) for name, given in data]


@dataclass(frozen=True)
class Call:
    """How to make and to draw a step: ``draws`` are functions of a ``Draw``, by parameter."""

    function: Callable[..., Any]
    weight: float
    draws: Mapping[str, Callable[[Draw], Any]]


CALLS: dict[str, Call] = {}


def call(weight: float, **draws: Callable[[Draw], Any]) -> Callable[[Function], Function]:
    """Register a function of a session and these parameters as a step, drawn in proportion to ``weight``."""

    def register(function: Function) -> Function:
        CALLS[function.__name__] = Call(function, weight, draws)
        return function

    return register


class Draw:
    """Draws parameters. Of Hypothesis's integers, not its floats, which are rarely ordinary.

    Args:
        rng: draws.
        ranks: of the context.
        large: bytes of the smallest large matrix.
        often: the share of large matrices.
    """

    def __init__(self, rng: random.Random, ranks: int, large: int, often: float = 0.1) -> None:
        self.rng, self.ranks, self.large, self.often = rng, ranks, large, often

    def slot(self) -> int:
        """A place."""
        return self.rng.randrange(SLOTS)

    def seed(self) -> int:
        """Of what a call draws itself."""
        return self.rng.randrange(1000)

    def rank(self) -> int:
        """A rank."""
        return self.rng.randrange(self.ranks)

    def shape(self) -> list[int]:
        """A shape: mostly small, now and then so large that copies and messages come in several parts."""
        kind, rng = self.rng.randrange(100) / 100, self.rng
        if kind < 0.04:
            return [rng.randrange(3), rng.randrange(3)]
        if kind < 0.55 * (1 - self.often):
            return [rng.choice(EXTENTS), rng.choice(EXTENTS)]
        share = rng.randrange(2, 31) / (100 if kind < 1 - self.often else 10)
        elements = share * self.large / 8
        rows = int(elements**0.5 * rng.choice([0.5, 1, 1, 2]))
        return [rows, int(elements / rows)]

    def layout(self, shape: Sequence[int] | None = None, dtype: str | None = None) -> dict[str, Any]:
        """A layout, as ``descriptor`` takes it."""
        rng, shape = self.rng, list(shape or self.shape())
        grid = rng.choice(grids(self.ranks))
        block = [rng.randint(1, rng.choice([3, 16, 64, extent + 5])) for extent in shape]
        while (shape[0] // block[0] + 1) * (shape[1] // block[1] + 1) > 400:
            block = [b * 2 for b in block]
        return {
            "shape": shape,
            "block": block,
            "grid": [grid.nprow, grid.npcol, grid.order],
            "source": [rng.randrange(grid.nprow), rng.randrange(grid.npcol)],
            "dtype": dtype or (rng.choice(TYPES) if rng.randrange(20) < 19 else "float8_e4m3fn"),
            "order": rng.choice("CF"),
            "pad": rng.randint(1, 5) if rng.randrange(5) == 4 else 0,
        }

    def elsewhere(self) -> dict[str, Any]:
        """A layout whose shape and type are to be another's."""
        whole = self.layout([self.rng.choice(EXTENTS)] * 2)
        del whole["shape"], whole["dtype"]
        return whole

    def window(self) -> list[int]:
        """First row and number of rows, first column and number of columns, each modulo what there is."""
        return [self.rng.randrange(300) if self.rng.randrange(10) > 2 else 0 for _ in range(4)]

    def scalar(self) -> int:
        """A number."""
        return self.rng.choice([1, 2, -1, 3])

    @staticmethod
    def of(*values: Any) -> Callable[[Draw], Any]:
        """One of these."""
        return lambda draw: draw.rng.choice(values)

    @staticmethod
    def upto(most: int) -> Callable[[Draw], Any]:
        """A number from 0 on, less than that."""
        return lambda draw: draw.rng.randrange(most)


def descriptor(
    layout: Mapping[str, Any], shape: Sequence[int] | None = None, dtype: Any = None
) -> pb.MatrixDescriptor:
    """Return the layout that plain data describe; ``shape`` and ``dtype`` if they have none."""
    p, q, ranks = layout["grid"]
    shape = tuple(layout.get("shape") or shape or ())
    tight = pb.MatrixDescriptor(
        shape, tuple(layout["block"]), pb.Grid(p, q, ranks), tuple(layout["source"]),
        layout.get("dtype") or dtype, layout["order"],
    )  # fmt: skip
    if not layout["pad"]:
        return tight
    return pb.MatrixDescriptor(
        shape, tight.block, tight.grid, tight.source, tight.dtype, tight.order, ld=max(shape) + layout["pad"]
    )


def converts(dtype: str, choice: int) -> str:
    """Return a type that another one converts to."""
    kinds = CONVERTS.get(dtype, (dtype,))
    return kinds[choice % len(kinds)]


@st.composite
def sequences(draw: st.DrawFn, ranks: int, length: int, large: int, only: Collection[str] = ()) -> list[Step]:
    """A strategy of Hypothesis's: sequences, most of them with some of the calls only.

    So each call often meets any other (A. Groce and others, "Swarm testing", 2012). There are few or many large
    matrices, and often only a few steps, since much goes wrong at a beginning.

    Args:
        draw: of Hypothesis.
        ranks: of the context.
        length: how many steps, at most.
        large: bytes of the smallest large matrix.
        only: names of the calls; by default all.
    """
    rng, able = draw(st.randoms(use_true_random=False)), list(only or CALLS)
    share, often = draw(st.sampled_from([1, 0.6, 0.3])), draw(st.sampled_from([0.05, 0.2, 0.5]))
    names = [name for name in able if rng.randrange(10) < 10 * share]
    for makers in (MATRICES, ("prepare",)):  # without which others have nothing to do
        if not set(makers) & set(names):
            names += [rng.choice(found)] if (found := [name for name in makers if name in able]) else []
    names = names or able
    begins = [name for name in BEGIN if name in names] or names
    least = min(length, draw(st.sampled_from([1, 10, 40, 40])))
    weighted = [name for name in names for _ in range(round(2 * CALLS[name].weight))] or names

    def some(names: list[str], least: int, most: int) -> list[Step]:
        return draw(st.lists(_step(names, ranks, large, often), min_size=least, max_size=most))

    first = [Step("panels", {"width": 7})] if not only and draw(st.booleans()) else []
    return [*first, *some(begins, 1, 4), *some(weighted, least, length)]


@st.composite
def _step(draw: st.DrawFn, names: list[str], ranks: int, large: int, often: float) -> Step:
    name = draw(st.sampled_from(names))
    of = Draw(draw(st.randoms(use_true_random=False)), ranks, large, often)
    return Step(name, {key: how(of) for key, how in CALLS[name].draws.items()})
