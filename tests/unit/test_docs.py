# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/ name every public name, and what they show at Python's prompt is so."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.runtime.plans import Graph
from reference.scalapack import locate
from tests.helpers.docs import DOCS, PAGES, blocks
from tests.helpers.fresh import run_fresh
from tests.helpers.slow import only_long

DOCUMENTED = re.compile(
    r"^\.\. (?:auto(?:class|function|exception)|py:data):: (?:pblasmp\.)?((?:(?:blas|linalg)\.)?\w+)$",
    re.MULTILINE,
)


def test_every_public_name_is_in_the_reference():
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    inner = {f"{module}.{name}" for module in ("blas", "linalg") for name in getattr(pb, module).__all__}
    assert set(DOCUMENTED.findall("\n".join(pages))) == {*pb.__all__, *inner}


DOTTED = re.compile(r"^\.\. auto(?:class|function|exception):: pblasmp\.([\w.]+)$", re.MULTILINE)

FRESH = """
import operator, os
import pblasmp
for names in map(str.split, sys.argv[1:]):
    if not (child := os.fork()):
        for name in names:
            try:
                operator.attrgetter(name)(pblasmp)
            except AttributeError as error:
                print(error)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def missing(*names: str) -> list[str]:
    """What a process that has only imported pblasmp says of each of these attributes that it lacks.

    The only attributes that other imports add to a module are its submodules. So a name is found after a new import of
    pblasmp alone if it is found after one, and then the names of the same module.
    """
    of: dict[str, list[str]] = {}
    for name in names:
        path = Path(pb.__file__).parent.joinpath(*name.split("."))
        is_module = path.is_dir() or path.with_suffix(".py").exists()
        of.setdefault(name if is_module else name.rpartition(".")[0], []).append(name)
    done = run_fresh(FRESH, *map(" ".join, of.values()))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_what_the_reference_names_is_there_before_anything_else_was_imported_and_nothing_else():
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    names = {name for name in DOTTED.findall("\n".join(pages)) if not name.startswith(("torch.", "engines."))}
    assert {"problems.files.load_grid", "pblas.pdgemm", "Context"} <= names
    modules = "layout", "pblas", "tensor_parallel", "testing", "errors"
    assert missing(*sorted(names), *modules, "nothing", "layout.nothing", "__main__") == [
        "module 'pblasmp' has no attribute 'nothing'",
        "module 'pblasmp.layout' has no attribute 'nothing'",
        "module 'pblasmp' has no attribute '__main__'",
    ]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_the_layers_are_there_before_anything_else_was_imported():
    assert missing("torch.ColumnParallelLinear") == []


SHOWN = re.compile(r"^\.\. auto(?:class|function):: ([\w.]+)(\(.*\))$", re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
@pytest.mark.parametrize(("name", "shown"), SHOWN.findall((DOCS / "api" / "torch.md").read_text()))
def test_signatures_that_a_page_writes_out_are_those_of_the_code(name, shown):
    module, _, attribute = name.rpartition(".")
    bare = [
        each.replace(annotation=each.empty)
        for each in inspect.signature(getattr(importlib.import_module(module), attribute)).parameters.values()
    ]
    assert shown.replace('"', "'") == str(inspect.Signature(bare))


@pytest.fixture
def modules(monkeypatch):
    """Return docs/generate.py and docs/figures.py."""
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("generate"), importlib.import_module("figures")


def test_every_name_of_pblas_is_found_by_search(modules):
    generate, _ = modules
    assert set(re.findall(r"`(p[sdcz]\w+)`", generate.pblas())) == {
        name for name in pblas.__all__ if name[0] == "p"
    }


def test_search_leads_to_the_right_page(modules):
    """A main entry of the index comes before all pages that only have the word."""
    generate, _ = modules
    listed = {
        page.stem: {
            word
            for line in re.findall(r"^```{index} (.*)$", page.read_text(), re.MULTILINE)
            for word in line.removeprefix("! ").split(", ! ")
        }
        for page in PAGES
    }
    for word, page in {
        "speed": "performance", "pdsyev": "solving", "positive definite": "solving", "Slurm": "running",
        "install": "quickstart",
    }.items():  # fmt: skip
        assert [stem for stem, words in listed.items() if word in words] == [page]
    (names,) = re.findall(r"^```{index} (.*)$", generate.ported(), re.MULTILINE)
    assert {name for name in pblas.__all__ if name[0] == "p"} <= set(names.removeprefix("! ").split(", ! "))


def test_every_name_of_scalapack_is_here_or_said_to_be_missing(modules):
    generate, _ = modules
    directory = locate("debian")
    if directory is None:
        assert os.environ.get("PBLASMP_SCALAPACK") != "required", "no ScaLAPACK (debian)"
        pytest.skip("ScaLAPACK (debian) is not here: python -m benchmarks.fetch_scalapack fetches it")
    library = min(directory.glob("libscalapack*.so*")).read_bytes()
    missing = {each for names in generate.MISSING for each in names.split(", ")}
    assert not [each for each in missing if f"{each}_\0".encode() not in library]
    assert not missing & {name for each in pblas.__all__ for name in (each, each[2:])}
    tools = (
        r"(?:free_)?blacs_\w+|(?:blacs|sys)2\w+|pb_\w+|p[ij]\w+|indx\w+|infog\w+|desc(?:init|set)|numroc|ilcm|iceil"
        r"|sl(?:_init|_grid\w+e|boot|timer|combine|inquire|enable|disable)|d(?:wall|cpu)time00|[idz](?:ge|tr|gs|ga)\w+2d"
    )
    names = {each.decode() for each in re.findall(rf"\0(p[sdcz]\w+|{tools})_(?=\0)".encode(), library)}
    assert {"pdgemv", "pzgetrf", "blacs_gridinit", "pigemr2d"} <= names
    here = {*pblas.__all__, *missing}
    inner = re.compile(f"p[sdczi](?:{'|'.join(generate.INNER)})")
    assert {"sl_init", "dgesd2d", "igamx2d", "sys2blacs_handle"} <= names
    assert not {each for each in names if not ({each, each[1:], each[2:]} & here or inner.fullmatch(each))}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "pycon")], ids=lambda page: page.stem
)
def test_prompts(page):
    text = "\n".join(blocks(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page):
    parts = "pblasmp|tests|docs|examples|benchmarks|reference|descriptors"
    files = re.findall(
        rf"`((?:{parts})/(?:[\w./-]*(?:/|\.py|\.md|\.json\b(?<!tuning\.json)))?)`", page.read_text()
    )
    assert [file for file in files if not (DOCS.parent / file).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_in_the_commands_of_a_page_exist(page):
    command = r"python3? (?:-m ((?:benchmarks|tests)\.[\w.]*\w)|((?:benchmarks|examples)/\w+\.py))"
    names = [file or module.replace(".", "/") for module, file in re.findall(command, page.read_text())]
    found = {name: [*DOCS.parent.glob(name), *DOCS.parent.glob(f"{name}.py")] for name in names}
    assert [name for name in names if not found[name]] == []


def test_every_example_is_on_a_page_with_its_output(modules, tmp_path):
    generate, _ = modules
    text = (DOCS / "examples.md").read_text() + (DOCS / "whole-problems.md").read_text()
    paths = sorted((DOCS.parent / "examples").glob("*.py"))
    assert [path.stem for path in paths if not re.search(rf"(example-|examples/){path.stem}\b", text)] == []
    for path in paths:
        generate.Example.read(path).write(tmp_path)
    shown = (tmp_path / "example-poisson.md").read_text()
    parts = [
        "mpirun -n 4 python examples/poisson.py\n",
        "\nside = 24 ",
        "\nsource 2: the residual is below 1e-12\n",
    ]
    assert all(part in shown for part in parts)
    assert "annotations" not in shown


def test_the_readme_has_the_newest_measurements(modules):
    _, figures = modules
    readme = (DOCS.parent / "README.md").read_text()
    assert figures.is_current(readme)
    assert not figures.is_current(readme.replace("the speed of cuSOLVERMp", "its speed"))
    assert figures.replaced(readme.replace("the speed of cuSOLVERMp", "its speed")) == readme


_MOST_COMMITS = 300  # of what ran: what was measured before so many is no longer what runs


def commits_since(commit: str, on_gpus: bool) -> int | None:
    """Return how many commits of the engines that ran are newer; None if it is unknown, or outside a checkout."""
    other = "host" if on_gpus else "gpu"
    what = ["pblasmp/engines", f":(exclude)pblasmp/engines/{other}"]
    command = ["git", "rev-list", "--count", f"{commit.rstrip('+')}..HEAD", "--", *what]
    try:
        done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else int(done.stdout)


def quoted(figures, monkeypatch, directory):
    """Return the runs that the README and the page on performance read, by name."""
    read = {}

    class Quoted(figures.Run):
        def __getattribute__(self, name):
            if name == "rows":
                read[self.name] = self
            return super().__getattribute__(name)

    runs = {name: Quoted(**asdict(run)) for name, run in figures.results.runs().items()}
    monkeypatch.setattr(figures.results, "runs", lambda: runs)
    readme, page = figures.readers(), (DOCS / "performance.md").read_text()
    for part in set(re.findall(r"_generated/(\w+)\.md", page)) - {
        "all_results"
    }:  # which says how old each is
        getattr(figures, part)()
    figures.charts(directory)
    assert readme
    # Predictions have a chart on the page on planning, which says of each run how old it is.
    return {name: run for name, run in read.items() if not name.startswith("predict-")}


def test_what_is_quoted_is_not_old(modules, monkeypatch, tmp_path):
    """What the README or the page on performance quotes is measured again after so many commits of the engines."""
    _, figures = modules
    read = quoted(figures, monkeypatch, tmp_path)
    assert {"factorizations-debian-4-ranks", "many_calls-debian-2x2-4-ranks"} <= read.keys()
    assert commits_since("no such commit", False) is None
    found = {name: commits_since(run.commit, run.gpus > 0) for name, run in read.items()}
    ages = {name: age for name, age in found.items() if age is not None}
    if not ages:
        pytest.skip("the commits of the runs are unknown here")
    assert commits_since("HEAD", True) == 0
    assert {name for name, age in ages.items() if age > _MOST_COMMITS} == set(), "measure these again"


def test_what_auto_takes_by_machine(modules):
    """Every kind of GPU takes something: before 8.9 8-bit floats go by messages, as a simulated A100's do."""
    _, figures = modules
    rows = [
        line.strip("| ").split(" | ") for line in figures.algorithms_by_machine().splitlines() if "`" in line
    ]
    assert len(rows) == 2 * len(figures._MACHINES)
    for machine, *taken, because in rows:
        assert set(re.findall("`(.*?)`", " ".join(taken))) <= {each.name for each in figures.PRODUCTS}, (
            machine
        )
        assert because
    a100 = [row[1:] for row in rows if "A100" in row[0]]
    assert [set(taken) == {"`push`"} for *taken, _ in a100] == [False, False, True, True]
    assert ["by messages" in because for *_, because in a100] == [False, False, True, True]


