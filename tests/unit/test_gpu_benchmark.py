# SPDX-License-Identifier: Apache-2.0
"""gpu_matmul.py without a GPU: which times count, agreement on failures, and that multicast stays off."""

import argparse

import numpy as np
import pytest

from benchmarks import gpu_bench, gpu_layouts, gpu_matmul, gpu_report
from benchmarks.gpu_report import AUTO, NCCL
from reference.gpu import owner_blocks


def row(case="4096, 1792, 4096", **entries):
    return {"case": case, "entries": entries}


ROW = row(
    **{
        NCCL: {"us": 214.4},
        AUTO: {"us": 220.0},
        "split_p2p": {"failed": "StatusError: not supported"},
        "default, symmetric": {"us": 100.0, "wrong": True},
    }
)


def test_a_sample_takes_as_long_as_its_slowest_rank():
    entry = gpu_report.summary([[1, 9, 3], [2, 4, 8]])
    assert entry == {"us": 8, "fastest_us": 2, "samples_us": [2, 9, 8]}


def test_a_failed_or_wrong_contender_shows_no_usable_time():
    cells = [gpu_report.cell(ROW["entries"][n]) for n in (AUTO, "split_p2p", "default, symmetric")]
    assert cells == ["220", "failed", "100 WRONG"]
    assert gpu_report.cell(None) == ""
    assert set(gpu_report.valid(ROW)) == {NCCL, AUTO}


@pytest.mark.parametrize(("p", "q"), [(1, 2), (2, 2), (2, 4)])
def test_pieces_multiply_by_owner(p, q):
    block, blocks = 3, 8
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, block * blocks)), rng.standard_normal((block * blocks, 4))
    pieces = b.reshape(blocks, block, 4)
    held = [pieces[row::p] for row in range(p)]
    total = np.zeros((5, 4))
    for column in range(q):
        mine = a.reshape(5, blocks, block)[:, column::q].reshape(5, -1)
        owner, which = owner_blocks(p, q, column)
        total += mine @ held[owner][which].reshape(-1, 4)
    np.testing.assert_allclose(total, a @ b)


def test_pieces_need_columns_that_are_a_multiple_of_rows():
    with pytest.raises(ValueError, match="2 x 3"):
        owner_blocks(2, 3, 0)


class Ranks:
    """A communicator in which the other ranks' faults are known."""

    def __init__(self, *others):
        self.others = list(others)
        self.size = 1 + len(self.others)

    def allgather(self, mine):
        return [mine, *self.others]


def failing():
    raise ValueError("no\n  good")


def test_ranks_agree_on_a_failure():
    assert gpu_bench.together(Ranks("", ""), lambda: 7) == (7, "")
    assert gpu_bench.together(Ranks("ValueError: no good"), failing) == (None, "ValueError: no good")
    assert gpu_bench.together(Ranks("", ""), failing) == (None, "ValueError: no good (on rank 0 of 3)")
    assert gpu_bench.together(Ranks("", "E: x"), lambda: 7)[1] == "E: x (on rank 2 of 3)"
    with pytest.raises(RuntimeError, match="no good"):
        gpu_bench.agreed(Ranks(""), failing)


@pytest.mark.parametrize("name", ["split_multicast", "atomic_multicast", "fused", "atomic_p2p"])
def test_multicast_is_refused(name):
    with pytest.raises(argparse.ArgumentTypeError, match="multicast stays off"):
        gpu_matmul.without_multicast(name)


def test_multicast_is_switched_off(monkeypatch):
    for name in gpu_matmul.MULTICAST_OFF:
        monkeypatch.setenv(name, "")  # so that what is set here ends with the test
        monkeypatch.delenv(name)
    gpu_matmul.forbid_multicast()
    assert gpu_matmul.os.environ["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(SystemExit, match="NCCL_NVLS_ENABLE=1"):
        gpu_matmul.forbid_multicast()


def test_every_layout_is_legal_and_deals_out_shares_as_the_plain_one_does():
    cases = gpu_layouts.operands(1024, 64, "float64", (1, 2))
    assert all(len({d.block for d in cases[name]}) == 3 for name in ("unequal blocks", "any blocks"))
    assert cases["sources"][0].source == (0, 1)
    for descriptors in cases.values():
        for d in descriptors:
            assert max(d.cols.counts()) <= 0.6 * d.shape[1]
