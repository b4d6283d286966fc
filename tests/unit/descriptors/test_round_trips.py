# SPDX-License-Identifier: Apache-2.0
"""Problems and descriptors as tables and TOML, there and back; and input that nobody meant."""

import contextlib
import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import pblasmp as pb
from pblasmp.dtypes import ELEMENT_TYPES, as_dtype, result_dtype
from pblasmp.layout import ParallelProblem
from pblasmp.layout.level3_problem import ROUTINES
from pblasmp.layout.schemes import SCHEMES
from pblasmp.problems import files
from pblasmp.problems.files import to_toml
from tests.helpers.oracle import descriptors
from tests.helpers.slow import draws

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VALIDATORS = {
    name: Draft202012Validator(json.loads((files.root() / f"{name}.schema.json").read_text()))
    for name in ("problem", "routine", "factorization", "parallel")
}
PROBLEMS = {path.stem: files.load_problem_file(path).problem for path in files.find("problems")}


def there_and_back(problem, kind):
    """Compare a problem with what its table, its JSON and its TOML make."""
    text = problem.to_toml()
    data = tomllib.loads(text)
    assert data == json.loads(json.dumps(problem.to_dict()))
    VALIDATORS[kind].validate(data)
    assert type(problem).from_dict(problem.to_dict()) == problem
    assert type(problem).from_dict(data) == problem
    assert pb.load_problem(io.StringIO(text)) == problem
    assert pb.load_problem(io.BytesIO(text.encode())) == problem


@given(descriptors())
def test_descriptors(d):
    assert pb.MatrixDescriptor.from_dict(d.to_dict()) == d
    assert pb.MatrixDescriptor.from_dict(tomllib.loads(d.to_toml())) == d


def matrix(rows, cols, **options):
    return pb.MatrixDescriptor((rows, cols), (3, 2), "2x2", **options)


FACTORIZATIONS = [
    *(pb.FactorProblem.of(name, 12, "2x1", 3, order="F") for name in ("cholesky", "lu", "qr", "solve", "lstsq")),
    pb.FactorProblem("lu", matrix(9, 9), d=matrix(9, 9), inverse=True),
    pb.FactorProblem("eigh", matrix(9, 9), d=matrix(9, 9), subset=(0, 3)),
    pb.FactorProblem("lstsq", matrix(9, 6), matrix(6, 2), d=matrix(9, 2), op="C"),
    pb.FactorProblem("triangular", matrix(4, 4), matrix(4, 1), d=matrix(4, 1), unit=True),
    pb.FactorProblem("svd", matrix(9, 6, dtype="complex64"), d=matrix(9, 6, dtype="complex64")),
    pb.FactorProblem("cholesky", matrix(9, 9), matrix(9, 1), d=matrix(9, 1), factored=True, conjugate=True),
]  # fmt: skip


@pytest.mark.parametrize("problem", FACTORIZATIONS, ids=str)
def test_factorizations(problem):
    problem.validate()
    there_and_back(problem, "factorization")


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"b": matrix(8, 2)}, ["b: expected 9 rows, got 8"]),
        ({"b": None}, ["b: missing"]),
        ({"d": matrix(9, 3)}, ["d: expected 9 x 2, got 9 x 3"]),
        (
            {"d": matrix(9, 2, dtype="float32"), "b": matrix(7, 2)},
            ["b: expected 9 rows", "d: dtype is float32"],
        ),
        (
            dict.fromkeys("ad", matrix(9, 9, dtype="float16")) | {"b": matrix(9, 9, dtype="float16")},
            ["a: dtype is float16, expected one of float64, float32, complex128, complex64"],
        ),
        ({"a": matrix(9, 8)}, ["a: expected a square matrix", "d: expected 8 x 2"]),
    ],
)
def test_factorizations_with_faults(change, faults):
    problem = replace(pb.FactorProblem("cholesky", matrix(9, 9), matrix(9, 2), d=matrix(9, 2)), **change)
    assert [said.startswith(fault) for fault, said in zip(faults, problem.faults(), strict=True)] == [
        True
    ] * len(faults)
    with pytest.raises(pb.LayoutError, match="this cholesky"):
        problem.validate()
    assert files.check(io.StringIO(problem.to_toml())) == problem.faults()


