# SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls on one context, each result against NumPy: what state between calls can spoil.

``Sequence`` is a state machine of Hypothesis's (``hypothesis.stateful``): its rules are public calls, its bundles the
matrices, plans, files and grids that they have made. A sequence that fails is shrunk and printed as a program.
"""

from .devices import Away, Gpu, Host, Simulated
from .matrices import Matrices
from .mistakes import Mistakes
from .plans import Plans
from .runs import replay, search
from .state import STEPS, State, WrongError, step

__all__ = [
    "STEPS",
    "Away",
    "Gpu",
    "Host",
    "Sequence",
    "Simulated",
    "State",
    "WrongError",
    "replay",
    "search",
    "step",
]


class Sequence(Matrices, Plans, Mistakes):
    """All steps there are."""
