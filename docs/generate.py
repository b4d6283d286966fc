# SPDX-License-Identifier: Apache-2.0
"""What the pages take from the code: tables from docstrings, the command line's help, pictures, measured times.

conf.py has everything written to docs/_generated before each build, so that nothing can be stale.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import figures
import flow
from click.testing import CliRunner

import pblasmp as pb
import pblasmp.pblas as names
from pblasmp.bindings import FUNCTIONS, version_text
from pblasmp.cli.commands import cli
from pblasmp.engines.product import Workspace
from pblasmp.layout.level3_problem import ROUTINES
from pblasmp.layout.routines import VECTOR_ROUTINES
from pblasmp.pblas.routine_functions import MISSING
from pblasmp.problems.files import load_problem_file
from reference.testers import RESULTS

ROOT = Path(__file__).parents[1]
PUBLIC = {name: getattr(pb, name) for name in pb.__all__} | {
    f"{module}.{name}": getattr(getattr(pb, module), name)
    for module in ("blas", "linalg")
    for name in getattr(pb, module).__all__
}

INHERITED = {"Context": ("close",)}
"""Collective methods of users that a class has from an internal one."""

RETURNED = {"Workspace": Workspace}
"""Classes that public calls return, without a public name."""

OPERATORS = {
    "__getitem__": "{}[i, j]",
    "__setitem__": "{}[i0:i1, j0:j1] = B",
    "__matmul__": "{} @ B",
    "__add__": "{} + B",
    "__sub__": "{} - B",
    "__mul__": "{} * B",
    "__truediv__": "{} / B",
    "__pow__": "{} ** B",
    "__iadd__": "{} += B",
    "__neg__": "-{}",
    "__abs__": "abs({})",
    "__call__": "{}()",
}
VARIABLES = {"Context": "ctx", "DistributedMatrix": "A", "Plan": "plan"}
"""Names of instances in the tables."""

DRAWN = (
    "docs/pictures/matrix.toml",
    "sub-all",
    *(
        f"docs/pictures/tensor-parallel-{form}.toml"
        for form in ("allgather", "reduce-scatter", "allreduce", "output")
    ),
)
"""Descriptor files, as ``pblasmp show`` is given them, of which the pages have pictures."""


def parts_drawn() -> dict[str, pb.Level3Problem]:
    """Return by file name the routines of which the pages have pictures of what is read and written."""
    grid = pb.Grid(2, 2)

    def matrix(rows: int, cols: int) -> pb.MatrixDescriptor:
        return pb.MatrixDescriptor((rows, cols), (2, 2), grid)

    square, tall, wide = matrix(12, 12), matrix(12, 7), matrix(7, 12)
    return {
        "trsm": pb.Level3Problem("trsm", square, tall, tall, side="L", uplo="L", diag="U"),
        "symm": pb.Level3Problem("symm", square, wide, wide, wide, side="R", uplo="U"),
        "syrk": pb.Level3Problem("syrk", tall, square, None, square, uplo="L", op_a="N"),
        "tradd": pb.Level3Problem("tradd", wide, tall, None, tall, uplo="L", op_a="T"),
    }


class Call(NamedTuple):
    """A public callable: how it is written, and its docstring."""

    name: str
    text: str

    @property
    def is_collective(self) -> bool:
        """Whether every rank must call it."""
        return re.search(r"\bCollective(\.| over)", self.text) is not None

    @property
    def summary(self) -> str:
        """What it does: the first sentence of the docstring."""
        first = self.text.strip().split("\n\n")[0].replace("\n", " ")
        sentence = re.split(r"\.(?= |$)", first)[0]
        return re.sub(r"\s+", " ", sentence).replace("``", "`")


def public_classes() -> dict[str, type]:
    """Return the public classes that are no exceptions, and those that public calls return."""
    classes = {name: x for name, x in PUBLIC.items() if inspect.isclass(x) and not issubclass(x, Exception)}
    return classes | RETURNED


def calls() -> Iterator[Call]:
    """Yield every public callable: functions, constructors, methods, operators."""
    for name, value in PUBLIC.items():
        if inspect.isfunction(value):
            yield Call(f"pb.{name}", value.__doc__ or "")
    for name, cls in public_classes().items():
        if name in PUBLIC:
            yield Call(f"pb.{name}", cls.__doc__ or "")
        owner = VARIABLES.get(name, name.rpartition(".")[2])
        inherited = {attribute: getattr(cls, attribute) for attribute in INHERITED.get(name, ())}
        for attribute, member in (vars(cls) | inherited).items():
            function = getattr(member, "__func__", member)
            if not inspect.isfunction(function):
                continue
            if attribute in OPERATORS:
                yield Call(OPERATORS[attribute].format(owner), function.__doc__ or "")
            elif not attribute.startswith("_"):
                yield Call(f"{owner}.{attribute}", function.__doc__ or "")


def collectives() -> str:
    """Return the table of collective calls."""
    rows = [[f"`{call.name}`", call.summary] for call in calls() if call.is_collective]
    return figures.table(["call", ""], rows)


def errors() -> str:
    """Return the table of exceptions."""
    rows = []
    for name, value in PUBLIC.items():
        if inspect.isclass(value) and issubclass(value, pb.PblasmpError):
            like = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
            rows.append([f"`{name}`", like, Call(name, value.__doc__ or "").summary])
    return figures.table(["exception", "is also a", ""], rows)


def command_line() -> str:
    """Return the help of every command, each under a heading."""
    settings = {"max_content_width": 84, "terminal_width": 84, "help_option_names": ["-h", "--help"]}
    parent = click.Context(cli, info_name="pblasmp")
    parts = []
    for name, command in cli.commands.items():
        context = click.Context(command, info_name=name, parent=parent, **settings)
        parts.append(f"## pblasmp {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def routines() -> str:
    """Return the table of the routines' names: in PBLAS, in Python, in cuBLASMp."""
    own = [
        (f"p?{name}" if row.pblas else "", f"pb.blas.{name}", f"cublasMp{name.capitalize()}")
        for name, row in ROUTINES.items()
    ]
    named = [
        ("p?gemm", "pb.matmul", "cublasMpMatmul"),
        *own,
        ("p?tran, p?tranu, p?tranc", 'pb.blas.geadd(a, c, op_a="T")', "cublasMpGeadd"),
        ("p?gemr2d", "A.redistribute", "cublasMpGemr2D"),
        ("p?trmr2d", "A.redistribute(uplo=...)", "cublasMpGemr2D"),
    ]
    rows = [
        [
            f"`{pblas}`" if pblas else "", f"`{python}`", f"`{symbol}`",
            version_text(FUNCTIONS[symbol].since).removesuffix(".0"),
        ]
        for pblas, python, symbol in named
    ]  # fmt: skip
    return figures.table(["PBLAS", "here", "cuBLASMp", "since"], rows)


