# SPDX-License-Identifier: Apache-2.0
"""A few trials, always the same; ``python -m tests.chaos`` makes as many others as you like."""

import pytest

from tests.chaos.trials import expected_status, judged, tried
from tests.helpers.mpi import starts_ranks


@starts_ranks
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_trial_ends_well(seed):
    orders, faults = tried(seed)
    assert not faults, f"{orders}\n" + "\n".join(faults)


ORDERS = {"victim": 1, "kind": "copy", "catches": True, "with": True}


def line(what, **more):
    return {"what": what, "at": 100.0, **more}


@pytest.mark.parametrize(
    ("told", "status", "ended", "words"),
    [
        ([[line("end")], [line("fault"), line("end")]], 0, 101, []),
        ([[line("end")], [line("fault"), line("end")]], None, 101, ["it hangs"]),
        ([[line("end")], [line("fault"), line("end")]], 0, 111, ["it ended 11.0 s after the fault"]),
        ([[line("end")], [line("fault"), line("end")]], 1, 101, ["status 1"]),
        ([[], [line("fault"), line("end")]], 0, 101, ["rank 0 has not come to its end"]),
        ([[line("wrong", call="gather"), line("end")], [line("end")]], 0, 101, ["gather returned wrong numbers"]),
        ([[line("error", text="oh"), line("end")], [line("end")]], 0, 101, ["does not name rank 1"]),
        ([[line("error", text="on rank 1"), line("end")], [line("end")]], 0, 101, []),
        ([[line("held", before=1, after=2, new=["/x"]), line("end")], [line("end")]], 0, 101, ["now 2, with /x"]),
    ],
)  # fmt: skip
def test_a_bad_end_is_found(told, status, ended, words):
    faults = judged(ORDERS, status, ended, told, 10.0)
    assert len(faults) == len(words), faults
    assert all(word in fault for word, fault in zip(words, faults, strict=True)), faults


def test_which_statuses_are_sure():
    assert expected_status({"kind": "copy", "catches": False}, met=True) == 1
    assert expected_status({"kind": "copy", "catches": False}, met=False) == 0
    assert expected_status({"kind": "copy", "catches": True}, met=True) == 0
    assert expected_status({"kind": "user code", "catches": True}, met=True) is None
    assert expected_status({"kind": "late", "catches": True}, met=False) == 0
    assert expected_status({"kind": "kill", "catches": True}, met=True) == 1
