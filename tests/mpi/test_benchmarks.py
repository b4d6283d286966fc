# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, their checks included; ScaLAPACK's only where it has been fetched."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import many_calls
from benchmarks.results import load, runs
from pblasmp import launch
from pblasmp.launch import find_launcher
from pblasmp.layout.schemes import FORMS
from reference.scalapack import locate
from tests.helpers.mpi import starts_ranks
from tests.helpers.slow import only_long

ROOT = Path(__file__).parents[2]

pytestmark = starts_ranks


def printed(*arguments, ranks=0):
    """Run a script, or a module after "-m", on so many ranks, and return what it printed."""
    mpirun = [find_launcher().path, "-n", ranks] if ranks else []
    command = [*map(str, [*mpirun, *launch.interpreter(), *arguments])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_quick(script, tmp_path, *options):
    """Run a script with --quick and return the runs that it wrote, by benchmark."""
    where = ["--quick", "--pairs", "2", "--results", tmp_path / "results"]
    printed(ROOT / "benchmarks" / script, *where, *options)
    return {run.benchmark: run for run in runs(tmp_path / "results").values()}


def needs(flavor):
    """Skip the test without this ScaLAPACK."""
    if locate(flavor) is None:
        assert os.environ.get("PBLASMP_SCALAPACK") != "required", f"no ScaLAPACK ({flavor})"
        pytest.skip(f"ScaLAPACK ({flavor}) is not here: python -m benchmarks.fetch_scalapack fetches it")


def test_redistribution(tmp_path):
    rows = run_quick("redistribution.py", tmp_path, "--directory", tmp_path)["redistribution"].rows
    assert {"np.copyto", "scatter", "gather", "save", "load"} < {row["case"]["operation"] for row in rows}
    assert all(len(row["seconds"]["time"]) == 2 for row in rows)
    assert list(tmp_path.iterdir()) == [tmp_path / "results"]


def test_predictions(tmp_path):
    """All kinds of problems beside measurements; of a stored run only the predictions change."""
    found = []
    for machine, stored in (("xeon-2-cores", False), ("dgx-h100", True)):
        file = tmp_path / "predict-1-ranks.json"
        more = ["--machine", machine, "--results", tmp_path, *(["--stored", file] if stored else [])]
        printed("-m", "benchmarks.predict", "--quick", "--engine", "host", *more)
        found.append(load(file))
    first, again = ({row["case"]["what"]: row["seconds"] for row in run.rows} for run in found)
    assert first.keys() == again.keys()
    assert {"cholesky", "trsm", "matmul_allreduce", "product"} <= {
        word for what in first for word in what.split()
    }
    assert all(first[what]["measured"] == again[what]["measured"] for what in first)
    assert all(first[what]["predicted"] != again[what]["predicted"] for what in first)
    assert "predicted_again" in found[1].options


def test_host_gemm_memory(tmp_path):
    (run,) = run_quick("host_gemm.py", tmp_path, "--only", "memory").values()
    assert [row["case"] for row in run.rows] == [
        {"n": 512, "ops": ops, "grid": "2x2", "block": 64} for ops in ("NN", "TN")
    ]
    first, second = (row["ratios"]["peak"] for row in run.rows)
    assert 0.2 < first < 100
    assert 0 <= second < 100  # it takes the slabs that the first one has left


def test_routines_on_simulated_nodes(tmp_path):
    """On one node nothing is sent to others; a case in which the rival hangs is timed without it."""
    needs("debian")
    one = run_quick("nodes.py", tmp_path, "--only", "dot", "--nodes", "1")["nodes"].rows
    asked = ("gemm, unlike layouts", "gemr2d, to 4 × 1", "matmul_allreduce", "potrf")
    two = run_quick("nodes.py", tmp_path, "--only", *asked, "--nodes", "2")["nodes"].rows[1:]
    assert [row["case"]["calls"] for row in one] == [100]
    assert tuple(row["case"]["routine"] for row in two) == asked
    assert [row["sent_bytes"] for row in one] == [0]
    assert all(0 < row["sent_bytes"] < 2 * 8 * 128 * 128 for row in two)
    assert [row["by"] for row in two] == ["shared", "", "sum", "panels"]
    for row in (*one, *two):
        assert {len(times) for times in row["seconds"].values()} == {2}
        assert {*row["seconds"]} >= {"pblasmp"}
        assert ("failed" in row) == (not row["ratios"])


def test_eigenvalues_beside_scalapack(tmp_path):
    needs("debian")
    given = ("--ranks", "2", "--pairs", "1")
    (run,) = run_quick("eigenvalues.py", tmp_path, *given).values()
    assert (run.name, run.reference) == ("eigenvalues-debian-2-ranks", "library")
    assert [row["case"]["routine"] for row in run.rows] == ["eigh", "svd"]
    assert all({"scalapack", "lapack"} <= set(row["ratios"]) for row in run.rows)


def test_vectors_beside_scalapack(tmp_path):
    needs("debian")
    given = ("--only", "pdgemv", "pdnrm2", "--grids", "2x2")
    rows = run_quick("vectors.py", tmp_path, *given)["vectors"].rows
    assert [row["case"]["routine"] for row in rows] == ["pdgemv", "pdgemv", "pdnrm2", "floor"]
    contenders = {"pblasmp", "debian", "debian-prepared"}
    assert all(contenders == set(row["seconds"]) for row in rows[:-1])
    assert contenders | {"vote"} == set(rows[-1]["seconds"])


@pytest.mark.parametrize("flavor", [*only_long("mkl"), "debian"])
def test_host_gemm_beside_scalapack(tmp_path, flavor):
    needs(flavor)
    (run,) = run_quick("host_gemm.py", tmp_path, "--only", flavor).values()
    assert (run.name, run.ranks, run.gpus) == (f"host_gemm-{flavor}-4-ranks", 4, 0)
    assert all({"pblasmp", "pdgemm"} <= set(row["seconds"]) for row in run.rows)
    assert all("pdgemm" in row["ratios"] for row in run.rows)


def test_factorizations_beside_scalapack(tmp_path):
    needs("debian")
    (run,) = run_quick("factorizations.py", tmp_path, "--scalapack", "debian").values()
    assert (run.name, run.ranks, run.gpus) == ("factorizations-debian-2-ranks", 2, 0)
    assert [row["case"]["routine"] for row in run.rows] == ["potrf", "getrf", "geqrf", "posv", "gesv", "gels"]
    assert all({"pblasmp", "debian", "debian-256"} == set(row["seconds"]) for row in run.rows)


def test_ways_of_factorizations():
    given = ("-n", 100, "--ranks", 2, "--seconds", 0, "--only", "potrf", "getrf")
    lines = printed("-m", "benchmarks.factorization_ways", *given).splitlines()
    rows = [line.split() for line in lines if line.startswith("  100")]
    assert [len(row) for row in rows] == [6, 5]  # LU is computed in panels, anyway
    assert all(float(row[-1]) >= 1 for row in rows)


def test_refined(tmp_path):
    given = ("-n", 40, "--pairs", 1, "--block", 16, "--results", tmp_path)
    printed("-m", "benchmarks.refined", *given, ranks=2)
    rows = load(tmp_path / "refined-2-ranks.json").rows
    assert [row["case"]["kind"] for row in rows] == ["gen", "pos"]
    assert all(0 < int(row["case"]["steps"]) < 10 and row["ratios"]["refined"] > 0 for row in rows)


def test_rounding(tmp_path):
    given = ("--engine=host", "--shape=16,8,32", "-n=200", f"--results={tmp_path}")
    lines = printed("benchmarks/rounding.py", *given, ranks=2).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if "16, 8, 32" in line]
    assert [row[:2] for row in rows[::2]] == [[t, f] for t in ("bfloat16", "float16") for f in ("RS", "AR")]
    assert all(0 < float(row[4]) < 3e-3 for row in rows)  # half a unit in the last place of 8 bits
    rows = [line.strip("| ").split(" | ") for line in lines if "| 200 | 64 |" in line]
    assert [row[3] for row in rows] == ["bfloat16", "float32", "float16", "float32"]
    assert all(0 < float(row[4]) < (1e-6 if row[3] == "float32" else 3e-3) for row in rows)
    (run,) = runs(tmp_path).values()
    assert run.name == "rounding-2-ranks"
    assert len(run.rows) == 8 + 4


