# SPDX-License-Identifier: Apache-2.0
"""Plans on paper: what a computation sends, needs and takes on ranks and machines that nobody has to have."""

from __future__ import annotations

from .traffic import Traffic, move_traffic, traffic

__all__ = ["Traffic", "move_traffic", "traffic"]
