# SPDX-License-Identifier: Apache-2.0
"""Every problem of descriptors/: it loads and is legal; and what they cover."""

from itertools import product

import numpy as np
import pytest

from pblasmp.layout.schemes import FORMS
from pblasmp.problems import files
from tests.helpers.edits import read
from tests.helpers.schemes import AG, AR, RS

PROBLEMS = files.find("problems")


@pytest.fixture(scope="module")
def problems():
    return {path.stem: files.load_problem_file(path) for path in PROBLEMS}


def test_problem_is_legal(subtests):
    for path in PROBLEMS:
        with subtests.test(path.stem):
            files.load_problem_file(path).problem.validate()
            assert files.check(path) == []


def test_windows_cut_the_operands_from_their_parents(problems, subtests):
    for name, problem_file in problems.items():
        with subtests.test(name):
            for letter, parent in problem_file.parents.items():
                operand = getattr(problem_file.problem, letter)
                window = problem_file.windows[letter]
                assert parent[window] == operand
                whole = np.arange(parent.shape[0] * parent.shape[1]).reshape(parent.shape)
                assert whole[window].shape == operand.shape


def test_every_file_is_known():
    """A file that no test reads is a mistake."""
    kinds = dict.fromkeys(("problems", "invalid", "grids", "models", "machines"), ".toml")
    stray = [
        path
        for path in files.root().rglob("*")
        if path.is_file() and kinds.get(path.relative_to(files.root()).parts[0]) != path.suffix
    ]
    assert sorted(path.name for path in stray) == [
        "README.md", "factorization.schema.json", "parallel.schema.json", "problem.schema.json", "routine.schema.json",
    ]  # fmt: skip


def test_every_grid_is_used():
    used = set()
    for path in PROBLEMS:
        data = read(path)
        tables = [data, *(data.get(name, {}) for name in "abdc")]
        used |= {table["grid"] for table in tables if isinstance(table.get("grid"), str)}
    assert used == {path.stem for path in files.find("grids")}


def test_titles_tell_problems_apart(problems):
    titles = [problem.title for problem in problems.values()]
    assert len(set(titles)) == len(titles) >= 60


# --- what the problems cover ---


def operands(problems):
    for name, problem_file in problems.items():
        p = problem_file.problem
        yield from ((name, x) for x in (p.a, p.b, p.d, p.c) if x is not None)


def test_rank_counts_are_covered(problems):
    assert {problem.nranks for problem in problems.values()} == {1, 2, 3, 4, 5, 6}


def test_every_product_of_every_scheme_is_covered(problems):
    covered = {
        (p.scheme, p.op_a + p.op_b, p.d.order)
        for p in (f.problem for f in problems.values())
        if p.a.order == p.b.order == p.d.order
    }
    transposes = {"NN", "NT", "TN", "TT"}
    assert covered >= {(scheme, ops, order) for scheme in (AG, RS) for ops in transposes for order in "CF"}
    assert covered >= {(AR, "TN", "F"), (AR, "NT", "C")}
    assert {ops for scheme, ops, _ in covered if scheme == "gemm"} >= transposes | {"CN", "NC", "CC"}


def test_names_of_files_begin_with_the_short_form_of_their_scheme(problems):
    prefixes = {names.short: form for form, names in FORMS.items()}
    found = {
        prefix: f.problem.scheme for name, f in problems.items() if (prefix := name.split("-")[0]) in prefixes
    }
    assert found == {"ag": AG, "rs": RS, "ar": AR}
    assert {prefixes[prefix] for prefix in found} == {*found.values()}


def test_every_mix_of_memory_orders_is_covered(problems):
    mixes = {
        p.a.order + p.b.order + p.d.order
        for p in (f.problem for f in problems.values())
        if p.scheme == "gemm"
    }
    assert mixes == {"".join(letters) for letters in product("CF", repeat=3)}


def test_every_type_is_covered(problems):
    pairs = {(f.problem.a.dtype.name, f.problem.d.dtype.name) for f in problems.values()}
    same = {"float64", "float32", "complex128", "complex64", "float16", "bfloat16"}
    assert pairs == {(t, t) for t in same} | {("float16", "float32"), ("bfloat16", "float32")}


def test_awkward_layouts_are_covered(problems):
    def some(holds):
        return any(holds(x) for _, x in operands(problems))

    assert some(lambda x: 0 in x.shape)
    assert some(lambda x: x.source != (0, 0))
    assert some(lambda x: x.ld is not None and x.order == "C")
    assert some(lambda x: x.ld is not None and x.order == "F")
    assert some(lambda x: x.shape[0] % x.block[0] and x.shape[1] % x.block[1])
    assert some(lambda x: x.block[0] > x.shape[0] > 0 and x.block[1] > x.shape[1] > 0)
    assert some(lambda x: 0 not in x.shape and any(0 in x.local_shape(rank) for rank in range(x.grid.size)))
    assert any(f.problem.a.grid.T == f.problem.d.grid != f.problem.a.grid for f in problems.values())
    windowed = {
        name
        for f in problems.values()
        for name, parent in f.parents.items()
        if parent != getattr(f.problem, name)
    }
    assert windowed == {"a", "b", "d", "c"}
    assert any(f.alpha.imag and f.beta.imag for f in problems.values())
    assert any(f.problem.c is not None and f.beta == 0 for f in problems.values())