def vectors() -> str:
    """Return the table of levels 1 and 2: here, in PBLAS, and the level-3 routine that computes it."""
    rows = []
    for name, row in VECTOR_ROUTINES.items():
        twin = {"gemm": "`matmul`", "": ""}.get(row.twin, f"`{row.twin}`")
        named = ", ".join(f"`{each}`" for each in row.names)
        rows.append([f"`pb.blas.{name}`", row.formula.replace("|", "&#124;"), named, twin])
    return figures.table(["here", "", "PBLAS", "computed as"], rows)


def pblas() -> str:
    """Return the table of the routines of pblasmp.pblas, by the type of their matrices."""
    kinds = {"s": "float32", "d": "float64", "c": "complex64", "z": "complex128"}
    found: dict[str, dict[str, str]] = {}
    for name in names.__all__:
        if re.match("p[sdcz]", name):
            found.setdefault(name[2:], {})[name[1]] = name
    for each, row in VECTOR_ROUTINES.items():
        for name, letter in row.names.items():
            del found[name[2:]][name[1]]
            others = found.setdefault(each if letter not in found.get(each, {}) else name[2:], {})
            others[letter] = name
    rows = [
        [f"`{row[kind]}`" if kind in row else "" for kind in kinds] for _, row in sorted(found.items()) if row
    ]
    return figures.table([*kinds.values()], rows)


