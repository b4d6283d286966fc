# SPDX-License-Identifier: Apache-2.0
"""Drawings in the terminal show the right owners, all of them."""

import dataclasses
import io
import itertools
import re
import time

import pytest
from rich.console import Console
from rich.style import Style

import pblasmp as pb
from pblasmp.drawing import labels
from pblasmp.drawing.maps import show
from pblasmp.problems import files
from tests.helpers.oracle import owners
from tests.helpers.slow import only_long

PROBLEMS = [path.stem for path in files.find("problems")]


def made(shape, block, grid, **more):
    """A problem file that is not on disk: a square product."""
    problem = pb.MatmulProblem.gemm(shape, shape, shape, grid, block, **more)
    parents = {"a": problem.a, "b": problem.b, "d": problem.d}
    windows = {name: (slice(0, shape), slice(0, shape)) for name in parents}
    return files.ProblemFile(files.root() / "made.toml", "made", "", problem, parents, windows, 1.0, 0.0)


LARGE = made(10_000, 256, pb.Grid(2, 3))
HUGE = made(10**9, 128, pb.Grid(1000, 1000))
FAULTY = files.load_problem_file(files.root() / "invalid" / "many-faults.toml")


def terminal(file, width=110, color=None):
    if color is not None:
        Style._add.cache_clear()  # Rich keeps a style's codes as the first console of the process had them
    console = Console(file=io.StringIO(), width=width, color_system=color, force_terminal=color is not None)
    show(file, console)
    return console.file.getvalue()


@pytest.mark.parametrize("wide", [False, *only_long(True)])
def test_terminal_shows_every_owner_and_every_local_shape(wide, subtests):
    for name in PROBLEMS:
        with subtests.test(name):
            file = files.load_problem_file(name)
            drawn = labels.views(file)
            text = terminal(file, 110 if wide else 60)
            if not wide:
                check_owners(file.problem, drawn, text)
            lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
            for rank in range(file.nranks):
                shapes = ["{} × {}".format(*view.descriptor.local_shape(rank)) for view in drawn]
                assert any(
                    line[0] == str(rank)
                    and all(a.startswith(b) for a, b in zip(line[1:], shapes, strict=True))
                    for line in lines
                    if len(line) == len(shapes) + 1
                )


def check_owners(problem, drawn, text):
    """Without colors a line of the map is a line of the owners, in order."""
    for view in drawn:
        d = getattr(problem, view.name[0].lower())
        title = f"{view.name}  {d.shape[0]} × {d.shape[1]}"
        assert title in text
        if 0 in d.shape:
            continue
        rows = ["".join(map(str, row)) for row in owners(d)]
        found = iter(re.sub("[^0-9·]", "", line) for line in text.partition(title)[2].splitlines())
        for row in rows:
            assert any(row in line for line in found), f"{view.name}: no line shows {row}"


def test_terminal_map_in_full():
    text = terminal(files.load_problem_file("ragged-2x3-sources"))
    expected = """
  0     3     6
0 3 3 3 4 4 4 5 5
  3 3 3 4 4 4 5 5
2 0 0 0 1 1 1 2 2
  0 0 0 1 1 1 2 2
4 3 3 3 4 4 4 5 5
  3 3 3 4 4 4 5 5
6 0 0 0 1 1 1 2 2
""".strip("\n").splitlines()
    lines = [line[:17].rstrip() for line in text.splitlines()]
    start = lines.index(expected[0])
    assert lines[start : start + len(expected)] == expected
    for line in (
        "D = A B   m = 7, n = 10, k = 8; GEMM on any 2D block-cyclic layout",
        "This product is legal.",
    ):
        assert line in text
    assert "blocks of 2 × 3 from process (1, 0)" in text
    assert " 0  1  2 \n 3  4  5 \n" in text


def test_terminal_marks_what_is_outside_of_a_window():
    lines = terminal(files.load_problem_file("sub-b")).splitlines()
    assert sum("[3:8, 3:10] of 12 × 12" in line for line in lines) == 1
    assert any("· · · 4 4 4 5 5 5 3 · ·" in line for line in lines)


