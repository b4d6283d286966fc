# SPDX-License-Identifier: Apache-2.0
"""What descriptors and problems have in common as values: tables and TOML text of them, and their picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import LayoutError
from ..hooks import hook
from .traffic import Traffic

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Value"]


class Value:
    """A value that descriptor files can hold, and notebooks draw."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the value in a table of plain values: one from ``to_dict`` or a descriptor file. Local.

        Args:
            data: the keys of a descriptor file, of which ``title`` may be missing. Those that say nothing about layouts
                (``title``, ``description``, ``alpha``, ``beta``) are checked and not kept.

        Raises:
            LayoutError: a key is unknown or missing, or a value makes no sense; the message names every fault.
        """
        made: Self = hook("made_from")(cls, data)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return a table of plain values that ``from_dict`` reads back: JSON and TOML can hold it. Local."""
        raise NotImplementedError

    def _repr_html_(self) -> str | None:
        try:
            picture: str = hook("draw")(self).svg
        except LayoutError:  # it has no picture
            return None
        return picture


class Problem(Value):
    """A problem: a value with a title in files."""

    __slots__ = ()

    def to_dict(self, title: str = "") -> dict[str, Any]:
        """Return a table of plain values that ``from_dict`` reads back: JSON and TOML can hold it. Local.

        Args:
            title: of the file; by default ``str`` of the problem.
        """
        raise NotImplementedError

    def to_toml(self, title: str = "") -> str:
        """Return the problem as the text of a descriptor file, which ``pblasmp.load_problem`` reads back. Local.

        Args:
            title: of the file; by default ``str`` of the problem.
        """
        text: str = hook("to_toml")(self.to_dict(title))
        return text

    def traffic(
        self,
        algorithm: str = "auto",
        *,
        alpha: complex = 1,
        beta: complex | None = None,
        nranks: int | None = None,
        ranks_per_node: int | None = None,
        memory_bytes: int | None = None,
    ) -> Traffic:
        """Return what every CPU rank sends, receives, computes and needs, without ranks. Local.

        The counts come from the code that runs: an algorithm prepares and runs on arrays without values.

        Args:
            algorithm: a name for ``algo``; "auto" takes the one that is the fastest by rule.
            alpha, beta: scalars; beta is 1 by default if the problem has a C.
            nranks: number of ranks; by default as many as the layouts need.
            ranks_per_node: consecutive ranks that share a node; by default all are on one.
            memory_bytes: free memory of a node, which "auto" looks at; by default enough.

        Returns:
            Arrays over the ranks, such as ``sent_bytes``, ``received_bytes``, ``messages``, ``flops`` and
            ``memory_bytes``, and sums over all ranks by link.

        Raises:
            ArgumentError: the problem is not legal, or an argument makes no sense.
            UnsupportedError: there is no such algorithm, or it cannot compute the problem.
        """
        found: Traffic = hook("traffic")(
            self, algorithm, alpha=alpha, beta=beta, nranks=nranks, ranks_per_node=ranks_per_node,
            memory_bytes=memory_bytes,
        )  # fmt: skip
        return found
