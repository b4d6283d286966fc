# SPDX-License-Identifier: Apache-2.0
"""Drawings of which rank owns what: in the terminal (``show``) and as pictures (``draw``, which needs matplotlib).

Charts of times are in ``charts``; the pictures of notebooks, which need no library, in ``layout.svg``.
"""

from __future__ import annotations

from .picture import draw, figure
from .terminal import show

__all__ = ["draw", "figure", "show"]
