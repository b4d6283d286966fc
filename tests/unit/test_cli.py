# SPDX-License-Identifier: Apache-2.0
"""The command line without ranks: help, and one clear line with exit status 2 for every kind of bad input."""

import errno
import gc
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import pblasmp as pb
from pblasmp import info, launch, resources
from pblasmp.cli import options
from pblasmp.cli.bench import print_bench
from pblasmp.cli.commands import cli
from pblasmp.cli.ranks import FailureError
from pblasmp.cli.reports import Channel
from pblasmp.cli.terminal import is_terminal, use_color
from pblasmp.problems.files import check as check_file
from pblasmp.problems.files import find
from tests.helpers.command_line import run_here
from tests.helpers.slow import only_long

ROOT = Path(__file__).parents[2]
PROBLEM = """
title = "Small"
m = 4
n = 4
k = 4
block = 2
grid = { nprow = 1, npcol = 2 }
"""
ROUTINE = """
title = "Solve L X = B"
routine = "trsm"
uplo = "U"
grid = "1x2"
block = 2
[a]
shape = [5, 5]
window = [[1, 5], [1, 5]]
[b]
shape = [4, 3]
[d]
shape = [4, 3]
"""


@pytest.fixture
def pblasmp(monkeypatch, tmp_path, capsys):
    """Run the command line in this process, in an empty directory; any rank that it started would be an error."""

    def no_launcher(*_, **__):
        raise AssertionError("ranks were started")

    def run(*arguments):
        done = run_here(arguments, monkeypatch, capsys)
        return done.returncode, done.stdout, done.stderr

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pblasmp.cli.ranks.Job", no_launcher)
    return run


@pytest.fixture
def files(tmp_path):
    """Matrices to get wrong."""
    return written(tmp_path)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """The same, for many tests that change nothing."""
    return written(tmp_path_factory.mktemp("files"))


def written(tmp_path):
    np.save(tmp_path / "A.npy", np.ones((4, 3)))
    np.save(tmp_path / "B.npy", np.ones((3, 5)))
    np.save(tmp_path / "B32.npy", np.ones((3, 5), np.float32))
    np.save(tmp_path / "Z.npy", np.ones((3, 5), complex))
    np.save(tmp_path / "ints.npy", np.ones((4, 3), int))
    np.save(tmp_path / "half.npy", np.ones((4, 3), ml_dtypes.bfloat16))
    np.save(tmp_path / "vector.npy", np.ones(3))
    np.save(tmp_path / "objects.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("not numbers")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "A.npy").read_bytes()[:-8])
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "good.toml").write_text(PROBLEM)
    (tmp_path / "bad.toml").write_text(PROBLEM.replace("block = 2", "blok = 2"))
    (tmp_path / "routine.toml").write_text(ROUTINE)
    (tmp_path / "illegal_routine.toml").write_text(ROUTINE.replace("[4, 3]", "[4, 2]", 1))
    (tmp_path / "faulty_routine.toml").write_text(ROUTINE.replace("uplo", "op_b"))
    (tmp_path / "illegal.toml").write_text(PROBLEM + "[b]\nblock = [3, 2]\n")
    return tmp_path


