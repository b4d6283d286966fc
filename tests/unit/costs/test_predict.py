# SPDX-License-Identifier: Apache-2.0
"""Predictions, advice and machines: numbers that follow by hand from a made-up machine, and what is refused."""

import json
import sys
from importlib import import_module
from unittest import mock

import pytest

import pblasmp as pb
from pblasmp.costs.advise import advise_layers, advise_move, scale
from pblasmp.costs.machines import load_machine, machine_from, machine_toml, with_ranks
from pblasmp.costs.predict import kernel_seconds
from pblasmp.engines.host.host_operations import HostOperations
from pblasmp.layout.routines import ROUTINES
from pblasmp.problems.files import find, load_table
from tests.helpers.command_line import run_here

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

NODE = {
    "ranks": 4, "copy": {"bytes_per_second": 1e9}, "link": {"bytes_per_second": 1e8, "seconds": 1e-3},
    "gemm": {"float64": [[10, 1e9], [1000, 1e9]]}, "call_seconds": 0.5,
}  # fmt: skip
TABLE = {
    "title": "Made up", "measured": True, "ranks_per_node": 4, "memory_bytes": 10**8, "ranks": [NODE],
}  # fmt: skip


def machine(**changes):
    return machine_from({**TABLE, **changes}, "made-up")


def test_one_rank():
    """2 n^3 operations at 1 GFLOP/s, and the call; one rank was not measured."""
    n = 200
    p = pb.MatmulProblem.gemm(n, n, n, "1x1", 50)
    found = pb.predict(p, machine())
    assert found.seconds == pytest.approx(2 * n**3 / 1e9 + 0.5)
    assert found.compute_seconds == pytest.approx(2 * n**3 / 1e9)
    assert found.extrapolated == ("1 rank on a node: measured with 4",)
    assert (found.low, found.high) == (found.seconds * 0.5, found.seconds * 2)
    assert "extrapolated" in str(found)
    assert found.memory_bytes == 3 * 8 * n * n


def test_messages_and_copies():
    """Gathered on 1 x 4: each rank gets three quarters of A in three messages, and copies its own quarter."""
    n = 400
    p = pb.MatmulProblem.gemm(n, n, n, "1x4", 100)
    found = pb.predict(p, machine(), "gathered")
    moved = 0.75 * 8 * n * n
    expected = moved / 1e8 + 3 * 1e-3 + moved / 3 / 1e9
    assert found.communication_seconds == pytest.approx(expected)
    assert found.seconds == pytest.approx(expected + 2 * n**3 / 4 / 1e9 + 0.5)
    assert found.extrapolated == ()
    assert (found.low, found.high) == (found.seconds * 0.8, found.seconds * 1.25)
    overlaps = machine(overlaps=True)
    assert (
        pb.predict(p, overlaps, "gathered").seconds == found.seconds
    )  # nothing is multiplied before all is there
    with mock.patch.object(
        HostOperations, "panel", 100
    ):  # the first of four panels is waited for, as are the others' rests
        cut = [pb.predict(p, where, "panels") for where in (machine(), overlaps)]
    assert [each.traffic.pieces for each in cut] == [4, 4]
    waits = cut[0].communication_seconds - cut[1].communication_seconds
    assert waits == pytest.approx(0.75 * min(cut[0].compute_seconds, moved / 1e8 + 3 * 1e-3))
    shared = pb.predict(p, machine(), "shared")  # copies
    assert shared.communication_seconds == pytest.approx(8 * n * n / 4 / 1e9)
    assert found.traffic.imbalance == 1