def test_what_was_measured_says_when_and_where(modules):
    """Each table on the page on performance, of every run that it has."""
    _, figures = modules
    runs = figures.results.runs()
    for text, names in {
        figures.comparison(): ["host_gemm-mkl-4-ranks", "transformer-mpirun-8192-4096-2-gpus"],
        figures.factorizations(): [name for name in runs if re.match("factorizations-(debian|mkl)-", name)],
        figures.many_calls(): [name for name in runs if name.startswith("many_calls-")],
        figures.performance(): ["tensor_parallel-allgather_matmul-2-gpus"],
        figures.all_results(): list(runs),
    }.items():
        for run in map(runs.__getitem__, names):
            assert run.where in text
            assert f"{run.date}, commit {run.commit}" in text


def test_the_page_on_support_has_the_versions_of_the_records(modules):
    _, figures = modules
    rows = dict(re.findall(r"^\| (\w[\w-]*) \| (.*) \|$", figures.support(), re.MULTILINE))
    assert set(rows) == {"Python", *figures.TESTED}
    runs = json.loads((DOCS.parent / "tests/gpu/runs.json").read_text())
    for name in ("cuBLASMp", "NCCL"):
        versions = {run[name] for run in runs} - {""}
        assert versions <= set(rows[name].split(" | ")[1].split(", "))
    project = (DOCS.parent / "pyproject.toml").read_text()
    for name, package in figures.TESTED.items():
        least = rows[name].split(" | ")[0]
        assert (f'"{package}>={least}"' in project) if package else not least
    assert rows["Python"].startswith("3.10 | 3.10, ")


