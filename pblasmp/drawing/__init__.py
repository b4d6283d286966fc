# SPDX-License-Identifier: Apache-2.0
"""Drawings of which rank owns what: as SVG (``draw``, which needs no library), and in the terminal (``terminal.show``).

Charts of times are in ``charts``.
"""

from __future__ import annotations

from .svg import Drawing, draw

__all__ = ["Drawing", "draw"]