def test_shipped_problems(subtests):
    for name, problem in PROBLEMS.items():
        with subtests.test(name):
            there_and_back(problem, "problem")
            there_and_back(problem.T, "problem")
            assert pb.load_problem(name) == problem


@settings(max_examples=draws(30, long=100))
@given(
    descriptors(), descriptors(), descriptors(), st.none() | descriptors(),
    st.sampled_from("NTC"), st.sampled_from("NTC"), st.sampled_from(list(SCHEMES)),
)  # fmt: skip
def test_any_product_legal_or_not(a, b, d, c, op_a, op_b, scheme):
    there_and_back(pb.MatmulProblem(a, b, d, op_a, op_b, c, scheme), "problem")


@settings(max_examples=draws(30, long=100))
@given(
    st.sampled_from([*ROUTINES]), descriptors(), descriptors(), descriptors(), descriptors(),
    st.sampled_from("LR"), st.sampled_from("LU"), st.sampled_from("NTC"), st.sampled_from("NU"), st.booleans(),
)  # fmt: skip
def test_any_routine_legal_or_not(routine, a, b, c, d, side, uplo, op_a, diag, with_c):
    has = ROUTINES[routine]
    flags = {"side": side, "uplo": uplo, "op_a": op_a, "diag": diag}
    operands = {"b": b if "b" in has.operands else None, "c": c if "c" in has.operands and with_c else None}
    problem = pb.Level3Problem(routine, a, d, **operands, **{x: flags[x] for x in has.options})
    there_and_back(problem, "routine")


SPLITS = {
    "allgather_matmul": ((2, 4), (5, 5), (3, 1)),
    "matmul_reduce_scatter": ((6, 6), (5, 2), (3, 3)),
    "matmul_allreduce": ((6, 6), (5, 2), (3, 3)),
    "matmul_allgather": ((6, 6), (5, 5), (3, 1)),
}


@given(
    st.sampled_from([*SPLITS]), st.sampled_from([*ELEMENT_TYPES]), st.none() | st.sampled_from([*ELEMENT_TYPES]),
    st.booleans(), st.sampled_from([1, 2]), st.booleans(), st.sampled_from(["", "x", "w", "xw"]),
)  # fmt: skip
def test_any_tensor_parallel_product(form, dtype, c_dtype, outputs_first, inner, apart, flipped):
    dtype, c_dtype = as_dtype(dtype), None if c_dtype is None else as_dtype(c_dtype)
    tokens, inputs, outputs = SPLITS[form]
    gathers = form == "allgather_matmul"
    rows = (sum(tokens),) * 2 if gathers else (4, 2) if form == "matmul_reduce_scatter" else tokens
    problem = ParallelProblem(
        form, tokens, inputs, outputs, rows, dtype, dtype, result_dtype(dtype), c_dtype, outputs_first, inner, gathers,
        (("x", (48, 16)), ("out", (8, 8))) if apart else (), bool(flipped), flipped, flipped,
    )  # fmt: skip
    there_and_back(problem, "parallel")
    assert files.check(io.StringIO(problem.to_toml())) == []
    short = {"form": form, "tokens": [6, 6], "inputs": [5, 5], "outputs": [3, 3]}
    made = ParallelProblem.from_dict(short)
    there_and_back(made, "parallel")
    expected = {"allgather_matmul": (12, 12), "matmul_reduce_scatter": (3, 3)}.get(form, (6, 6))
    assert (made.rows, made.dtype.name, made.out_dtype.name) == (expected, "float64", "float64")


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        ({"form": "matmul"}, "form: expected one of allgather_matmul, "),
        ({"tokens": []}, "tokens: expected a list of integers, one for each rank"),
        ({"tokens": [6, -1]}, "tokens: expected a list of integers, one for each rank"),
        ({"inputs": [5]}, "inputs: has 1 numbers, expected 2, one for each rank, like tokens"),
        ({"row_bytes": {"x": [16]}}, "row_bytes.x: has 1 numbers, expected 2"),
        ({"row_bytes": {"y": [16, 16]}}, "row_bytes.y: unknown key"),
        (
            {"tokens": [6, 5]},
            "tokens: expected the same number for each rank with form 'matmul_allreduce', got [6, 5]",
        ),
        ({"rows": [6, 5]}, "rows: expected [6, 6], got [6, 5]"),
        ({"inner": 4}, "inner: expected a divisor of tokens and rows, got 4"),
        (
            {"form": "matmul_reduce_scatter", "rows": [3, 4]},
            "rows: expected 6 in all, as many as tokens, got [3, 4]",
        ),
        ({"return_gathered": True}, "return_gathered: form 'matmul_allreduce' gathers no X"),
        ({"transposed": "wx"}, 'transposed: expected "x", "w" or "xw"'),
        ({"grid": "2x2"}, "grid: unknown key"),
    ],
)
def test_faults_of_tensor_parallel_tables(edit, fault):
    data = {
        "title": "T",
        "form": "matmul_allreduce",
        "tokens": [6, 6],
        "inputs": [5, 5],
        "outputs": [3, 3],
        **edit,
    }
    with pytest.raises(pb.LayoutError) as caught:
        ParallelProblem.from_dict(data)
    assert fault in str(caught.value)
    text = to_toml(data)
    with pytest.raises(pb.LayoutError, match="<StringIO>") as caught:
        pb.load_problem(io.StringIO(text))
    assert fault in str(caught.value)
    assert any(fault in each for each in files.check(io.StringIO(text)))