def test_terminal_colors_are_those_of_the_ranks():
    text = terminal(files.load_problem_file("grid-2x2"), color="truecolor")
    for rank, color in enumerate(labels.PALETTE[:4]):
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        assert re.search(rf"48;2;{red};{green};{blue}m *{rank} *\x1b", text)
    assert "48;2;0;0;0" not in text
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", text))) == 4


def test_blocks_of_one_rank_can_be_told_apart():
    text = terminal(files.load_problem_file("one-rank"), color="truecolor")
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", text))) == 2


def test_terminal_lists_faults():
    text = terminal(FAULTY, width=300)
    assert "This product is not legal:" in text
    assert text.count("\n  - ") == 6


def test_terminal_draws_large_matrices_by_block():
    text = terminal(LARGE)
    assert text.count("each cell one of 40 × 40 blocks") == 3
    assert "0  1  2  0  1  2  …" in text
    assert " 0    5120 × 3344  5120 × 3344  5120 × 3344" in text
    wide = terminal(made(300, 10, pb.Grid(2, 3)))
    assert "first" not in wide
    assert "  ".join(itertools.islice(itertools.cycle("012"), 30)) in wide


def test_terminal_draws_huge_matrices_at_once():
    before = time.perf_counter()
    text = terminal(HUGE)
    assert time.perf_counter() - before < 5
    assert "999999   999936 × 999936" in text
    assert len(text.splitlines()) < 150


@pytest.mark.parametrize(
    ("name", "alpha", "beta", "line"),
    [
        ("op-tn", 1, 0, "D = Aᵀ B"),
        ("op-nc", -1, 0, "D = -A Bᴴ"),
        ("op-nc", 1j, 0, "D = i A Bᴴ"),
        ("op-nc", -2j, 0, "D = -2i A Bᴴ"),
        ("op-cc", 1 - 1j, 0, "D = (1 - i) Aᴴ Bᴴ"),
        ("op-cc", -0.5 + 2.5j, 0, "D = (-0.5 + 2.5i) Aᴴ Bᴴ"),
        ("scale-alpha-beta", 2, 1, "D = 2 A B + C"),
        ("scale-alpha-beta", 0, -1, "D = 0 A B - C"),
        ("scale-alpha-beta", 1, -2.5, "D = A B - 2.5 C"),
        ("scale-alpha-beta", 3, 0, "D = 3 A B"),
        ("scale-complex", 1, -1j, "D = A Bᴴ - i C"),
    ],
)
def test_formula(name, alpha, beta, line):
    assert labels.formula(dataclasses.replace(files.load_problem_file(name), alpha=alpha, beta=beta)) == line


def test_neighbors_in_the_grid_differ_in_color():
    for grid in (pb.Grid(3, 4), pb.Grid(8, 8, "col"), pb.Grid(2, 3)):
        colors = labels.Colors(grid)
        for prow, pcol in itertools.product(range(grid.nprow), range(grid.npcol)):
            mine = colors(grid.rank(prow, pcol))
            assert prow + 1 == grid.nprow or mine != colors(grid.rank(prow + 1, pcol))
            assert pcol + 1 == grid.npcol or mine != colors(grid.rank(prow, pcol + 1))
    assert len({labels.Colors(pb.Grid(2, 4))(rank) for rank in range(8)}) == 8


ROUTINE = """
title = "A triangle"
routine = "trsm"
uplo = "U"
grid = "2x2"
block = 2
a = { shape = [6, 6] }
b = { shape = [6, 4] }
d = { shape = [9, 4], window = [[2, 8], [0, 4]] }
"""


def test_terminal_shows_routines():
    text = terminal(files.load_problem_file(io.StringIO(ROUTINE)))
    assert "op(A) D = alpha B, or D op(A) = alpha B   m = 6, n = 4, k = 6; trsm, side=L, uplo=U" in text
    assert "A  6 × 6" in text
    assert "[2:8, 0:4] of 9 × 4" in text
    assert text.rstrip().endswith("This trsm is legal.")
    wrong = terminal(files.load_problem_file(io.StringIO(ROUTINE.replace("[6, 6]", "[5, 5]"))))
    assert "This trsm is not legal:\n  - a: shape is 5x5" in wrong
