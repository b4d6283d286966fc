# SPDX-License-Identifier: Apache-2.0
"""Sizes as letters: a glance at them and the words for faults come to the same verdict."""

from itertools import product

import pytest

from pblasmp.layout import Grid, Level3Problem, MatmulProblem, MatrixDescriptor
from pblasmp.layout.problem import nearest_legal
from pblasmp.layout.routines import GEMM, ROUTINES, WORDS

LEGAL = {"side": "LR", "uplo": "L", "op_a": "NT", "op_b": "NT", "diag": "N"}
SHAPES = [*product((2, 3), repeat=2)]


def faults(name, row, shapes, options):
    """Return what is wrong with the sizes, in words."""
    given = {
        letter: shape and MatrixDescriptor(shape, shape, Grid(1, 1))
        for letter, shape in zip("abcd", shapes, strict=True)
    }
    if row is GEMM:
        return nearest_legal(MatmulProblem(**given, **options)).faults()
    return Level3Problem(name, **given, **options).faults()


@pytest.mark.parametrize("name", ["matmul", *ROUTINES])
def test_the_table_and_the_words_agree(name):
    row, verdicts = ROUTINES.get(name, GEMM), set()
    of = [[None] if letter not in (*row.operands, "d") else SHAPES for letter in "abcd"]
    of[2] = [*SHAPES, None] if "c" in row.operands else [None]
    for values in product(*(LEGAL[each] for each in WORDS)):
        options = {each: value for each, value in zip(WORDS, values, strict=True) if each in row.options}
        if any(
            value != LEGAL[each][0] and each not in options for each, value in zip(WORDS, values, strict=True)
        ):
            continue
        for shapes in product(*of):
            extents = [n for shape in shapes for n in shape or (-1, -1)]
            fits = row.sizes.fit(extents, values, tuple(shape is None for shape in shapes[1:]))
            verdicts.add(fits)
            assert fits == (not faults(name, row, shapes, options)), (values, shapes)
    assert verdicts == {True, False}
