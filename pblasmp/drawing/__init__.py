# SPDX-License-Identifier: Apache-2.0
"""Drawings of which rank owns what: SVG by ``draw``, which needs no library; by ``terminal.show`` in the terminal."""

from __future__ import annotations

from .svg import Drawing, draw

__all__ = ["Drawing", "draw"]
