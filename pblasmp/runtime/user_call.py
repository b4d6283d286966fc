# SPDX-License-Identifier: Apache-2.0
"""A call of a public function, as one rank makes it: how it is read, computed and planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from ..engines.product import Product
from ..engines.request import Operands, Task
from ..errors import UnsupportedError
from ..layout import ParallelProblem
from .runtime import Runtime

Result = TypeVar("Result")
NO_STREAM = nullcontext()


class UserCall(ABC, Generic[Result]):
    """A call of a public function, as one rank makes it: its arguments, and the computation, once they are read.

    Attributes:
        ctx: the context.
        name: the function's name.
        names: what the function calls the arrays that a plan of the call takes.
        keeps_memory: whether plans are kept that hold memory of their own.
        keeps_last: whether the arrays of a plan's run are those of the next.
        number: by which the ranks know the call, once they have agreed on it.
        ran_by: the kept ``Plan`` by which it has run, if it is kept.
    """

    ctx: Runtime[Any]
    name: str
    names: Sequence[str] = ("a", "b", "c")
    keeps_memory = False
    keeps_last = False
    number = 0
    ran_by: Any = None

    # -- reading the arguments

    def find_context(self) -> None:
        """Set ``ctx`` to that in which the other ranks make this call, if that is in doubt. Collective over it."""

    def stream(self) -> AbstractContextManager[Any]:
        """Return the block in which the stream of the call's arrays is the current one. Local."""
        return NO_STREAM

    @abstractmethod
    def signature(self) -> Hashable:
        """Return all that decides how the call is computed, apart from its arrays' values. Local.

        None if a call like this one is not remembered; a value that equals no other if its arguments must be checked
        anew.
        """

    @abstractmethod
    def read(self, facts: dict[str, Any]) -> None:
        """Check the arguments, and add what must be equal on every rank to ``facts``. Local."""

    def complete(self) -> None:
        """Read what depends on the other ranks' arrays. Collective over the context."""

    @abstractmethod
    def remembered(self) -> Any:
        """Return what ``again`` needs of what was read: no arrays. Local."""

    @abstractmethod
    def again(self, remembered: Any) -> None:
        """Read the arguments, which are like those of an earlier call. Local."""

    def kin(self) -> Hashable:
        """Return what it has in common with earlier calls from which ``vary`` can derive it; None if nothing. Local."""
        return None

    def vary(self, remembered: Any) -> tuple[ParallelProblem, tuple[int, ...]] | None:  # noqa: ARG002
        """Place the arrays, of which not all are like those of an earlier call, the kin. Local.

        Return what is computed then, and numbers that are the same on every rank if, and only if, all ranks vary the
        kin in the same way; None if it must be read as a new call.
        """
        return None

    def place(self, remembered: Any) -> tuple[int, ...] | None:  # noqa: ARG002
        """Get ready for a run of a kept plan on arrays at known addresses, without reading them. Local.

        Return the addresses of all arrays, with which the call is the earlier one again; none of them if the plan is
        not to be bound to arrays; None if they must be read.
        """
        return None

    def placed(self, product: Product) -> Operands:
        """Return the operands of a call that has its place, as a product takes them. Local."""
        raise NotImplementedError

    # -- computing, once they are read

    @abstractmethod
    def key(self, number: int) -> Hashable:
        """Return the key of the kept plan, None if none is to be kept; ``number`` is 0 unless all repeat a call. Local.

        Equal on every rank.
        """

    @abstractmethod
    def task(self) -> Task:
        """Return what is computed, and how. Local."""

    @abstractmethod
    def operands(self) -> Operands:
        """Return the local arrays. Local."""

    @property
    def starts(self) -> bool:
        """Whether ``start`` does anything."""
        return False

    def start(self) -> None:
        """Write what the result starts as. Local."""

    @abstractmethod
    def result(self, found: Any) -> Result:
        """Return what the function returns; ``found`` is what the engine found besides arrays. Collective."""

    # -- the same call as a plan

    def planned(self) -> None:
        """Get ready for a plan that a user runs again and again. Collective over the context."""

    @abstractmethod
    def replaced(self, given: Mapping[str, Any], product: Product) -> UserCall[Result]:
        """Return the call on other arrays like the planned ones, by name, that has been read. Local.

        ArgumentError if an array does not fit what was planned.
        """

    def facts(self) -> dict[str, Any]:
        """Return what must be equal on every rank in a run, apart from the plan and the names of new arrays. Local."""
        return {}

    def check_gradients(self) -> None:
        """Raise ArgumentError if arrays require gradients, which would be lost. Local."""

    def recorded(self) -> Result:
        """Return what a graph of the call writes; raise ArgumentError if there can be none. Local."""
        return self.result(None)

    def with_own_x(self) -> tuple[Any, UserCall[Result]]:
        """Return the plan's own array for x, and the call on it. Collective over the context.

        UnsupportedError unless the plan is of a tensor-parallel product.
        """
        with self.ctx.agreement("plan.input_buffer"):
            raise UnsupportedError(
                f"input_buffer: only for tensor-parallel products, the plan is of {self.name}"
            )

    def close(self) -> None:
        """Give back memory that the call has made for its plan. Local."""