def test_tensor_parallel(tmp_path):
    """A file for each product, with every algorithm that applies next to a separate collective."""
    options = ["--quick", "--engine=host", "--in-a-row=2", f"--results={tmp_path}"]
    printed("-m", "benchmarks.tensor_parallel", *options, ranks=2)
    found = {run.benchmark: run for run in runs(tmp_path).values()}
    assert set(found) == {f"tensor_parallel-{form}" for form in FORMS}
    for run in found.values():
        (row,) = run.rows
        assert row["case"] == {"T": 16, "N": 16, "K": 16}
        assert {"pblasmp", "push", "MPI + BLAS", "GEMM alone"} <= set(row["seconds"])
        assert set(row["ratios"]) == set(row["seconds"]) - {"pblasmp"}
        assert (run.reference, run.options["in_a_row"]) == ("pblasmp", 2)


def test_cholesky(tmp_path):
    lines = printed("benchmarks/cholesky.py", "-n=300", "--block=32", f"--results={tmp_path}", ranks=4)
    for line, name in zip(lines.splitlines(), ("pblasmp", "pb.linalg.cholesky"), strict=True):
        assert line.startswith(f"n = 300, blocks of 32, 4 ranks, {name}: ")
        assert float(line.rpartition(" ")[2]) < 1e-14  # the residual
    (run,) = runs(tmp_path).values()
    assert [len(times) for times in run.rows[0]["seconds"].values()] == [2, 2]


