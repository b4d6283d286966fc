# SPDX-License-Identifier: Apache-2.0
"""The protocol that every engine fulfils, and the values it speaks in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..epilogue import Epilogue
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor
from ..layout.trapezoid import Trapezoid
from ..scales import Scales

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["Engine", "Move", "Options", "Problem", "Product", "Workspace", "overlap"]

LocalArray = Any  # numpy.ndarray on the host engine, cupy.ndarray on cublasmp
Problem = TypeVar("Problem", MatmulProblem, Level3Problem)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that a plan needs on this rank beside its operands, in bytes; plans of one context share it."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Options:
    """How a product is to be computed.

    Attributes:
        alpha, beta: scalars, float or complex as D's type.
        algo: "auto" or a way that the engine has.
        compute: what products are summed in: None (the type itself, float32 for 16-bit types), or an engine's name.
        comm_dtype: type in which partial sums travel (schemes "rs" and "ar"); None is D's type.
        comm_sms: streaming multiprocessors that communicate; None leaves it to the library.
        epilogue: what follows the product, over this engine's arrays.
        scales: of 8-bit operands and results, over this engine's arrays.
    """

    alpha: complex = 1
    beta: complex = 0
    algo: str = "auto"
    compute: str | None = None
    comm_dtype: np.dtype | None = None
    comm_sms: int | None = None
    epilogue: Epilogue | None = None
    scales: Scales | None = None


class Product(Protocol):
    """A prepared product: everything that can be decided before the numbers are there.

    Attributes:
        workspace: what it needs on this rank.
        sent_bytes: what this rank sends to other ranks in one run.
        copied_bytes: what this rank copies, to its own memory or the node's, in one run.
    """

    workspace: Workspace
    sent_bytes: int
    copied_bytes: int

    @property
    def path(self) -> str:
        """Name of the way it takes."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Anything a reader of the plan's report should know."""

    def run(self, a: LocalArray, b: LocalArray, c: LocalArray | None, d: LocalArray) -> None:
        """Compute D from the local arrays. Collective over the context."""

    def follow(self, epilogue: Epilogue | None, scales: Scales | None) -> None:
        """Let these, made of the same parts, take the place of the planned epilogue and scales. Local."""

    def release(self) -> None:
        """Forget the arrays of the last run: the next one is given others, what follows by ``follow``. Local."""

    def misfit(self, name: str, array: LocalArray) -> str:
        """Return why ``array`` cannot stand in for the planned operand ``name``, or an empty string. Local."""

    def capture(
        self, a: LocalArray, b: LocalArray, c: LocalArray | None, d: LocalArray
    ) -> Callable[[], None]:
        """Record the product as a CUDA graph and return what replays it. Collective over the context.

        Raises:
            UnsupportedError: this engine has no graphs.
        """

    def close(self) -> None:
        """Give back what only this product holds. Collective over the context."""


class Move(Protocol):
    """A prepared move of a matrix from one layout to another, converting its element type.

    Attributes:
        workspace: what it needs on this rank.
        copied_bytes: what this rank copies in its own memory in one run.
    """

    workspace: Workspace
    copied_bytes: int

    @property
    def path(self) -> str:
        """How the matrix is moved, in a few words."""

    @property
    def sent_bytes(self) -> int:
        """What this rank sends to other ranks in one run."""

    def run(self, source: LocalArray, target: LocalArray) -> None:
        """Write what is moved into ``target``. Collective over the context."""

    def misfit(self, source: LocalArray) -> str:
        """Return why ``source`` cannot take the place of the planned array, or an empty string. Local."""

    def close(self) -> None:
        """Give back what only this move holds. Collective over the context."""


class Engine(Protocol):
    """One way to compute. Local unless said otherwise.

    Attributes:
        name: "host" or "cublasmp".
        why: why this engine was taken.
        xp: the array module of local arrays: NumPy or CuPy.
        agrees: whether the ranks agree before every run of a plan; an engine that only queues work does not.
        uneven: whether products on one line of processes are as fast where extents do not divide by the ranks.
    """

    name: str
    why: str
    xp: Any
    agrees: bool
    uneven: bool

    def empty(
        self, shape: tuple[int, int], dtype: np.dtype, order: str, ld: int, *, symmetric: bool = False
    ) -> LocalArray:
        """Return an uninitialised local array with leading dimension ``ld``. Collective if ``symmetric``."""

    def recycle(self, array: LocalArray) -> None:
        """Let the next symmetric array have the memory of this one, which nobody uses any more. Collective."""

    def stored(self, dtype: np.dtype) -> np.dtype:
        """Return the type of local arrays of ``dtype``: itself, or bytes for what the array library does not know."""

    def adopt(self, array: Any, dtype: np.dtype | None = None) -> LocalArray:
        """Return ``array`` as a local array of this engine, without a copy.

        Args:
            array: what the caller has; 8-bit floats may come as bytes.
            dtype: the element type that is expected, where it matters.

        Raises:
            LayoutError: it is not an array that this engine can use in place.
        """

    def to_host(self, array: LocalArray) -> NDArray[Any]:
        """Return the values as a NumPy array: the array itself where it already is one."""

    def from_host(self, array: LocalArray, values: NDArray[Any]) -> None:
        """Write ``values`` into ``array``."""

    def overlap(self, a: LocalArray, b: LocalArray) -> bool:
        """Return whether two local arrays have an element in common."""

    def suited(self, problem: Problem) -> tuple[Problem, tuple[str, ...]]:
        """Return the legal problem that this engine can run, and why it is another one than ``problem``.

        Operands may be laid out otherwise: the plan then moves them first. The same on every rank.
        """

    def synchronize(self) -> None:
        """Wait until the work that was queued is done."""

    def prepare_move(
        self,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[LocalArray, LocalArray],
        part: Trapezoid | None = None,
    ) -> Move:
        """Prepare a move between the local arrays of two matrices of one shape, of everything or of ``part``.

        Collective over the context. What is not moved keeps its values.
        """

    def prepare(
        self, problem: MatmulProblem, options: Options, arrays: Sequence[LocalArray | None]
    ) -> Product:
        """Prepare a legal product of the local arrays of A, B, C and D. Collective over the context.

        Raises:
            UnsupportedError: this engine has no such product or no such option.
        """

    def prepare_level3(
        self, problem: Level3Problem, options: Options, arrays: Sequence[LocalArray | None]
    ) -> Product:
        """Prepare a legal level-3 routine of the local arrays of A, B, C and D. Collective over the context.

        C, where there is one, lies like D, maybe in the other memory order. D may be the array of C, for trsm and trmm
        that of B.

        Raises:
            UnsupportedError: this engine has no such routine or no such option.
        """

    def lane(self) -> Lane:
        """Return what this rank does on its own arrays, with messages meanwhile."""

    def close(self) -> None:
        """Give everything back. Collective over the context."""


def overlap(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether two NumPy arrays have an element in common; also where that takes too long to tell. Local."""
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
