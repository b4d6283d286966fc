# SPDX-License-Identifier: Apache-2.0
"""Every file of descriptors/invalid raises what it claims, no more and no less, and where it claims."""

import pblasmp
from pblasmp.problems import files
from pblasmp.problems.schema import problem_faults
from tests.helpers.edits import invalid_files, read

INVALID = invalid_files()


def matches(claims, faults):
    """Whether each claim matches a different fault, and no fault is left."""
    left = list(faults)
    for claim in claims:
        found = next((fault for fault in left if claim in fault), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def raised(path):
    """The error of a file, and the step that found it."""
    try:
        problem = files.load_problem_file(path).problem
    except pblasmp.PblasmpError as error:
        return ("structure" if problem_faults(read(path)) else "values"), error
    try:
        problem.validate()
    except pblasmp.PblasmpError as error:
        return "rules", error
    return "nowhere", None


def test_invalid_file_raises_what_it_claims(subtests):
    for path in INVALID:
        with subtests.test(path.stem):
            claimed = read(path)["raises"]
            at, error = raised(path)
            assert at == claimed["at"]
            assert type(error) is getattr(pblasmp, claimed["error"])
            text = str(error)
            if at != "rules":
                assert text.startswith(str(path))
            first, *several = text.split("\n  - ")
            assert matches(claimed["faults"], [first, *several]), text
            assert matches(claimed["faults"], files.check(path))


def test_there_are_enough():
    assert len(INVALID) >= 30


def test_matching_is_strict():
    assert matches(["a", "b"], ["xbx", "xax"])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["a", "a"], ["a"])
    assert not matches(["c"], ["a"])