def test_every_stored_run_is_shown(modules):
    _, figures = modules
    shown = figures.all_results()
    for run in figures.results.runs().values():
        assert f"{figures.source(run)}{figures.about(run)}:" in shown
        assert figures.title_of(run)


def test_ratios_are_times_over_those_of_pblasmp(modules):
    _, figures = modules
    row = {
        "case": {"n": 1},
        "seconds": {"pblasmp": [2.0], "x": [3.0], "y": [5.0, 4.0, 9.0], "GEMM alone": [1.0]},
    }
    run = figures.Run("b", "2026-11-25", "c", 1, 1, {"gpu": "H"}, {}, {}, "", "all", [row])
    assert [ratio for _, ratio in figures.compare(run, ["y"])] == [2.5]
    assert [ratio for _, ratio in figures.compare(run, ["x", "y", "z"])] == [1.5]  # the fastest of them
    assert not list(figures.compare(run, ["z"]))
    assert figures.own(row) == 2.0
    said = '; "auto" takes 0.67 times as long as the fastest algorithm, at most 0.67 times'
    assert figures.behind(run) == said  # than x, not than the GEMM alone
    del row["seconds"]["pblasmp"]
    assert not figures.behind(run)
    assert figures.own(row) == 3.0  # its fastest algorithm by name, and not the GEMM alone
    assert figures.spread([3.0, 1.0, 2.0]) == "2.00 (1.00–3.00)"


