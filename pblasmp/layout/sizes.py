# SPDX-License-Identifier: Apache-2.0
"""Sizes of operands as letters, as the tables of routines have them.

"m k op_a" are m rows and k columns, exchanged unless the option ``op_a`` is "N". "side" is a square matrix, of m rows
if ``side`` is "L", else of n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["WORDS", "Sizes"]

WORDS = ("side", "uplo", "op_a", "op_b", "diag")
"""The options of routines, in the order in which they are handed on."""


class Sizes:
    """What the sizes of A, B, C and D have to do with each other. Local.

    Args:
        texts: rows, columns and perhaps an option, by operand.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self._equal: dict[
            tuple[str, ...], list[tuple[int, int]]
        ] = {}  # by options, extents that are the same letter

    def fit(self, extents: Sequence[int], words: tuple[str, ...]) -> bool:
        """Return whether operands fit together. Local.

        Args:
            extents: rows and columns of A, B, C and D; -1 for those that are absent.
            words: legal options, in the order of ``WORDS``.
        """
        equal = self._equal.get(words)
        if equal is None:
            equal = self._equal[words] = self._same_letters(words)
        for i, j in equal:  # noqa: SIM110 - a generator takes longer than this
            if extents[i] != extents[j] >= 0:
                return False
        return True

    def _same_letters(self, words: tuple[str, ...]) -> list[tuple[int, int]]:
        options = dict(zip(WORDS, words, strict=True))
        first: dict[str, int] = {}  # A and B, which come first, are there if they have a size
        equal = []
        for place, operand in enumerate("abcd"):
            for axis, letter in enumerate(letters(self.texts.get(operand, ""), options)):
                here = 2 * place + axis
                at = first.setdefault(letter, here)
                if at != here:
                    equal.append((at, here))
        return equal


def letters(text: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the letters of the rows and columns of an operand, as it is stored. Local."""
    if text == "side":
        return ("m", "m") if options["side"] == "L" else ("n", "n")
    rows, cols, option = (*text.split(), "", "", "")[:3]
    if not text:
        return ()
    return (cols, rows) if option and options[option] != "N" else (rows, cols)