BAD = [
    ("bogus", "No such command 'bogus'"),
    ("matmul --bogus", "No such option"),
    ("matmul -n 0", "'-n' / '--ranks': 0 is not"),
    ("matmul -n four", "'four' is not"),
    ("matmul --grid 2", "'2': expected rows x columns of ranks, for example 2x2"),
    ("matmul --grid 0x2", "'0x2': expected rows x columns"),
    ("matmul --grid 2x2 -n 3", "--grid 2x2 needs 4 ranks, but -n is 3"),
    ("matmul --block 0", "'0': expected one block size, or two or three for m, n and k"),
    ("matmul --block 4x4", "'4x4': expected one block size"),
    ("matmul --block 4,4,4,4", "'4,4,4,4': expected one block size"),
    ("matmul --trans NX", "'NX': expected two letters of N, T and C"),
    ("matmul --trans N", "'N': expected two letters"),
    ("matmul --alpha two", "'two': expected a number, for example 2, -0.5 or 1+2j"),
    ("matmul --alpha 1i", "--alpha: 1j is complex, but the matrices are float64"),
    ("matmul --dtype float8", "'float8' is not one of 'float64'"),
    ("matmul --engine gpu", "'gpu' is not one of 'auto', 'host', 'cublasmp'"),
    ("matmul --size -1", "'--size': -1 is not"),
    ("matmul --beta 2", "--beta scales C: give --c C.npy too"),
    ("matmul --c A.npy", "--c needs A and B"),
    ("matmul A.npy", "got A but no B"),
    ("matmul A.npy B.npy", "no output file: give -o D.npy"),
    ("matmul A.npy B.npy -o D.npy --size 3", "--size is for random matrices"),
    ("matmul A.npy B.npy C.npy -o D.npy", "unexpected extra argument (C.npy)"),
    ("matmul none.npy B.npy -o D.npy", "none.npy: No such file or directory"),
    ("matmul A.npy none.npy -o D.npy", "none.npy: No such file or directory"),
    ("matmul A.npy B.npy --c none.npy -o D.npy", "none.npy: No such file or directory"),
    ("matmul folder.npy B.npy -o D.npy", "folder.npy: Is a directory"),
    ("matmul text.npy B.npy -o D.npy", "text.npy: not a readable .npy file"),
    ("matmul A.h5 B.npy -o D.npy", "A.h5: No such file or directory"),
    ("matmul A.npy B.zarr:x -o D.npy", "B.zarr: No such file or directory"),
    ("matmul A.txt B.npy -o D.npy", "A.txt: expected a name that ends in .npy, .h5, .hdf5 or .zarr"),
    ("matmul A.npy B.npy -o D.h5", "D.h5: an HDF5 file holds matrices by their names: give -o D.h5:NAME"),
    ("matmul A.npy B.npy -o D.h5:/", "D.h5: names no matrix: expected one after the colon, as in D.h5:NAME"),
    ("matmul cut.npy B.npy -o D.npy", "cut.npy: not a readable .npy file"),
    ("matmul objects.npy B.npy -o D.npy", "objects.npy: not a readable .npy file"),
    ("matmul vector.npy B.npy -o D.npy", "vector.npy: expected a matrix (2 dimensions), got 1"),
    ("matmul B.npy A.npy -o D.npy", "B.npy is 3 × 5 and A.npy 4 × 3: with --trans NN, op(A) has 5 columns"),
    ("matmul A.npy B.npy --trans TN -o D.npy", "op(A) has 4 columns and op(B) 3 rows, expected the same number"),
    ("matmul A.npy B.npy --c A.npy -o D.npy", "A.npy is 4 × 3, but the product is 4 × 5"),
    ("matmul ints.npy B.npy -o D.npy", "ints.npy holds int64: choose a type to multiply in with --dtype"),
    ("matmul half.npy B.npy -o D.npy", "half.npy holds |V2: choose a type to multiply in with --dtype"),
    ("matmul A.npy B32.npy -o D.npy", "differ in type (A.npy float64, B32.npy float32): choose one to multiply in"),
    ("matmul A.npy Z.npy -o D.npy --dtype float64", "Z.npy: complex128 does not convert to float64"),
    ("matmul A.npy B.npy -o none/D.npy", "none/D.npy: there is no directory none"),
    ("matmul A.npy B.npy -o folder.npy", "folder.npy is a directory, expected a file after -o"),
    ("matmul A.npy B.npy -o D.txt", "D.txt: expected a name that ends in .npy, .h5, .hdf5 or .zarr"),
    ("matmul A.npy B.npy -o ./B.npy", "B.npy is also read: write the product to another file"),
    ("run", "Missing argument 'FILE.toml'"),
    ("run none.toml", "none.toml: cannot be read: No such file or directory"),
    ("run bad.toml", "blok: unknown key: did you mean 'block'?"),
    ("run illegal.toml", "illegal.toml"),
    ("run illegal_routine.toml", "illegal_routine.toml: this trsm: b: shape is 4x2, expected 4x3"),
    ("run faulty_routine.toml", "faulty_routine.toml: op_b: unknown key"),
    ("run routine.toml -n 1", "routine.toml needs 2 ranks, got 1: give -n 2"),
    ("show routine.toml -o picture.png", "cannot save 'picture.png': expected a name that ends in .svg"),
    ("show routine.toml -o none/picture.svg", "none/picture.svg: No such file or directory"),
    ("check illegal_routine.toml", "pblasmp: illegal_routine.toml is not legal"),
    ("matmul -n 10000000 --check", "10000000 ranks, but this machine has memory for"),
    ("run good.toml -n 1", "good.toml needs 2 ranks, got 1: give -n 2"),
    ("run gird-2x2", "cannot be read: No such file or directory: did you mean 'grid-2x2'?"),
    ("show", "Missing argument 'FILE.toml'"),
    ("show none.toml", "none.toml: cannot be read: No such file or directory"),
    ("show good.toml -o picture.txt", "cannot save 'picture.txt': expected a name that ends in"),
    ("show good.toml -o none/picture.svg", "none/picture.svg: No such file or directory"),
    ("bench -p broadcast",
     "'broadcast' is not one of 'allgather_matmul', 'matmul_reduce_scatter', 'matmul_allreduce'"),
    ("bench --shape 4,4", "'4,4': expected tokens, outputs and inputs, for example 1024,512,2048"),
    ("bench --shape 4,0,4", "'4,0,4': expected tokens"),
    *(
        (f"bench --sizes={sizes}", "expected the least and the largest, for example 1KiB-1GiB")
        for sizes in ("1KiB", "0B-1KiB", "1KB-1MB", "1MiB-1KiB", "-1KiB-1KiB", "1KiB-99999GiB")
    ),
    ("bench --sizes=1KiB-1MiB --shape=8,8,8", "leave --shape out"),
    ("bench --samples 0", "'--samples': 0 is not"),
    ("bench --dtype complex64", "'complex64' is not one of"),
    ("tune --model llama-8b", "--model and --tokens go together. Try 'pblasmp tune --help'"),
    ("tune --tokens 64", "--model and --tokens go together"),
    ("tune --model llama-8b --tokens 64 --shape 8,8,8", "--model determines the shapes: leave --shape out"),
    ("tune --model llama-8b --tokens 64,x", "'64,x': expected numbers of tokens, for example 1024,4096"),
    ("tune --model llama --tokens 64", "model: expected one of llama-70b, llama-8b, got 'llama'"),
    ("tune --limit 0", "'--limit': 0.0 is not in the range x>0"),
    ("tune -p broadcast", "'broadcast' is not one of"),
    ("plan 8 8 8", "Missing option '--machine'"),
    ("plan 8 8 --machine dgx-h100", "expected three sizes, one descriptor file or a factorization, got 8 8"),
    ("plan 0 8 8 --machine dgx-h100", "m: expected at least 1, got 0"),
    ("plan 8 8 8 --machine cray", "machine: expected one of 2-h100"),
    ("plan 8 8 8 --machine text.npy", "text.npy: not a TOML file"),
    ("plan 8 8 8 --machine folder.npy", "folder.npy: cannot be read: Is a directory"),
    ("plan 8 8 8 --machine good.toml", "machine good: ranks: expected tables [[ranks]]"),
    ("plan none.toml --machine dgx-h100", "none.toml: cannot be read: No such file or directory"),
    ("plan 8 8 8 --machine dgx-h100 --nodes 4..1", "'4..1': expected a number or first..last"),
    ("plan --model llama-8b --tokens 64 --machine dgx-h100 --ranks 3", "of a node: leave --ranks and --nodes out"),
    ("plan good.toml --machine dgx-h100 --nodes 1..2", "the file determines ranks and types: leave --ranks"),
    ("plan good.toml --machine dgx-h100 --dtype float32", "the file determines ranks and types: leave --ranks"),
    ("plan --lu 8 --machine dgx-h100 --dtype float16", "a: dtype is float16, expected one of float64, float32"),
    ("plan 99999999999 99999999999 8 --machine dgx-h100 --ranks 1",
     "an array of 99999999999 × 99999999999 float64 is too large: expected at most 2^60 bytes on a rank"),
    ("plan 999999 999999 8 --machine dgx-h100 --ranks 2 --dry-run",
     "--dry-run: this process would hold the arrays of all ranks, 7.45e+03 GiB, this machine has"),
    ("plan 999999999 999999999 99999 --machine dgx-h100 --ranks 64",
     "the counts of a rank must fit into 64 bits, got 3.1"),
    ("measure -n 2", "Missing option '-o' / '--output'"),
    ("measure -n 2 -o none/m.toml", "none/m.toml: there is no directory none"),
    ("measure -n 2 -o text.npy", "text.npy: not a TOML file"),
    ("measure -n 2 -o good.toml", "machine good: ranks: expected tables [[ranks]]"),
    ("doctor -n 2 --machine cray", "machine: expected one of 2-h100"),
    ("preload -- none", "cannot start 'none': No such file or directory"),
    ("preload --min -1", "'--min' (env var: 'PBLASMP_PRELOAD_MIN'): -1 is not in the range"),
    ("check", "Missing argument 'FILE.toml...'"),
    ("check good.toml illegal.toml none.toml", "2 of 3 files are not legal"),
    ("check bad.toml", "pblasmp: bad.toml is not legal"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_and_status_2(pblasmp, monkeypatch, unchanged, line, message):
    monkeypatch.chdir(unchanged)
    before = sorted(unchanged.iterdir())
    status, _, err = pblasmp(*line.split())
    assert message in err
    assert err.startswith("pblasmp: ")
    assert err.count("\n") == 1
    assert status == 2
    assert sorted(unchanged.iterdir()) == before


def test_a_plan_of_too_many_panels_is_bad_input(pblasmp, monkeypatch):
    monkeypatch.setattr("pblasmp.costs.dry_engine.MOST_EXCHANGES", 1)
    status, _, err = pblasmp(*["plan", "30000", "30000", "30000", "--machine", "dgx-h100", "--ranks", "16"])
    what = "a problem of more than 0 panels is too large to be counted panel by panel"
    assert (status, err) == (2, f"pblasmp: {what}\n")


def test_debug_shows_the_traceback(pblasmp, files):
    status, _, err = pblasmp("matmul", "none.npy", "B.npy", "-o", "D.npy", "--debug")
    assert status == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1] == "pblasmp: none.npy: No such file or directory"
    assert pblasmp("--debug", "matmul", "A.npy")[2].startswith("Traceback")


def test_a_fault_of_ours_says_so(pblasmp, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("pblasmp.cli.matmul.multiply", broken)
    status, _, err = pblasmp("matmul")
    assert (status, err) == (1, "pblasmp: ZeroDivisionError: oops (a bug in pblasmp)\n")


def test_interrupted_before_any_rank(pblasmp, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("pblasmp.cli.matmul.multiply", interrupted)
    status, _, err = pblasmp("matmul")
    assert (status, err.strip()) == (130, "pblasmp: interrupted")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError("no room"), 1),
        (OSError(errno.ENOSPC, "No space left on device", "D.npy"), 1),
        (OSError(errno.EIO, "Input/output error", "D.npy"), 1),
        (OSError("lost"), 1),
        (pb.ClosedError("the context is closed"), 1),
        (pb.StatusError("CUBLAS_STATUS_INTERNAL_ERROR"), 1),
        (pb.FactorizationError("singular"), 1),
        (RuntimeError("can't start new thread"), 1),
        (FileNotFoundError(errno.ENOENT, "No such file", "A.npy"), 2),
        (FileNotFoundError("there is no directory none"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "A.npy"), 2),
        (OSError(errno.EROFS, "Read-only file system", "D.npy"), 2),
        (pb.ArgumentError("wrong"), 2),
        (pb.LayoutError("shapes"), 2),
        (pb.UnsupportedError("no such algorithm"), 2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("on_a_rank", [False, True])
def test_status_1_is_a_failure_and_2_bad_input(pblasmp, monkeypatch, tmp_path, error, status, on_a_rank):
    """The error is raised in this process, or told by a rank."""

    def fails(*args):
        if on_a_rank:
            channel = Channel(tmp_path)
            channel.error(error)
            told = next(channel.events())
            raise FailureError(told["error"], 2 if told["bad_input"] else 1)
        raise error

    monkeypatch.setattr("pblasmp.cli.matmul.multiply", fails)
    found, _, err = pblasmp("matmul", "--size", 8)
    assert found == status
    assert err.startswith("pblasmp: ")
    assert err.count("\n") == 1
    assert "a bug" not in err
    assert "rank 0" not in err


def test_no_launcher_says_what_to_install(pblasmp, monkeypatch, tmp_path):
    from pblasmp.launch import Job

    monkeypatch.setattr("pblasmp.cli.ranks.Job", Job)
    # The interpreter of the tests needs a compiler in PATH.
    monkeypatch.setattr("pblasmp.launch.interpreter", lambda: [sys.executable])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = pblasmp("matmul", "--size", 8)
    assert status == 2
    assert err.startswith("pblasmp: no MPI launcher")
    assert "pblasmp[mpi]" in err
    assert "-n 1" in err


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name in cli.commands)])
def test_help_has_examples(pblasmp, arguments):
    status, out, err = pblasmp(*arguments)
    assert (status, err) == (0, "")
    name = " ".join(["pblasmp", *arguments[:-1]])
    assert out.startswith("Usage: pblasmp")
    assert name in out.partition("Examples:")[2]