def test_kernels_calls_and_hosts():
    """Solves at their own rate; calls by kind; a GPU's host queues calls while it computes, or takes longer itself."""
    n, square = 100, pb.MatrixDescriptor((100, 100), (100, 100), pb.Grid(1, 1))
    solve = pb.Level3Problem("trsm", a=square, b=square, d=square)
    product = pb.MatmulProblem.gemm(n, n, n, "1x1", n)
    node = {
        **NODE,
        "ranks": 1,
        "columns": {"trsm": 1e-4},
        "calls": {"routine": 0.25},
        "launch_seconds": 0.125,
    }
    found = pb.predict(solve, machine(ranks=[node]))
    assert found.call_seconds == 0.25
    assert found.extrapolated == ()
    assert pb.predict(product, machine(ranks=[node])).call_seconds == 0.5
    assert found.compute_seconds == pytest.approx(1.6 * n**3 / 1e9 + n * 1e-4)
    assert (found.low, found.high) == (found.seconds * 0.5, found.seconds * 2)  # not only products
    unknown = pb.predict(solve, machine(ranks=[{**NODE, "ranks": 1}]))
    assert unknown.compute_seconds == pytest.approx(1.6 * n**3 / 1e9)
    assert unknown.extrapolated == ("trsm was not measured: taken to be as fast as products",)
    gpu = machine(ranks=[node], engine="gpu")
    assert pb.predict(product, gpu).seconds == pytest.approx(0.5 + 0.125)  # the host's
    slow = machine(ranks=[{**node, "gemm": {"float64": [[10, 1e6]]}}], engine="gpu")
    assert pb.predict(product, slow).seconds == pytest.approx(2 * n**3 / 1e6)  # the GPU's
    square = pb.MatrixDescriptor((4096, 4096), (256, 256), pb.Grid(1, 2))
    symm = pb.Level3Problem("symm", a=square, b=square, d=square)
    assert pb.predict(symm, "2-h200").algorithm == "full"  # as GPUs do
    assert pb.predict(symm, machine(ranks_per_node=2, memory_bytes=1 << 34)).algorithm == "shared"


def test_factorizations():
    """One rank: the sum of its kernels. Two: each panel is awaited, too."""
    n, node = 512, {**NODE, "calls": {"lu": 0.0}, "copy": {"bytes_per_second": 1e15}}
    node["link"] = {"bytes_per_second": 1e15}
    for name in ("cholesky", "lu", "qr"):
        took = {}
        for ranks in (1, 2):
            d = pb.MatrixDescriptor((n, n), (64, 64), pb.Grid(1, ranks))
            p = pb.FactorProblem(name, a=d, c=d)
            where = machine(ranks=[{**node, "ranks": ranks, "call_seconds": 0.0}], ranks_per_node=ranks)
            with mock.patch.multiple(HostOperations, factor_width=64, factor_alone=8):
                found = pb.predict(p, where)
            took[ranks], flops = found.seconds, found.traffic.flops.sum()
            assert 0.99 <= found.compute_seconds * ranks / (flops / 1e9) <= 1.61
            assert any("was not measured" in each for each in found.extrapolated)
            assert ranks > 1 or found.seconds == pytest.approx(found.compute_seconds, rel=1e-6)
        assert found.compute_seconds < took[2] < took[1]
        assert not pb.predict(p, "2-h200").extrapolated  # GPUs apply reflectors by products
    cores = pb.predict(p, machine(ranks=[{**node, "ranks": 2}], ranks_per_node=2, cores=1))
    assert sorted(cores.traffic.flops > 0) == [False, True]
    with pytest.raises(
        pb.UnsupportedError, match="condition: what it does depends on the values of the matrix"
    ):
        pb.FactorProblem("condition", a=d).traffic()
    tall = pb.MatrixDescriptor((8, 6), (2, 2), pb.Grid(1, 1))
    for words, faulty in {
        "a: expected a square matrix, got 8 x 6": pb.FactorProblem("cholesky", a=tall, c=tall),
        "lstsq: .*, b and d, got 8 x 6": pb.FactorProblem("lstsq", a=tall, c=tall),
        r"c: expected the shape of a, \(8, 6\), got \(512, 512\)": pb.FactorProblem("lu", a=tall, c=d),
        "c: missing": pb.FactorProblem("qr", a=tall),
        "d: missing": pb.FactorProblem("triangular", a=d, b=d),
        "^d: missing": pb.FactorProblem("qr", a=tall, factored=True),
        "d: missing: it": pb.FactorProblem("lu", a=d, b=d),
        "^a: expected a square matrix, got 8 x 6": pb.FactorProblem("lu", a=tall, b=tall, d=tall),
        "d: expected 512 x 512, got 8 x 6": pb.FactorProblem("qr", a=d, b=d, c=d, d=tall),
    }.items():
        with pytest.raises(pb.ArgumentError, match=words):
            faulty.traffic()


