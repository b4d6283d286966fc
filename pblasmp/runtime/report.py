# SPDX-License-Identifier: Apache-2.0
"""Report: what a plan does, in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..engines.method import Verdict
from ..engines.product import Workspace
from ..layout.value import bytes_text


@dataclass(frozen=True, slots=True)
class Report:
    """What a plan does on this rank; ``str()`` gives it as text. Made by ``plan.report()``. Local.

    Attributes:
        call: the product: ops, sizes, type, scheme.
        engine: name of the engine; ``ctx.engine.why`` says why it was chosen.
        asked: the algorithm requested.
        path: how it is computed.
        sent_bytes: bytes that this rank sends to other ranks in one run.
        copied_bytes: bytes that this rank copies within its node's memory in one run.
        workspace: memory besides the operands.
        algorithms: by name, why each algorithm was taken or not.
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
    algorithms: Mapping[str, Verdict] = field(default_factory=dict)
    moved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def algorithm(self) -> str:
        """Name of the algorithm that was taken."""
        return next((name for name, verdict in self.algorithms.items() if verdict.taken), "")

    @property
    def bytes_moved(self) -> int:
        """Bytes that this rank sends and copies in one run."""
        return self.sent_bytes + self.copied_bytes

    def __str__(self) -> str:
        device, host = self.workspace.device_bytes, self.workspace.host_bytes
        lines = [
            self.call,
            f"  engine     {self.engine}",
            f"  path       {self.path} (requested: {self.asked})",
            f"  each run   {bytes_text(self.sent_bytes)} sent, {bytes_text(self.copied_bytes)} copied by this rank",
            f"  workspace  {bytes_text(device)} on the device, {bytes_text(host)} on the host",
            *(f"  first      {move}" for move in self.moved),
            *(f"  algorithm  {name}: {verdict}" for name, verdict in self.algorithms.items()),
            *(f"  note       {note}" for note in self.notes),
        ]
        return "\n".join(lines)
