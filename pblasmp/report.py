# SPDX-License-Identifier: Apache-2.0
"""Report: what a plan does, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass

from .engines.base import Workspace

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """What a plan does on this rank. ``str()`` of it is a text for people.

    Attributes:
        call: the product: ops, sizes, type, scheme.
        engine: name of the engine.
        asked: the algorithm asked for.
        path: the way taken.
        sent_bytes: bytes that this rank sends to other ranks in one run.
        copied_bytes: bytes that this rank copies in its node's memory in one run.
        workspace: memory beside the operands.
        moved: the operands that are redistributed first, each with its new layout.
        notes: reasons and warnings.
    """

    call: str
    engine: str
    asked: str
    path: str
    sent_bytes: int
    copied_bytes: int
    workspace: Workspace
    moved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes_moved(self) -> int:
        """Bytes that this rank sends and copies in one run."""
        return self.sent_bytes + self.copied_bytes

    def __str__(self) -> str:
        device, host = self.workspace.device_bytes, self.workspace.host_bytes
        lines = [
            self.call,
            f"  engine     {self.engine}",
            f"  path       {self.path} (asked for: {self.asked})",
            f"  each run   {_bytes(self.sent_bytes)} sent, {_bytes(self.copied_bytes)} copied by this rank",
            f"  workspace  {_bytes(device)} on the device, {_bytes(host)} on the host",
            *(f"  first      {move}" for move in self.moved),
            *(f"  note       {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def _bytes(number: int) -> str:
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
