# SPDX-License-Identifier: Apache-2.0
"""What pblasmp logs, through ``logging.getLogger("pblasmp")``: INFO says what was chosen, DEBUG gives the details.

Modules call ``logger.info`` and ``logger.debug``. Nothing is shown unless the program configures logging or
``PBLASMP_LOG=info`` or ``debug`` is set. Only rank 0 logs; ``PBLASMP_LOG=info,all`` makes every rank log. Records
have a ``rank``, None in a process that no launcher started.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from .errors import ArgumentError
from .launchers import surroundings

VARIABLE = "PBLASMP_LOG"

logger = logging.getLogger("pblasmp")


class _OneRank(logging.Filter):
    """Notes the rank of each record, and drops those of ranks other than 0."""

    def __init__(self) -> None:
        super().__init__()
        self.everyone = False

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = rank = _rank()
        record.who = "" if rank is None else f" rank {rank}"
        return self.everyone or not rank


def _rank(environ: Mapping[str, str] = os.environ) -> int | None:
    around = surroundings(environ)
    if around is not None:
        return around.rank
    under_torchrun = "TORCHELASTIC_RUN_ID" in environ and environ.get("RANK", "").isdecimal()
    return int(environ["RANK"]) if under_torchrun else None


_filter = _OneRank()


def show_logs(handler: logging.Handler | None = None, setting: str | None = None) -> None:
    """Write the log to ``handler``, standard error by default, as PBLASMP_LOG or ``setting`` says. Local.

    ArgumentError unless the setting is "info" or "debug", with ",all" or without.
    """
    setting = os.environ.get(VARIABLE, "") if setting is None else setting
    if not setting:
        return
    match = re.fullmatch(r"(info|debug)(,all)?", setting.lower())
    if match is None:
        raise ArgumentError(
            f"{VARIABLE}: expected info or debug, or with ,all for every rank (info,all), got {setting!r}"
        )
    handler = handler or logging.StreamHandler()
    handler.setFormatter(logging.Formatter("pblasmp %(levelname)s%(who)s: %(message)s"))
    for mine in [each for each in logger.handlers if getattr(each, "from_pblasmp", False)]:
        logger.removeHandler(mine)
    handler.from_pblasmp = True  # type: ignore[attr-defined]
    logger.addHandler(handler)
    logger.setLevel(match[1].upper())
    logger.propagate = False  # otherwise a program that also configures logging shows everything twice
    _filter.everyone = match[2] is not None


logger.addFilter(_filter)
logger.addHandler(logging.NullHandler())
show_logs()