INNER = (
    "la\\w+", "[a-z]+[23][lr]?", "[bdpt][bt]trsv", "[dz]ttrsv", "lauum", "rot", "max1", "[cz]sum1", "parmq",
    "chekpad", "fillpad", "col2row", "row2col", "treecomb", "(ge|tr)mr2do", "copy",
)  # fmt: skip
"""Names of ScaLAPACK that only its other routines and its tests use."""

HERE = {
    "gridinit": "`pb.Context()`, `pb.Grid(nprow, npcol)`",
    "blacs_gridinit": "`pb.Context()`, `pb.Grid(nprow, npcol)`",
    "blacs_gridinfo": "`grid.coords(ctx.rank)`",
    "blacs_gridexit": "the end of the `with` block",
    "gridinfo": "`grid.coords(ctx.rank)`",
    "gridexit": "the end of the `with` block",
    "blacs_get": "`pb.Context()`",
    "blacs_exit": "the end of the `with` block",
    "blacs_gridmap": "`pb.Context(comm)` with the ranks in another order",
    "blacs_pinfo": "`ctx.rank`, `ctx.size`",
    "blacs_pnum": "`grid.rank(i, j)`",
    "blacs_pcoord": "`grid.coords(rank)`",
    "blacs_barrier": "`ctx.comm.barrier()`",
    "descinit": "`pb.MatrixDescriptor`",
    "descset": "`pb.MatrixDescriptor`",
    "numroc": "`descriptor.local_shape(rank)`, `pb.numroc`",
    "indxg2p": "`descriptor.owner(i, j)`",
    "indxg2l": "`descriptor.to_local(i, j)`",
    "indxl2g": "`descriptor.to_global(rank, i, j)`",
    "infog1l": "`descriptor.to_local(i, j)`",
    "infog2l": "`descriptor.to_local(i, j)`",
    "iceil": "`-(-m // n)`",
    "ilcm": "`math.lcm(m, n)`",
    "potrf": "`pb.linalg.cholesky`",
    "potrs": "`pb.linalg.cho_solve`",
    "posv": '`pb.linalg.solve(a, b, assume_a="pos")`',
    "potri": '`pb.linalg.inv(a, assume_a="pos")`',
    "getrf": "`pb.linalg.lu_factor`",
    "getrs": "`pb.linalg.lu_solve`",
    "gesv": "`pb.linalg.solve`",
    "getri": "`pb.linalg.inv`",
    "geqrf": "`pb.linalg.qr`",
    "orgqr": "`pb.linalg.qr(a).q()`",
    "ungqr": "`pb.linalg.qr(a).q()`",
    "ormqr": "`pb.linalg.qr(a).apply(b)`",
    "unmqr": "`pb.linalg.qr(a).apply(b)`",
    "gels": "`pb.linalg.lstsq`",
    "trtri": '`pb.linalg.inv(a, assume_a="lower triangular")`',
    "trtrs": "`pb.linalg.solve_triangular(a, b)`",
    **dict.fromkeys(("syev", "syevd", "heev", "heevd"), "`pb.linalg.eigh(a)`"),
    **dict.fromkeys(
        ("syevr", "syevx", "heevr", "heevx"), "`pb.linalg.eigh(a, subset_by_index=(first, last))`"
    ),
    **dict.fromkeys(("sygvx", "hegvx"), "`pb.linalg.eigh(a, b, subset_by_index=(first, last))`"),
    "gesvd": "`pb.linalg.svd(a)`",
}
"""What the tools of ``pblasmp.pblas`` are called with pblasmp's matrices."""


