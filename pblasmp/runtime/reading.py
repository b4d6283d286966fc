# SPDX-License-Identifier: Apache-2.0
"""The reader of arguments that are distributed matrices: of products, levels 1 to 3 and factorizations.

``glance`` goes by what the tables of routines say of sizes and options, and returns what a direct call needs, or None
if anything about the arguments is unusual. It has no words for that: the checks, which name every fault, find them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from ..engines.direct import Part
from ..engines.request import CONSTANTS
from ..errors import ArgumentError, ArgumentTypeError, PblasmpError
from ..layout import MatrixDescriptor
from ..layout.routines import Sizes
from .handle import Handle, no_matrix
from .runtime import Runtime

_ABSENT = (-1, -1)


Glance = tuple[Part, Part | None, Part | None, Part, tuple[str, str, str, str, str], Any]
"""What a direct call needs: A, B, C and D, None for those that are absent; its words in their order; the result."""


def glance(
    ctx: Runtime[Any],
    sizes: Sizes,
    matrices: tuple[Any, ...],
    options: Mapping[str, Any],
    new: Callable[[], MatrixDescriptor],
    *,
    zeros: bool = False,
) -> Glance | None:
    """Return what a direct call needs of its arguments; None if it takes the ordinary way. Local.

    Matrices are the caller's, ``out`` the last; None for those that are absent. ``new`` returns the layout of a new D,
    which is filled with zeros if ``zeros``.
    """
    get = options.get
    words = get("side", "L"), get("uplo", "L"), get("op_a", "N"), get("op_b", "N"), get("diag", "N")
    extents: list[int] = []
    parts = sub_matrices(ctx, matrices, extents)
    if parts is None or 0 in extents:
        return None
    a, b, c, d = parts
    try:
        fits = sizes.fit(extents, words, (b is None, c is None, d is None))
    except Exception:  # noqa: BLE001 (what is wrong with an option is said where all ranks hear it)
        return None
    if a is None or not fits:
        return None
    result = matrices[3]
    if d is None:
        result = _made(ctx, new, zeros=zeros)
        d = None if result is None else result.direct_part()
    elif not result.writeable:
        return None
    return None if d is None else (a, b, c, d, words, result)


def sub_matrices(ctx: Runtime[Any], matrices: Iterable[Any], extents: list[int]) -> list[Part | None] | None:
    """Return what direct calls take, None for what is absent; None if they do not take all matrices together. Local.

    ``extents`` gets their rows and columns, -1 for what is absent.
    """
    parts: list[Part | None] = []
    letter, last, part, size = "", None, None, _ABSENT
    for x in matrices:
        if x is None:
            parts.append(None)
            extents += _ABSENT
            continue
        if x is not last:  # as a result that takes an operand's place is
            if not isinstance(x, Handle) or x.context is not ctx:
                return None
            part, last = x.direct_part(), x
            if part is None:
                return None
            held, _, _, m, n, transposed = part
            its = held.pattern.letter
            if its != letter:
                if letter:
                    return None
                letter = its
            size = (n, m) if transposed else (m, n)
        parts.append(part)
        extents += size
    return parts


def _made(ctx: Runtime[Any], new: Callable[[], MatrixDescriptor], *, zeros: bool) -> Any:
    """Return a new matrix; None if that fails, perhaps on this rank only: the ordinary way finds it again. Local."""
    try:
        with ctx.engine.on_device():
            made = ctx.allocate(new())
            if zeros:
                made.local[...] = 0
    except (MemoryError, PblasmpError, RuntimeError):  # the last one of a GPU's library
        return None
    return made


def number(value: Any, letter: str, real: bool) -> complex | None:
    """Return a scalar as BLAS's type of that letter has it, None if it takes a closer look. Local.

    It must be real for a real type, and for every type if ``real``.
    """
    kind = type(value)
    is_real = letter not in "czi" or real
    try:
        if kind is int:
            value = float(value)
        elif kind is not float:
            if isinstance(value, np.number):
                value = value.item()
            elif kind is not complex:
                return None
            value = complex(value)
            if is_real:
                return value.real if value.imag == 0 else None
    except (OverflowError, TypeError):
        return None
    return value if is_real else complex(value)


def context_of(call: str, *matrices: object) -> Runtime[Any]:
    """Return the context of the arguments that are distributed matrices. Local if they have one that is open.

    Without one, or with several, it is that in which the other ranks make this call: there this rank tells them what is
    wrong with its arguments. Collective over that context. ArgumentError or ClosedError if none is open.
    """
    contexts = [
        x.context if isinstance(x, Handle) else x for x in matrices if isinstance(x, (Handle, Runtime))
    ]
    different = [ctx for ctx in {id(ctx): ctx for ctx in contexts}.values() if not ctx.is_closed]
    if len(different) == 1:
        return different[0]
    found: Runtime[Any] | None = Runtime.where_others_call(call, next(iter(different), None))
    if found is not None:
        return found
    for ctx in contexts:
        ctx.check_open()
    raise ArgumentTypeError(
        f"{call}: expected distributed matrices; ctx.scatter, ctx.load and ctx.from_local make them"
    )


def refuse(call: str, error: Exception, *values: object, waits_in: str | None = None) -> NoReturn:
    """Raise what is wrong with a call on all ranks of its context, which ``context_of`` finds. Collective over it.

    Without an open context, raise it here: local. ``waits_in`` is the call in which other ranks wait, if not this one;
    empty if it is unknown.
    """
    try:
        ctx = context_of(call if waits_in is None else waits_in, *values)
    except PblasmpError:
        raise error from None
    with ctx.agreement(call):
        raise error from None
    raise AssertionError  # an agreement raises what is raised in it


def comparable(ctx: Runtime[Any], matrices: Iterable[Any], options: Iterable[Any]) -> bool:
    """Return whether two calls with these arguments, if they are equal, are alike: else check them anew. Local."""
    if not CONSTANTS.issuperset(map(type, options)):
        return False
    return not [x for x in matrices if x is not None and not (isinstance(x, Handle) and x.context is ctx)]


def check_operands(ctx: Runtime[Any], required: Container[str], matrices: Mapping[str, object]) -> None:
    """Raise ArgumentError unless all ``required`` operands, and all that are given, are matrices of ``ctx``. Local."""
    for name, x in matrices.items():
        if x is None and name not in required:
            continue
        if not isinstance(x, Handle):
            raise ArgumentTypeError(f"{name}: {no_matrix(x)}")
        if x.context is not ctx:
            x.context.check_open()
            raise ArgumentError(f"{name}: belongs to another context")


def check_writable(matrices: Mapping[str, Handle | None]) -> None:
    """Raise ArgumentError if a local array is read-only. Local."""
    for name, x in matrices.items():
        if x is not None and not getattr(x.local.flags, "writeable", True):
            raise ArgumentError(f"{name}: its local array is read-only")


def check_overlap(
    ctx: Runtime[Any],
    matrices: Mapping[str, Handle | None],
    in_place: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Raise ArgumentError if D shares memory with an operand, unless it is the operand ``in_place`` itself. Local.

    ``names`` has what messages call the operands, if not "a", "b" and "c".
    """
    out = matrices["d"]
    assert out is not None
    check_writable({"out": out})
    for name in "abc":
        x = matrices[name]
        if x is None:
            continue
        if name == in_place and x.descriptor == out.descriptor:
            first = x.local[:1, :1], out.local[:1, :1]
            if ctx.engine.overlap(*first):
                continue  # the same memory
        if ctx.engine.overlap(x.local, out.local):
            said = (names or {}).get(name, name)
            expected = f"{said} itself or a separate matrix" if name == in_place else "a separate matrix"
            raise ArgumentError(f"out: shares memory with {said}; expected {expected}")