def test_version(pblasmp):
    assert pblasmp("--version") == (0, f"pblasmp {pb.__version__}\n", "")
    assert gc.isenabled(), "it is off while modules are imported"


def test_help_is_not_cut(pblasmp):
    listed = " ".join(pblasmp("--help")[1].split())
    for name, command in cli.commands.items():
        assert f"{name} {command.help.splitlines()[0]}" in listed
    assert min(4, resources.usable_cores()) == options.DEFAULT_RANKS
    assert "one per core, at most 4]" in " ".join(pblasmp("bench", "--help")[1].split())


def test_check_explains(pblasmp, files):
    status, out, _ = pblasmp("check", "good.toml")
    assert status == 0
    assert out.startswith("good.toml: legal\n  Small\n  NN product of 4 × 4 × 4")
    assert out.count("in blocks of 2x2 on 1x2 processes") == 3
    _, out, _ = pblasmp("check", "bad.toml", "illegal.toml")
    assert "bad.toml: blok: unknown key" in out
    assert "illegal.toml: b: the rows of op(B) are in blocks of 3" in out


def test_check_takes_the_names_of_problems_and_grids_that_come_along(pblasmp):
    assert pblasmp("check", "grid-2x2")[0] == 0
    assert pblasmp("check", ROOT / "descriptors" / "grids" / "2x2.toml")[0] == 0