def test_parts_of_the_time_are_not_negative():
    """Also where kernels of several streams run at once, and where the slowest rank computes the least."""
    for name, n, ranks in (("lu", 8192, 1), ("lu", 100, 2), ("cholesky", 100, 2), ("qr", 1000, 2)):
        d = pb.MatrixDescriptor((n, n), min(256, n), pb.Grid(1, ranks))
        found = pb.predict(pb.FactorProblem(name, a=d, c=d), "2-h100")
        parts = [
            getattr(found, f"{part}_seconds") for part in ("compute", "communication", "imbalance", "call")
        ]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(found.seconds)
        assert found.efficiency <= 1
        assert " -" not in str(found).replace(" - ", "")


def test_a_factorization_that_does_not_fit():
    """It is counted like a product, also with CPU ranks that share memory."""
    d = pb.MatrixDescriptor((1024, 1024), 128, pb.Grid(1, 2))
    for name in ("cholesky", "lu", "qr"):
        problem = pb.FactorProblem(name, a=d, c=d)
        found = pb.predict(problem, machine(ranks_per_node=2, memory_bytes=1 << 20))
        assert not found.fits
        assert "does not fit" in str(found)
        counts = problem.traffic(memory_bytes=1)
        assert 3 * d.nbytes <= counts.memory_bytes.sum() < 3.5 * d.nbytes  # A, the factors and the panels
    for name in ("cholesky", "lu", "qr"):
        problems = (pb.layout.FactorProblem.of(name, 8192, "1x2", 512, order=order) for order in "CF")
        turned, kept = (pb.predict(each, "2-h200").memory_bytes for each in problems)
        a = 8 * 8192**2 / 2
        assert 3 * a < turned < 4.2 * a  # also of the panels that are on their way
        assert kept == turned - a  # these are panels already


def test_factorizations_by_name():
    """As ``FactorProblem.of`` makes them: the problems that users' calls have."""
    of = pb.layout.FactorProblem.of
    square, tall, right = (
        pb.MatrixDescriptor(shape, (16, 16), pb.Grid(2, 2), dtype="float32", order="F")
        for shape in ((64, 64), (96, 64), (64, 3))
    )
    how = {"dtype": "float32", "order": "F"}
    for name in ("cholesky", "lu", "qr"):
        assert of(name, 64, "2x2", 16, **how) == pb.layout.FactorProblem(name, square, c=square)
    assert of("qr", 64, (2, 2), 16, m=96, **how) == pb.layout.FactorProblem("qr", tall, c=tall)
    solves = [of("solve", 64, "2x2", 16, right=3, **how), of("lu", 64, "2x2", 16, right=3, **how)]
    assert solves == [pb.layout.FactorProblem("lu", square, right, d=right)] * 2
    assert of("solve", 64, "2x2", 16).right == 1
    assert of("cholesky", 64, "2x2", 16, right=3, **how).routine == "cholesky"
    least = of("lstsq", 64, "2x2", 16, m=96, right=3, **how)
    assert (least.routine, least.b.shape, least.d.shape) == ("lstsq", (96, 3), (64, 3))
    for words, call in {
        "name: expected one of cholesky, lu, qr, solve, lstsq, got 'svd'": lambda: of("svd", 8, "1x1", 2),
        "n: .* 0": lambda: of("lu", 0, "1x1", 2),
        "m: expected 8: lu takes square matrices, got 9": lambda: of("lu", 8, "1x1", 2, m=9),
        "m: expected at least 8, got 7": lambda: of("qr", 8, "1x1", 2, m=7),
        "right: .* 0": lambda: of("solve", 8, "1x1", 2, right=0),
    }.items():
        with pytest.raises(pb.ArgumentError, match=words):
            call()
    with pytest.raises(
        pb.ArgumentTypeError, match=r"expected one of MatmulProblem.* FactorProblem\.of makes"
    ):
        pb.predict("cholesky", "dgx-h100")


