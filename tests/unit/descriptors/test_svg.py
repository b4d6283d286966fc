# SPDX-License-Identifier: Apache-2.0
"""Layouts as SVG: every owner is right, nothing is lost, and no library is needed."""

import functools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.drawing import labels
from pblasmp.drawing.labels import PALETTE, Colors
from pblasmp.layout import ParallelProblem
from pblasmp.problems import files
from tests.helpers.oracle import places

PROBLEMS = [path.stem for path in files.find("problems")]
BOX = re.compile(r"rank (\d+): \[(\d+):(\d+), (\d+):(\d+)\]")
SVG = "{http://www.w3.org/2000/svg}"


@functools.lru_cache(4)
def elements(svg):
    """The elements of a picture by their names."""
    found = defaultdict(list)
    for element in ET.fromstring(svg).iter():
        found[element.tag.removeprefix(SVG)].append(element)
    return found


def boxes(drawing):
    """The blocks of a picture: (rank, rows, columns, color), and their places."""
    found = []
    for rect in elements(drawing.svg)["rect"]:
        tip = rect.find(f"{SVG}title")
        if tip is not None and (match := BOX.fullmatch(tip.text)):
            rank, i0, i1, j0, j1 = map(int, match.groups())
            place = [float(rect.get(name)) for name in ("x", "y", "width", "height")]
            found.append((rank, range(i0, i1), range(j0, j1), rect.get("fill"), place))
    return found


def texts(drawing):
    return [text.text for text in elements(drawing.svg)["text"]]


def test_factorizations_have_pictures():
    d = pb.MatrixDescriptor((8, 8), 2, "2x2")
    b = pb.MatrixDescriptor((8, 3), 2, "2x2")
    for problem, names, text in (
        (pb.FactorProblem("cholesky", d, c=d), ["A", "factors"], "cholesky of 8 x 8 on"),
        (pb.FactorProblem("lu", d, b, d, b), ["A", "B", "factors", "X"], "lu of 8 x 8, 3 columns, on"),
        (pb.FactorProblem("lu", d, d=d, inverse=True), ["A", "D"], "inverse (lu) of 8 x 8 on"),
        (pb.FactorProblem("eigh", d, d=d), ["A", "D"], "eigh of 8 x 8 on"),
        (pb.FactorProblem("svd", d, c=d, d=d), ["A", "V^H", "D"], "svd of 8 x 8 on"),
    ):
        drawing = pb.draw(problem)
        assert [
            name for name in ("A", "B", "factors", "X", "V^H", "D") if f">{name}  8 ×" in drawing.svg
        ] == names
        assert text in drawing.svg
        assert text in str(problem)
        assert problem._repr_html_() == drawing.svg
    with pb.Context(engine="host") as ctx, pb.plan(pb.linalg.inv, ctx.full((4, 4), 1.0)) as plan:
        assert pb.draw(plan).svg == plan._repr_html_() == pb.draw(plan.problem).svg
        assert "inverse (lu) of 4 x 4" in str(plan.report())


def test_every_owner_of_every_operand(subtests):
    for name in PROBLEMS:
        with subtests.test(name):
            problem = pb.load_problem(name)
            for x in filter(None, (problem.a, problem.b, problem.c, problem.d)):
                drawing = pb.draw(x)
                assert drawing.svg == x._repr_html_() == drawing._repr_html_()
                found = {}
                colors = Colors(x.grid)
                for rank, rows, cols, color, (_, _, width, height) in boxes(drawing):
                    assert color == PALETTE[colors(rank)]
                    assert width > 0 < height
                    found |= {(i, j): str(rank) for i in rows for j in cols}
                assert found == {place: str(rank) for place, (rank, _, _) in places(x).items()}
                said = texts(drawing)
                for rank in range(x.grid.size):
                    m, n = x.local_shape(rank)
                    assert said[said.index(f"rank {rank}") + 1] == f"{m} × {n}"
            whole = pb.draw(problem)
            assert problem._repr_html_() == whole.svg
            assert texts(whole)[0] == str(problem)
            assert "Not legal:" not in texts(whole)


