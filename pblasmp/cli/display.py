# SPDX-License-Identifier: Apache-2.0
"""Progress on the terminal."""

from __future__ import annotations

import click
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from .reports import Reporter
from .terminal import console, use_color


class Display(Reporter):
    """Progress on the terminal that stderr is connected to, a line for each step. A context manager."""

    def __init__(self) -> None:
        context = click.get_current_context(silent=True)
        color = use_color("auto") if context is None else bool(context.color)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console(color=color, stderr=True, terminal=True),
            transient=True,
        )
        self._task: TaskID | None = None

    def step(self, name: str) -> None:
        """Finish the previous step and start this one. Local."""
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1)
        self._task = self._progress.add_task(f"{name:<14}", total=None)

    def progress(self, done: int, total: int) -> None:
        """Show how far the step is. Local."""
        if self._task is not None:
            self._progress.update(self._task, total=total, completed=done)

    def __enter__(self) -> Display:  # noqa: PYI034 (typing.Self is newer than the oldest Python)
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