def test_advice_on_factorizations(capsys, monkeypatch):
    """By name: the best layout, or from how many ranks on it fits; also on the command line, with errors in words."""
    found = pb.advise("lu", 20_000, ranks=8, machine="dgx-h100")
    assert [each.problem.a.grid.shape for each in found.choices] == [(1, 8), (2, 4)]
    assert found.best.problem == pb.layout.FactorProblem.of(
        "lu", 20_000, "1x8", found.best.layout.block[0], order="F"
    )
    best = [each.prediction.seconds for each in found.choices]
    assert best == sorted(best)
    assert "2x4 grid" in found.why_not_second
    assert pb.advise("solve", 500, 7, ranks=2, machine="2-h100", order="C").best.problem.right == 7
    cluster = machine(network={"bytes_per_second": 1e7})
    large = pb.advise("cholesky", 4000, ranks=4, machine=cluster)  # 128 MB, three times, on 4 ranks of 100 MB
    assert pb.advise("cholesky", 4000, ranks=8, machine=cluster).best.prediction.fits
    assert (large.best.prediction.fits, large.least_ranks) == (True, 4)
    larger = pb.advise("cholesky", 6000, ranks=4, machine=cluster)
    assert (larger.best.prediction.fits, larger.least_ranks) == (False, 16)
    assert "does not fit below 16 ranks" in str(larger)
    for words, call in {
        "expected one of cholesky, .*, or m, n and k, got 'svd'": lambda: pb.advise(
            "svd", 8, ranks=1, machine=cluster
        ),
        "machine: expected one of .*dgx-h100": lambda: pb.advise("lu", 8, ranks=1, machine="cray"),
        "machine: expected a machine's name": lambda: pb.advise("lu", 8, ranks=1),
        "ranks: ": lambda: pb.advise("lu", 8, machine=cluster),
        "k: expected an integer": lambda: pb.advise(8, 8, ranks=1, machine=cluster),
        "ranks: planning is for up to 1048576 ranks, got 2": lambda: pb.advise(
            "lu", 8, ranks=2**31, machine=cluster
        ),
        "is too large: expected at most 2.60 bytes": lambda: pb.advise(
            "lu", 10**18, ranks=2, machine=cluster
        ),
        "the counts of a rank must fit into 64 bits, got 8.33e.19": lambda: pb.advise(
            "lu", 10**7, ranks=8, machine=cluster
        ),
    }.items():
        with pytest.raises(pb.ArgumentError, match=words):
            call()

    def plan(arguments):
        return run_here(["plan", *arguments.split()], monkeypatch, capsys)

    for name in ("cholesky", "lu", "qr", "solve", "lstsq"):
        done = plan(f"--{name} 3000 --right 5 --ranks 2 --machine 2-h100")
        assert "time  " in done.stdout
        assert (done.returncode, done.stderr, "5 columns" in done.stdout) == (0, "", True)
    done = plan("--lu 400000 --machine 2-h100")
    assert "per rank: does not fit" in done.stdout
    assert "fits on no number of ranks that this machine has" in done.stdout
    scaled = json.loads(plan("--qr 4000 --nodes 1..2 --machine dgx-h100 --json").stdout)
    assert [each["nodes"] for each in scaled["plans"]] == [1, 2]
    for arguments, words in {
        "--lu 8 --qr 8": "expected one of a product, a file, a model and a factorization",
        "--lu 8 8 8 8": "expected one of a product",
        "8 8 8 --right 3": "--right is for factorizations",
        "--lu 8 --dry-run": "--dry-run is for one product",
        "--lu 0": "0 is not in the range",
        "--lu 8 --ranks 4": "2-h100 is one node of 2 ranks, the layouts need 4",
    }.items():
        done = plan(f"{arguments} --machine 2-h100")
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr


def test_panels():
    """Columns of panels take their time, one after the other; earlier releases' files."""
    node = {**NODE, "columns": {"trsm": 0.125, "potrf": 1.0, "getrf": 0.25, "geqrt": 0.5}}
    remarks = []

    def seconds(*kernel):
        return kernel_seconds(machine(ranks=[node]).nodes[0], kernel, remarks)

    flops = 2 * 100 * 10 * 10 - 110 * 100 + 2 * 1000 / 3
    for dtype, times in (("float64", 1), ("complex128", 4)):
        took = seconds("getrf", dtype, 100, 10, 10)
        assert took == pytest.approx(1.6 * times * flops / 1e9 + 10 * 0.25)
    flops = 2 * 10 * 10 * (100 - 10 / 3)
    assert seconds("geqrt", "float64", 100, 10, 10) == pytest.approx(1.6 * flops / 1e9 + 5)
    assert seconds("potrf", "float64", 10, 10, 10) == pytest.approx(10, rel=1e-3)
    assert seconds("trsm", "float64", 10, 1000, 10) == pytest.approx(1.6 * 1e5 / 1e9 + 1.25)
    assert seconds("gemqrt", "float64", 100, 5, 2) == pytest.approx((4 * 100 - 2) * 5 * 2 / 1e9, rel=0.5)
    assert not remarks
    former = {**NODE, "getrf_panel": {}, "trsm": {"float64": [[10, 1e9]]}, "swap": {"bytes_per_second": 1}}
    assert machine(ranks=[former]) == machine()


def test_what_does_not_fit_is_not_counted():
    """A factorization whose matrices are larger than the memory: at once, with the time of its operations."""
    with mock.patch("pblasmp.costs.predict.traffic", side_effect=AssertionError("it was counted")):
        found = pb.predict(pb.FactorProblem.of("cholesky", 10**6, "1x8", 512), "dgx-h100")
    assert not found.fits
    assert "its matrices alone do not fit" in str(found)
    assert found.compute_seconds == pytest.approx(1e18 / 3 / 8 / 47e12, rel=0.01)
    assert found.memory_bytes >= 2 * 8 * 10**12 / 8


def test_some_ranks_of_a_factorization_are_counted():
    p = pb.FactorProblem.of("lu", 640, "1x32", 16)
    with mock.patch.multiple(HostOperations, factor_width=16, factor_alone=16):
        exact = p.traffic(ranks_per_node=8)
        found = pb.predict(p, "dgx-h100")
    assert len(exact.shapes) == 32
    assert len(found.traffic.shapes) <= 4


def test_every_kind_of_problem():
    square = pb.MatrixDescriptor((64, 64), (8, 8), pb.Grid(2, 2))
    for name, has in ROUTINES.items():
        p = pb.Level3Problem(name, **dict.fromkeys({*has.operands, "d"}, square))
        found = pb.predict(p, machine())
        assert found.seconds > 0.5
        assert json.loads(json.dumps(found.to_dict()))["algorithm"] == found.algorithm
    for each in advise_layers("llama-8b", 512, "dgx-h100"):
        assert set(each.predictions) == {1, 2, 4, 8}
        assert each.predictions[each.best].seconds == min(x.seconds for x in each.predictions.values())
        assert "dgx-h100 was not measured" in each.predictions[8].extrapolated


def test_advice():
    """The best choice is legal and the fastest that fits; where nothing fits, it says how many ranks would."""
    advice = pb.advise(1000, 1000, 1000, 4, machine())
    advice.best.problem.validate()
    assert advice.best.prediction.seconds == min(each.prediction.seconds for each in advice.choices)
    assert {each.problem.d.grid.shape for each in advice.choices} == {(1, 4), (2, 2), (4, 1)}
    assert "%" in advice.why_not_second or "as fast" in advice.why_not_second
    gpus = {n: pb.advise(n, n, n, 8, "dgx-h100") for n in (4096, 100_000)}
    assert [each.best.prediction.algorithm for each in gpus.values()] == ["push", "panels"]
    assert all(each.best.prediction.fits for each in gpus.values())
    several = pb.advise(40_000, 40_000, 40_000, 64, "dgx-h100")  # eight of them
    assert {each.prediction.algorithm for each in several.choices} == {"gathered", "panels"}
    cluster = machine(network={"bytes_per_second": 1e7})
    large = pb.advise(8000, 8000, 8000, 4, cluster)
    assert not large.best.prediction.fits
    assert large.least_ranks > 4
    assert f"does not fit below {large.least_ranks} ranks" in str(large)
    assert pb.advise(8000, 8000, 8000, large.least_ranks, cluster).best.prediction.fits
    (_, one), (_, two) = scale(2000, 2000, 2000, [1, 2], cluster)
    assert two.best.prediction.traffic.nranks == 2 * one.best.prediction.traffic.nranks
    with pytest.raises(pb.ArgumentError, match="m"):
        pb.advise(0, 1, 1, 1, cluster)