def test_matrices_and_plans_show_what_they_are_of():
    with pb.Context(engine="host") as ctx:
        a = ctx.zeros((4, 6), block=2)
        assert pb.draw(a).svg == a._repr_html_() == pb.draw(a.descriptor).svg
        for f, args in ((pb.matmul, (a, a.T)), (pb.blas.syrk, (a,))):
            with pb.plan(f, *args) as plan:
                assert plan._repr_html_() == pb.draw(plan).svg == plan.problem._repr_html_()
                assert texts(pb.draw(plan))[0].startswith(str(plan.problem))
        x = np.ones((4, 6))
        with pb.plan(pb.matmul_allreduce, x, x, ctx) as plan:
            assert plan._repr_html_() == pb.draw(plan).svg == pb.draw(plan.problem).svg
        with pb.plan(pb.matmul_allgather, x, x, ctx) as plan:
            assert plan._repr_html_() is None  # Jupyter shows its repr
            with pytest.raises(pb.LayoutError, match="has no picture: every rank holds all of X and of Y"):
                pb.draw(plan)


@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize("form", ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"])
def test_tensor_parallel_products(form, outputs_first):
    """8 tokens, 6 outputs and 5 inputs on two ranks: which rank holds which elements of X, W and Y."""
    f, inputs = np.dtype("float32"), (5, 5) if form == "allgather_matmul" else (3, 2)
    x, w, y = {
        "allgather_matmul": ((4, 5), (3, 5), (8, 3)),
        "matmul_reduce_scatter": ((8, 3), (6, 3), (4, 6)),
        "matmul_allreduce": ((8, 3), (6, 3), (8, 6)),
    }[form]
    p = ParallelProblem(
        form, (x[0],) * 2, inputs, (w[0],) * 2, (y[0],) * 2, f, f, f, f, outputs_first=outputs_first,
        return_gathered=form == "allgather_matmul",
    )  # fmt: skip
    said = texts(pb.draw(p))
    assert said[0] == str(p)
    held = [text for name, text in pairwise(said) if name == "rank 0"]
    assert held == ["{} × {}".format(*shape) for shape in (x, w if outputs_first else w[::-1], y)]
    assert "Not legal:" not in said
    uneven = replace(p, tokens=(5, 3)) if form == "allgather_matmul" else replace(p, inputs=(1, 4))
    with pytest.raises(pb.LayoutError, match=r"draw: .* has no picture: (tokens|inputs) are .* expected"):
        pb.draw(uneven)
    assert uneven._repr_html_() is None


def test_sub_matrices_begin_inside_a_block():
    d = pb.MatrixDescriptor((10, 10), (3, 4), "2x2")[1:9, 2:10]
    owners = {(i, j): rank for rank, rows, cols, *_ in boxes(pb.draw(d)) for i in rows for j in cols}
    assert owners == {(i, j): d.owner(i, j) for i in range(8) for j in range(8)}


def test_huge_matrices_are_a_corner():
    drawing = pb.draw(pb.MatmulProblem.gemm(10**30, 10**30, 10**30, (1000, 1000), 128))
    assert len(boxes(drawing)) == 3 * 24 * 24
    assert len(drawing.svg) < 10**6
    assert texts(drawing).count("… of 1000 × 1000 processes") == 3
    assert sum("24 × 24 of" in text for text in texts(drawing)) == 3


def test_faults_are_listed():
    file = files.load_problem_file(files.root() / "invalid" / "many-faults.toml")
    for faulty in (file, file.problem):
        said = texts(pb.draw(faulty))
        assert "Not legal:" in said
        assert sum(text.startswith("•") for text in said) == len(file.problem.faults()) == 6


@pytest.mark.parametrize("uplo", "LU")
@pytest.mark.parametrize("diag", "NU")
@pytest.mark.parametrize("shape", [(6, 6), (3, 7), (7, 3)])
def test_what_a_routine_does_not_touch_is_faded(uplo, diag, shape):
    """The middle of each element is inside of the polygon exactly if the element is not touched."""
    side = pb.MatrixDescriptor((6, 6), 2, "2x2")
    if shape == (6, 6):
        problem = pb.Level3Problem("trmm", side, side, side, uplo=uplo, diag=diag)
        part = problem.touched("a")
    else:
        side = pb.MatrixDescriptor(shape, 2, "2x2")
        problem = pb.Level3Problem("tradd", side, side, uplo=uplo)
        part = problem.touched("a")
    inner = next(ET.fromstring(pb.draw(problem).svg).iter(f"{SVG}polygon"))
    corners = [tuple(map(float, pair.split(","))) for pair in inner.get("points").split()]
    for i in range(shape[0]):
        for j in range(shape[1]):
            touched = j - i <= part.diagonal if uplo == "L" else j - i >= part.diagonal
            assert inside(corners, j + 0.5, i + 0.5) == (not touched), (i, j)


def inside(corners, x, y):
    odd = False
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        if (y0 > y) != (y1 > y) and x < x0 + (y - y0) * (x1 - x0) / (y1 - y0):
            odd = not odd
    return odd


def test_empty_matrices():
    assert "(empty)" in texts(pb.draw(pb.MatrixDescriptor((0, 5), 2, "2x2")))


def test_files(tmp_path):
    drawing = pb.draw(pb.Grid(1, 1))
    drawing.save(tmp_path / "grid.svg")
    content = (tmp_path / "grid.svg").read_text(encoding="utf-8")
    assert content.startswith("<?xml")
    assert drawing.svg in content
    for name in ("grid.png", "grid"):
        with pytest.raises(pb.UnsupportedError, match=r"expected a name that ends in \.svg"):
            drawing.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    assert repr(drawing).startswith("Drawing(")


def test_no_library_is_needed():
    script = """
import sys, pblasmp as pb
pb.draw(pb.MatmulProblem.gemm(9, 9, 9, "2x2", 2))
print([name for name in ("matplotlib", "rich", "mpi4py", "scipy", "pydantic") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


EDGE = re.compile(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H([\d.]+)Z")


def outlines(drawing):
    """The edges of windows: left, top, right, bottom of each; and those of what is faded."""
    found = {"none": [], "white": []}
    for path in elements(drawing.svg)["path"]:
        left, top, right, bottom, back = map(float, EDGE.fullmatch(path.get("d")).groups())
        assert back == left
        found[path.get("fill")].append((left, top, right, bottom))
    return found["none"], found["white"]


def test_windows_of_files(subtests):
    """The whole matrices, each with the edge of the part that is used, what is not used faded, and local shapes."""
    for name in PROBLEMS:
        with subtests.test(name):
            file = files.load_problem_file(name)
            drawing = pb.draw(file)
            said = texts(drawing)
            assert said[0] == file.title
            assert f"{labels.formula(file)}    {labels.sizes(file)}" in said
            found = iter(boxes(drawing))
            edges, faded = map(iter, outlines(drawing))
            for view in labels.views(file):
                blocks = [
                    next(found)
                    for _ in range(
                        labels.block_count(view.parent.rows) * labels.block_count(view.parent.cols)
                    )
                ]
                if blocks:
                    owners = {(i, j): rank for rank, rows, cols, *_ in blocks for i in rows for j in cols}
                    assert owners == {
                        (i, j): view.parent.owner(i, j) for i, j in np.ndindex(*view.parent.shape)
                    }
                if view.windowed and blocks:
                    x0, y0 = (min(place[i] for *_, place in blocks) for i in (0, 1))
                    x1, y1 = (max(place[i] + place[i + 2] for *_, place in blocks) for i in (0, 1))
                    across, down = (x1 - x0) / view.parent.shape[1], (y1 - y0) / view.parent.shape[0]
                    (i0, i1), (j0, j1) = view.rows, view.cols
                    edge = x0 + across * j0, y0 + down * i0, x0 + across * j1, y0 + down * i1
                    assert np.allclose(next(edges), edge, atol=0.2)
                    beside = (
                        (x0, y0, x1, edge[1]),
                        (x0, edge[3], x1, y1),
                        (x0, edge[1], edge[0], edge[3]),
                        (edge[2], edge[1], x1, edge[3]),
                    )
                    for area in beside:
                        if area[2] - area[0] > 1 and area[3] - area[1] > 1:
                            assert np.allclose(next(faded), area, atol=0.2)
                    assert f"[{i0}:{i1}, {j0}:{j1}] of" in " ".join(said)
                for rank in range(view.parent.grid.size):
                    m, n = view.descriptor.local_shape(rank)
                    assert f"{m} × {n}" in said
            assert next(edges, None) is next(faded, None) is next(found, None) is None
