# SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls on one context, each result against NumPy: what state between calls can spoil.

A step is a call's name and plain data, and is legal whatever came before, so that steps can be left out until only
those remain that a failure needs. Ranks are given the sequence, or draw the same one.
"""

from __future__ import annotations

from .devices import Away, Gpu, Host, Simulated
from .runs import Outcome, replay, shortened
from .steps import CALLS, Step, drawn, steps_of

__all__ = [
    "CALLS",
    "Away",
    "Gpu",
    "Host",
    "Outcome",
    "Simulated",
    "Step",
    "drawn",
    "replay",
    "shortened",
    "steps_of",
]
