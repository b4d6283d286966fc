# SPDX-License-Identifier: Apache-2.0
"""Many cases in one test: each is printed before it begins; what the library refuses or gets wrong is in one table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pblasmp as pb


class Table:
    """What went wrong, case by case; ``assert not table.lines, table`` at the end."""

    def __init__(self, ctx: pb.Context) -> None:
        self._ctx = ctx
        self.lines: list[str] = []

    def add(self, case: str, run: Callable[[], str | None]) -> None:
        """Run a case and note what is wrong on any rank. Collective over the context."""
        if self._ctx.rank == 0 and os.environ.get("PBLASMP_TRACE"):
            print(case, file=sys.__stderr__, flush=True)
        try:
            wrong = run()
        except (pb.StatusError, pb.UnsupportedError) as error:
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        found = self._ctx.comm.allgather(wrong)
        ranks = [rank for rank, text in enumerate(found) if text]
        if ranks:
            self.lines.append(f"{case:<56} {found[ranks[0]]} (ranks {ranks})")

    def __str__(self) -> str:
        return "\n".join([f"{len(self.lines)} cases:", *self.lines])