@pytest.mark.skipif(not only_long(True), reason="the docs' build runs these commands")
def test_what_planning_shows_is_what_the_commands_print(modules, tmp_path):
    """A scaling, a layout that it pays to move, a model's layers."""
    generate, _ = modules
    product, nodes, layout, model, cholesky, lu = generate.planned(DOCS / "planning.md", tmp_path)
    assert product.startswith("best: ")
    assert [line.split()[0] for line in nodes.splitlines()[:5]] == ["8", "16", "32", "64", "128"]
    assert "does not fit" in nodes
    assert "pays at once" in layout
    assert "cholesky of 100000 x 100000" in cholesky
    assert "per rank: does not fit" in lu
    assert len(re.findall("best on", model)) == 6


def test_a_command_that_fails_fails_the_build(modules, tmp_path):
    generate, _ = modules
    page = tmp_path / "page.md"
    page.write_text("pblasmp plan 8 8 --machine dgx-h100\n")
    with pytest.raises(ValueError, match=r"page\.md: pblasmp plan 8 8 --machine dgx-h100: .*"):
        list(generate.planned(page, tmp_path))


def test_a_chart_without_times_fails_the_build(modules, tmp_path):
    _, figures = modules
    with pytest.raises(ValueError, match=r"chart\.svg: there is no time to draw"):
        figures.draw([figures.Bars("x", [])], "y", tmp_path / "chart.svg")


def test_every_environment_variable_is_on_the_page_of_the_command_line():
    sources = "".join(path.read_text() for path in (DOCS.parent / "pblasmp").rglob("*.py"))
    read = set(re.findall(r"\bPBLASMP_[A-Z_]+", sources)) - {
        "PBLASMP_JOB",
        "PBLASMP_COMPLETE",
    }  # by pblasmp, click
    read = {name for name in read if not name.startswith("PBLASMP_PRELOAD_")} | {"PBLASMP_PRELOAD_MIN"}
    rows = re.findall(r"^\| (`.*?) \| ", (DOCS / "command-line.md").read_text(), re.MULTILINE)
    assert read == {name for row in rows for name in re.findall(r"`(PBLASMP_\w+)`", row)}


def test_what_the_reference_leaves_out_exists_and_is_for_other_modules():
    text = (DOCS / "api" / "matrices.md").read_text()
    left_out = [
        set(names.split(", ")) for names in re.findall(r":exclude-members: (.*)$", text, re.MULTILINE)
    ]
    internal = {
        *("direct_part", "know", "known_call", "like_on_host", "move_to", "on_host", "part", "place"),
        *("transposed", "whole", "writeable"),
    }
    assert left_out == [{"matrix_type"}, internal]
    for cls, names in zip((pb.Context, pb.DistributedMatrix), left_out, strict=True):
        assert [name for name in names if not hasattr(cls, name)] == []
    assert left_out[1] & vars(pb.DistributedMatrix).keys() == set()