def test_moving_first():
    """Blocks so large that one rank has everything: it pays to move. The best layout: it never does."""
    bad = pb.MatmulProblem.gemm(800, 800, 800, "2x2", 800)
    found = advise_move(bad, machine())
    saved = found.keep.seconds - found.moved.prediction.seconds
    assert saved > 0
    assert (found.break_even - 1) * saved < found.move_seconds <= found.break_even * saved
    assert advise_move(found.moved.problem, machine()).break_even == 0


@pytest.mark.parametrize("path", find("machines"), ids=lambda path: path.stem)
def test_machines_that_come_with_pblasmp(path):
    found = load_machine(path.stem)
    assert found.title
    assert found.measured or "not measured" in str(found)
    table = load_table(path)
    assert machine_from(tomllib.loads(machine_toml(table)), path.stem) == found
    title = 'any "text" \x01 \x7f'
    assert tomllib.loads(machine_toml({**table, "title": title}))["title"] == title


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"color": 3}, "color: unknown key"),
        ({"ranks": []}, r"ranks: expected tables \[\[ranks\]\]"),
        ({"ranks": [{"ranks": 1}]}, r"ranks\[0\].gemm: missing; ranks\[0\].copy: missing"),
        ({"ranks_per_node": 0}, "ranks_per_node: must be greater than or equal to 1, got 0"),
        ({"engine": "tpu"}, "engine: must be 'host' or 'gpu', got 'tpu'"),
        ({"ranks": [{**NODE, "copy": {}}]}, "bytes_per_second"),
        ({"ranks": [{**NODE, "gemm": {}}]}, r"ranks\[0\].gemm: .* at least 1 item"),
        ({"name": "cray"}, "name: unknown key"),
        (
            {"ranks": [{**NODE, "gemm": {"float64": [[10, -1]]}}]},
            r"ranks\[0\].gemm.float64\[0\]\[1\]: must be greater than 0, got -1",
        ),
    ],
)
def test_files_that_are_no_machine(changes, words):
    with pytest.raises(pb.ArgumentError, match=words):
        machine(**changes)


def test_unknown_machines_and_measuring_again():
    with pytest.raises(pb.ArgumentError, match=r"expected one of .*dgx-h100.* or a file, got 'cray'"):
        pb.predict(pb.MatmulProblem.gemm(8, 8, 8, "1x1", 2), "cray")
    with pytest.raises(pb.ArgumentTypeError, match="machine: expected a path, got 3"):
        load_machine(3)
    with pytest.raises(pb.ArgumentTypeError, match="path: expected a path, got None"):
        pb.draw(pb.Grid(1, 1)).save(None)
    table = with_ranks(None, {**NODE, "ranks": 2}, title="x", measured=True)
    table = with_ranks(table, NODE, title="y")
    table = with_ranks(table, {**NODE, "ranks": 2, "call_seconds": 7.0})
    assert (table["title"], table["ranks_per_node"]) == ("x", 4)
    assert [each["ranks"] for each in table["ranks"]] == [2, 4]
    found = machine_from(table, "twice")
    assert found.node_of(2)[0].call_seconds == 7
    assert found.node_of(3)[1] == "3 ranks on a node: measured with 4"
    assert found.nodes[0].rate("float64", 100) == pytest.approx(1e9)
