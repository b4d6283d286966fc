# SPDX-License-Identifier: Apache-2.0
"""Calls on matrices whose arguments the core reads: those that write into ``out`` and look quite usual."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .._core import objects
from ..engines.direct import FAMILIES, ROUTINE_NUMBERS, Asked, Held, host_address
from ..layout.routines import WORDS, Routine, Sizes
from .handle import Handle
from .runtime import Runtime

_LETTERS = {"side": "LR", "uplo": "LU", "op_a": "NTC", "op_b": "NTC", "diag": "NU"}
_SIZES = "mnk"
_SLOTS = "context", "_view_of", "_at", "_array", "_held"


class FormRow(NamedTuple):
    """What a form has of a routine, as ``Routine`` says it."""

    sizes: Sizes
    operands: str
    required: str
    real: tuple[str, ...] = ()


class HandleForm:
    """A routine as a direct call on matrices: a ``RoutineForm``. Making one is local.

    ``names`` are the arguments that ``run`` gets, "out" among them; the routine may be one that has no direct calls.
    """

    def __init__(self, routine: str, row: Routine | FormRow, names: Sequence[str], call: str = "") -> None:
        self.call, self.routine, self.dtype = call or routine, routine, np.dtype("d")  # it makes no numbers
        self._way = "factor" if FAMILIES.get(routine) == "factored" else "run"
        self.names, self._row, self._is_direct = names, row, routine in FAMILIES
        self._at = at = {name: place for place, name in enumerate(names)}
        self.out, self._algo = at["out"], at["algo"]
        self._operands = {"d": self.out, **{x: at[x] for x in row.operands}}

    @cached_property
    def address(self) -> int:
        """Of what the core knows of it."""
        row, at, operands, matrices = self._row, self._at, [*self._operands], list[int]()
        for operand, place in self._operands.items():
            text = row.sizes.texts[operand]
            rows, cols, option = ("m", "m", "side") if text == "side" else (*text.split(), "")[:3]
            turned = ("n", "n") if text == "side" else (cols, rows)
            sizes = map(_SIZES.index, (rows, turned[0], cols, turned[1]))
            chosen_by = WORDS.index(option) if option in at else objects.BY_NONE
            matrices += place, *sizes, chosen_by, -1, operand == "d"
        matrices += [-1] * 8 * (objects.MATRICES - len(operands))
        self._form = objects.FORM.pack(
            self.call.encode(), ROUTINE_NUMBERS[self.routine], -1,
            "".join(Asked._field_defaults[word] for word in WORDS).encode(),
            b"".join(_LETTERS[word].encode().ljust(4, b"\0") for word in WORDS),
            *(at.get(word, -1) for word in WORDS), *[-1] * objects.SIZES,
            at.get("alpha", -1), at.get("beta", -1), "alpha" in row.real, "beta" in row.real, 0.0, *matrices,
            *(operands.index(x) if x in operands else -1 for x in "abcd"), 0, -1, 0, -1, 0,
            *(objects.slot(Handle, name) for name in _SLOTS), id(Held),
            operands.index("c") if "c" in operands and "c" not in row.required else -1,
        )  # fmt: skip
        return host_address(np.frombuffer(self._form, np.uint8))

    def run(self, args: Sequence[Any]) -> Any:
        """Compute a call on arguments of any types; return what ``Direct.run`` or ``factor`` does. Collective."""
        out, algo = args[self.out], args[self._algo]
        if not (self._is_direct and isinstance(out, Handle) and is_text(algo, "auto")):
            return None
        ctx = out.context
        engine = ctx.engine
        direct: Any = engine.direct
        if direct is None or not ctx.is_usable:
            return None
        try:
            return getattr(direct, self._way)(ctx.control, self, args)
        except BaseException as error:
            tell_of_interrupt(ctx, error, self.call)
            raise

    def asked(self, args: Sequence[Any], words: list[str], alpha: complex, beta: complex) -> Asked:
        """See ``RoutineForm``. Local."""
        a, b, c, d = (self._part(args, x) for x in "abcd")
        side, uplo, op_a, op_b, diag = words
        if not d[0].pattern.is_complex:
            alpha, beta = alpha.real, beta.real
        return Asked(self.call, self.routine, a, b, c, d, False, side, uplo, op_a, op_b, diag, alpha, beta)

    def _part(self, args: Sequence[Any], operand: str) -> Any:
        """Return what direct calls take of an operand, None if it is absent. Local."""
        x = args[self._operands[operand]] if operand in self._operands else None
        return None if x is None else x.direct_part()

    def learn(self, args: Sequence[Any], tell: Callable[..., None]) -> bool:  # noqa: ARG002
        """See ``RoutineForm``. Local."""
        for place in self._operands.values():
            x = args[place]
            part = x.direct_part() if isinstance(x, Handle) else None
            if part is not None:
                operator.index(part[0])  # it has an address in the core then
            elif x is not None:
                return False
        return True

    def answer(self, args: Sequence[Any], direct: Any, done: Any) -> Any:  # noqa: ARG002
        """See ``RoutineForm``. Local."""
        return done


def is_text(value: object, text: str) -> bool:
    """Return whether ``value``, which may have any type, is a text of Python's and equal to another. Local."""
    return type(value) is str and value == text


def tell_of_interrupt(ctx: Runtime[Any], error: BaseException, call: str) -> None:
    """Break the context if it is an interrupt that ends a direct call: the other ranks wait for this one. Local."""
    if not isinstance(error, (Exception, SystemExit)):
        ctx.control.channel.break_(error, call)