def test_titles_of_any_problem():
    p = ParallelProblem.from_dict({"form": "matmul_allreduce", "tokens": [6], "inputs": [5], "outputs": [3]})
    found = files.load_problem_file(io.StringIO(p.to_toml("Summed everywhere")))
    assert (found.title, found.problem, found.nranks) == ("Summed everywhere", p, 1)


def test_plans_of_tensor_parallel_products():
    with pb.Context(engine="host") as ctx:
        for form in SPLITS:
            x = np.ones((6, 2, 5), np.float32)
            with pb.plan(form, x, np.ones((3, 5), np.float32), ctx) as plan:
                there_and_back(plan.problem, "parallel")


def test_products_of_8_bits():
    p = pb.MatmulProblem.gemm(32, 16, 48, "2x2", 16, op_b="T", dtype="float8_e4m3fn")
    there_and_back(p, "problem")
    short = {"m": 32, "n": 16, "k": 48, "grid": "2x2", "block": 16, "ops": "NT", "dtype": "float8_e4m3fn"}
    assert pb.MatmulProblem.from_dict(short) == p


@pytest.mark.parametrize("path", files.find("grids"), ids=lambda path: path.stem)
def test_the_grids_of_the_directory_are_what_their_names_say(path):
    assert files.load_grid(path) == pb.layout.as_grid(path.stem)


def test_standard_input(monkeypatch):
    text = PROBLEMS["grid-2x2"].to_toml("piped")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert files.load_problem_file("-").title == "piped"
    monkeypatch.setattr(sys, "stdin", io.StringIO("title = 3"))
    with pytest.raises(pb.LayoutError, match=r"^<stdin>: title: expected a text, got 3"):
        pb.load_problem("-")


def test_open_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(PROBLEMS["sub-all"].to_toml())
    for mode in ("r", "rb"):
        with path.open(mode) as file:
            assert pb.load_problem(file) == PROBLEMS["sub-all"]
    path.write_text("routine = 'trsm'")
    with path.open() as file, pytest.raises(pb.ArgumentError, match=r"mine\.toml has 3 faults: "):
        pb.load_problem(file)
    for wrong in (3, ""):  # an unset variable of a shell
        with pytest.raises(
            pb.ArgumentError, match=f"file: expected a path, '-' or an open file, got {wrong!r}"
        ):
            pb.load_problem(wrong)


# --- faults ---

BASE = {"m": 4, "n": 4, "k": 4, "grid": "2x2", "block": 2}
ROUTINE = {"routine": "trsm", "grid": "2x2", "block": 2, "d": {"shape": [4, 4]}, "a": {"shape": [4, 4]}}


