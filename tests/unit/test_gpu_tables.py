# SPDX-License-Identifier: Apache-2.0
"""How tests on GPUs tell what is refused where they run from what is wrong: ``tests/helpers/gpu/tables.py``."""

from functools import partial
from types import SimpleNamespace

import pytest

import pblasmp as pb
from tests.helpers.gpu.tables import check_each, why_refused_here

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


def right():
    pass


def check(*runs):
    check_each(SimpleNamespace(rank=0), map(partial, runs))


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


def test_cases_go_on_after_what_is_refused_here():
    check(refused(NO_WINDOW), right)
    with pytest.raises(AssertionError, match="other numbers"):
        check(refused(NO_WINDOW), differs)
    with pytest.raises(pb.UnsupportedError, match="it takes none"):
        check(right, refused(FAULTS[1]))


def test_nothing_but_refusals_is_refused():
    with pytest.raises(pb.UnsupportedError, match="no window"):
        check(refused(NO_WINDOW), refused(NO_WINDOW))
