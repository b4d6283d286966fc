# SPDX-License-Identifier: Apache-2.0
"""Plans on paper: what a computation sends, needs and takes on ranks and machines that nobody has to have."""

from __future__ import annotations

from ..layout.traffic import Traffic
from .advise import Advice
from .predict import Prediction
from .pretend import DryRun, dry_run
from .traffic import move_traffic

__all__ = ["Advice", "DryRun", "Prediction", "Traffic", "dry_run", "move_traffic"]
