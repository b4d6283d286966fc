# SPDX-License-Identifier: Apache-2.0
"""The command line with ranks: real products from end to end, and every way in which they can end early."""

import contextlib
import gc
import json
import os
import pty
import re
import select
import signal
import subprocess
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import zarr

import pblasmp as pb
from pblasmp import launch
from pblasmp.cli.options import DEFAULT_RANKS
from pblasmp.cli.ranks import FailureError, on_ranks
from pblasmp.cli.run import print_run, run_factorization
from pblasmp.launch import find_launcher
from pblasmp.problems.files import ProblemFile, load_problem_file
from tests.helpers.command_line import kept_ranks, run_here, wait_for
from tests.helpers.mpi import ROOT, run_mpi, starts_ranks
from tests.helpers.slow import only_long

pytestmark = starts_ranks

LIMIT = 120


@pytest.fixture
def environment(tmp_path):
    """An environment whose processes can be distinguished from all others, in which sitecustomize.py can be given."""
    return {**os.environ, "PYTHONPATH": f"{tmp_path}/site:{ROOT}", "PBLASMP_TEST": str(tmp_path)}


@pytest.fixture
def patched(tmp_path):
    """Have every Python process of the test run some lines first."""

    def write(code):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(code)

    return write


@pytest.fixture
def pblasmp(tmp_path, monkeypatch, capsys):
    """Run the command line in this process, on ranks that are kept: what the process is does not matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pblasmp.cli.ranks.Job", kept_ranks)
    return lambda *arguments: run_here(arguments, monkeypatch, capsys)


@pytest.fixture
def command(tmp_path, environment):
    """Run the command line as a process, which starts its ranks."""

    def run(*arguments, prefix=()):
        command = [*prefix, *launch.interpreter(), "-m", "pblasmp", *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )

    return run


@pytest.fixture
def start(tmp_path, environment):
    """Start the command line and leave it running."""
    started = []

    def run(*arguments):
        command = [*launch.interpreter(), "-m", "pblasmp", *map(str, arguments)]
        started.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def processes(tmp_path):
    """The processes that this test has started and that still run."""
    mark = f"PBLASMP_TEST={tmp_path}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (directory / "environ").read_bytes():
                found.append(directory.name)
    return found


def integers(shape, seed, dtype="float64", order="C"):
    random = np.random.default_rng(seed)
    real = random.integers(-4, 5, shape)
    values = real + 1j * random.integers(-4, 5, shape) if np.dtype(dtype).kind == "c" else real
    return values.astype(dtype, order=order)


def op(letter, matrix):
    return {"N": matrix, "T": matrix.T, "C": matrix.conj().T}[letter]


PARALLEL = {
    "gathered": 'form = "allgather_matmul"\ntokens = [6, 3]\ninputs = [4, 4]\noutputs = [6, 5]\ninner = 3\n'
    "return_gathered = true",
    "scattered": 'form = "matmul_reduce_scatter"\ntokens = [6, 6]\ninputs = [3, 4]\noutputs = [5, 5]\n'
    'c_dtype = "float64"',
    "summed": 'form = "matmul_allreduce"\ntokens = [6, 6]\ninputs = [3, 4]\noutputs = [5, 5]\n'
    'dtype = "complex64"\noutputs_first = false\nrow_bytes = { x = [32, 64], w = [40, 40] }',
    "columns": 'form = "matmul_allgather"\ntokens = [6, 6]\ninputs = [4, 4]\noutputs = [5, 5]\ndtype = "bfloat16"',
}


def test_files_of_tensor_parallel_products(pblasmp, tmp_path):
    """They run, are compared, and need as many ranks as they have."""
    sizes = {"gathered": 9 * 11 + 2 * 9 * 4, "scattered": 6 * 5, "summed": 2 * 6 * 5, "columns": 2 * 6 * 10}
    for name, text in PARALLEL.items():
        (tmp_path / f"{name}.toml").write_text(f'title = "{name}"\n{text}\n')
        done = pblasmp("run", f"{name}.toml")
        assert done.returncode == 0, done.stderr
        assert f"{name}, on 2 ranks" in done.stdout
        assert f"{sizes[name]} elements, all equal to NumPy's" in done.stdout
    done = pblasmp("run", "gathered.toml", "--algo", "push", "--json")
    assert json.loads(done.stdout)["algorithm"] == "push"
    (tmp_path / "inside.toml").write_text(f'title = "turned"\nturned = true\n{PARALLEL["columns"]}\n')
    for arguments, words in (
        (["gathered.toml", "-n", 3], "gathered.toml is for 2 ranks, got 3"),
        (["gathered.toml", "-n", 1], "gathered.toml needs 2 ranks, got 1"),
        (["inside.toml"], "inside.toml: a product of matrices in this form"),
    ):
        done = pblasmp("run", *arguments)
        assert (done.returncode, words in done.stderr) == (2, True)


def test_product_of_hdf5_and_zarr(pblasmp, tmp_path):
    """Matrices are read and written by their names in a file; what else is in it stays."""
    a, b, c = integers((30, 20), 1), integers((20, 10), 2), integers((30, 10), 3)
    with h5py.File(tmp_path / "R.h5", "w") as file:
        file["run/A"], file["other"] = a, b
    zarr.save_array(str(tmp_path / "B.zarr"), b)
    np.save(tmp_path / "C.npy", c)
    done = pblasmp("matmul", "R.h5:run/A", "B.zarr", "--c", "C.npy", "-o", "R.h5:run/D", "-n", 2)
    assert done.returncode == 0, done.stderr
    with h5py.File(tmp_path / "R.h5") as file:
        assert np.array_equal(file["run/D"][:], a @ b + c)
        assert np.array_equal(file["run/A"][:], a)
        assert np.array_equal(file["other"][:], b)
    for output, words in (
        ("R.h5:run/A", "R.h5:run/A is also read"),
        ("B.zarr", "B.zarr is also read"),
        ("R.h5", "give -o R.h5:NAME"),
    ):
        done = pblasmp("matmul", "R.h5:run/A", "B.zarr", "-o", output)
        assert (done.returncode, words in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("nranks", "trans", "dtype", "orders", "options"),
    [
        (1, "NN", "float64", "CC", []),
        (2, "TN", "float32", "CF", ["--block", "7,5"]),
        (3, "NT", "complex128", "FC", ["--grid", "3x1", "--block", "16,4,8", "--check"]),
        (4, "CT", "complex64", "FF", ["--grid", "2x2", "--block", "5", "--alpha", "1+2j", "--check"]),
        (4, "NN", "float64", "CC", ["--grid", "1x3", "--block", "8", "--alpha", "-2"]),
        (6, "TT", "float64", "CF", ["--block", "4", "--check"]),
    ],
)
def test_product_of_files(pblasmp, tmp_path, nranks, trans, dtype, orders, options):
    m, n, k = 37, 41, 29
    a = integers((m, k) if trans[0] == "N" else (k, m), 1, dtype, orders[0])
    b = integers((k, n) if trans[1] == "N" else (n, k), 2, dtype, orders[1])
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    done = pblasmp("matmul", "A.npy", "B.npy", "-o", "D.npy", "-n", nranks, "--trans", trans, *options)
    assert (done.returncode, done.stderr) == (0, "")
    alpha = complex(options[options.index("--alpha") + 1]) if "--alpha" in options else 1
    alpha = alpha if alpha.imag else alpha.real
    d = np.load(tmp_path / "D.npy")
    assert d.dtype == dtype
    np.testing.assert_array_equal(d, (alpha * (op(trans[0], a) @ op(trans[1], b))).astype(dtype))
    assert re.search(rf"^grid .* of ({nranks} ranks|one rank) on one node$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^multiply +\d+\.\d+ s for the first call, then \d+\.\d+ s, \d+\.\d GFLOP/s \(",
        done.stdout,
        re.MULTILINE,
    )
    assert ("check     right" in done.stdout) == ("--check" in options)
    if "--block" in options:
        rows, *cols = options[options.index("--block") + 1].split(",")
        assert f"{dtype} in blocks of {rows} × {(cols or [rows])[0]}, " in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["A.npy", "B.npy", "D.npy"]


def test_adding_c_and_converting_integers(pblasmp, tmp_path):
    a, b, c = (
        integers((12, 9), 1, int),
        integers((9, 10), 2, "float32"),
        integers((12, 10), 3, "float64", "F"),
    )
    for name, matrix in (("A", a), ("B", b), ("C", c)):
        np.save(tmp_path / f"{name}.npy", matrix)
    given = ["matmul", "A.npy", "B.npy", "--c", "C.npy", "--dtype", "float64", "-n", 2, "--block", 4]
    assert pblasmp(*given, "-o", "D.npy", "--alpha", 2, "--beta", -1, "--check").returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "D.npy"), 2.0 * a @ b - c)
    assert pblasmp(*given, "-o", "E.npy").returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "E.npy"), a @ b + c)


@pytest.mark.parametrize(
    ("given", "formula"),
    [
        (["--alpha", -2, "--beta", 0.5], "-2 A {a} · B {b} + 0.5 C"),
        (["--trans", "TN", "--alpha", -1, "--beta", -1], "-Aᵀ {a} · B {b} - C"),
        (["--dtype", "complex128", "--alpha", "1-2j", "--beta", 0], "(1 - 2i) A {a} · B {b}"),
    ],
)
def test_the_formula_that_was_computed(pblasmp, tmp_path, given, formula):
    for name in "ABC":
        np.save(tmp_path / f"{name}.npy", integers((4, 4), 1))
    done = pblasmp("matmul", "A.npy", "B.npy", "--c", "C.npy", "-o", "D.npy", "-n", 1, *given)
    assert (done.returncode, done.stderr) == (0, "")
    size = "(4 × 4, C order)"
    assert done.stdout.splitlines()[0] == f"product   D {size} = {formula.format(a=size, b=size)}"


def test_the_number_of_nodes_is_the_one_that_the_engine_uses(pblasmp, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", "1")
    done = pblasmp("matmul", "-n", 2, "--engine=host", "--size", 8)
    assert (done.returncode, done.stderr) == (0, "")
    assert "of 2 ranks on 2 nodes\n" in done.stdout


def looks_for_garbage(options, reporter):
    return {"enabled": gc.isenabled()}


def test_ranks_that_have_started_look_for_garbage(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert on_ranks(looks_for_garbage, None, 1) == {"enabled": True}


def hands_over(options, reporter):
    reporter.found({"given": options})
    raise pb.ArgumentError("later")


def test_ranks_hand_over_what_they_have_found_before_they_fail(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    heard = []
    with pytest.raises(FailureError, match="later"):
        on_ranks(hands_over, 3, 2, heard.append)
    assert heard == [{"given": 3}]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--size 100 -n 4", "layout    float64 in blocks of 50 × 50, rank 0 holds 50 × 50 of D"),
        ("--size 20 -n 4 --block 6,3,2 --trans NT", "layout    float64 in blocks of 6 × 3, rank 0 holds 12 × 11 of D"),
        ("--size 0 -n 3 -o D.npy", "check     right"),
    ],
)  # fmt: skip
def test_blocks(pblasmp, tmp_path, given, words):
    """Default ones leave no rank without a part; along m, n and k; of a matrix without elements."""
    done = pblasmp("matmul", "--check", *given.split())
    assert (done.returncode, done.stderr, words in done.stdout) == (0, "", True), done.stdout
    assert ("-o" not in given) or np.load(tmp_path / "D.npy").shape == (0, 0)


BOTH, NOT_HERE = (
    "-pmatmul_allgather -pmatmul_reduce_scatter",
    "algo: the host engine has 'auto', .* here, got ",
)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("bench -pmatmul_allreduce --shape=8,6,4 --algo=summa", f"{NOT_HERE}'summa'"),
        ("bench -pallgather_matmul --shape=8,6,4 --algo=two_shot", f"{NOT_HERE}'two_shot'"),
        ("tune -pmatmul_allreduce --shape=64,32,47",
         "matmul_allreduce of 64,32,47: K is split over the ranks, expected a multiple of 2"),
        (f"bench {BOTH} --shape=63,32,47",
         "matmul_reduce_scatter of 63,32,47: T and K are split over the ranks, expected multiples of 2"),
    ],
)  # fmt: skip
def test_what_bench_and_tune_refuse(pblasmp, given, words):
    done = pblasmp(*given.split(), "-n2", "--engine=host")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"pblasmp: {words}\n", done.stderr)


def test_random_matrices_are_the_same_on_every_grid(pblasmp, tmp_path):
    for name, options in (("one.npy", ["-n", 1]), ("four.npy", ["-n", 4, "--block", 3])):
        assert pblasmp("matmul", "--size", 17, "-o", name, *options).returncode == 0
    one, four = np.load(tmp_path / "one.npy"), np.load(tmp_path / "four.npy")
    np.testing.assert_allclose(one, four, rtol=1e-12)


def test_random_matrices(command):
    done = command("matmul", "--size", 150, "--block", 32, "--dtype", "bfloat16", "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "layout    bfloat16 in blocks of 32 × 32" in done.stdout
    assert f"of {DEFAULT_RANKS} ranks" in done.stdout
    assert "check     right" in done.stdout


def test_first_call_and_steady_state(pblasmp):
    done = pblasmp("matmul", "-n", 2, "--size", 40, "--repeat", 3)
    assert re.search(
        r"^multiply .* for the first call, .*\(the median of 3 more calls\)$", done.stdout, re.MULTILINE
    )
    done = pblasmp(
        "matmul", "-n", 2, "--size", 40, "--repeat", 0, "--json", "--check", "--dtype", "complex64"
    )
    result = json.loads(done.stdout)
    assert result["flops"] == 8 * 40**3
    assert (done.returncode, done.stderr) == (0, "")
    assert (result["ranks"], result["ok"], result["repeated_seconds"]) == (2, True, [])
    assert result["seconds"]["multiplying"] > 0
    assert result["why"] not in pblasmp("matmul", "-n", 1, "--size", 8).stdout  # the engine's line is short


def test_one_rank_needs_no_mpi(command, patched, environment, tmp_path):
    patched("import sys; sys.modules['mpi4py'] = None")
    environment["PBLASMP_MPIRUN"] = str(tmp_path / "none")
    done = command("matmul", "-n", 1, "--size", 40, "--check", "-o", "D.npy")
    assert (done.returncode, done.stderr) == (0, "")
    assert "of one rank on one node" in done.stdout
    assert "check     right" in done.stdout
    done = command(
        "bench", "-n1", "--engine=host", "-pallgather_matmul", "--shape=8,6,4", "--samples=1", "--json"
    )
    assert (done.returncode, json.loads(done.stdout)["ranks"]) == (0, 1)
    assert command("run", "one-rank").returncode == 0


def test_not_finite_products_are_right_and_written(pblasmp, tmp_path):
    a = integers((30, 20), 1)
    a[3, 4], a[5, 6] = np.nan, np.inf
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", integers((20, 10), 2))
    done = pblasmp("matmul", "A.npy", "B.npy", "-o", "D.npy", "-n", 2, "--block", 8, "--check")
    assert done.returncode == 0, done.stderr
    d = np.load(tmp_path / "D.npy")
    assert (
        f"; D holds {np.isnan(d).sum()} NaN and {np.isinf(d).sum()} infinite numbers, as NumPy's does"
        in done.stdout
    )
    assert np.isnan(d[3]).all()


def test_the_log(command, environment):
    environment["PBLASMP_LOG"] = "info"
    done = command("matmul", "-n", 2, "--size", 8)
    assert re.search(r"^pblasmp INFO: starting 2 ranks with .*$", done.stderr, re.MULTILINE)
    assert re.findall(r"^pblasmp INFO( rank \d): engine (\w+) on 2 ranks: ", done.stderr, re.MULTILINE) == [
        (" rank 0", "host")
    ]
    environment["PBLASMP_LOG"] = "debug,all"
    done = command("matmul", "--size", 8, prefix=find_launcher().command(2, []))
    assert {f"rank {r}: engine" in done.stderr for r in range(2)} == {True}
    environment["PBLASMP_LOG"] = "loud"
    done = command("matmul", "-n", 2, "--size", 8)
    assert (done.returncode, done.stderr) == (
        2, "pblasmp: PBLASMP_LOG: expected info or debug, or with ,all for every rank (info,all), got 'loud'\n"
    )  # fmt: skip


def test_in_place_under_mpirun(command, tmp_path):
    a, b = integers((12, 9), 1), integers((9, 10), 2)
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    launcher = find_launcher()
    prefix = launcher.command(2, [])
    done = command("matmul", "A.npy", "B.npy", "-o", "D.npy", "--block", 4, prefix=prefix)
    assert done.returncode == 0
    assert done.stdout.count("of 2 ranks on one node") == 1
    np.testing.assert_array_equal(np.load(tmp_path / "D.npy"), a @ b)
    for bad, message in (
        (
            ["-n", 3],
            f"pblasmp: -n 3, but {'Open MPI' if launcher.kind == 'openmpi' else 'Hydra'} has started 2 ranks",
        ),
        (["--grid", "2x2"], "needs 4 ranks, got 2"),
    ):
        done = command("matmul", "A.npy", "B.npy", "-o", "E.npy", *bad, prefix=prefix)
        assert done.returncode != 0
        assert done.stderr.count("pblasmp: ") == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "E.npy").exists()


def test_run_compares_with_numpy(pblasmp, tmp_path):
    done = pblasmp("run", "grid-2x3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "on 6 ranks" in done.stdout
    assert "all equal to NumPy's" in done.stdout
    done = pblasmp("run", "grid-1x2", "-n", 3, "--json")
    result = json.loads(done.stdout)
    assert (result["ranks"], result["wrong"], result["elements"]) == (3, 0, 48)


ROUTINE = """
title = "Solve L X = B"
routine = "trsm"
grid = "1x2"
block = 2
a = { shape = [9, 9], window = [[1, 9], [1, 9]] }
b = { shape = [8, 3] }
d = { shape = [8, 6], window = [[0, 8], [2, 5]] }
"""


def test_run_compares_routines_with_numpy(pblasmp, command, tmp_path):
    (tmp_path / "routine.toml").write_text(ROUTINE)
    done = pblasmp("run", "routine.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Solve L X = B, on 2 ranks\nfloat64 trsm side=L ")
    assert done.stdout.endswith("result     48 elements, all equal to NumPy's\n")
    prefix = find_launcher().command(3, [])
    done = command("run", "routine.toml", "--algo", "panels", "--json", prefix=prefix)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ranks"], result["wrong"], result["algorithm"]) == (3, 0, "panels")


FACTORIZATION = """
title = "Solve A X = B"
factorization = "cholesky"
grid = "1x2"
block = 2
a = { shape = [10, 9], window = [[1, 10], [0, 9]] }
b = { shape = [9, 3] }
d = { shape = [9, 6], window = [[0, 9], [2, 5]] }
"""


def factorizations(comm, directory):
    def matrix(rows, cols, **options):
        return pb.MatrixDescriptor((rows, cols), (3, 2), "2x1", **options)

    square, tall, column = matrix(9, 9, dtype="complex64"), matrix(12, 9), matrix(9, 2)
    of, inverted = pb.FactorProblem, ("cholesky", "lu", "triangular")
    cases = {
        **{name: of.of(name, 12, "2x1", 3, order="F") for name in ("cholesky", "lu", "qr", "solve", "lstsq")},
        **{f"inverse by {name}": of(name, square, d=square, inverse=True) for name in inverted},
        "triangular": of("triangular", matrix(9, 9), column, d=column),
        "eigh": of("eigh", square, d=square, subset=(1, 4)),
        "svd": of("svd", tall, d=tall),
    }
    path = Path(directory) / "made.toml"
    with pb.Context(comm, engine="host") as ctx:
        for name, problem in cases.items():
            if comm.rank == 0:
                path.write_text(problem.to_toml())
            comm.Barrier()
            _, right = run_factorization(ctx, load_problem_file(path), "auto", mock.Mock())
            assert right, name
            comm.Barrier()
        refused = of("lu", matrix(9, 9), column, d=column, factored=True)
        with pytest.raises(pb.LayoutError, match="no function computes this from A and B alone"):
            run_factorization(ctx, ProblemFile(path, "", "", refused, {}, {}), "auto", mock.Mock())


def test_run_checks_factorizations(pblasmp, tmp_path, capsys):
    run_mpi(factorizations, 2, directory=str(tmp_path))
    (tmp_path / "solve.toml").write_text(FACTORIZATION)
    done = pblasmp("run", "solve.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Solve A X = B, on 2 ranks\nfloat64 cholesky of 9 x 9, 3 columns, on 1x2 ")
    assert re.search(r"\n  result     right: error \S+, rounding explains \S+\n$", done.stdout)
    print_run({"title": "x", "ranks": 1, "report": "", "wrong": 1, "error": 1.0, "bound": 0.5})
    assert "WRONG: error 1.0e+00" in capsys.readouterr().out


def test_run_reads_standard_input(environment, tmp_path):
    text = (ROOT / "descriptors" / "problems" / "grid-1x2.toml").read_text()
    command = [*launch.interpreter(), "-m", "pblasmp", "run", "-"]
    for prefix in ([], find_launcher().command(2, [])):
        done = subprocess.run(
            [*prefix, *command], cwd=tmp_path, env=environment, input=text, capture_output=True, text=True,
            timeout=LIMIT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "on 2 ranks" in done.stdout
        assert "all equal to NumPy's" in done.stdout


def test_algo(pblasmp):
    done = pblasmp("matmul", "-n", 2, "--engine=host", "--size", 8, "--algo", "panels", "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^engine +host, algorithm panels$", done.stdout, re.MULTILINE)
    for what in (["matmul", "-n", 2, "--size", 8], ["run", "grid-1x2"]):
        done = pblasmp(*what, "--engine=host", "--algo=gathered", "--json")
        assert (done.returncode, json.loads(done.stdout)["algorithm"]) == (0, "gathered"), done.stderr
        done = pblasmp(*what, "--engine=host", "--algo=ring")
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"pblasmp: algo: the host engine has 'auto', .* here, got 'ring'\n", done.stderr)


WRONG = """
import pblasmp.runtime.plans as m
right = m.Plan._run
def wrong(self, *given):
    result = right(self, *given)
    if self._ctx.rank == 1:
        result.local[0, 0] += 1
    return result