def test_usage_errors_say_where_help_is(pblasmp, files):
    assert pblasmp("matmul", "--bogus")[2].endswith(". Try 'pblasmp matmul --help'\n")
    assert pblasmp("bogus")[2].endswith(". Try 'pblasmp --help'\n")
    assert "--help" not in pblasmp("check", "bad.toml")[2]  # the command was right


MANY = ROOT / "descriptors" / "invalid" / "many-faults.toml"


@pytest.mark.parametrize("command", ["run", "check"])
def test_many_faults_are_one_per_line(pblasmp, command):
    faults = check_file(MANY)
    status, out, err = pblasmp(command, MANY)
    assert status == 2
    first, *others = (out + err).splitlines()[: len(faults)]
    assert first.endswith(f" has {len(faults)} faults: {faults[0]}")
    assert others == [f"  - {x}" for x in faults[1:]]
    assert len(faults) > 3


def test_json(pblasmp, files):
    status, out, err = pblasmp("check", "--json", "good.toml", "bad.toml", "none.toml")
    good, bad, none = json.loads(out)
    assert (status, err.count("\n")) == (2, 1)
    assert (good["legal"], good["faults"], good["nranks"]) == (True, [], 2)
    assert good["operands"]["a"]["local_shapes"] == [[4, 2], [4, 2]]
    assert (bad["legal"], none["legal"]) == (False, False)
    assert "did you mean 'block'?" in bad["faults"][0]
    assert none["faults"] == ["cannot be read: No such file or directory"]


