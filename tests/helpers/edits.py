# SPDX-License-Identifier: Apache-2.0
"""Descriptor files with something wrong in them."""

from __future__ import annotations

import copy
from typing import Any


def edited(data: dict[str, Any], edits: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """Return a copy with keys set, or taken out (None), at the top or in a table."""
    data = copy.deepcopy(data)
    for table, key, value in edits:
        target = data.get(table) if table else data
        if not isinstance(target, dict):
            continue
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value
    return data
