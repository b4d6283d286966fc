# SPDX-License-Identifier: Apache-2.0
"""Docstrings of functions that are made from the tables of routines, and what public classes call themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import TypeVar

__all__ = ["complete", "public_face"]

Class = TypeVar("Class", bound=type)


def public_face(cls: Class) -> Class:
    """Give a class its own copy of the constructor that it inherits: Python's errors then name the class. Local."""
    base: FunctionType = cls.__init__  # type: ignore[misc]
    own = FunctionType(base.__code__, base.__globals__, base.__name__, base.__defaults__, base.__closure__)
    own.__dict__.update(base.__dict__)
    own.__kwdefaults__, own.__annotations__ = base.__kwdefaults__, base.__annotations__
    own.__qualname__, own.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    cls.__init__ = own  # type: ignore[misc]
    return cls


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