def test_show(pblasmp, files):
    status, out, err = pblasmp("show", "good.toml")
    assert (status, err) == (0, "")
    assert out.startswith("Small\n")
    assert "This product is legal" in out
    status, out, err = pblasmp("show", "good.toml", "--json")
    shown = json.loads(out)
    assert (status, err) == (0, "")
    assert (shown["file"], shown["m"], shown["operands"]["d"]["block"]) == ("good.toml", 4, [2, 2])
    assert pblasmp("show", "good.toml", "--output", "picture.svg") == (0, "", "")
    assert (files / "picture.svg").read_bytes().startswith(b"<?xml")
    status, out, err = pblasmp("show", "illegal.toml")
    assert "This product is not legal" in out
    assert (status, err) == (2, "pblasmp: illegal.toml: this product is not legal\n")
    status, out, _ = pblasmp("show", "illegal.toml", "--json")
    assert (status, json.loads(out)["legal"]) == (2, False)


def test_files_of_routines(pblasmp, files):
    status, out, err = pblasmp("check", "routine.toml")
    assert (status, err) == (0, "")
    assert out.startswith(
        "routine.toml: legal\n  Solve L X = B\n  trsm side=L uplo=U op_a=N diag=N of 4 × 3, 2 ranks"
    )
    (checked,) = json.loads(pblasmp("check", "--json", "routine.toml")[1])
    shown = json.loads(pblasmp("show", "--json", "routine.toml")[1])
    assert checked == shown
    assert (shown["routine"], shown["uplo"], shown["m"], shown["n"], shown["k"]) == ("trsm", "U", 4, 3, 4)
    assert (shown["title"], shown["nranks"], list(shown["operands"])) == ("Solve L X = B", 2, ["a", "b", "d"])
    assert shown["operands"]["a"]["window"] == [[1, 5], [1, 5]]
    assert "This trsm is legal" in pblasmp("show", "routine.toml")[1]
    assert pblasmp("show", "routine.toml", "-o", "picture.svg") == (0, "", "")
    assert "trsm" in (files / "picture.svg").read_text()
    status, _, err = pblasmp("show", "illegal_routine.toml", "-o", "picture.svg")
    assert (status, err) == (2, "pblasmp: illegal_routine.toml: this trsm is not legal\n")