def ported() -> str:
    """Return the table of every name of ScaLAPACK that is here, beside its 0-based form, and of those that are not."""
    groups: dict[str, list[str]] = {}
    for name in names.__all__:
        function = getattr(names, name)
        if inspect.isclass(function):
            continue
        found = re.search(r"here ``(.+?)``", function.__doc__ or "")
        form = HERE.get(name) or (f"`{found[1]}`" if found else "") or HERE.get(name[2:], "")
        if not form:
            raise ValueError(f"pblas.{name}: say in HERE what it is called with pblasmp's matrices")
        groups.setdefault(re.sub(r"^`pblasmp\.", "`pb.", form), []).append(name)
    rows = [
        [", ".join(f"`{name}`" for name in each), form]
        for form, each in sorted(groups.items(), key=lambda item: item[1][0])
    ]
    missing = [[", ".join(f"`{x}`" for x in each.split(", ")), why] for each, why in MISSING.items()]
    listed = ", ".join(f"! {name}" for name in sorted(name for each in groups.values() for name in each))
    search = f"```{{index}} {listed}\n```\n"  # so that a search for a name leads here
    words = "Left out: what only other routines use, such as `pdlarfb` and, without blocks, `pdgetf2`.\n"
    tables = (
        figures.table(["here", "with pblasmp's matrices"], rows),
        figures.table(["not here", "instead"], missing),
    )
    return "\n".join([search, *tables, words])


def testers() -> str:
    """Return the table of ScaLAPACK's testers: ``python -m benchmarks.testers --save``."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows: dict[str, list[dict[str, Any]]] = {}
    for each in found["testers"]:
        rows.setdefault(each["about"], []).append(each)
    lines = [
        [about, ", ".join(f"`{Path(each['program']).name}`" for each in group),
         *(str(sum(each[key] for each in group)) for key in ("total", "passed", "by_pblasmp", "by_library")),
         *(_seconds(group, key) for key in ("seconds", "scalapack_seconds", "grid_seconds"))]
        for about, group in rows.items()
    ]  # fmt: skip
    head = [
        "what is tested", "testers", "tests", "passed", "calls by pblasmp", "left to ScaLAPACK",
        "seconds of all calls", "all by ScaLAPACK", "for grids",
    ]  # fmt: skip
    return figures.table(head, lines, 7) + f"\nOn {found['ranks']} ranks, {found['date']}.\n"


def _seconds(testers: list[dict[str, Any]], key: str) -> str:
    """Return the sum of the testers' medians; nothing if one was not timed."""
    if not all(each.get(key) for each in testers):
        return ""
    return f"{sum(median(each[key]) for each in testers):.2f}"


def flips() -> str:
    """Return the table of options that change if a matrix is in C order."""
    said = {
        "side": "`side`", "uplo": "`uplo`", "op": "`op_a`", "conj": "A is conjugated", "alpha": "alpha is conjugated",
        "swap": "A and B change places",
    }  # fmt: skip
    rows = []
    for name, traits in ROUTINES.items():
        cells = (", ".join(said[x] for x in said if x in each) for each in (traits.d_flips, traits.a_flips))
        rows.append([f"`{name}`", *cells])
    return figures.table(["routine", "D in C order", "A in C order"], rows)


GALLERY = (
    "grid-2x3",
    "grid-2x3-col",
    "ragged-2x2",
    "source-each",
    "order-cfc",
    "idle-ranks",
    "sub-rows",
    "thin-outer-product",
)
"""Problems that the gallery shows, by name."""


def gallery() -> str:
    """Return the gallery: a title and a picture for each problem."""
    shown = ((name, load_problem_file(name).title) for name in GALLERY)
    return "\n".join(
        f"## {title}\n\n`pblasmp show {name}`\n\n![{title}](_generated/{name}.svg)\n" for name, title in shown
    )