def test_completion_shows_what_the_reference_has():
    with pb.Context(engine="host") as ctx:
        shown = [{name for name in dir(x) if not name.startswith("_")} for x in (ctx, ctx.zeros((2, 2)))]
    of_context = {name for name in vars(pb.Context) if not name.startswith("_")} - {"matrix_type"}
    assert shown[0] == of_context | {"close", "comm", "engine", "rank", "size"}
    of_matrix = {
        name for cls in pb.DistributedMatrix.__mro__ for name in vars(cls) if not name.startswith("_")
    }
    page = (DOCS / "api" / "matrices.md").read_text()
    _, hidden = re.findall(r":exclude-members: (.*)$", page, re.MULTILINE)
    assert shown[1] == (of_matrix | {"context"}) - set(hidden.split(", "))


def test_every_public_object_has_words_of_its_own(tmp_path):
    """No ``repr`` is Python's own, which only gives the address."""
    d = pb.MatrixDescriptor((4, 4), (2, 2), pb.Grid(1, 1))
    with pb.Context(engine="host") as ctx, ctx.open_file(tmp_path / "R.h5") as file:
        a = ctx.eye(d)
        a.save(file, dataset="A")
        x = np.ones((2, 2))
        with (
            pb.plan("matmul", a, a) as plan,
            pb.plan("lu_factor", a) as lu,
            pb.plan("matmul_allreduce", x, x, ctx) as y,
        ):
            objects = [
                ctx, ctx.comm, ctx.engine, ctx.engine.traits, a, d, d.grid, d.rows, pb.draw(d), file,
                plan, plan.problem, plan.report(), *plan.report().algorithms.values(), plan.workspace,
                lu, lu.problem, y, y.problem, Graph(lambda: None, a), pb.linalg.qr(a), pb.verify(a, a, None, a),
                pb.Level3Problem("syrk", d, d), pb.Epilogue("relu"), pb.Scales(a=1.0), plan.problem.traffic(),
            ]  # fmt: skip
            words = [repr(each) for each in objects]
    assert [text for text in words if re.search(r"<\S+ object at 0x", text)] == []


def test_docstrings_say_once_whether_a_call_is_collective(modules):
    generate, _ = modules
    said = {call.name: len(re.findall(r"\bCollective(?:\.| over)", call.text)) for call in generate.calls()}
    assert [name for name, count in said.items() if count > 1] == []


def test_files_that_the_pictures_of_calls_name_exist(modules):
    flow = importlib.import_module("flow")
    pictures = (DOCS / "pictures" / "call-path.svg").read_text() + flow.direct_call()
    files = re.findall(r">(pblasmp/[\w/.]+)<", pictures)
    assert {box.file for box in flow.DIRECT_CALL.values()} < set(files)
    assert len(files) >= 14
    assert [file for file in files if not (DOCS.parent / file).exists()] == []


ODD = re.compile(
    r"(?:that|which) (?:is|are) there\b|ways that are\b|those that there are|times as fast: |least to most"
    r"|beside (?:the same library|ScaLAPACK|Debian|MKL|NumPy|cuSOLVERMp|NCCL|PyTorch)|asked for: |not asked: "
    r"|\ba fault in this\b|Read again|On paper|which they have agreed on before"
)
"""What only this project said, and plain English says otherwise."""


def test_plain_words():
    root = DOCS.parent
    folders = ("pblasmp", "docs", "benchmarks", "descriptors", "examples")
    files = [
        path
        for part in folders
        for path in (root / part).rglob("*")
        if not {"_build", "_generated"} & {*path.parts}
    ]
    files += [root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml")]
    texts = {
        path: re.sub(r"\s+", " ", path.read_text())
        for path in files
        if path.suffix in (".c", ".cu", ".cuh", ".h", ".md", ".py", ".toml")
    }
    assert len(texts) > 400
    assert {path: words for path, text in texts.items() if (words := ODD.findall(text))} == {}


def test_the_citation_and_the_changelog_are_of_this_version():
    import pblasmp

    root = DOCS.parent
    assert f"\nversion: {pblasmp.__version__}\n" in (root / "CITATION.cff").read_text()
    released = re.search(
        r"^## \[(.*)\] - (\d{4}-\d\d-\d\d)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert released is not None
    assert released[1] == pblasmp.__version__
    assert f"\ndate-released: {released[2]}\n" in (root / "CITATION.cff").read_text()
