# SPDX-License-Identifier: Apache-2.0
"""Arguments as PBLAS counts them: what is wrong with them, and the number under which it is reported."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, short_repr

Function = TypeVar("Function", bound=Callable[..., Any])

DESCRIPTOR = {
    "DTYPE_": 1, "CTXT_": 2, "M_": 3, "N_": 4, "MB_": 5, "NB_": 6, "RSRC_": 9, "CSRC_": 10, "LLD_": 11,
}  # fmt: skip
"""The entries of a descriptor, in their order, and the numbers under which PBLAS reports them.

PBLAS checks a descriptor of nine integers as one of eleven. Entries 5 and 6 of that one are the rows and columns of the
first block, here MB_ and NB_, so these are reported there; RSRC_, CSRC_ and LLD_ are entries 9 to 11.
Source: PBLAS, PB_CargFtoC and PB_Cchkmat.
"""

LONGER = {"IMB_": 5, "INB_": 6, "MB_": 7, "NB_": 8}
"""Entries of a descriptor of eleven integers (type 2), under their own numbers."""


class ParameterError(ArgumentError):
    """An argument of a routine of ``pblasmp.pblas`` is not legal; the message names every one that is not.

    Attributes:
        info: as ScaLAPACK's INFO: ``-i`` if argument i is illegal, ``-(100 * i + j)`` if entry j of descriptor i is,
            both counted from 1. PBLAS's numbers of ``RSRC_``, ``CSRC_`` and ``LLD_`` are 9, 10 and 11, those of
            ScaLAPACK's factorizations and solves 7, 8 and 9. If several arguments are illegal, the number of the first.
    """

    info: int = 0

    @classmethod
    def number(cls, info: int, message: str) -> ParameterError:
        """Return the error with this number. Local."""
        error = cls(message)
        error.info = info
        return error


class Faults:
    """Everything that is wrong with the arguments of one call, each fault under its number. Local.

    Names are in the arguments' order; entries of descriptors are counted as in PBLAS, or as in ScaLAPACK.
    """

    def __init__(self, call: str, names: Sequence[str], *, of_pblas: bool = True) -> None:
        self.call, self._names, self._of_pblas = call, list(names), of_pblas
        self._found: list[tuple[int, str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, name: str, text: str, entry: int | str = 0) -> None:
        """Note a fault of argument ``name``, or of its ``entry`` if it is a descriptor.

        An entry is a number from 1 to 9, or one of ``LONGER``.
        """
        number = self._names.index(name) + 1
        which, reported = f"argument {number} ({name})", 0
        if isinstance(entry, str):
            reported = LONGER[entry]
            which = f"entry {reported} ({entry}) of {which}"
        elif entry:
            label, reported = list(DESCRIPTOR.items())[entry - 1]
            reported = reported if self._of_pblas else entry
            which = f"entry {entry} ({label}) of {which}"
        self._found.append((100 * number + reported, f"{which}: {text}"))

    def error(self) -> ParameterError:
        """Return the error to raise."""
        self._found.sort()
        number = self._found[0][0]
        info = -number if number % 100 else -(number // 100)
        texts = [text for _, text in self._found]
        head = texts[0] if len(texts) == 1 else "\n  - ".join([f"{len(texts)} faults", *texts])
        return ParameterError.number(info, f"{self.call}: {head}\n  INFO = {info}")

    def check(self) -> None:
        """Raise the error if there are any faults."""
        if self:
            raise self.error()

    def integer(self, name: str, value: Any, minimum: int | None = None, instead: int = 0) -> int:
        """Return ``value`` as an int; note a fault if it is too small, or none: then ``instead`` takes its place."""
        try:
            number = operator.index(value)
        except TypeError:
            self.add(name, f"expected an integer, got {short_repr(value)}")
            return instead if minimum is None else minimum
        if minimum is not None and number < minimum:
            self.add(name, f"expected at least {minimum}, got {short_repr(number)}")
            return minimum
        return number

    def no_context(self, name: str, ictxt: Any) -> None:
        """Note that an argument is no context of this process."""
        self.add(name, f"{short_repr(ictxt)} is not a context of this process")

    def letter(self, name: str, value: Any, allowed: str) -> str:
        """Return the upper-case letter that an option begins with; note a fault if it is not in ``allowed``."""
        found = value[:1].upper() if isinstance(value, str) else ""
        if found and found in allowed:
            return found
        self.add(name, f"expected one of {', '.join(allowed)}, got {short_repr(value)}")
        return allowed[0]


def signature_of(
    annotations: Mapping[str, str], returns: str, optional: Container[str] = ()
) -> inspect.Signature:
    """Return the signature of a routine; ``optional`` are arguments that are None if they are left out. Local.

    Annotations are by the names of its arguments, in their order.
    """
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if name in optional else inspect.Parameter.empty,
                annotation=annotation,
            )
            for name, annotation in annotations.items()
        ],
        return_annotation=returns,
    )


def bound(
    call: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, or raise TypeError. Local."""
    try:
        found = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{call}: {error}") from None
    if len(found.arguments) < len(signature.parameters):
        found.apply_defaults()
    return found.arguments


def as_routine(function: Function, name: str, signature: inspect.Signature, text: str) -> Function:
    """Return a function under the name of a routine, with its signature and docstring. Local."""
    function.__name__ = function.__qualname__ = name
    function.__module__ = __name__.rpartition(".")[0]
    function.__doc__ = text
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def takes_number(value: Any) -> bool:
    """Return whether a number can be written to an argument, or is only returned: None. Local."""
    return value is None or (isinstance(value, np.ndarray) and value.size == 1 and value.flags.writeable)


def number_place(faults: Faults, name: str, value: Any) -> NDArray[Any] | None:
    """Return the array to which a number is written; None if it is only returned. Local."""
    if takes_number(value):
        place: NDArray[Any] | None = value
        return place
    faults.add(name, f"expected a writeable NumPy array of one element, or None, got {short_repr(value)}")
    return None


def give(place: Any, number: Any) -> Any:
    """Return a number, written to an argument that may be None. Local."""
    if place is not None:
        place[...] = number
    return number