class Example(NamedTuple):
    """A script of examples/, as the page of examples shows it."""

    name: str
    command: str
    code: str
    prints: str

    @classmethod
    def read(cls, path: Path) -> Example:
        """Return the script of a file: its second line is the command, its docstring ends with what it prints."""
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        _, _, printed = (ast.get_docstring(tree) or "").partition("\nPrints:\n")
        code = "\n".join(text.splitlines()[tree.body[0].end_lineno :])
        code = code.replace("from __future__ import annotations\n", "").strip()
        command = text.splitlines()[1].removeprefix("# Run: ")
        return cls(path.stem, command, code, inspect.cleandoc(printed))

    def write(self, directory: Path) -> None:
        """Write the whole script between its command and its output, and the output alone."""
        prints = f"Its output contains\n\n```text\n{self.prints}\n```\n"
        run = f"```sh\n{self.command}\n```\n"
        whole = f"{run}\n```python\n{self.code}\n```\n\n{prints}"
        (directory / f"example-{self.name}.md").write_text(whole, encoding="utf-8")
        (directory / f"prints-{self.name}.md").write_text(f"{run}\n{prints}", encoding="utf-8")


def planned(page: Path, directory: Path) -> Iterator[str]:
    """Yield what each ``pblasmp plan`` of a page prints. Files that they need and draw are in ``directory``."""
    text = page.read_text(encoding="utf-8")
    for name, content in re.findall(r"`([\w.-]+\.toml)`:\n\n```toml\n(.*?)```", text, re.DOTALL):
        (directory / name).write_text(content, encoding="utf-8")
    for line in re.findall(r"^pblasmp (plan .*)$", text, re.MULTILINE):
        arguments = [str(directory / x) if x.endswith((".toml", ".svg")) else x for x in line.split()]
        done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        if done.exit_code:
            raise ValueError(f"{page.name}: pblasmp {line}: {done.output}")
        yield done.output


def write_all(directory: Path) -> None:
    """Write everything that the pages include."""
    directory.mkdir(exist_ok=True)
    for function in (
        collectives,
        errors,
        command_line,
        routines,
        vectors,
        pblas,
        ported,
        testers,
        flips,
        gallery,
    ):
        (directory / f"{function.__name__}.md").write_text(function(), encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not figures.is_current(readme):
        raise ValueError("README.md: the table of comparison is old: python docs/figures.py writes it")
    for table in (
        figures.comparison, figures.layer_times, figures.performance, figures.level3_gpu, figures.many_calls,
        figures.few_columns_gpu, figures.solves_gpu,
        figures.vector_times, figures.factorizations, figures.nodes, figures.between_hosts,
        figures.eigenvalues, figures.eigenvalues_on_gpus, figures.whole_problems, figures.refined_solves,
        figures.rounding_blocks, figures.rounding_sums, figures.one_kernel, figures.one_kernel_in_8_bits,
        figures.one_kernel_by_mma, figures.algorithms_by_machine, figures.gathered_rates, figures.barrier,
        figures.first_calls, figures.all_results, figures.gpu_runs, figures.predictions, figures.support,
    ):  # fmt: skip
        (directory / f"{table.__name__}.md").write_text(table(), encoding="utf-8")
    readers = figures.readers().replace("](docs/", "](")
    for script, heading in (
        ("scalapack_solve", "pdgesv-and-pdposv"),
        ("tensor_parallel_mlp", "a-tensor-parallel-mlp"),
    ):
        readers = readers.replace(f"](examples/{script}.py)", f"](examples.md#{heading})")
    (directory / "readers.md").write_text(readers, encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        Example.read(path).write(directory)
    figures.charts(directory)
    flow.write(directory)
    for i, output in enumerate(planned(ROOT / "docs/planning.md", directory)):
        (directory / f"plan-{i}.md").write_text(f"```text\n{output}```\n", encoding="utf-8")
    for file in (*DRAWN, *GALLERY):
        pb.draw(load_problem_file(ROOT / file if "/" in file else file)).save(
            directory / f"{Path(file).stem}.svg"
        )
    for name, problem in parts_drawn().items():
        pb.draw(problem).save(directory / f"{name}.svg")
