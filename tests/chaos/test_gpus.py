# SPDX-License-Identifier: Apache-2.0
"""The tester of faults on GPUs, on GPUs that are played, and what it finds bad."""

import pytest

from tests.chaos.gpus import FAULTS, TRIALS, judged, tried
from tests.helpers.mpi import starts_ranks
from tests.helpers.recorder import build
from tests.helpers.slow import only_long


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("cublasmp"))


@starts_ranks
@pytest.mark.parametrize(
    ("fault", "work"),
    [("kill", "matmul gathered"), ("raise", "matmul direct"), ("raise", "ar push"),
     *only_long(("trap", "ar nccl")), ("trap", "matmul default"), ("trap caught", "ar nccl"),
     ("raise caught", "ar push"), ("nccl", "ar nccl"), ("return", "matmul push")],
)  # fmt: skip
def test_a_trial_on_played_gpus_ends_well(library, fault, work):
    ending, faults, output = tried({"fault": fault, "work": work, "library": library, "n": 32}, 2)
    assert not faults, f"{ending}: {faults}\n{output}"


@starts_ranks
def test_out_of_memory_on_played_gpus(library):
    cases = ["zeros", "matmul gathered", "matmul default", "ar push", "gather"]
    orders = {"fault": "memory", "work": "", "cases": cases, "library": library, "n": 32}
    ending, faults, output = tried(orders, 2)
    assert not faults, f"{ending}: {faults}\n{output}"
    assert all(f"{case}: " in ending and f"{case}: 0 errors" not in ending for case in cases)


def line(what, **more):
    return {"what": what, "at": 100.0, **more}


MET = [line("ready"), line("fault")]
HEARD = line(
    "error", text="ClosedError: rank 1 left waiting with StatusError: cudaErrorLaunchFailure: unspecified"
)
OUTPUT = "StatusError: GPU 0 of rank 1: cudaErrorLaunchFailure"


@pytest.mark.parametrize(
    ("orders", "told", "status", "ended", "output", "words"),
    [
        ({"fault": "trap"}, [[HEARD], [*MET, HEARD]], 1, 101, OUTPUT, []),
        ({"fault": "trap"}, [[HEARD], [*MET, HEARD]], None, 101, OUTPUT, ["it hangs"]),
        ({"fault": "trap"}, [[HEARD], [*MET, HEARD]], 0, 101, OUTPUT, ["status 0"]),
        ({"fault": "trap"}, [[HEARD], [*MET, HEARD]], 1, 131, OUTPUT, ["it ended 31.0 s after the fault"]),
        ({"fault": "trap"}, [[], [*MET, HEARD]], 1, 101, OUTPUT, ["rank 0 raised nothing"]),
        ({"fault": "trap"}, [[HEARD], [HEARD]], 1, 101, OUTPUT, ["the fault was never met"]),
        ({"fault": "trap"}, [[line("error", text="cudaErrorX")], [*MET, HEARD]], 1, 101, OUTPUT,
         ["rank 0: an error without 'rank 1'"]),
        ({"fault": "trap"}, [[HEARD], [*MET, HEARD]], 1, 101, "rank 1", ["the output has no 'cudaError|719'"]),
        ({"fault": "trap"}, [[HEARD], [*MET, HEARD]], 1, 101, OUTPUT + "\nException ignored in", ["destructor"]),
        ({"fault": "raise"}, [[line("wrong", case="ar push")], MET], 1, 101, "FaultError: injected",
         ["rank 0: wrong: ar push"]),
        ({"fault": "memory", "cases": ["zeros", "gather"]}, [[], [line("survived", case="zeros", kept=1, broken=0)]], 0,
         101, "", ["gather was not tried to its end"]),
        ({"fault": "_exit"}, [[], MET], 0, 101, "", []),
    ],
)  # fmt: skip
def test_a_bad_end_is_found(orders, told, status, ended, output, words):
    faults = judged(orders, status, ended, told, output)
    assert len(faults) == len(words), faults
    assert all(word in fault for word, fault in zip(words, faults, strict=True)), faults


def test_every_kind_of_fault_is_tried():
    assert {orders["fault"] for orders in TRIALS} == set(FAULTS)
