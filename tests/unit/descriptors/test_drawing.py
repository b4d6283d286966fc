# SPDX-License-Identifier: Apache-2.0
"""Drawings show the right owners, all of them, and nothing over anything else."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import subprocess
import sys
import time
from functools import cache

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.style import Style

import pblasmp as pb
from pblasmp import drawing
from pblasmp.drawing import labels
from pblasmp.extras import install
from pblasmp.layout import files

PROBLEMS = [path.stem for path in files.find("problems")]
PICTURED = [
    *(
        "grid-2x2",
        "ragged-2x3-sources",
        "nvidia-allgather",
        "nvidia-allreduce",
        "sub-all",
        "sub-empty",
        "one-rank",
    ),
    *("idle-wrapped", "empty-k", "padded-f-order", "padded-c-order", "thin-dot-product", "grid-transposed-a"),
]


def golden(name):
    return json.loads((files.root() / "golden" / f"{name}.json").read_text())


def made(shape, block, grid, **more):
    """A problem file that is not on disk: a square product."""
    problem = pb.MatmulProblem.gemm(shape, shape, shape, grid, block, **more)
    parents = {"a": problem.a, "b": problem.b, "d": problem.d}
    windows = {name: (slice(0, shape), slice(0, shape)) for name in parents}
    return files.ProblemFile(files.root() / "made.toml", "made", "", problem, parents, windows, 1.0, 0.0)


TWELVE = made(14, 2, pb.Grid(3, 4, "col"))
LARGE = made(10_000, 256, pb.Grid(2, 3))
HUGE = made(10**9, 128, pb.Grid(1000, 1000))
FAULTY = files.load_problem_file(files.root() / "invalid" / "many-faults.toml")
MADE = {"twelve": TWELVE, "large": LARGE, "huge": HUGE, "faulty": FAULTY}


@cache
def picture(name):
    return drawing.figure(MADE.get(name) or files.load_problem_file(name))


# --- the terminal ---


def terminal(file, width=110, colour=None):
    Style._add.cache_clear()  # Rich keeps a style's codes as the first console of the process had them
    console = Console(file=io.StringIO(), width=width, color_system=colour, force_terminal=colour is not None)
    drawing.show(file, console)
    return console.file.getvalue()


@pytest.mark.parametrize("name", PROBLEMS)
def test_terminal_shows_every_owner(name):
    """Without colours a line of the map is a line of the golden owners, in order."""
    file = files.load_problem_file(name)
    text = terminal(file, width=60)
    for view in labels.views(file):
        facts = golden(name)[view.name[0].lower()]
        title = f"{view.name}  {facts['shape'][0]} × {facts['shape'][1]}"
        assert title in text
        if 0 in facts["shape"]:
            continue
        owners = (
            ["·" * len(facts["owners"][0])] * view.rows[0] + facts["owners"]
            if view.windowed
            else facts["owners"]
        )
        found = iter(re.sub("[^0-9·]", "", line) for line in text.partition(title)[2].splitlines())
        for row in owners[view.rows[0] if view.windowed else 0 :]:
            assert any(row in line for line in found), f"{view.name}: no line shows {row}"


@pytest.mark.parametrize("name", PROBLEMS)
def test_terminal_shows_every_local_shape(name):
    file = files.load_problem_file(name)
    lines = [re.split(r" {2,}", line.strip()) for line in terminal(file).splitlines()]
    drawn = labels.views(file)
    for rank in range(file.nranks):
        shapes = ["{} × {}".format(*view.descriptor.local_shape(rank)) for view in drawn]
        assert any(
            line[0] == str(rank) and all(a.startswith(b) for a, b in zip(line[1:], shapes, strict=True))
            for line in lines
            if len(line) == len(shapes) + 1
        )


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


def test_terminal_colours_are_those_of_the_ranks():
    text = terminal(files.load_problem_file("grid-2x2"), colour="truecolor")
    for rank, colour in enumerate(labels.PALETTE[:4]):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert re.search(rf"48;2;{red};{green};{blue}m *{rank} *\x1b", text)
    assert "48;2;0;0;0" not in text
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", text))) == 4


def test_blocks_of_one_rank_can_be_told_apart():
    text = terminal(files.load_problem_file("one-rank"), colour="truecolor")
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


def test_terminal_marks_two_digit_ranks():
    assert "9  9  0  0  3  3" in terminal(TWELVE)
    assert "10 10 1  1  4  4" in terminal(TWELVE)


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


def test_neighbours_in_the_grid_differ_in_colour():
    for grid in (pb.Grid(3, 4), pb.Grid(8, 8, "col"), pb.Grid(2, 3)):
        colours = labels.Colours(grid)
        for prow, pcol in itertools.product(range(grid.nprow), range(grid.npcol)):
            mine = colours(grid.rank(prow, pcol))
            assert prow + 1 == grid.nprow or mine != colours(grid.rank(prow + 1, pcol))
            assert pcol + 1 == grid.npcol or mine != colours(grid.rank(prow, pcol + 1))
    assert len({labels.Colours(pb.Grid(2, 4))(rank) for rank in range(8)}) == 8


# --- pictures ---


def meshes(figure):
    return [item for item in figure.axes[0].collections if isinstance(item, QuadMesh)]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def elements(mesh, shape):
    """The colour of every element, from a mesh whose cells are blocks."""
    lines = mesh.get_coordinates()
    counts = []
    for along, extent in ((lines[:, 0, 1], shape[0]), (lines[0, :, 0], shape[1])):
        sizes = np.diff(along) * extent / (along[-1] - along[0])
        assert np.allclose(sizes, np.rint(sizes))
        counts.append(np.rint(sizes).astype(int))
    cells = np.asarray(mesh.get_array()).reshape(len(counts[0]), len(counts[1]), 3)
    return np.repeat(np.repeat(cells, counts[0], axis=0), counts[1], axis=1)


def rgb(colour):
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


@pytest.mark.parametrize("name", PICTURED)
def test_picture_shows_every_owner(name):
    """The first mesh of each matrix is the matrix, the others are the local arrays, in the colour of their rank."""
    file = files.load_problem_file(name)
    found = iter(meshes(picture(name)))
    for view in labels.views(file):
        if 0 in view.parent.shape:
            continue
        colours = elements(next(found), view.parent.shape)
        window = file.windows[view.name[0].lower()]
        owners = golden(name)[view.name[0].lower()]["owners"]
        for row, line in zip(colours[window], owners, strict=True):
            assert np.allclose(row, [rgb(labels.PALETTE[int(rank)]) for rank in line])
        outside = np.ones(view.parent.shape, bool)
        outside[window] = False
        assert (colours[outside] > 0.7).all(), "what is outside of the window is faded"
        grid = view.parent.grid
        for place in itertools.product(range(grid.nprow), range(grid.npcol)):
            rank = grid.rank(*place)
            shape = view.parent.local_shape(rank)
            if 0 not in shape:
                local = elements(next(found), shape)
                full = np.isclose(local, rgb(labels.PALETTE[rank])).all(axis=2)
                assert full.sum() == np.prod(view.descriptor.local_shape(rank))
    assert next(found, None) is None


@pytest.mark.parametrize("name", PICTURED)
def test_picture_names_ranks_shapes_and_indices(name):
    file = files.load_problem_file(name)
    said = texts(picture(name))
    assert said[0] == file.title
    assert labels.formula(file) in said[1]
    for view in labels.views(file):
        for rank in range(view.parent.grid.size):
            label = "rank {}   {} × {}".format(rank, *view.descriptor.local_shape(rank))
            assert any(text.startswith(label) for text in said)
    # every block of a matrix has the number of its rank in it, and its first index in a local array
    blocks = [
        (view, i, j)
        for view in labels.views(file)
        for i in labels.blocks(view.parent.rows)
        for j in labels.blocks(view.parent.cols)
    ]
    numbers = sorted(str(view.parent.grid.rank(i.process, j.process)) for view, i, j in blocks)
    places = sorted(f"{i.start}, {j.start}" for _, i, j in blocks)
    sizes = {text: said.count(text) for text in said}
    assert all(sizes.get(number, 0) >= numbers.count(number) for number in set(numbers))
    assert sum(sizes.get(place, 0) for place in set(places)) >= 0.9 * len(places), "some may be too narrow"


@pytest.mark.parametrize("name", [*PICTURED, *MADE])
def test_nothing_in_a_picture_overlaps(name):
    figure = picture(name)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in figure.axes[0].texts if t.get_text()]
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in boxes:
        assert 0 < box.x0 < box.x1 < width, text
        assert 0 < box.y0 < box.y1 < height, text
    edges = np.array([[box.x0, box.y0, box.x1, box.y1] for _, box in boxes])
    for i, (x0, y0, x1, y1) in enumerate(edges):
        others = edges[i + 1 :]
        over = (others[:, 0] < x1) & (others[:, 2] > x0) & (others[:, 1] < y1) & (others[:, 3] > y0)
        assert not over.any(), (boxes[i][0], [boxes[i + 1 + j][0] for j in np.flatnonzero(over)])
    areas = [mesh.get_window_extent(renderer) for mesh in meshes(figure)]
    for one, other in itertools.combinations(areas, 2):
        assert not (one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1)


def test_window_is_outlined_in_matrix_and_local_arrays():
    figure = picture("sub-all")
    strong = [p for p in figure.axes[0].patches if isinstance(p, Rectangle) and p.get_linewidth() > 1.5]
    # three matrices; two ranks own a part of A, two of B, all four of D
    assert len(strong) == 3 + 2 + 2 + 4
    matrix = meshes(figure)[0].get_coordinates()
    element = (matrix[0, -1, 0] - matrix[0, 0, 0]) / 10
    outline = strong[0]
    assert np.isclose(outline.get_width(), 2 * element)
    assert np.isclose(outline.get_height(), 6 * element)
    assert np.isclose(outline.get_x() - matrix[0, 0, 0], 2 * element)
    assert np.isclose(outline.get_y() - matrix[0, 0, 1], 4 * element)


def test_padding_is_hatched():
    def hatched(name):
        return [p for p in picture(name).axes[0].patches if p.get_hatch()]

    assert len(hatched("padded-c-order")) == 4 + 4 + 2, "exactly fitting rows of D have none"
    assert hatched("grid-2x2") == []


def test_picture_of_a_large_matrix_is_whole_and_of_a_huge_one_a_corner():
    large = meshes(picture("large"))
    assert large[0].get_coordinates().shape == (41, 41, 2)
    huge = picture("huge")
    assert meshes(huge)[0].get_coordinates().shape == (25, 25, 2)
    assert any("the first 3072 × 3072 are drawn" in text for text in texts(huge))
    assert texts(huge).count("rank 999999   999936 × 999936") == 3


def test_picture_lists_faults():
    said = texts(picture("faulty"))
    assert "This product is not legal:" in said
    assert sum(text.startswith("•") for text in said) == 6


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_files(tmp_path, suffix, magic):
    file = files.load_problem_file("one-rank")
    output = tmp_path / f"picture{suffix}"
    drawing.draw(file, output, dpi=50)
    content = output.read_bytes()
    assert content.startswith(magic)
    again = tmp_path / f"again{suffix}"
    drawing.draw(file, str(again), dpi=50)
    assert again.read_bytes() == content, "the same picture is the same file"


def test_unknown_kind_of_file(tmp_path):
    with pytest.raises(pb.UnsupportedError, match=r"picture\.jpg'.*\.pdf, \.png, \.svg"):
        drawing.draw(files.load_problem_file("one-rank"), tmp_path / "picture.jpg")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(pb.UnsupportedError, match=re.escape(install("plot"))):
        drawing.draw(files.load_problem_file("one-rank"), tmp_path / "picture.png")


def test_the_terminal_needs_no_matplotlib():
    script = "import sys, pblasmp.drawing; print('matplotlib' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