def test_list(pblasmp):
    names = [path.stem for path in find("problems")]
    status, out, _ = pblasmp("list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == names
    listed = json.loads(pblasmp("list", "--json")[1])
    assert [one["name"] for one in listed] == names
    for one in listed:
        assert f"{one['title']}\n" in out


def test_standard_input(pblasmp, files, monkeypatch):
    for command in ("check", "show"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROBLEM.encode())))
        status, out, err = pblasmp(command, "-")
        assert (status, err) == (0, "")
        assert "Small" in out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"m = 1")))
    status, _, err = pblasmp("run", "-")
    assert (status, err.partition(":")[0]) == (2, "pblasmp")
    assert "<stdin>: " in err
    assert "title: missing" in err
    assert "/tmp" not in err


HUGE = "9" * 5000
BAD_FILES = {
    "nranks": ("nranks = 1000000000000000000", "at most 2147483647"),
    "digits": (f"nranks = {HUGE}", "5000 digits"),
    "hex": (f"nranks = 0x{'f' * 5000}", "too large to print"),
    "shown": (f"nranks = 1\nsource = 0x{'f' * 5000}", "too large to print"),
    "deep": (f"nranks = 1\nalpha = {'[' * 5000}{']' * 5000}", "too deep"),
    "alpha": (f"nranks = 1\nalpha = [1{'0' * 400}, 0]", "alpha: expected a number"),
}