m.Plan._run = wrong
"""


def test_a_wrong_product_is_found_and_not_written(command, patched, tmp_path):
    patched(WRONG)
    done = command("matmul", "-n", 2, "--size", 300, "--block", 32, "--check", "-o", "D.npy")
    assert (done.returncode, done.stderr) == (1, "pblasmp: the product is wrong, and not written\n")
    assert "check     WRONG" in done.stdout
    assert not (tmp_path / "D.npy").exists()
    done = command("run", "grid-1x2")
    assert (done.returncode, done.stderr) == (1, "pblasmp: the result is wrong\n")
    assert "48 elements, 1 DIFFERS from NumPy's" in done.stdout


ON_RANK_1 = """
import os
import pblasmp.runtime.plans as m
def call(self, *rest):
    if self._ctx.rank == 1:
        {fault}
    self._ctx.comm.barrier()
m.Plan._run = call
"""


def test_an_exception_on_one_rank_is_told_once(command, patched, tmp_path):
    patched(ON_RANK_1.format(fault="1 / 0"))
    (tmp_path / "D.npy").write_text("what was here before")
    done = command("matmul", "-n", 2, "--size", 64, "-o", "D.npy")
    assert done.stderr == "pblasmp: rank 1: ZeroDivisionError: division by zero (a bug in pblasmp)\n"
    assert done.returncode == 1
    assert (tmp_path / "D.npy").read_text() == "what was here before"
    assert not processes(tmp_path)
    assert "in call\n" in command("matmul", "-n", 2, "--size", 64, "--debug").stderr


def test_ranks_that_another_mpi_starts_and_ends(command, environment, tmp_path):
    """MPICH 5 ends the ranks of Open MPI's mpirun itself, before Python sees an error."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\n[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.11' || exit 16\n")
    mpirun.chmod(0o755)
    (tmp_path / "site" / "mpi4py").mkdir(parents=True)
    (tmp_path / "site" / "mpi4py" / "__init__.py").write_text(
        "__version__ = '9'\nclass rc: pass\nclass MPI:\n    Get_library_version = lambda: 'MPICH Version: 5'\n"
    )
    environment["PBLASMP_MPIRUN"] = str(mpirun)
    done = command("matmul", "--size", 8, "-n", 2)
    assert done.returncode == 1
    assert done.stderr == (
        f"pblasmp: the ranks ended with status 16 and without a result: {mpirun}: it belongs to a different MPI from "
        "the library, MPICH Version: 5. PBLASMP_MPIRUN names another one\n"
    )