def test_host_times_of_calls(tmp_path):
    """Every call has a time on new sub-matrices and one repeated; a view has one."""
    text = printed("benchmarks/gpu_host.py", "-n=640", "--calls=3", f"--results={tmp_path}", ranks=2)
    assert "| syrk 256 x 64 |" in text
    (run,) = runs(tmp_path).values()
    kinds = {row["case"]["call"]: set(row["seconds"]) for row in run.rows}
    both = {"new", "repeated"}
    assert kinds == {"matmul": both, "trsm": both, "syrk": both, "geadd": both, "view": {"new"}}


def test_first_calls(tmp_path):
    """On CPU ranks nothing is compiled."""
    tiny = ("-n=60", "--types", "float64", "complex64", "--shape", "32", "16", "32")
    text = printed("benchmarks/first_calls.py", *tiny, f"--results={tmp_path}", ranks=2)
    assert "LU factorization, complex64 first" in text
    (run,) = runs(tmp_path).values()
    first, *rows = run.rows
    assert first["case"] == {"call": "imports and context"}
    assert len(rows) == 2 * 8 + 3
    assert all(set(row["seconds"]) == {"first", "again"} for row in rows)


TINY = ("--layers=2", "--width=16", "--heads=4", "--tokens=12", "--batch=2", "--steps=2", "--rounds=3")

WRONG = """
import sys
from benchmarks import transformer


def without_down(work):
    model, forward = transformer.eager(transformer.parallel, work)
    model[0].down.weight.data.zero_()
    return model, forward


def absent_on_one(work):
    if work.ctx.rank == 1:
        raise OSError("not on this rank")


known = transformer.ways
transformer.ways = lambda arguments: known(arguments) | {
    "wrong": transformer.Way(without_down),
    "absent": transformer.Way(without_down, absent_on_one),
}
transformer.main(sys.argv[1:])
"""


def run_transformer(tmp_path, *command):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pblasmp[torch]'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(find_launcher().path), "-n", "2", *launch.interpreter(), *command[:2], *TINY, *command[2:],
         f"--results={tmp_path}"],
        check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def rates_of(output):
    """Return the tokens per second, and their least and most, of each way in a table."""
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if re.match(r"\| \w", line)]
    return {row[0]: (float(row[1]), *map(float, row[2].split(".."))) for row in rows}


def test_transformer_finds_a_wrong_loss_and_measures_the_others(tmp_path):
    done = run_transformer(tmp_path, "-c", WRONG, "--bias")
    assert done.returncode != 0
    rates = rates_of(done.stdout)
    assert list(rates) == ["pblasmp", "PyTorch"]
    assert all(0 < least <= middle <= most for middle, least, most in rates.values())
    assert "left out: wrong: WrongLossError: the losses are " in done.stdout
    assert "left out: absent: OSError: not on this rank (on rank 1 of 2)" in done.stdout
    assert "PyTorch async TP, compiled: NotImplementedError: it needs GPUs" in done.stdout
    assert "a loss was wrong" in done.stderr
    (run,) = runs(tmp_path).values()
    assert run.name == "transformer-mpirun-16-12-2-ranks"
    assert {name: len(each) for name, each in run.rows[0]["rates"].items()} == {"pblasmp": 3, "PyTorch": 3}


@pytest.mark.parametrize("options", [["--heads=3"], ["--tokens=5"], ["--width=20"]])
def test_transformer_refuses_what_cannot_be_split(options):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pblasmp[torch]'")
    from benchmarks import transformer

    transformer.check(transformer.parse([]), 2)
    with pytest.raises(SystemExit, match=f"{options[0].replace('=', ' ')}.*expected heads and tokens"):
        transformer.check(transformer.parse(options), 2)


def test_transformer_with_fused_products(tmp_path):
    done = run_transformer(tmp_path, "-m", "benchmarks.transformer", "--rehearse", "--layers=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(rates_of(done.stdout)) == ["pblasmp", "PyTorch", "PyTorch async TP, compiled"]


@pytest.mark.parametrize("flavor", [*only_long("mkl"), "debian"])
def test_level3_beside_scalapack(tmp_path, flavor):
    needs(flavor)
    routines = *only_long("trsm"), "herk", "syrkx"
    (run,) = run_quick("level3.py", tmp_path, "--scalapack", flavor, "--only", *routines).values()
    assert {row["case"]["routine"] for row in run.rows} == {*routines}
    assert all(bool(row["ratios"]) == (row["case"]["routine"] != "syrkx") for row in run.rows)


def test_many_calls(tmp_path):
    found = run_quick("many_calls.py", tmp_path, "--scalapack", "none", "--grids", "1x2", "--nodes", "2")
    rows = found["nodes-2-many_calls-none-1x2"].rows
    assert {row["case"].get("algorithm") for row in rows} == {*many_calls.ALGORITHMS, None}
    assert {row["case"].get("call") for row in rows} == {"matmul", "trsm", "syrk", "geadd", "view", None}


@pytest.mark.parametrize("script", ["level3.py", "host_gemm.py"])
def test_what_starts_its_ranks_itself_says_so_under_mpirun(script):
    command = [str(find_launcher().path), "-n", "1", *launch.interpreter(), str(ROOT / "benchmarks" / script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "starts its ranks itself: leave mpirun out" in done.stderr
    assert "Traceback" not in done.stderr
