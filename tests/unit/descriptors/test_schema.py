# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema and the loader's own idea of the structure are the same."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pblasmp.problems import files
from pblasmp.problems.schema import GridTable, ProblemTable, json_schemas, problem_faults, table_faults
from tests.helpers.edits import edited, invalid_files, read

SCHEMA = json.loads((files.root() / "problem.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
GRID_VALIDATOR = Draft202012Validator({"$ref": "#/$defs/GridTable", "$defs": SCHEMA["$defs"]})
FILES = {path.stem: read(path) for path in (*files.find("problems"), *invalid_files())}


@pytest.mark.parametrize("name", json_schemas())
def test_schemas_are_fresh(name):
    text = (files.root() / name).read_text()
    Draft202012Validator.check_schema(json.loads(text))
    assert text == json_schemas()[name], "run: python -m pblasmp.problems.schema"


def test_problems_obey_the_schema(subtests):
    for path in files.find("problems"):
        with subtests.test(path.stem):
            VALIDATOR.validate(FILES[path.stem])


def test_only_structural_faults_break_the_schema(subtests):
    """Of these, all but the keys that contradict each other, which no editor sees."""
    for path in invalid_files():
        with subtests.test(path.stem):
            data = FILES[path.stem]
            contradicts = bool(problem_faults(data)) and not table_faults(data, ProblemTable)
            assert (VALIDATOR.is_valid(data) and not contradicts) == (data["raises"]["at"] != "structure")


def test_grids_obey_the_schema(subtests):
    for path in files.find("grids"):
        with subtests.test(path.stem):
            GRID_VALIDATOR.validate(read(path))
            assert files.check(path) == []


KEYS = [
    *SCHEMA["properties"],
    *SCHEMA["$defs"]["OperandTable"]["properties"],
    *SCHEMA["$defs"]["Raises"]["properties"],
]
VALUES = st.sampled_from(
    [
        *(-1, 0, 1, 2, 2.5, True, "", "N", "C", "NT", "TCN", "row", "ag", "gemm", "2x2", "float16", "CFC"),
        *([], [0], [0, 0], [1, 2], [1, -2], [0.5, 1], [1, 2, 3], ["x"], [[0, 1], [2, 3]], [[0, 1], [2]]),
        *({}, {"shape": [2, 2], "block": [1, 1]}, {"nprow": 1, "npcol": 2}, {"nprow": 1}, {"order": "col"}),
    ]
)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["", *"abdc", "grid", "raises"]),
        st.sampled_from([*KEYS, "nprow", "x"]),
        VALUES | st.none(),
    ),
    max_size=4,
)


@given(st.sampled_from(sorted(FILES)), EDITS)
def test_loader_and_schema_agree_on_edited_files(name, edits):
    data = edited(FILES[name], edits)
    found = table_faults(data, ProblemTable)
    assert VALIDATOR.is_valid(data) == (found == []), found


@given(st.dictionaries(st.sampled_from(["nprow", "npcol", "order", "description", "x"]), VALUES))
def test_loader_and_schema_agree_on_grids(data):
    assert GRID_VALIDATOR.is_valid(data) == (table_faults(data, GridTable) == []), table_faults(
        data, GridTable
    )