def test_a_rank_that_dies_is_told(command, patched, tmp_path):
    patched(ON_RANK_1.format(fault="os.kill(os.getpid(), 9)"))
    done = command("matmul", "-n", 2, "--size", 64, "-o", "D.npy")
    *printed, last = done.stderr.splitlines()
    assert re.fullmatch(r"pblasmp: the ranks ended with status \d+ and without a result", last)
    assert re.search("signal 9|Killed", "\n".join(printed)), "what the launcher knows is shown"
    assert done.returncode == 1
    assert not (tmp_path / "D.npy").exists()
    assert not processes(tmp_path)


SLOW = """
import time
from pathlib import Path
import {module} as m
right = m.{name}
def slow(*given):
    Path({here!r}, "slow").touch()
    time.sleep(60)
m.{name} = slow
"""


@pytest.mark.parametrize(
    ("module", "name", "number", "status", "said"),
    [
        ("pblasmp.runtime.plans", "Plan._run", signal.SIGINT, 130, "pblasmp: interrupted\n"),
        *only_long(
            ("pblasmp.matrix.io.formats", "RawFile.write", signal.SIGINT, 130, "pblasmp: interrupted\n")
        ),
        ("pblasmp.matrix.io.formats", "RawFile.write", signal.SIGTERM, 143, ""),
        ("pblasmp.matrix.io.formats", "RawFile.write", signal.SIGHUP, 129, ""),
    ],
)
def test_signals_leave_nothing_behind(start, patched, tmp_path, module, name, number, status, said):
    """While multiplying (the ranks wait for each other), and while writing (the temporary file is there)."""
    patched(SLOW.format(module=module, name=name, here=str(tmp_path)))
    # What is started would ignore a signal that is ignored here, as SIGHUP is under nohup.
    before = signal.signal(number, lambda *_: None)
    process = start("matmul", "-n", 2, "--size", 64, "-o", "D.npy")
    signal.signal(number, before)
    wait_for((tmp_path / "slow").exists)
    if name == "RawFile.write":
        assert list(tmp_path.glob(".D.npy.*"))
    process.send_signal(number)
    assert process.communicate(timeout=20)[1].lstrip() == said
    assert process.returncode == status
    assert sorted(p.name for p in tmp_path.iterdir()) == ["site", "slow"]
    assert not processes(tmp_path)


