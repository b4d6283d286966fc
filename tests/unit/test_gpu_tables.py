# SPDX-License-Identifier: Apache-2.0
"""How tests on GPUs tell what is refused where they run from what is wrong: ``tests/helpers/gpu/tables.py``."""

from types import SimpleNamespace

import pytest

import pblasmp as pb
from tests.helpers.gpu.tables import Table, why_refused_here

NO_WINDOW = "algo 'default': NCCL has no window over all ranks: a null window"
REFUSED = [NO_WINDOW, "no algorithm takes this problem: gathered: fused=True asks for a fused one"]
FAULTS = [
    "no algorithm takes this problem: default: NCCL has no window over all ranks",  # "auto" is to find one
    "algo 'default': epilogue: it takes none",
]


@pytest.fixture(autouse=True)
def between_hosts(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "host0")
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)


def refused(text):
    def run():
        raise pb.UnsupportedError(text)

    return run


def table(*runs):
    found = Table(SimpleNamespace(rank=0, comm=SimpleNamespace(allgather=lambda x: [x])))
    for number, run in enumerate(runs):
        found.add(f"case {number}", run)
    return found


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_between_hosts_is_so_only_there(monkeypatch, text):
    assert why_refused_here(pb.UnsupportedError(text + "\non rank 1: too")) == text
    assert not why_refused_here(pb.StatusError(text))
    monkeypatch.delenv("NCCL_HOSTID")
    assert not why_refused_here(pb.UnsupportedError(text))


@pytest.mark.parametrize("text", FAULTS)
def test_other_refusals_are_faults(text):
    assert not why_refused_here(pb.UnsupportedError(text))


def test_another_refusal_was_expected():
    with (
        pytest.raises(AssertionError) as found,
        pytest.raises(pb.UnsupportedError, match="fewer tokens than ranks"),
    ):
        refused(NO_WINDOW)()
    assert why_refused_here(found.value) == NO_WINDOW


def differs():
    raise AssertionError("other numbers")


def test_a_table_goes_on_after_what_is_refused_here():
    table(refused(NO_WINDOW), lambda: None).check()
    with pytest.raises(AssertionError, match=r"1 cases:\ncase 1 +other numbers"):
        table(refused(NO_WINDOW), differs).check()
    with pytest.raises(AssertionError, match="it takes none"):
        table(lambda: None, refused(FAULTS[1])).check()


def test_a_table_of_nothing_but_refusals_is_refused():
    with pytest.raises(pb.UnsupportedError, match="no window"):
        table(refused(NO_WINDOW), refused(NO_WINDOW)).check()