@pytest.mark.parametrize(
    ("kind", "data", "faults"),
    [
        (pb.MatmulProblem, {**BASE, "blocks": 2, "m": -1},
         ["m: expected an integer, at least 0, got -1", "blocks: unknown key: did you mean 'block'?"]),
        (pb.MatmulProblem, {**BASE, "a": {"ld": 1}, "b": {"lead": [3, 0]}},
         ["a.ld: 1 is too small", "b.lead: (3, 0) is not inside a block of (2, 2)"]),
        (pb.MatmulProblem, [1], ["data: expected a table, got [1]"]),
        (pb.MatmulProblem, {**BASE, 7: 8}, ["7: unknown key"]),
        (pb.MatmulProblem, {**BASE, "alpha": 1j}, ["alpha: expected a number, or [real, imaginary], got 1j"]),
        (pb.MatmulProblem, {**BASE, "alpha": [0, 1]}, ["alpha: 1j is complex, but the matrices are float64"]),
        (pb.MatmulProblem, {**BASE, "a": {"window": [[0, 9], [0, 1]]}}, ["a.window: expected a part of 0 to 4"]),
        (pb.MatmulProblem, {**BASE, "dtype": b"float64"}, ["dtype: expected one of float64"]),
        (pb.MatmulProblem, {**BASE, "ops": "NT\n"}, ["ops: expected two letters"]),
        (pb.Level3Problem, {**ROUTINE, "routine": "trms"}, ["routine: expected one of trsm, trmm"]),
        (pb.Level3Problem, {"routine": "trsm", "d": {}, "a": {"shape": [1, 1], "grid": "1x1"}},
         ["a.block: missing", "d.shape: missing", "d.block: missing", "d.grid: missing"]),
        (pb.Level3Problem, ROUTINE, ["b: expected a MatrixDescriptor, got None"]),
        (pb.Level3Problem, {**ROUTINE, "routine": "geadd", "side": "R"}, ["side: geadd has no such option"]),
        (pb.MatrixDescriptor, {"shape": [2, 2]}, ["block: missing", "grid: missing"]),
        (pb.MatrixDescriptor, {"shape": [2, 2], "block": 0, "grid": "2x"}, ["block: expected", "grid: expected"]),
        (pb.MatrixDescriptor, {"shape": [2, 2], "block": 1, "grid": "1x1", "source": [1, 0]}, ["source: process"]),
        (pb.MatrixDescriptor, "2x2", ["data: expected a table, got '2x2'"]),
        (pb.MatrixDescriptor, {"shape": {2, 3}, "block": 1, "grid": "1x1"}, ["shape: expected two integers, each at"]),
        (pb.MatmulProblem, {**BASE, "block": iter([2, 2, 2])}, ["block: expected an integer, two for m and n"]),
        (pb.MatmulProblem, {**BASE, "ld": 4, "subset": [0, 1]},
         ["ld: unknown key: expected one of title", "subset: unknown key: expected one of title"]),
    ],
)  # fmt: skip
def test_tables_with_faults(kind, data, faults):
    with pytest.raises(pb.ArgumentError) as error:
        kind.from_dict(data)
    found = str(error.value).split("\n  - ")
    assert len(found) == len(faults)
    assert all(fault in said for fault, said in zip(faults, found, strict=True)), found


@pytest.mark.parametrize(
    "text",
    [
        f"m = {'9' * 5000}",
        f"grid = {'[' * 5000}{']' * 5000}",
        "a." * draws(2000, long=5000) + "b = 1",
        f"alpha = [1{'0' * 400}, 0]",
        f"m = 1{'0' * 400}",
        "m = 1\x00",
    ],
    ids=["digits", "deep", "dotted", "overflowing", "large", "zero"],
)
def test_hostile_files(tmp_path, text):
    lines = {"m": "m = 4", "grid": 'grid = "2x2"', "n": "n = 4", "k": "k = 4", "block": "block = 2"}
    kept = [line for key, line in lines.items() if not text.startswith(f"{key} ")]
    path = tmp_path / "hostile.toml"
    path.write_text("\n".join(['title = "x"', *kept, text]))
    for load in (pb.load_problem, files.load_problem_file, files.load_grid):
        with pytest.raises(pb.LayoutError) as error:
            load(path)
        assert str(path) in str(error.value)
        assert len(str(error.value)) < 5000
    assert files.check(path) != []


@settings(max_examples=draws(30, long=100))
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
), st.sampled_from([*VALIDATORS["problem"].schema["properties"]]))  # fmt: skip
def test_nothing_but_layout_errors(value, key):
    for kind, data in ((pb.MatmulProblem, {**BASE, key: value}), (pb.MatrixDescriptor, {key: value})):
        with contextlib.suppress(pb.LayoutError):
            kind.from_dict(data)
