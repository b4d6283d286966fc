# SPDX-License-Identifier: Apache-2.0
"""Planning: what a computation sends, needs and takes on ranks and machines that nobody has to have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..lazy import submodule

if TYPE_CHECKING:
    from ..layout.value import Traffic as Traffic
    from .advise import Advice as Advice
    from .predict import Prediction as Prediction
    from .pretend import DryRun as DryRun
    from .pretend import dry_run as dry_run
    from .traffic import move_traffic as move_traffic

_HOME = {
    "Advice": ".advise", "DryRun": ".pretend", "Prediction": ".predict", "Traffic": "..layout.value",
    "dry_run": ".pretend", "move_traffic": ".traffic",
}  # fmt: skip
"""The modules of the public names, which are imported when they are first used: counts take less than that."""

__all__ = ["Advice", "DryRun", "Prediction", "Traffic", "dry_run", "move_traffic"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name], __name__), name)
    return submodule(__name__, name)
