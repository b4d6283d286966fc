# SPDX-License-Identifier: Apache-2.0
"""Many cases in one test: each is printed before it begins; what the library refuses or gets wrong is in one table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pblasmp as pb

from .products import failure

_REFUSED = {  # by environment variable: why what was asked for by name may be refused
    "NCCL_HOSTID": ("NCCL has no window", "GPUs of one NVLink domain", "fused=True asks for"),
    "NCCL_MULTI_RANK_GPU_ENABLE": ("ranks share a GPU",),
}


def why_refused_here(error: BaseException) -> str:
    """Return why a call is refused where the tests run, between hosts or with ranks that share a GPU; "" if not. Local.

    Only algorithms asked for by name and fused epilogues count, also where a test expected another refusal.
    The conftest of tests/gpu skips a test that raises such an error.
    """
    words = [word for name, words in _REFUSED.items() if os.environ.get(name) for word in words]
    for each in (error, error.__context__):
        text = str(each) if isinstance(each, pb.UnsupportedError) else ""
        if (text.startswith("algo ") or "fused=True" in text) and any(word in text for word in words):
            return text.splitlines()[0]
    return ""


class Table:
    """What went wrong, case by case; ``check`` at the end."""

    def __init__(self, ctx: pb.Context) -> None:
        self._ctx = ctx
        self.lines: list[str] = []
        self._computed = 0
        self._refused: pb.UnsupportedError | None = None

    def add(self, case: str, run: Callable[[], Any]) -> None:
        """Run a case, which asserts after its last collective call, and note what fails on any rank. Collective."""
        if self._ctx.rank == 0 and os.environ.get("PBLASMP_TRACE"):
            print(case, file=sys.__stderr__, flush=True)
        try:
            wrong = failure(run)
        except (pb.StatusError, pb.UnsupportedError) as error:
            if isinstance(error, pb.UnsupportedError) and why_refused_here(error):  # on every rank
                self._refused = error
                return
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        found = self._ctx.comm.allgather(wrong)
        ranks = [rank for rank, text in enumerate(found) if text]
        if ranks:
            self.lines.append(f"{case:<56} {found[ranks[0]]} (ranks {ranks})")
        self._computed += 1

    def check(self) -> None:
        """Fail if a case was wrong. Local.

        Raises:
            UnsupportedError: all cases were refused for where the tests run.
        """
        assert not self.lines, str(self)
        if self._refused is not None and not self._computed:
            raise self._refused

    def __str__(self) -> str:
        return "\n".join([f"{len(self.lines)} cases:", *self.lines])
