# SPDX-License-Identifier: Apache-2.0
"""Reading descriptor files: defaults, what is shared, windows, and errors that name the file."""

import dataclasses
import json
import re
import textwrap

import pytest

import pblasmp as pb
from pblasmp.problems import files


@pytest.fixture
def write(tmp_path):
    def writer(text, name="problem.toml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return writer


SHORT = """
    title = "short"
    grid = "2x3"
    m = 6
    n = 7
    k = 8
    block = 2
"""


def test_d_follows_a_and_b(write):
    text = """
        title = "d is not mentioned"
        grid = { nprow = 2, npcol = 2, order = "col" }
        ops = "NT"
        [a]
        shape = [9, 9]
        window = [[2, 7], [3, 9]]
        block = [2, 3]
        [b]
        shape = [4, 6]
        block = [5, 3]
    """
    p = files.load_problem_file(write(text)).problem
    assert p.d == pb.MatrixDescriptor((5, 4), (2, 5), pb.Grid(2, 2, "col"))
    assert p.a == pb.MatrixDescriptor((9, 9), (2, 3), pb.Grid(2, 2, "col"))[2:7, 3:9]


def test_own_keys_go_before_shared_ones(write):
    own = """
[b]
source = [2, 1]
order = "F"
grid = "3x2-col"
ld = 50
block = [4, 5]
dtype = "float32"
"""
    b = files.load_problem_file(write(textwrap.dedent(SHORT) + own)).problem.b
    assert b == pb.MatrixDescriptor((8, 7), (4, 5), pb.Grid(3, 2, "col"), (2, 1), "float32", "F", ld=50)


def test_c_is_like_d_with_its_window(write):
    text = (
        textwrap.dedent(SHORT) + "[d]\nshape = [12, 12]\nwindow = [[4, 10], [2, 9]]\nsource = [1, 0]\n[c]\n"
    )
    found = files.load_problem_file(write(text))
    assert found.problem.c == found.problem.d
    assert found.parents["c"] == found.parents["d"] != found.problem.d
    moved = files.load_problem_file(write(text + "window = [[0, 6], [0, 7]]\nld = 40\n"))
    assert moved.problem.c == dataclasses.replace(found.parents["d"], ld=40)[0:6, 0:7]
    whole = files.load_problem_file(write(text + "shape = [6, 7]\n"))
    assert whole.windows["c"] == (slice(0, 6), slice(0, 7))


def test_ranks_in_place_of_a_grid(write):
    found = files.load_problem_file(write(SHORT.replace('grid = "2x3"', "nranks = 12")))
    assert found.problem.d.grid == pb.Grid.squarest(12)
    assert found.nranks == 12


@pytest.mark.parametrize(
    ("scheme", "make"),
    [
        ("allgather_matmul", pb.MatmulProblem.allgather_matmul),
        ("matmul_reduce_scatter", pb.MatmulProblem.matmul_reduce_scatter),
        ("matmul_allreduce", pb.MatmulProblem.matmul_allreduce),
    ],
)
def test_schemes_have_the_defaults_of_their_constructors(write, scheme, make):
    text = f'title = "x"\nscheme = "{scheme}"\nm = 4\nn = 8\nk = 6\nnranks = 2\n'
    assert files.load_problem_file(write(text)).problem == make(4, 8, 6, 2)
    other = 'ops = "NC"\norder = "C"\ndtype = "float16"\n'
    assert files.load_problem_file(write(text + other)).problem == make(
        4, 8, 6, 2, "N", "C", dtype="float16", order="C"
    )


def test_shipped_files_are_found_by_name(write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert files.load_problem_file("grid-2x2") == files.load_problem_file(
        files.root() / "problems" / "grid-2x2.toml"
    )
    assert files.load_grid("2x3-col") == pb.Grid(2, 3, "col")
    assert files.check("nvidia-allgather") == []
    write(SHORT, "grid-2x2")
    assert files.load_problem_file("grid-2x2").title == "short", "a file of the caller's goes before"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"title = ", "not a TOML file: "),
        (b"title = 'x'\ntitle = 'y'\n", "not a TOML file: "),
        (b"\xff\xfe", "not a TOML file: "),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_unreadable_files(tmp_path, content, fault):
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    for load in (files.load_problem_file, files.load_grid):
        with pytest.raises(pb.LayoutError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: {fault}")
    assert files.check(path)[0].startswith(fault)


def test_a_mistyped_name():
    with pytest.raises(pb.LayoutError, match=r"No such file or directory: did you mean 'grid-2x2-col'\?"):
        pb.load_problem("grid_2x2-col")


def test_directory_is_not_a_file(tmp_path):
    assert files.check(tmp_path) == ["cannot be read: Is a directory"]


def test_every_structural_fault_is_named_at_once(write):
    path = write("titel = 'x'\nops = 'XY'\n[a]\nblock = 0\nshapes = 3\n")
    with pytest.raises(pb.LayoutError) as caught:
        files.load_problem_file(path)
    first, *faults = str(caught.value).split("\n  - ")
    faults = [first.removeprefix(f"{path} has 5 faults: "), *faults]
    assert [fault.partition(":")[0] for fault in faults] == ["titel", "ops", "a.block", "a.shapes", "title"]


def test_grid_files(write):
    path = write("nprow = 3\nnpcol = 2\norder = 'col'\n", "grid.toml")
    assert files.load_grid(path) == pb.Grid(3, 2, "col")
    assert files.check(path) == []
    bad = write("nprow = 3\norder = 'C'\n", "bad.toml")
    faults = ['order: expected "row" or "col", got \'C\'', "npcol: missing, expected an integer, at least 1"]
    assert files.check(bad) == faults
    with pytest.raises(pb.LayoutError, match=r"bad\.toml has 2 faults: order: "):
        files.load_grid(bad)


def test_kinds_of_shipped_files():
    with pytest.raises(
        pb.ArgumentError, match="one of 'problems', 'grids', 'models', 'machines', got 'invalid'"
    ):
        files.find("invalid")


def test_root_is_in_the_package_once_installed(tmp_path, monkeypatch):
    """In a wheel the files are in the package; if they are neither there nor next to it, the error says so."""
    module = tmp_path / "site" / "pblasmp" / "layout" / "files.py"
    monkeypatch.setattr(files, "__file__", str(module))
    with pytest.raises(pb.LibraryNotFoundError, match="install pblasmp again"):
        files.root()
    installed = tmp_path / "site" / "pblasmp" / "descriptors"
    installed.mkdir(parents=True)
    (installed / "problem.schema.json").touch()
    assert files.root() == installed


def examples():
    readme = (files.root() / "README.md").read_text()
    return [
        block for block in re.findall(r"```toml\n(.*?)```", readme, re.DOTALL) if block.startswith("title")
    ]


@pytest.mark.parametrize("text", examples())
def test_examples_of_the_readme_are_legal(write, text):
    assert files.check(write(text)) == []


def test_readme_explains_every_key():
    readme = (files.root() / "README.md").read_text()
    schema = json.loads((files.root() / "problem.schema.json").read_text())
    keys = {*schema["properties"], *schema["$defs"]["OperandTable"]["properties"]} - {"raises", *"abdc"}
    assert {key for key in keys if f"`{key}`" not in readme} == set()


def test_every_value_of_a_routine_that_cannot_be_is_named(write):
    text = textwrap.dedent("""
        title = "x"
        routine = "trsm"
        grid = "2x2"
        block = 2
        a = { shape = [4, 4], source = [5, 5] }
        b = { shape = [4, 4] }
        d = { shape = [4, 4], source = [9, 9] }
    """)
    assert [fault[:9] for fault in files.check(write(text))] == ["a.source:", "d.source:"]
    assert [fault[:9] for fault in files.check(write(text.replace("[9, 9]", "[0, 0]")))] == ["a.source:"]