STUCK = """
import ctypes, os
from pathlib import Path
import pblasmp.comm.mpi_communicator as m
def stuck():
    Path({here!r}, "slow").touch()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
m.mpi = stuck
os.statvfs = lambda path: type("Free", (), {{"f_bavail": 8, "f_frsize": 1 << 20}})
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_whose_mpi_waits_when_it_starts_says_why_and_ends_on_signals(
    start, patched, environment, tmp_path, number
):
    """MPICH does so on a node without room in /dev/shm, in C code that lets no handler of Python run."""
    patched(STUCK.format(here=str(tmp_path)))
    environment |= {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
    process = start("doctor")
    wait_for((tmp_path / "slow").exists)
    process.send_signal(number)
    said = process.communicate(timeout=20)[1]
    assert "/dev/shm has 8 MiB free for 2 ranks, which need 32, and MPI may wait" in said
    assert process.returncode == -number


def test_ranks_end_when_the_command_is_killed(start, patched, tmp_path):
    patched(SLOW.format(module="pblasmp.runtime.plans", name="Plan._run", here=str(tmp_path)))
    process = start("matmul", "-n", 2, "--size", 64)
    wait_for((tmp_path / "slow").exists)
    assert len(processes(tmp_path)) > 2
    process.kill()
    process.wait()
    wait_for(lambda: not processes(tmp_path))


def test_mpirun_of_another_mpi_is_told(command, tmp_path, environment):
    """A launcher whose ranks do not find each other: each is alone in its world."""
    path = tmp_path / "mpirun"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo HYDRA 1.0; exit; }\nn=$2; shift 2\n'
        'for i in $(seq $n); do "$@" & done; wait\n'
    )
    path.chmod(0o755)
    environment["PBLASMP_MPIRUN"] = str(path)
    done = command("matmul", "-n", 2, "--size", 8)
    assert done.returncode == 2
    assert re.match(
        r"pblasmp: mpirun started 2 ranks, but mpi4py's MPI library \(.*\) sees 1: the launcher belongs to another MPI",
        done.stderr,
    )


def test_a_launcher_that_starts_nothing_is_told(command, patched, tmp_path, environment):
    """MPICH's asks srun in an allocation, and waits for ever if there is none."""
    path = tmp_path / "mpirun"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo HYDRA 1.0; exit; }\necho no srun; exec sleep 100\n'
    )
    path.chmod(0o755)
    patched("import pblasmp.cli.ranks; pblasmp.cli.ranks._START_SECONDS = 0.2")
    environment |= {"PBLASMP_MPIRUN": str(path), "SLURM_JOB_ID": "7"}
    done = command("doctor", "-n", 2)
    assert done.returncode == 1
    assert (
        f"the ranks failed: {path} has started no rank within 0.2 seconds. In an allocation of Slurm let srun start "
        "pblasmp: srun pblasmp doctor: no srun\n"
    ) in done.stdout
    assert not processes(tmp_path)


