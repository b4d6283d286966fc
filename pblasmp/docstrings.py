# SPDX-License-Identifier: Apache-2.0
"""Docstrings of functions that are made from the tables of routines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

__all__ = ["complete"]


def complete(
    function: Callable[..., object], meaning: Callable[[str], str], raises: Iterable[str], *more: str
) -> None:
    """Append the sections that tables know to a docstring, of four spaces' indentation. Local.

    Args:
        function: the function; its docstring has what is particular to it.
        meaning: returns what an argument is, by its name.
        raises: lines on errors.
        more: paragraphs: the first ones before the arguments, one that starts with "Source" at the end.
    """
    before = [each for each in more if not each.startswith("Source")]
    after = [each for each in more if each.startswith("Source")]
    text = [(function.__doc__ or "").rstrip(), *(f"    {each}" for each in before)]
    arguments = [f"        {name}: {meaning(name)}" for name in inspect.signature(function).parameters]
    text += ["\n".join(["    Args:", *arguments])]
    text += ["\n".join(["    Raises:", *(f"        {line}" for line in raises)])]
    function.__doc__ = "\n\n".join([*text, *(f"    {each}" for each in after)]) + "\n    "