@pytest.mark.parametrize("command", ["check", "run", "show"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_hostile_files_are_bad_input(pblasmp, tmp_path, command, name):
    line, message = BAD_FILES[name]
    (tmp_path / "x.toml").write_text(f'title = "T"\nm = 4\nn = 4\nk = 4\nblock = 2\n{line}\n')
    status, out, err = pblasmp(command, "x.toml")
    assert (status, err.count("\n")) == (2, 1)
    assert message in out + err
    assert "fault in pblasmp" not in err


def test_numbers_that_python_does_not_print_are_bad_input(pblasmp, tmp_path):
    """In files of each kind, to each command."""
    number = f"0x{'f' * 5000}"
    form = 'form = "allgather_matmul"\ninputs = [3]\noutputs = [3]\n'
    for text in (
        f"{form}tokens = [{number}]",
        f"{form}tokens = [4]\ninner = {number}",
        f"{form}tokens = [4]\n[row_bytes]\nx = [{number}]",
        f'factorization = "eigh"\nsubset = [0, {number}]\n[a]\nshape = [4, 4]\nblock = 2\ngrid = "1x1"',
    ):
        (tmp_path / "x.toml").write_text(f'title = "T"\n{text}\n')
        for command in (["check"], ["check", "--json"], ["show"], ["run"], ["plan", "--machine", "dgx-h100"]):
            status, _, err = pblasmp(*command, "x.toml")
            assert status == 2, err


def test_run_has_limits(pblasmp, tmp_path):
    (tmp_path / "many.toml").write_text('title = "T"\nm = 4\nn = 4\nk = 4\nblock = 2\nnranks = 5000\n')
    status, _, err = pblasmp("run", "many.toml")
    assert status == 2
    assert re.search(r"many.toml needs 5000 ranks, at most \d+ are started: give --max-ranks 5000", err)
    assert "at most 3 are" in pblasmp("run", "many.toml", "--max-ranks", 3)[2]
    size = 10**9
    (tmp_path / "big.toml").write_text(
        f'title = "T"\nm = {size}\nn = {size}\nk = {size}\nblock = 64\nnranks = 2\n'
    )
    status, _, err = pblasmp("run", "big.toml")
    assert (status, err.count("\n")) == (2, 1)
    assert "big.toml: run compares whole matrices on one rank; these need" in err


def test_control_characters_are_escaped(pblasmp, tmp_path):
    text = PROBLEM.replace('"Small"', r'"red \u001b[31m and \u009b32m"')
    (tmp_path / "x\x1b[1m.toml").write_text(text)
    (tmp_path / "key.toml").write_text(text + '"a\\u001bb" = 1\n')
    for command in (["check"], ["show"]):
        _, out, err = pblasmp(*command, "x\x1b[1m.toml")
        assert not {"\x1b", "\x9b"} & set(out + err)
        assert r"red \x1b[31m and \x9b32m" in out
    for command in ("check", "run"):
        _, out, err = pblasmp(command, "key.toml")
        assert r"a\x1bb: unknown key" in out + err


def test_colors(pblasmp, files, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in pblasmp("check", "good.toml", "--color=always")[1]
    assert "\x1b[" in pblasmp("--color=always", "check", "good.toml")[1]
    assert "\x1b[" in pblasmp("show", "good.toml", "--color=always")[1]
    assert "\x1b[" not in pblasmp("check", "good.toml")[1]  # no terminal
    monkeypatch.setattr("pblasmp.cli.terminal.is_terminal", lambda _: True)
    settings = (({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False))
    for environ, expected in settings:
        assert use_color("auto", environ) is expected
        assert use_color("always", environ)
        assert not use_color("never", environ)


def test_each_stream_is_asked_for_itself(monkeypatch):
    for name, terminal in (("stdout", True), ("stderr", False)):
        monkeypatch.setattr(sys, name, SimpleNamespace(isatty=lambda terminal=terminal: terminal))
    assert (is_terminal(1), is_terminal(2)) == (True, False)


def test_under_a_launcher_its_own_output_decides(monkeypatch, tmp_path):
    """Open MPI gives ranks a pseudo-terminal wherever its own output goes."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    launcher = tmp_path / "mpirun"
    launcher.symlink_to(shutil.which("bash"))
    script = "from pblasmp.cli.terminal import is_terminal; print(is_terminal(1), is_terminal(2))"
    inner = f"script -qec {shlex.quote(shlex.join([*launch.interpreter(), '-c', script]))} /dev/null; true"
    if shutil.which("script") is None:
        pytest.skip("script(1) makes the terminal of this test")
    done = subprocess.run(
        [launcher, "-c", inner], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "False"]


def test_completion_in_bash(tmp_path):
    """Through bash itself: the function that click makes for it forgets what comes before files."""
    for file in ("grid-mine.toml", "mine.toml", "A.npy"):
        (tmp_path / file).touch()
    command = tmp_path / "pblasmp"
    python = shlex.join([*launch.interpreter(), "-c", "from pblasmp.cli import main; main()"])
    command.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    command.chmod(0o755)
    script = """
        files() { answer=files; }
        compopt() { files; }
        eval "$(_PBLASMP_COMPLETE=bash_source pblasmp)"
        complete() { COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=() answer=words; _pblasmp_completion $1
                     echo $answer ${COMPREPLY[*]}; }
        complete pblasmp mat
        complete pblasmp show grid-2x2
        complete pblasmp show grid-m
        complete pblasmp run ""
        complete pblasmp matmul A
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    command, names, mine, everything, file = (line.split() for line in done.stdout.splitlines())
    assert command == ["words", "matmul"]
    assert names == ["files", "grid-2x2-col", "grid-2x2"] or names == ["files", "grid-2x2", "grid-2x2-col"]
    assert mine == ["files"]
    assert {"ag-nn-c", "grid-2x2", "grid-mine.toml", "mine.toml"} < set(everything)
    assert file == ["files"]


def test_modules_in_the_current_directory_are_not_imported(tmp_path):
    for name in ("colorsys", "json", "mpi4py", "numpy"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'a').write(__name__)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments in (*only_long(["matmul", "-n", "1", "--size", "8"]), ["info"]):
        done = subprocess.run(
            [sys.executable, "-m", "pblasmp", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "imported").exists()


def test_tensor_parallel_files(pblasmp, files):
    text = 'title = "AG"\nform = "allgather_matmul"\ntokens = [4, 4]\ninputs = [16, 16]\noutputs = [6, 5]\n'
    (files / "parallel.toml").write_text(text)
    status, out, err = pblasmp("show", "parallel.toml")
    assert (status, err) == (0, "")
    assert re.search(r"^0 +4 × 16  6 × 16  8 × 6\n1 +4 × 16  5 × 16  8 × 5$", out, re.MULTILINE)
    (files / "even.toml").write_text(text.replace("[6, 5]", "[6, 6]"))
    assert pblasmp("show", "even.toml", "-o", "picture.svg") == (0, "", "")
    assert (files / "picture.svg").read_bytes().startswith(b"<?xml")
    found = json.loads(pblasmp("show", "parallel.toml", "--json")[1])
    assert (found["m"], found["n"], found["k"], found["nranks"]) == (8, 11, 16, 2)
    assert found["ranks"][1] == {"x": [4, 16], "w": [5, 16], "result": [8, 5]}
    status, out, _ = pblasmp("check", "parallel.toml")
    assert (status, "allgather_matmul of 8 x 11 x 16 on 2 ranks" in out) == (0, True)
    (files / "parallel.toml").write_text(text.replace("[16, 16]", "[16, 15]"))
    for command in ("check", "show", "run"):
        status, out, err = pblasmp(command, "parallel.toml")
        assert status == 2
        assert "inputs: expected the same number for each rank" in out + err


def test_info(pblasmp, monkeypatch):
    status, out, _ = pblasmp("info", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["pblasmp"]["version"] == pb.__version__
    assert found["Python"]["path"] == sys.executable
    for name in ("numpy", "scipy"):
        assert found[name]["version"]
        assert all(Path(blas["filepath"]).is_file() for blas in found[name]["blas"])
        assert found[name]["blas"]
    for name in ("mpi4py", "MPI library", "mpirun"):
        assert Path(found[name]["path"]).is_file()
        assert "problem" not in found[name]
    assert found["engine"]["version"] in ("host", "cublasmp")
    assert found["engine"]["why"]
    assert ("problem" in found["cuBLASMp"]) != ("version" in found["cuBLASMp"])
    monkeypatch.setattr(info, "collect", lambda: found)
    text = pblasmp("info")[1]
    assert not re.search(r"^  [a-z0-9-]+(cu1[23]|12x|13x)[0-9]", text, re.MULTILINE)
    for topic, facts in found.items():
        assert topic in text
        for name, value in facts.items():
            assert (
                isinstance(value, list) or name == "version" or re.search(rf"^  {name}  ", text, re.MULTILINE)
            )
        for value in facts.values():
            assert isinstance(value, list) or str(value) in text
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert pblasmp("info") == (0, "", ""), "of many ranks one tells"


@pytest.mark.parametrize(("line", "status"), [("show grid-2x3", 0), ("list", 0), ("check none.toml", 2)])
def test_output_that_nobody_reads_is_no_error(line, status):
    """The exit status is the command's, also where the reader leaves before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    python, unbuffered = ([sys.executable], "1") if line == "list" else (launch.interpreter(), "")
    done = subprocess.run(
        [*python, "-m", "pblasmp", *line.split()],
        cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, stdout=writing, stderr=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == status
    assert done.stderr.count("\n") == (status > 0)


def test_output_that_cannot_be_written_is_said_once():
    command = [sys.executable, "-m", "pblasmp", "list"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "pblasmp: standard output: No space left on device\n")


def test_a_directory_that_is_gone(pblasmp, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    status, _, err = pblasmp("info")
    assert (status, err) == (2, "pblasmp: the current directory has been removed\n")
    command, environment = (
        [*launch.interpreter(), "-m", "pblasmp", "list"],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_the_characters():
    script = "import sys; sys.stdout.reconfigure(encoding='latin-1'); from pblasmp.cli import main; main()"
    command = [*launch.interpreter(), "-c", script, "matmul", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert b"D = A? B" in done.stdout


def test_what_bench_prints(capsys):
    """Operations of all ranks by the time until all are done; which algorithm was taken of which shape."""

    def row(case, algorithm="sum", path="sums"):
        us = {"pblasmp": 1500.0, "ring": 1000.0}
        about = {"flops": 3_000_000_000, "fastest_us": 1000.0, "left_out": "", "good": True}
        return {"case": case, "us": us, "algorithm": algorithm, "path": path, **about}

    rows = [row("8, 6, 4"), row("9, 6, 4", "push", "push"), row("10, 6, 4")]
    head = {"ranks": 2, "dtype": "float32", "engine": "host", "samples": 5}
    print_bench({**head, "sections": {"matmul_allreduce": rows}})
    print_bench({**head, "sections": {"matmul_allreduce": rows[:1]}}, rate=True)  # in TFLOP/s
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split() == ["8,", "6,", "4", "2", "3"]
    assert [line.strip() for line in lines if line.startswith("  pblasmp")] == [
        "pblasmp at 8, 6, 4 and at 10, 6, 4: sum, sums",
        "pblasmp at 9, 6, 4: push",
        "pblasmp takes at most 1.50 times as long as the fastest algorithm",
        "pblasmp: sum, sums",
        "pblasmp takes at most 1.50 times as long as the fastest algorithm",
    ]
