# SPDX-License-Identifier: Apache-2.0
"""Times that were measured: what "auto" makes of them, and the file that they are kept in."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tracemalloc
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.request import Options
from pblasmp.layout import ParallelProblem
from pblasmp.tuning import measurements
from pblasmp.tuning.measurements import Entry, Measured, machine_of, read_file, save, tuning_file


def product(m: int, n: int = 64, k: int = 64) -> pb.MatmulProblem:
    return pb.MatmulProblem.gemm(m, n, k, pb.Grid(1, 1), 16)


def known(*sizes_and_times) -> Measured:
    found = Measured("this machine")
    for sizes, seconds in sizes_and_times:
        found.add(found.entry(product(*sizes), Options(), seconds, "2026-01-01"))
    return found


def test_the_same_sizes():
    found = known(((64, 64, 64), {"a": 2.0, "b": 1.0}))
    assert found.seconds(product(64), Options()) == pytest.approx({"a": 2.0, "b": 1.0})
    assert found.knows(product(64), Options())


def test_between_sizes_the_nearer_one_counts_more():
    found = known(((64,), {"a": 1.0, "b": 2.0}), ((256,), {"a": 8.0, "b": 4.0}))
    for m, best in ((70, "a"), (90, "a"), (180, "b"), (250, "b")):
        seconds = found.seconds(product(m), Options())
        assert min(seconds, key=seconds.get) == best
    assert found.seconds(product(128), Options())["a"] == pytest.approx(math.sqrt(2.0 * 4.0))


def test_algorithms_that_were_not_measured_everywhere_are_not_compared():
    found = known(((64,), {"a": 1.0, "b": 2.0}), ((100,), {"a": 1.0}))
    assert set(found.seconds(product(80), Options())) == {"a"}
    assert found.seconds(product(64), Options()) == {"a": 1.0, "b": 2.0}  # exactly what was measured


def test_far_sizes_other_types_and_other_forms_are_unknown():
    found = known(((64,), {"a": 1.0}))
    assert found.seconds(product(64 * 8), Options()) == {}
    assert found.seconds(product(0), Options()) == {}
    other = pb.MatmulProblem.gemm(64, 64, 64, pb.Grid(1, 1), 16, dtype="float32")
    assert found.seconds(other, Options()) == {}
    assert found.seconds(product(64), Options(beta=1.0)) == {}
    routine = pb.MatmulProblem.gemm(64, 64, 64, pb.Grid(1, 1), 16, op_a="T")
    assert found.seconds(routine, Options()) == {}


def matrix(rows: int, cols: int, block: int, grid: str = "2x1", **how) -> pb.MatrixDescriptor:
    return pb.MatrixDescriptor((rows, cols), block, grid, **how)


def squares(n: int, block: int, **how) -> pb.MatmulProblem:
    x = matrix(n, n, block, **how)
    return pb.MatmulProblem(x, x, x)


def unlike_products():
    """Products of one size, and options, of which no two take equally long."""
    x, f = matrix(64, 64, 8), np.dtype("float16")
    for name, y in {
        "blocks": matrix(64, 64, 4),
        "one block each": matrix(64, 64, 32),
        "all on one": matrix(64, 64, 64),
        "another process first": matrix(64, 64, 8, source=(1, 0)),
        "inside a block": matrix(64, 64, 8, lead=(3, 0)),
        "C order": matrix(64, 64, 8, order="F"),
        "another grid": matrix(64, 64, 8, "1x2"),
    }.items():
        for at in range(3):  # also k, which only A and B have
            yield f"{name} of {'abd'[at]}", pb.MatmulProblem(*(y if i == at else x for i in range(3))), {}
    p = pb.MatmulProblem(x, x, x)
    yield "matmul", p, {}
    yield "sums sent in 16 bits", p, {"comm_dtype": f}
    yield "few multiprocessors", p, {"comm_sms": 4}
    for routine, options in (
        ("trsm", {"diag": "N"}),
        ("trsm", {"diag": "U"}),
        ("trsm", {"uplo": "U"}),
        ("symm", {}),
    ):
        yield f"{routine} {options}", pb.Level3Problem(routine, x, x, x, **options), {}
    yield "trsm, B in F order", pb.Level3Problem("trsm", x, x, matrix(64, 64, 8, order="F")), {}
    yield "trsm, B in other blocks", pb.Level3Problem("trsm", x, x, matrix(64, 64, 2)), {}
    four = (16, 16, 16, 16)
    split = {
        "inputs": four,
        "outputs": (64,) * 4,
        "rows": (64,) * 4,
        "dtype": f,
        "w_dtype": f,
        "out_dtype": f,
    }
    for name, more in {
        "": {},
        "uneven inputs": {"inputs": (31, 11, 11, 11)},
        "more uneven inputs": {"inputs": (40, 8, 8, 8)},
        "turned": {"turned": True},
        "transposed": {"transposed": "x"},
        "conjugated": {"conjugated": "w"},
        "with C": {"c_dtype": f},
    }.items():
        yield f"split {name}", ParallelProblem("matmul_allreduce", (64,) * 4, **{**split, **more}), {}


def test_what_differs_in_more_than_size_is_another_kind():
    found = Measured("this machine")
    cases = [*unlike_products()]
    for i, (name, problem, options) in enumerate(cases):
        assert not found.knows(problem, Options(**options)), name
        assert found.seconds(problem, Options(**options)) == {}, name
        found.add(found.entry(problem, Options(**options), {name: 1.0}, "today"))
        assert len(found.entries) == i + 1
    for name, problem, options in cases:
        assert [*found.seconds(problem, Options(**options))] == [name]
    for follows in ("bias", "relu bias", "gelu"):
        assert not found.knows(cases[-1][1], Options(), follows)
        assert found.seconds(cases[-1][1], Options(), follows) == {}
        found.add(found.entry(cases[-1][1], Options(), {follows: 1.0}, "today", follows))
    for follows in ("bias", "relu bias", "gelu"):
        assert [*found.seconds(cases[-1][1], Options(), follows)] == [follows]


def test_sizes_may_differ_where_blocks_are_alike():
    """Equal blocks, or as few equal parts, whatever their size."""
    found = Measured("this machine")
    found.add(found.entry(squares(600, 1), Options(), {"of 1": 1.0}, "today"))
    found.add(found.entry(squares(600, 300), Options(), {"halves": 1.0}, "today"))
    for n, block, names in (
        (1100, 1, ["of 1"]),
        (1100, 550, ["halves"]),
        (601, 301, ["halves"]),
        (1100, 275, []),
        (1100, 700, []),
        (1100, 1100, []),
    ):
        assert [*found.seconds(squares(n, block), Options())] == names, (n, block)


def test_tokens_split_by_the_rule_are_even():
    """Of 10 tokens the fourth rank has 1: this is as even as it gets."""
    f = np.dtype("float32")

    def split(tokens, inner=1):
        each = (8,) * len(tokens)
        rows = (sum(tokens),) * len(tokens)
        return ParallelProblem("allgather_matmul", tokens, each, each, rows, f, f, f, inner=inner)

    found = Measured("this machine")
    found.add(found.entry(split((3, 3, 3, 3)), Options(), {"even": 1.0}, "today"))
    assert [*found.seconds(split((3, 3, 3, 1)), Options())] == ["even"]
    assert [*found.seconds(split((8, 8, 4, 0), 4), Options())] == ["even"]
    assert found.seconds(split((10, 0, 0, 0)), Options()) == {}
    many = split((7, *range(1, 1000)))
    found.add(found.entry(many, Options(), {"long": 1.0}, "today"))
    assert max(len(entry.key) for entry in found.entries.values()) < 200
    assert [*found.seconds(many, Options())] == ["long"]


def entry(m: int = 64, seconds: float = 1.0, machine: str = "here") -> Entry:
    return Entry(machine, "matmul", (m, 64, 64), {"a": seconds}, "2026-01-01")


def test_no_file_is_no_fault(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_file(tmp_path / "nothing.json") == []


def file_of(entries: object, version: object = 2) -> str:
    return json.dumps({"kind": "pblasmp tuning", "version": version, "measurements": entries})


GOOD = {"machine": "here", "key": "matmul", "sizes": [1, 2, 3], "seconds": {"a": 1.0}, "date": "today"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "half-written"),
        ('{"kind": "pblasmp tuning", "version": 1, "measureme', "half-written"),
        ("[1, 2]", "not a file of measurements"),
        ('{"name": "someone else\'s"}', "not a file of measurements"),
        (file_of([], 3), "version is 3, expected 2"),
        (file_of([], "2"), "version is '2', expected 2"),
        (file_of([], 1e300), "version is 1e\\+300, expected 2"),
        (json.dumps({"kind": "pblasmp tuning", "version": 2}), "broken"),
        (file_of(7), "broken"),
        (file_of({"a": GOOD}), "ignored"),
        *(
            (file_of([GOOD, bad]), "ignored")
            for bad in (
                7,
                {},
                GOOD | {"sizes": [1, 2]},
                GOOD | {"sizes": [1, 2, "3"]},
                GOOD | {"sizes": [1, 2, -3]},
                GOOD | {"seconds": {}},
                GOOD | {"seconds": {"a": -1.0}},
                GOOD | {"seconds": {"a": float("nan")}},
                GOOD | {"seconds": {"a": "fast"}},
                GOOD | {"seconds": {"a": True}},
                GOOD | {"seconds": {"a": 0}},
                GOOD | {"seconds": {"a": 1e300}},
                GOOD | {"seconds": {"a": 1e-300}},
                GOOD | {"seconds": {"a": float("inf")}},
                GOOD | {"seconds": {"a": 10**400}},
                GOOD | {"seconds": [1.0]},
                GOOD | {"sizes": [10**400, 1, 1]},
                GOOD | {"sizes": [1.5, 2, 3]},
                GOOD | {"sizes": {"1": 1, "2": 2, "3": 3}},
                GOOD | {"key": ["matmul"]},
                GOOD | {"date": None},
                GOOD | {"machine": 3},
            )
        ),
        (b"\xff\xfe\x00".decode("latin1"), "half-written"),
        ("[" * 100000, "broken"),
    ],
)
def test_a_file_that_is_not_ours_or_not_whole_is_ignored_and_left_alone(tmp_path, content, words):
    file = tmp_path / "tuning.json"
    file.write_text(content)
    with pytest.warns(UserWarning, match=words):
        assert read_file(file) == []
    assert "tuning.json" in save(file, [entry()])
    assert file.read_text() == content


def test_a_file_of_an_earlier_version_is_ignored_and_replaced(tmp_path):
    file = tmp_path / "tuning.json"
    file.write_text(file_of([GOOD], 1))
    with pytest.warns(UserWarning, match="earlier version"):
        assert read_file(file) == []
    assert save(file, [entry()]) == ""
    assert read_file(file) == [entry()]


def test_what_no_measurement_fills_is_not_read(tmp_path):
    """100 MB, without reading them all; a pipe that nobody writes to, without waiting; a folder."""
    file, pipe = tmp_path / "tuning.json", tmp_path / "pipe"
    with file.open("wb") as out:
        out.truncate(100 << 20)
    os.mkfifo(pipe)
    for path, words in (
        (file, "larger than 8 MiB"),
        (pipe, "no regular file"),
        (tmp_path, "no regular file"),
    ):
        tracemalloc.start()
        with pytest.warns(UserWarning, match=words) as told:
            assert read_file(path) == []
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(told) == 1
        assert peak < 32 << 20
        assert words in save(path, [entry()])
    assert file.stat().st_size == 100 << 20


def test_a_file_does_not_grow_beyond_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "_LARGEST_FILE", 2000)
    file = tmp_path / "tuning.json"
    told = [save(file, [entry(machine=f"machine {i}")]) for i in range(20)]
    assert told[0] == ""
    assert "larger than" in told[-1]
    assert len(read_file(file)) == told.count("") > 2


def test_times_below_the_clock_are_read_back(tmp_path):
    found = known(((64,), {"a": 0.0}))
    assert save(tmp_path / "tuning.json", [*found.entries.values()]) == ""
    assert read_file(tmp_path / "tuning.json") == [*found.entries.values()]


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    assert "PBLASMP_TUNING" in save(tmp_path / "file" / "tuning.json", [entry()])


def write(file, first):
    for i in range(5):
        assert save(file, [entry(machine=f"{first} {i}")]) == ""


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    file = tmp_path / "tuning.json"
    writers = [multiprocessing.get_context("fork").Process(target=write, args=(file, i)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(read_file(file)) == 15


def test_where_the_file_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PBLASMP_TUNING", str(tmp_path / "mine.json"))
    assert tuning_file() == tmp_path / "mine.json"
    monkeypatch.delenv("PBLASMP_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_file() == tmp_path / "pblasmp" / "tuning.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_file() == tmp_path / ".cache" / "pblasmp" / "tuning.json"


def test_a_bucket_is_a_little_of_every_size():
    assert entry(64).bucket == entry(70).bucket
    assert entry(64).bucket != entry(128).bucket
    assert entry(64).bucket != replace(entry(64), key="other").bucket


def test_the_machine_is_that_of_all_ranks():
    """Also where ranks differ in processor or libraries: all look up the same times."""
    ranks = [("GPU, 18 NVLinks", "BLAS 1"), ("GPU, PCIe 5 x16", "BLAS 2"), ("GPU, 18 NVLinks", "BLAS 1")]
    places = [SimpleNamespace(machine=machine) for machine in ("one", "other", "one")]
    comm = SimpleNamespace(
        size=3,
        imax=lambda _, out: out.fill(1),  # not the same on all ranks
        allgather=lambda _: ranks,
        locations=lambda: places,
    )
    found = {machine_of(comm, *mine) for mine in ranks}
    assert found == {"GPU, 18 NVLinks and GPU, PCIe 5 x16, 3 ranks on 2 nodes, BLAS 1 and BLAS 2"}
