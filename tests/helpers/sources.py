# SPDX-License-Identifier: Apache-2.0
"""The files of this repository: what they import and which classes they have, anywhere in them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # of a statement: the statements in it


class Source(NamedTuple):
    """What a file has: of ``import a.b`` ("a.b", ""), of ``from a import b`` ("a", "b"), with absolute names.

    ``bases`` are those of all its classes, by their last names.
    """

    imports: list[tuple[str, str]]
    classes: list[str]
    bases: list[str]


@functools.cache
def source(path: Path) -> Source:
    """Return what a file has, also under TYPE_CHECKING and within functions. Local."""
    package = path.parent.relative_to(ROOT).parts
    found = Source([], [], [])
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:  # statements only: there are ten times as many nodes
        node = left.pop()
        if isinstance(node, ast.Import):
            found.imports.extend((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.imports.extend((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
            found.bases.extend(
                re.split(r"\W", ast.unparse(base).partition("[")[0])[-1] for base in node.bases
            )
        for block in _BLOCKS:
            left += getattr(node, block, ())
    return found
