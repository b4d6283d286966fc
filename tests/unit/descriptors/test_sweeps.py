# SPDX-License-Identifier: Apache-2.0
"""Sweep files: structure, values, the schema, and that they hold what they say."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import pblasmp as pb
from pblasmp.problems import files
from pblasmp.problems.schema import table_faults
from tests.helpers.edits import edited
from tests.helpers.golden import read
from tests.helpers.sweep_files import SweepTable, faults_of, find_sweeps, load_sweep, schema

SCHEMA = json.loads((files.root() / "sweep.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
SWEEPS = {path.stem: read(path) for path in find_sweeps()}
TESTER = {  # columns of PBLAS/TESTING/PDBLAS3TST.dat: M, N, K, blocks, first rows, TRANSA + TRANSB, UPLO
    "pblas-tester-1": (22, 23, 24, 4, 5, "NN", "U"),
    "pblas-tester-2": (30, 29, 28, 5, 1, "NN", "L"),
    "pblas-tester-3": (8, 7, 9, 6, 7, "NT", "U"),
    "pblas-tester-4": (20, 21, 22, 3, 7, "NT", "L"),
    "pblas-tester-5": (3, 3, 3, 2, 1, "TN", "U"),
    "pblas-tester-6": (5, 14, 9, 1, 12, "TN", "L"),
    "pblas-tester-7": (11, 11, 11, 4, 1, "TT", "U"),
    "pblas-tester-8": (8, 8, 8, 5, 11, "TT", "L"),
}


def test_the_schema_is_fresh():
    path = files.root() / "sweep.schema.json"
    assert path.read_text() == schema(), "run: python -m tests.helpers.sweep_files"


@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_load_and_obey_the_schema(name):
    VALIDATOR.validate(SWEEPS[name])
    sweep = load_sweep(name)
    assert sweep.title
    assert max(grid.size for grid in sweep.grids.values()) <= 6


def test_the_tester_is_there():
    for name, (m, n, k, block, first, ops, uplo) in TESTER.items():
        sweep = load_sweep(name)
        assert (sweep.m, sweep.n, sweep.k, sweep.op_a + sweep.op_b, sweep.uplo) == (m, n, k, ops, uplo)
        assert (sweep.side, sweep.diag, sweep.alpha, sweep.beta, sweep.gap) == ("L", "N", 2 - 4j, 3 - 2j, 10)
        assert [grid.shape for grid in sweep.grids.values()] == [(2, 2), (1, 2), (2, 1), (1, 4)]
        for x, extent in zip("abc", (31, 32, 35), strict=True):
            d = sweep.parent(x, pb.Grid(2, 2), "float64")
            assert (d.shape, d.block, d.source) == ((extent, extent), (block, block), (0, 0))
            assert sweep.start(x) == (first - 1, first - 1)
            assert d.lld(0) == max(d.local_shape(rank)[0] for rank in range(4)) + 10


def test_titles_and_sources():
    assert set(TESTER) < set(SWEEPS)
    assert len({sweep["title"] for sweep in SWEEPS.values()}) == len(SWEEPS)
    others = [load_sweep(name) for name in SWEEPS if name not in TESTER]
    sources = {
        tuple(sweep.parent(x, grid, "float64").source for x in "abc")
        for sweep in others
        for grid in sweep.grids.values()
    }
    assert len(sources) >= 12


BASE = SWEEPS["pblas-tester-1"]


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        ({"m": -1}, "m: expected an integer, at least 0"),
        ({"grids": []}, "grids: expected a list of names of grids"),
        ({"grids": ["9x9"]}, "grids: expected names out of .* got '9x9'"),
        ({"side": "X"}, "side: expected"),
        ({"gaps": 1}, "gaps: unknown key: did you mean 'gap'"),
        ({"a": {"shape": [31, 31]}}, "a.block: missing"),
        ({"b": {"shape": [31, 31], "block": [4, 0]}}, "b.block: expected two integers"),
        (
            {"c": {"shape": [25, 31], "block": [4, 4], "start": [2, 0]}},
            r"c.start\[0\]: 24 from 2 on are more",
        ),
    ],
)
def test_faults(edit, fault):
    (found,) = faults_of({**BASE, **edit})
    assert re.search(fault, found)


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("grids = 3")
    with pytest.raises(pb.LayoutError, match=r"(?s)x.toml has 8 faults: .*grids: expected"):
        load_sweep(path)
    with pytest.raises(pb.LayoutError, match="cannot be read"):
        load_sweep(tmp_path / "none.toml")


KEYS = [*SCHEMA["properties"], *SCHEMA["$defs"]["PartTable"]["properties"], "x"]
VALUES = st.sampled_from(
    [-1, 0, 1, 2.5, True, "", "N", "U", "NT", "TCN", [], [0], [0, 0], [1, 2], [0.5, 1], ["x"], {}, None]
)


@given(st.lists(st.tuples(st.sampled_from(["", *"abc"]), st.sampled_from(KEYS), VALUES), max_size=4))
def test_loader_and_schema_agree_on_edited_files(edits):
    data = edited(BASE, edits)
    assert VALIDATOR.is_valid(data) == (table_faults(data, SweepTable) == []), table_faults(data, SweepTable)