def test_progress_on_a_terminal(environment, tmp_path):
    """Every step is shown; the result follows."""
    main_end, terminal = pty.openpty()
    command = [
        *launch.interpreter(),
        "-m",
        "pblasmp",
        "matmul",
        "--size",
        "600",
        "-n",
        "2",
        "--check",
        "-o",
        "D.npy",
    ]
    environment |= {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while select.select([main_end], [], [], LIMIT)[0]:
                shown += os.read(main_end, 65536)
    os.close(main_end)
    assert process.returncode == 0
    for step in ("starting ranks", "making A", "making B", "preparing", "multiplying", "checking", "writing"):
        assert step in shown.decode()
    assert "GFLOP/s" in shown.decode()


SUMS, SLABS = "sum  two_shot  ring  push", "shared  gathered  panels  pull  push"
TITLES = ["AllGather + GEMM (", "GEMM + ReduceScatter", "GEMM + AllReduce", "GEMM + AllGather of the output"]
BENCHED = {
    "every product": (
        "-n2 --shape=64,32,48 --shape=6,5,4 --samples=2",
        {rf"^ *({'|'.join(map(re.escape, TITLES))})": TITLES, r"^ +(64, 32, 48) +\d+ +\d+ +\d+$": ["64, 32, 48"] * 4},
    ),
    "which algorithm it was, once": (
        "-n2 -pallgather_matmul -pmatmul_reduce_scatter -pmatmul_allgather --shape=64,32,48 --samples=2 --algo=push",
        {r"^ +pblasmp: push, (\w+)": ["every", "partial", "panels"]},
    ),
    "rates": (
        "-n2 -pmatmul_allreduce -pmatmul_allgather --shape=64,32,48 --samples=2 --rate",
        {r"^ +(64, 32, 48)(?: +[\d.e-]+){3}$": ["64, 32, 48"] * 2, "TFLOP/s over all ranks, median of (2)": ["2"]},
    ),
    "shapes that divide": (
        "-n3 -pmatmul_allreduce --samples=1",
        {r"^ +(\d+, \d+, \d+)": ["513, 256, 513", "1026, 512, 1026", "2049, 512, 1026"]},
    ),
    "every algorithm": (
        "-n2 -pmatmul_allreduce -pallgather_matmul --shape=8,6,4 --samples=1 --algo=all",
        {r"^ *T, N, K  +pblasmp  +(.*?)  +MPI \+ BLAS  +GEMM alone$": [SUMS, SLABS],
         r"^ +(8, 6, 4)(?: +\d+){7,8}$": ["8, 6, 4"] * 2,
         r"^  (pblasmp takes at most) \d+\.\d\d times as long as the fastest algorithm$":
         ["pblasmp takes at most"] * 2},
    ),
}  # fmt: skip
"""What ``pblasmp bench`` is asked, and what it prints, by pattern."""


@pytest.mark.parametrize(("given", "printed"), BENCHED.values(), ids=BENCHED)
def test_bench(pblasmp, given, printed):
    done = pblasmp("bench", "--engine=host", *given.split())
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    for pattern, expected in printed.items():
        found = [re.sub("  +", "  ", each) for each in re.findall(pattern, done.stdout, re.MULTILINE)]
        assert found == expected, f"{pattern}: {done.stdout}"


def test_bench_of_one_algorithm(pblasmp):
    how = ("--shape=8,6,4", "--samples=1", "--algo=sum", "--json")
    done = pblasmp("bench", "-n2", "--engine=host", "-pmatmul_allreduce", *how)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["sections"]["matmul_allreduce"]
    assert row["path"] == "partial products summed over ranks"
    assert list(row["us"]) == ["pblasmp", "MPI + BLAS", "GEMM alone"]
    assert row["flops"] == 2 * 8 * 6 * 4  # K is split: those of all ranks are one product


def test_tune(pblasmp, monkeypatch, tmp_path, environment):
    """What was measured is printed, the fastest first, kept, and what "auto" takes in the next process."""
    monkeypatch.setenv("PBLASMP_TUNING", str(tmp_path / "times.json"))
    environment["PBLASMP_TUNING"] = str(tmp_path / "times.json")
    what = ("-n2", "--engine=host", "-pmatmul_allreduce", "--shape=8,6,4")
    done = pblasmp("tune", *what)
    assert done.returncode == 0, done.stderr
    machine, title, line, kept = done.stdout.splitlines()
    assert machine.endswith(", float32")
    assert "µs" in title
    found = re.fullmatch(r"matmul_allreduce +8, 6, 4((?:  \w+ \d+)+)", line)
    names, times = found[1].split()[::2], [int(us) for us in found[1].split()[1::2]]
    assert set(names) == {"sum", "two_shot", "ring", "push"}
    assert times == sorted(times)
    assert kept == f"kept in {tmp_path / 'times.json'}"
    code = (
        "import numpy as np, pblasmp as pb\n"
        "with pb.Context(engine='host') as ctx:\n"
        "    x, w = np.ones((8, 2), 'f4'), np.ones((6, 2), 'f4')\n"
        "    with pb.plan(pb.matmul_allreduce, x, w, ctx) as plan:\n"
        "        measured = 'measured on this machine' in str(plan.report())\n"
        "        print(f'{plan.report().algorithm} {measured}\\n', end='')\n"  # one write: the ranks' lines stay whole
    )
    next_process = find_launcher().command(2, [*launch.interpreter(), "-c", code])
    ran = subprocess.run(
        next_process, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ran.stdout.splitlines() == [f"{names[0]} True"] * 2, ran.stderr


SMALLER = """
from dataclasses import replace
import pblasmp.cli.bench as tune
load = tune.load_model
tune.load_model = lambda name: [replace(x, outputs=x.outputs // 16, inputs=x.inputs // 16) for x in load(name)]
"""


def test_tune_as_json_for_the_layers_of_a_model(command, patched, tmp_path, environment):
    patched(SMALLER)
    environment["PBLASMP_TUNING"] = str(tmp_path / "times.json")
    how = ("--model=llama-8b", "--tokens=2", "--limit=0.001", "--json")
    done = command("tune", "-n2", "--engine=host", "-pmatmul_reduce_scatter", *how)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["dtype"], result["file"]) == ("float32", str(tmp_path / "times.json"))
    assert [row["case"] for row in result["measured"]] == ["2, 256, 256", "2, 256, 896"]
    for row in result["measured"]:
        assert row["product"] == "matmul_reduce_scatter"
        assert row["best"] == min(row["us"], key=row["us"].get)
        assert all("s had passed" in why for why in row["refused"].values())


def test_tune_says_if_it_cannot_keep_the_times(pblasmp, monkeypatch):
    monkeypatch.setenv("PBLASMP_TUNING", "/proc/none/times.json")
    done = pblasmp("tune", "-n2", "--engine=host", "-pmatmul_allreduce", "--shape=4,4,4")
    assert done.returncode == 0, done.stderr
    why = "/proc/none/times.json: No such file or directory; remove it, or set PBLASMP_TUNING to another file"
    assert done.stdout.splitlines()[-1] == f"the times could not be kept: {why}"
    assert "from now on" not in done.stdout
    assert re.fullmatch(rf"pblasmp: warning: tune: .*{re.escape(why)}\n", done.stderr)


def test_a_broken_file_of_times_is_told_once(command, environment, tmp_path):
    (tmp_path / "bad.json").write_text('{"kind"')
    environment["PBLASMP_TUNING"] = "bad.json"
    ignored = "pblasmp: warning: bad.json: ignored, algorithms are chosen by rule: broken or half-written: "
    for prefix, ranks in (([], ["-n", 2]), (find_launcher().command(2, []), [])):
        done = command("matmul", *ranks, "--engine=host", "--size", 8, prefix=prefix)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(ignored)
        assert done.stderr.count("\n") == 1
    done = command(
        "tune", "-n2", "--engine=host", "-pmatmul_allreduce", "--shape=4,4,4", "--shape=4,8,4", "--json"
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()
    result = json.loads(done.stdout)
    assert first.startswith(ignored)
    assert result["file"] == ""
    assert result["reason"].startswith("bad.json: broken or half-written: ")
    assert second.endswith(f"only this context knows them: {result['reason']}")
    assert (tmp_path / "bad.json").read_text() == '{"kind"'


def test_bench_over_sizes(pblasmp):
    how = (
        "-n3",
        "--engine=host",
        "-pmatmul_allreduce",
        "-pmatmul_allgather",
        "--samples=1",
        "--sizes=1KiB-70KiB",
    )
    done = pblasmp("bench", *how)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    assert (
        re.findall(r"  (\d+ KiB)$", done.stdout, re.MULTILINE) == ["1 KiB", "4 KiB", "16 KiB", "64 KiB"] * 2
    )
    for t, n, _ in re.findall(r"(\d+), (\d+), (\d+)", done.stdout.partition("matmul_allgather")[0])[1:]:
        assert 256 <= int(t) * int(n) <= 1.2 * 64 * 256


EVEN_WHERE_SPLIT = [
    ("allgather_matmul", "8,3,5"),
    ("matmul_allreduce", "7,3,6"),
    ("matmul_allgather", "7,3,5"),
]


@pytest.mark.parametrize(("product", "shape"), EVEN_WHERE_SPLIT)
def test_only_what_is_split_must_divide(pblasmp, tmp_path, monkeypatch, product, shape):
    monkeypatch.setenv("PBLASMP_TUNING", str(tmp_path / "times.json"))
    what = ("-n2", "--engine=host", f"-p{product}", f"--shape={shape}")
    done = pblasmp("bench", *what, "--samples=1", "--algo=all")
    assert (done.returncode, done.stderr, "WRONG" in done.stdout) == (0, "", False)
    done = pblasmp("tune", *what, "--limit=0.001")
    assert (done.returncode, done.stderr) == (0, "")


def test_bench_tells_a_wrong_product(command, patched):
    patched(
        "import pblasmp.cli.bench as r; f = r.Separate.error; "
        "r.Separate.error = lambda self, y: f(self, y + (self._ctx.rank == 1))"
    )
    how = ("--shape=8,6,4", "--samples=1", "--dtype=bfloat16")
    done = command("bench", "-n2", "--engine=host", "-pmatmul_reduce_scatter", *how)
    assert (done.returncode, "WRONG" in done.stdout, "a product is wrong" in done.stderr) == (
        1,
        True,
        True,
    ), done
