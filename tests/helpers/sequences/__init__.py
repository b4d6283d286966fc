# SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls on one context, each result against NumPy: what state between calls can spoil.

A step is a call's name and plain data, and is legal whatever came before, so that steps can be left out until only
those remain that a failure needs. Rank 0 draws sequences by Hypothesis; all ranks make them.
"""

from .devices import Away, Gpu, Host, Simulated
from .runs import Outcome, replay, search
from .steps import CALLS, Step, sequences, steps_of

__all__ = [
    "CALLS",
    "Away",
    "Gpu",
    "Host",
    "Outcome",
    "Simulated",
    "Step",
    "replay",
    "search",
    "sequences",
    "steps_of",
]
