# SPDX-License-Identifier: Apache-2.0
"""Descriptor files as plain data, those with faults, and how to put something wrong into them."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from pblasmp.problems import files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def invalid_files() -> list[Path]:
    """The descriptor files with faults."""
    return sorted((files.root() / "invalid").glob("*.toml"))


def read(path: Path) -> dict[str, Any]:
    """A descriptor file as plain data."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


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
