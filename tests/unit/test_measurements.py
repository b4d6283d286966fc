# SPDX-License-Identifier: Apache-2.0
"""Times that were measured: what "auto" makes of them, and the file that they are kept in."""

from __future__ import annotations

import json
import math
import multiprocessing
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.request import Options
from pblasmp.layout import ParallelProblem
from pblasmp.tuning.measurements import Entry, Measured, machine_of, read_file, save, tuning_file


def product(m: int, n: int = 64, k: int = 64) -> pb.MatmulProblem:
    return pb.MatmulProblem.gemm(m, n, k, pb.Grid(1, 1), 16)


def known(*sizes_and_times) -> Measured:
    found = Measured("this machine", planned=False)
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


def test_plans_are_another_kind_where_they_replay_graphs():
    again, f = Options(repeated=True), np.dtype("float32")
    split = ParallelProblem("matmul_allreduce", (8, 8), (4, 4), (6, 6), (8, 8), f, f, f)
    for p, planned, expected in (
        (split, False, {"a": 1.0}),
        (split, True, {}),
        (product(64), True, {"a": 1.0}),
    ):
        found = Measured("this machine", planned)
        found.add(found.entry(p, Options(), {"a": 1.0}, "2026-01-01"))
        assert found.seconds(p, again) == pytest.approx(expected)


def entry(m: int = 64, seconds: float = 1.0, machine: str = "here") -> Entry:
    return Entry(machine, "matmul", (m, 64, 64), {"a": seconds}, "2026-01-01")


def test_what_is_saved_is_read(tmp_path):
    file = tmp_path / "deep" / "tuning.json"
    assert save(file, [entry(), entry(machine="there")]) == ""
    assert read_file(file) == [entry(), entry(machine="there")]
    assert save(file, [entry(65, 2.0)]) == ""  # the same bucket: replaced
    assert read_file(file) == [entry(65, 2.0), entry(machine="there")]
    assert {path.name for path in file.parent.iterdir()} == {"tuning.json", "tuning.json.lock"}


def test_measurements_of_empty_products_are_ignored(tmp_path):
    """Nothing follows from their times, and a file of an older version may hold some."""
    file = tmp_path / "tuning.json"
    assert save(file, [entry(0), entry(2)]) == ""
    assert '"sizes": [\n    0,' in file.read_text().replace("\r", "")
    assert read_file(file) == [entry(2)]
    assert known().knows(product(0), Options())  # there is nothing to measure


def test_no_file_is_no_fault(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_file(tmp_path / "nothing.json") == []


GOOD = {"machine": "here", "key": "matmul", "sizes": [1, 2, 3], "seconds": {"a": 1.0}, "date": "today"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "half-written"),
        ('{"kind": "pblasmp tuning", "version": 1, "measureme', "half-written"),
        ("[1, 2]", "not a file of measurements"),
        ('{"name": "someone else\'s"}', "not a file of measurements"),
        (
            json.dumps({"kind": "pblasmp tuning", "version": 2, "measurements": []}),
            "version is 2, expected 1",
        ),
        (json.dumps({"kind": "pblasmp tuning", "version": 1}), "broken"),
        *(
            (json.dumps({"kind": "pblasmp tuning", "version": 1, "measurements": [bad]}), "ignored")
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
